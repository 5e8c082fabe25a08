"""Text on its way to the reader: three ways to show answers that grow at the same time.

On a terminal several answers are drawn side by side in place, which is what happens inside: one batch. In a
pipe they come in the order of the prompts, each as it is written, the later ones in one go when their turn
comes; one prompt alone is printed bare. With ``--json`` every answer is one line, in prompt order. All
three see *updates* that carry the whole text so far, so none depends on how tokens were cut into updates.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from typing import IO, Any, Protocol

from gapless.engine.outputs import CompletionOutput, Logprob

_LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI's API uses this number for a token that cannot be drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One choice of one prompt, as far as it has come. ``prompt`` is None when it came as token ids."""

    index: int
    choice: int
    prompt: str | None
    output: CompletionOutput
    shows_ids: bool = False

    @property
    def is_finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def shown_text(self) -> str:
        """What a reader sees: the text, or the token ids of a model without a tokenizer."""
        return self.output.text or (" ".join(map(str, self.output.token_ids)) if self.shows_ids else "")


class AnswerView(Protocol):
    def update(self, answer: Answer) -> None: ...

    def close(self) -> None: ...


def make_view(
    titles: list[str], num_choices: int, *, as_json: bool = False, out: IO[str] | None = None
) -> AnswerView:
    """The view that fits ``out`` (standard output). ``titles`` is what the reader knows the prompts by."""
    out = sys.stdout if out is None else out
    num_answers = len(titles) * num_choices
    if as_json:
        return JsonView(len(titles), num_choices, out)
    # Live needs a title and at least two lines of text for each answer on the screen.
    if out.isatty() and 1 < num_answers <= (shutil.get_terminal_size().lines - 1) // 4:
        return LiveView(titles, num_choices, out)
    return OrderedView(titles, num_choices, out)


class OrderedView:
    """Answers one after the other; the current one grows, the others wait for their turn."""

    def __init__(self, titles: list[str], num_choices: int, out: IO[str]) -> None:
        self._titles, self._num_choices, self._out = titles, num_choices, out
        self._keys = [(i, c) for i in range(len(titles)) for c in range(num_choices)]
        self._latest: dict[tuple[int, int], Answer] = {}
        self._current, self._printed, self._has_title = 0, 0, False

    def update(self, answer: Answer) -> None:
        self._latest[answer.index, answer.choice] = answer
        while self._current < len(self._keys):
            current = self._latest.get(self._keys[self._current])
            if current is None:
                return
            self._show(current)
            if not current.is_finished:
                return
            self._out.write("\n" if len(self._keys) == 1 else "\n\n")
            self._out.flush()
            self._current, self._printed, self._has_title = self._current + 1, 0, False

    def close(self) -> None:
        if self._printed:
            self._out.write("\n")
        self._out.flush()

    def _show(self, answer: Answer) -> None:
        if not self._has_title and len(self._keys) > 1:
            self._out.write(_heading(answer, self._titles, self._num_choices) + "\n")
            self._has_title = True
        text = answer.shown_text
        if answer.output.error is not None:
            text += f"(failed: {answer.output.error})"
        self._out.write(text[self._printed :])
        self._printed = max(self._printed, len(text))
        self._out.flush()


class JsonView:
    """One JSON line per answer, in prompt order, as soon as every earlier one is out."""

    def __init__(self, num_prompts: int, num_choices: int, out: IO[str]) -> None:
        self._keys = [(i, c) for i in range(num_prompts) for c in range(num_choices)]
        self._finished: dict[tuple[int, int], Answer] = {}
        self._out = out
        self._next = 0

    def update(self, answer: Answer) -> None:
        if answer.is_finished:
            self._finished[answer.index, answer.choice] = answer
        while self._next < len(self._keys) and self._keys[self._next] in self._finished:
            ready = self._finished.pop(self._keys[self._next])
            self._out.write(_json_line(answer_record(ready), getattr(self._out, "encoding", None)) + "\n")
            self._out.flush()
            self._next += 1

    def close(self) -> None:
        self._out.flush()


class LiveView:
    """Every answer in place, growing together, for a terminal.

    While they run each answer has an equal share of the screen and shows its last lines; ``close`` prints
    all in full.
    """

    def __init__(self, titles: list[str], num_choices: int, out: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._titles, self._num_choices = titles, num_choices
        self._latest: dict[tuple[int, int], Answer] = {}
        self._is_closing = False
        self._console = Console(file=out, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=12, get_renderable=self._render)
        self._live.start()

    def update(self, answer: Answer) -> None:
        self._latest[answer.index, answer.choice] = answer

    def close(self) -> None:
        self._is_closing = True
        self._live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.padding import Padding
        from rich.text import Text

        num_answers = len(self._titles) * self._num_choices
        lines_each = max(1, (self._console.height - 1) // num_answers - 2)  # a title and an empty line
        rows: list[Any] = []
        for key in sorted(self._latest):
            answer = self._latest[key]
            heading = _heading(answer, self._titles, self._num_choices)
            rows.append(Text(heading, style="bold", no_wrap=True, overflow="ellipsis"))
            body = Text(answer.shown_text.strip())
            if answer.output.error is not None:
                body.append(f"(failed: {answer.output.error})", style="red")
            elif not answer.is_finished:
                body.append(" ▌", style="dim")
            lines = body.wrap(self._console, self._console.width - 2)
            shown = list(lines) if self._is_closing else list(lines)[-lines_each:]
            rows.append(Padding(Group(*shown), (0, 0, 1, 2)))
        return Group(*rows)


def answer_record(answer: Answer) -> dict[str, Any]:
    """The ``request`` line of ``--json``."""
    output = answer.output
    return {
        "type": "request",
        "index": answer.index,
        "choice": answer.choice,
        "prompt": answer.prompt,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "logprobs": None if output.logprobs is None else [_logprobs(step) for step in output.logprobs],
        "error": output.error,
    }


def _json_line(record: dict[str, Any], encoding: str | None) -> str:
    """Readable where the output can show it, else escaped: what the stream puts in its place is not JSON."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(record)
    return line


def _logprobs(step: dict[int, Logprob]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token,
            "logprob": max(entry.logprob, _LEAST_LOGPROB),
            "rank": entry.rank,
            "token": entry.decoded_token,
        }
        for token, entry in step.items()
    ]


def _heading(answer: Answer, titles: list[str], num_choices: int) -> str:
    label = f"{answer.index + 1}/{len(titles)}"
    if num_choices > 1:
        label += f" #{answer.choice + 1}"
    return f"[{label}] {titles[answer.index]}"
