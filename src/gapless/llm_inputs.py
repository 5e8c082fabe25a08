"""The forms in which ``LLM`` takes prompts, chats and sampling parameters, brought to one.

Invariant: nothing is guessed: a form that could mean two things has one documented meaning (a list of
integers is one prompt), and everything else is a ``RequestError`` that shows the form that would work. Read
``llm.py`` next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from gapless.engine.outputs import CompletionOutput, RequestOutput
from gapless.errors import RequestError
from gapless.llm_media import MEDIA_KEY, Media, media_of
from gapless.sampling.params import SamplingParams

PromptLike = str | Seq[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; the two may have
``"multi_modal_data": {"image": …, "video": …}`` beside them."""
Conversation = Seq[Mapping[str, Any]]
"""Messages such as ``{"role": "user", "content": "Hello"}``; content may be a list of parts."""


def as_prompts(prompts: Any) -> list[PromptLike | RequestError]:
    """One prompt or many: a string, a mapping and a list of numbers are one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = _as_list(prompts, "prompts")
    if items and not isinstance(items[0], Iterable):
        return [items]
    return items


def as_conversations(messages: Any) -> list[Any]:
    items = _as_list(messages, "messages")
    return [items] if items and isinstance(items[0], Mapping) else items


def check_conversation(conversation: Any) -> None:
    """Raises ``RequestError`` unless it is a list of messages with roles; what they say is the template's
    affair."""
    if not isinstance(conversation, Seq) or isinstance(conversation, str) or not conversation:
        raise RequestError(f"conversation {conversation!r}: must be a list of at least one message")
    for message in conversation:
        if not isinstance(message, Mapping) or "role" not in message:
            raise RequestError(f'message {message!r}: must be like {{"role": "user", "content": "Hello"}}')


def split_prompt(prompt: PromptLike | RequestError) -> tuple[Any, str | None, Media]:
    """What the core takes (text or token ids), the text that token ids came from, and what it shows.

    ``prompt`` may hold token ids too where it stands beside ``multi_modal_data``.
    """
    if isinstance(prompt, RequestError):
        raise prompt
    if not isinstance(prompt, Mapping):
        return prompt, None, Media()
    unknown = set(prompt) - {"prompt", "prompt_token_ids", MEDIA_KEY}
    if unknown or not set(prompt) - {MEDIA_KEY}:
        raise RequestError(
            f"prompt has the keys {sorted(map(str, prompt))}: give 'prompt' (text) or 'prompt_token_ids', "
            f"and '{MEDIA_KEY}' where it shows something"
        )
    media = media_of(prompt.get(MEDIA_KEY))
    text = prompt.get("prompt")
    if media and text is not None and not isinstance(text, str):
        return prompt.get("prompt_token_ids", text), None, media
    if text is not None and not isinstance(text, str):
        raise RequestError(f"'prompt' is {text!r}: must be a string")
    return prompt.get("prompt_token_ids", text), text, media


def params_for(
    prompts: Seq[PromptLike | RequestError], sampling_params: SamplingParams | Seq[SamplingParams] | None
) -> list[SamplingParams]:
    if sampling_params is None:
        return [SamplingParams()] * len(prompts)
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * len(prompts)
    params = _as_list(sampling_params, "sampling_params")
    if len(params) != len(prompts):
        raise RequestError(
            f"{len(params)} sampling_params for {len(prompts)} prompts: give one, or one for each"
        )
    return params


def failed_output(
    request_id: str, prompt: PromptLike | RequestError, params: SamplingParams, error: str
) -> RequestOutput:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return RequestOutput(
        request_id=request_id,
        prompt=text if isinstance(text, str) else None,
        prompt_token_ids=(),
        outputs=[
            CompletionOutput(index=index, text="", token_ids=(), finish_reason="error", error=error)
            for index in range(params.n if isinstance(params, SamplingParams) else 1)
        ],
    )


def _as_list(value: Any, name: str) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        raise RequestError(f"{name}={value!r}: must be a list") from None
