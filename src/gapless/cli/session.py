"""What ``generate`` and ``demo`` share: start an engine with progress, run prompts, feed a view.

The engine is shut down however the block ends, so an interrupted command leaves nothing behind. Prompts go in
together and run as one continuous batch; the view decides how their answers reach the reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gapless.cli.media import chat_content, raw_prompt
from gapless.cli.options import EngineOptions
from gapless.cli.progress import show_progress
from gapless.cli.prompts import Prompt
from gapless.cli.streaming import Answer, AnswerView
from gapless.errors import ConfigError, RequestError
from gapless.llm_media import Media
from gapless.sampling.params import SamplingParams

if TYPE_CHECKING:
    from gapless.engine.outputs import RequestOutput
    from gapless.llm import LLM


@contextmanager
def open_llm(options: EngineOptions) -> Iterator[LLM]:
    """An engine for the block, made from command-line options; progress goes to standard error."""
    if options.model is None and options.config is None:
        raise ConfigError("no model: give --model smollm2, a model folder, or a .gguf file")
    from gapless.llm import LLM

    with show_progress() as progress:
        llm = LLM(progress=progress, config=options.config, **options.given())
    try:
        yield llm
    finally:
        llm.shutdown()


def has_chat_template(llm: LLM) -> bool:
    return getattr(llm.tokenizer, "chat_template", None) is not None


def render_prompts(llm: LLM, prompts: list[Prompt], *, chat: bool, media: Media | None = None) -> list[Any]:
    """What the engine takes: each text as one user message in the model's template, or as it is; all of them
    show ``media``.

    A prompt that cannot be rendered becomes its ``RequestError``, so that the others can run.
    """
    media = Media() if media is None else media
    rendered: list[Any] = []
    for prompt in prompts:
        try:
            is_chat = chat and isinstance(prompt, str)
            rendered.append(_render(llm, prompt, media) if is_chat else raw_prompt(llm, prompt, media))
        except RequestError as error:
            rendered.append(error)
    return rendered


def run_prompts(
    llm: LLM, prompts: list[Prompt], rendered: list[Any], params: SamplingParams, view: AnswerView
) -> list[RequestOutput]:
    """Run all prompts at once; returns their final outputs in order. A bad prompt fails alone."""
    from gapless.llm_inputs import failed_output

    final: dict[int, RequestOutput] = {}

    def show(index: int, output: RequestOutput) -> None:
        final[index] = output
        prompt = prompts[index]
        text = prompt if isinstance(prompt, str) else None
        for choice in output.outputs:
            view.update(
                Answer(
                    index=index,
                    choice=choice.index,
                    prompt=text,
                    output=choice,
                    shows_ids=not params.detokenize,
                )
            )

    good = [index for index, prompt in enumerate(rendered) if not isinstance(prompt, RequestError)]
    try:
        for index, prompt in enumerate(rendered):
            if isinstance(prompt, RequestError):
                show(index, failed_output(f"bad-{index}", prompt, params, str(prompt)))
        for output in llm.stream([rendered[index] for index in good], params, errors="return"):
            show(good[int(output.request_id.rpartition("-")[2])], output)
    finally:
        view.close()
    return [final[index] for index in range(len(prompts))]


def titles_of(prompts: list[Prompt]) -> list[str]:
    """What a reader knows each prompt by: its first line, shortened."""
    return [_title(p) if isinstance(p, str) else f"{len(p)} token ids" for p in prompts]


def _render(llm: LLM, prompt: Prompt, media: Media) -> Any:
    if not prompt:
        raise RequestError("empty prompt: there is nothing to answer")
    return llm.render_chat([{"role": "user", "content": chat_content(str(prompt), media)}])[0]


def _title(prompt: str, limit: int = 90) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
