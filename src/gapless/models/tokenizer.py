"""Text to token ids and back, and chats to text: a thin class over a ``tokenizers`` backend.

Folders go through Transformers' ``AutoTokenizer``, so the result is by definition what Transformers gives; a
GGUF file's tokenizer is built from its own metadata, because that takes a tenth of the time. Chat templates
are rendered by Transformers' sandboxed jinja. Heavy imports happen where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from gapless.errors import ModelError, RequestError
from gapless.models.gguf_file import GGUFFile

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
_SPECIAL_KINDS, _USER_DEFINED = (2, 3), 4
"""GGUF token types that are matched in the text before anything else: unknown and control tokens are
special."""


class Tokenizer:
    """Encodes, decodes and renders chats. ``special_tokens`` maps names such as ``bos_token`` to their text.

    Decoding never "cleans up" spaces, even where a tokenizer's config asks Transformers to: that would lose
    spaces the model wrote, and change text that has been streamed already.
    """

    def __init__(
        self, backend: Backend, *, special_tokens: Mapping[str, str], chat_template: str | None
    ) -> None:
        self._backend = backend
        self.special_tokens, self.chat_template = dict(special_tokens), chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens (such as BOS) are added where the model wants them."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; incomplete UTF-8 becomes U+FFFD, unknown ids nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry itself, in the vocabulary's own alphabet; None for an unknown id."""
        return self._backend.id_to_token(token_id)

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included; a model may have more embeddings."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_variables: Any,
    ) -> str:
        """The prompt text of a chat. It contains its special tokens: encode with
        ``add_special_tokens=False``.

        Raises ``RequestError`` when there is no template or the template refuses the messages.
        """
        template = chat_template or self.chat_template
        if template is None:
            raise RequestError("this model has no chat template: pass one, or use generate() with plain text")
        if not messages:
            raise RequestError("a chat needs at least one message")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(
                    f"chat message {message!r} must be an object with a 'role' and a 'content'"
                )
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **template_variables},
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return str(rendered[0][0])


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, or None when the folder has no tokenizer files."""
    if not any((folder / name).is_file() for name in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Transformers raises many kinds here; all mean the same to a user.
        raise ModelError(f"{folder}: the tokenizer files cannot be used: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ModelError(
            f"{folder}: tokenizer class {type(loaded).__name__} has no fast backend; add a tokenizer.json"
        )
    return Tokenizer(
        backend,
        special_tokens={name: str(token) for name, token in loaded.special_tokens_map.items()},
        chat_template=_default_template(loaded.chat_template),
    )


def gguf_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """The tokenizer inside a GGUF file, or None when the file has none. Raises ``ModelError`` for unknown
    kinds."""
    metadata = file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        return None
    kind = metadata.get("tokenizer.ggml.model")
    special_tokens = _gguf_special_tokens(metadata, tokens)
    if kind == "gpt2":
        backend = _byte_level_backend(file, tokens)
    elif kind == "llama":
        backend = _sentencepiece_backend(file, tokens, unknown=special_tokens.get("unk_token"))
    else:
        raise ModelError(f"{file.path}: GGUF tokenizer model {kind!r} is not implemented; gpt2 and llama are")
    _add_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    adds_bos_by_default = kind == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    bos = special_tokens.get("bos_token")
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos_by_default) and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
        )
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_template=_default_template(metadata.get("tokenizer.chat_template")),
    )


_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
"""Word borders the vocabularies were trained with; they are part of the models."""


def _byte_level_backend(file: GGUFFile, tokens: list[str]) -> Backend:
    """Byte-level BPE (GPT-2 and everything after it)."""
    merges = file.metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError(f"{file.path}: metadata key 'tokenizer.ggml.merges' is missing")
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    backend = _bpe(file, tokens, [_merge_pair(merge) for merge in merges], ignore_merges=pre == "llama-bpe")
    if pre in ("default", "gpt-2"):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in ("qwen2", "llama-bpe"):
        words = Regex(_QWEN2_WORDS if pre == "qwen2" else _LLAMA3_WORDS)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(words, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
    else:
        raise ModelError(
            f"{file.path}: GGUF pre-tokenizer {pre!r} is not implemented; default, gpt-2, smollm, qwen2 and "
            f"llama-bpe are"
        )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(file: GGUFFile, tokens: list[str], *, unknown: str | None) -> Backend:
    """Llama 2's BPE over pieces with a visible space and byte fallback; merges follow from the pieces'
    scores."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(
            f"{file.path}: metadata key 'tokenizer.ggml.scores' must have one score for each token"
        )
    merges = _merges_from_scores(tokens, scores)
    backend = _bpe(file, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *undo]
    )
    return backend


def _bpe(file: GGUFFile, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Backend:
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        return Backend(BPE(vocab, merges, **options))
    except Exception as error:  # the library raises bare ones
        raise ModelError(f"{file.path}: the tokenizer inside cannot be used: {error}") from error


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, best resulting score first, ties by the parts' scores."""
    vocab = {token: index for index, token in enumerate(tokens)}
    ranked = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], -scores[left], -scores[right], piece[:cut], piece[cut:]))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _merge_pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_tokens(backend: Backend, tokens: list[str], kinds: Sequence[int]) -> None:
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind in _SPECIAL_KINDS]
    defined = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _gguf_special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}


def _default_template(template: Any) -> str | None:
    """Some models name several templates; the one for plain chats is called ``default``."""
    return template.get("default") if isinstance(template, Mapping) else template
