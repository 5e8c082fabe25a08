"""Answers of ``/v1/completions``, whole and as events.

Choices are numbered prompt by prompt: choice ``i`` of prompt ``p`` is ``p * n + i``. With ``echo`` the prompt
comes before the text and its log-probabilities before the text's. Invariant: the events' texts and lists put
together are those of the whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import UNSET

from gapless.serve.answers import Collected, UsageCounter
from gapless.serve.deltas import Deltas
from gapless.serve.logprobs import answer_logprobs, join, prompt_logprobs
from gapless.serve.messages import Delta, TokenLogprob
from gapless.serve.responses import TextChoice, TextCompletion, TextLogprobs, Usage
from gapless.serve.sse import Events, TextEvent, event
from gapless.serve.text_offsets import AnswerOffsets


@dataclass(frozen=True, kw_only=True, slots=True)
class Echo:
    """A prompt to send back: its text, where its tokens begin in it if that was asked for, and the text of
    the first one, which has no candidates."""

    text: str = ""
    first_token: str = ""
    offsets: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFormat:
    """``echoes``: per prompt, empty without echo. ``drops_text``: the request asked for the echo alone.
    ``offsets_after``: of the tokens of an answer to prompt p behind an echo of that length."""

    id: str
    created: int
    model: str
    n: int
    num_top: int | None
    echoes: Sequence[Echo]
    offsets_after: Callable[[int, int], AnswerOffsets]
    drops_text: bool = False

    def completion(self, collected: Collected) -> TextCompletion:
        choices = []
        for position, of_prompt in enumerate(collected.choices):
            echoed = collected.prompt_logprobs.get(position)
            for index, choice in enumerate(of_prompt):
                writer = _Choice(self, position, index)
                text, logprobs = writer.begin(echoed)
                more, more_logprobs = writer.go_on(choice.text, choice.logprobs)
                choices.append(
                    writer.choice(
                        text + more,
                        [logprobs, more_logprobs],
                        choice.finish_reason or "stop",
                        choice.stop_reason,
                    )
                )
        usage = collected.usage.usage()
        return TextCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=_without_completion(usage) if self.drops_text else usage,
        )


async def text_events(
    format: TextFormat, deltas: Deltas, *, usage: UsageCounter, includes_usage: bool, num_prompts: int
) -> Events:
    """Raises what ``deltas`` raises."""
    choices = [[_Choice(format, p, i) for i in range(format.n)] for p in range(num_prompts)]
    echoed: dict[int, list[list[TokenLogprob] | None]] = {}
    no_usage = None if includes_usage else UNSET

    def completion(choice: TextChoice) -> TextCompletion:
        return TextCompletion(
            id=format.id, created=format.created, model=format.model, choices=[choice], usage=no_usage
        )

    try:
        async for position, items in deltas:
            events: list[bytes] = []
            for delta in items:
                usage.add(position, delta)
                if delta.prompt_logprobs is not None:
                    echoed[position] = delta.prompt_logprobs
                choice = choices[position][delta.index]
                if choice.is_plain(delta):
                    if delta.text:
                        events.append(choice.plain_event(delta.text, completion))
                    continue
                chunk = choice.chunk(delta, echoed.get(position))
                if chunk is not None:
                    events.append(event(completion(chunk)))
            if events:
                yield b"".join(events)
    finally:
        await deltas.aclose()
    if includes_usage:
        total = _without_completion(usage.usage()) if format.drops_text else usage.usage()
        yield event(
            TextCompletion(id=format.id, created=format.created, model=format.model, choices=[], usage=total)
        )


class _Choice:
    """Writes one choice from its beginning to its end."""

    def __init__(self, format: TextFormat, position: int, index: int) -> None:
        self._format = format
        self._echo = format.echoes[position] if format.echoes else None
        self._number = position * format.n + index
        self._num_top = format.num_top
        self._offsets: AnswerOffsets | None = None
        if self._num_top is not None:
            self._offsets = format.offsets_after(position, len(self._echo.text) if self._echo else 0)
        self._has_begun = self._echo is None
        self._is_text_only = self._num_top is None and not format.drops_text
        self._plain: TextEvent | None = None

    def is_plain(self, delta: Delta) -> bool:
        """Whether its event differs from others in its text only."""
        return self._has_begun and self._is_text_only and delta.finish_reason is None

    def plain_event(self, text: str, completion: Callable[[TextChoice], TextCompletion]) -> bytes:
        if self._plain is None:
            self._plain = TextEvent(completion(self.choice("", [], None, None)), "text")
        return self._plain.of(text)

    def begin(
        self, of_prompt: Sequence[Sequence[TokenLogprob] | None] | None
    ) -> tuple[str, TextLogprobs | None]:
        """The echo."""
        self._has_begun = True
        if self._echo is None:
            return "", None
        if self._num_top is None or of_prompt is None:
            return self._echo.text, None
        return self._echo.text, prompt_logprobs(
            of_prompt,
            num_top=self._num_top,
            offsets=self._echo.offsets,
            first_token=self._echo.first_token,
        )

    def go_on(
        self, text: str, logprobs: Sequence[Sequence[TokenLogprob]] | None
    ) -> tuple[str, TextLogprobs | None]:
        if self._format.drops_text:
            return "", None
        if self._num_top is None or self._offsets is None or not logprobs:
            return text, None
        return text, answer_logprobs(logprobs, num_top=self._num_top, offsets=self._offsets)

    def chunk(
        self, delta: Delta, of_prompt: Sequence[Sequence[TokenLogprob] | None] | None
    ) -> TextChoice | None:
        """None when there is nothing to say."""
        echo, echo_logprobs = ("", None) if self._has_begun else self.begin(of_prompt)
        text, logprobs = self.go_on(delta.text, delta.logprobs)
        if not (echo or text or echo_logprobs or logprobs) and delta.finish_reason is None:
            return None
        reason: Literal["stop", "length"] | None = None
        if delta.finish_reason is not None:
            reason = "length" if delta.finish_reason == "length" else "stop"
        return self.choice(echo + text, [echo_logprobs, logprobs], reason, delta.stop_reason)

    def choice(
        self,
        text: str,
        logprobs: Sequence[TextLogprobs | None],
        finish_reason: Literal["stop", "length"] | None,
        stop_reason: str | int | None,
    ) -> TextChoice:
        known = [part for part in logprobs if part is not None]
        is_asked = self._num_top is not None
        drops_end = self._format.drops_text and finish_reason is not None
        return TextChoice(
            index=self._number,
            text=text,
            logprobs=join(known) if is_asked and (known or finish_reason is not None) else None,
            finish_reason="length" if drops_end else finish_reason,
            stop_reason=UNSET if stop_reason is None or drops_end else stop_reason,
        )


def _without_completion(usage: Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=0,
        total_tokens=usage.prompt_tokens,
        prompt_tokens_details=usage.prompt_tokens_details,
    )
