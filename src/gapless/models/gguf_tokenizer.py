"""The tokenizer inside a GGUF file, built from its metadata.

Transformers can convert it too, but takes seconds for a vocabulary of 49,000 tokens where this takes a tenth
of one, and it leaves out how a vocabulary splits words before merging (``tokenizer.ggml.pre``), which the
models were trained with. A kind of splitting that is not known here is refused, for a wrong one gives
plausible, worse text. Tested against Transformers' conversion where that one is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from gapless.errors import ModelError
from gapless.models.gguf_file import GGUFFile
from gapless.models.tokenizer import Tokenizer, default_template

_SPECIAL_KINDS, _USER_DEFINED = (2, 3), 4
"""Token types matched in the text before anything else: unknown and control tokens are special."""


def gguf_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """The tokenizer inside a GGUF file, or None when it has none. Raises ``ModelError`` for unknown kinds."""
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
        chat_template=default_template(metadata.get("tokenizer.chat_template")),
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
    """Llama 2's BPE: pieces with a visible space, byte fallback, merges that follow from the scores."""
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
