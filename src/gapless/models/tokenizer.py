"""Text to token ids and back, and chats to text: a thin class over a ``tokenizers`` backend.

Folders go through Transformers' ``AutoTokenizer``, so the result is by definition what Transformers gives.
Chat templates are rendered by Transformers' sandboxed jinja. Heavy imports happen where they are used: a
model without a folder tokenizer never pays for them. Read ``gguf_tokenizer.py`` for the other source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from gapless.errors import ModelError, RequestError
from gapless.models.vl_template import template_of_folder
from gapless.models.vocabulary import token_bytes

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


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
        """Token ids of ``text``; special tokens (such as BOS) are added where the model wants them.

        Raises ``RequestError`` for what is not text (half of a surrogate pair, for example).
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the prompt is not valid Unicode text: {error}") from error

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

    def token_bytes(self) -> list[bytes]:
        """What each token adds to a text, by id; special tokens nothing."""
        return token_bytes(self._backend)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_variables: Any,
    ) -> str:
        """The prompt text of a chat. It has its special tokens: encode it with ``add_special_tokens=False``.

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
    # Lengths are the engine's business, but a saved tokenizer may ask for a cut or padding of its own.
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(
        backend,
        special_tokens={name: str(token) for name, token in loaded.special_tokens_map.items()},
        chat_template=template_of_folder(folder, default_template(loaded.chat_template)),
    )


def default_template(template: Any) -> str | None:
    """Some models name several templates; the one for plain chats is called ``default``."""
    return template.get("default") if isinstance(template, Mapping) else template
