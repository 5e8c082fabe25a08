"""``gapless generate``: prompts in, text out as it comes, then how it ran.

Standard output carries the text (or JSON lines) and nothing else, so it can be piped; progress, the table of
steps and the plan go to standard error. The exit code says whether every request ended well.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gapless.cli.media import check_media, check_source, read_media
from gapless.cli.options import EngineOptions, SamplingOptions
from gapless.cli.prompts import collect_prompts
from gapless.cli.session import has_chat_template, open_llm, render_prompts, run_prompts, titles_of
from gapless.cli.streaming import make_view
from gapless.errors import ConfigError
from gapless.sampling.params import SamplingParams
from gapless.sampling.structured import StructuredOutputsParams


def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeatable.")] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            "--prompts-file",
            metavar="FILE",
            help='One prompt per line, or JSON lines with "prompt" or "token_ids"; - is standard input.',
        ),
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option("--image", metavar="FILE", help="An image that every prompt shows; repeatable."),
    ] = None,
    video: Annotated[
        list[str] | None,
        typer.Option("--video", metavar="FILE", help="A video that every prompt shows; repeatable."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put prompts into the model's chat template, or not. Default: if it has one.",
            show_default=False,
        ),
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema", metavar="FILE", help="Answers are JSON that this schema allows; - is stdin."
        ),
    ] = None,
    regex: Annotated[
        str | None, typer.Option("--regex", help="Answers match this regular expression as a whole.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON lines: one per answer, then a report.")
    ] = False,
) -> None:
    """Generate text for one or more prompts, all of them at the same time."""
    prompts = collect_prompts(prompt, prompts_file)
    media = read_media(image, video)
    check_source(_source(engine), media)
    structured = _structured_outputs(json_schema, regex)
    params = SamplingParams(**sampling.sampling_kwargs(), structured_outputs=structured)
    with open_llm(engine) as llm:
        check_media(llm, media)
        if chat and not has_chat_template(llm):
            raise ConfigError("--chat: this model has no chat template; use --raw")
        if llm.tokenizer is None:
            if params.stop:
                raise ConfigError(
                    f"--stop {params.stop[0]!r}: this model has no tokenizer, so its answers are token ids "
                    "without text to search; leave --stop out, or give a model folder with a tokenizer"
                )
            print("this model has no tokenizer: answers are token ids", file=sys.stderr)
            params = dataclasses.replace(params, detokenize=False)
        use_chat = has_chat_template(llm) if chat is None else chat
        if chat is None and use_chat:
            print("using the model's chat template (--raw turns it off)", file=sys.stderr)
        rendered = render_prompts(llm, prompts, chat=use_chat, media=media)
        view = make_view(titles_of(prompts), params.n, as_json=as_json)
        outputs = run_prompts(llm, prompts, rendered, params, view)
        report = llm.report()

    if as_json:
        print(json.dumps({"type": "report", **report}), flush=True)
    else:
        from gapless.cli.render import make_console, plan_lines, print_report

        console = make_console(sys.stderr)
        print_report(console, report)
        for line in plan_lines(report["plan"]):
            console.print(line, style="dim")
    if any(choice.finish_reason in ("error", "abort") for output in outputs for choice in output.outputs):
        raise typer.Exit(1)


def _source(engine: EngineOptions) -> str | None:
    """The model that will be loaded, by flag or config file."""
    if engine.model is not None or engine.config is None:
        return engine.model
    from gapless.config_sources import read_config_file

    options = read_config_file(engine.config)
    model = options.get("model", options.get("model_path"))
    return model if isinstance(model, str) else None


def _structured_outputs(json_schema: str | None, regex: str | None) -> StructuredOutputsParams | None:
    if json_schema is None and regex is None:
        return None
    if json_schema is None:
        return StructuredOutputsParams(regex=regex)
    if regex is not None:
        raise ConfigError("--json-schema and --regex: an answer can follow one of them")
    try:
        text = sys.stdin.read() if json_schema == "-" else Path(json_schema).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--json-schema {json_schema}: the file cannot be read: {error}") from None
    return StructuredOutputsParams(json=text)
