"""``gapless demo``: a first look. Several prompts at once with graphs, what ran, and proof that nothing
changed.

The same prompts run twice: with graphs, and in *padded eager*, the same kernels on the same padded batches
without graphs. Padding and kernel choice are the only things that may move the last bits of a float, and
here they are equal, so every token id must be. The exit code is 1 if one is not.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapless.cli.options import EngineOptions
from gapless.cli.prompts import Prompt
from gapless.cli.session import has_chat_template, open_llm, render_prompts, run_prompts, titles_of
from gapless.cli.streaming import make_view
from gapless.sampling.params import SamplingParams

if TYPE_CHECKING:
    from gapless.engine.outputs import RequestOutput

PROMPTS: list[Prompt] = [
    "What is the capital of France?",
    "Make a title for this text: For forty years the bakery in the small town had a single oven. When it "
    "broke, the baker thought of closing, but the neighbours collected money, bought a new oven, and carried "
    "it through the narrow door together.",
    "Write one sentence about the sea.",
    "Explain to a child in two short sentences why the sky is blue.",
    "Rewrite this message so that it is friendly and short: Dear customer, we hereby inform you that, owing "
    "to unforeseen technical circumstances in our warehouse, the delivery of your order will be postponed by "
    "approximately two working days. We kindly request your patience and understanding in this matter and "
    "remain at your disposal for any further questions you may have regarding the delivery.",
]


def demo(
    engine: EngineOptions,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens in an answer.")] = 64,
) -> None:
    """Generate with graphs, show what ran, and compare every token with the same run without graphs."""
    from gapless.cli.render import make_console, plan_lines, print_report

    console = make_console()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    if engine.model is None and engine.config is None:
        engine = dataclasses.replace(engine, model="smollm2")
    with open_llm(engine) as llm:
        rendered = render_prompts(llm, PROMPTS, chat=has_chat_template(llm))
        console.print(headline(llm.report()["startup"]), style="dim")
        llm.reset_report()
        started = time.perf_counter()
        with_graphs = run_prompts(llm, PROMPTS, rendered, params, make_view(titles_of(PROMPTS), params.n))
        seconds = time.perf_counter() - started
        report = llm.report()
        num_tokens = sum(len(choice.token_ids) for output in with_graphs for choice in output.outputs)
        console.print(f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.0f} tokens/s")
        print_report(console, report)
        for line in plan_lines(report["plan"]):
            console.print(line, style="dim")

        failed = [c.error for output in with_graphs for c in output.outputs if c.error is not None]
        if failed:
            console.print(f"a request failed: {failed[0]}", style="bold red")
            raise typer.Exit(1)
        console.print("\nthe same prompts again without graphs (padded eager) …", style="dim")
        llm.reset_prefix_cache()  # the same chunks again
        with llm.padded_eager():
            without_graphs = llm.generate(rendered, params)

    difference = first_difference(with_graphs, without_graphs)
    if difference is not None:
        console.print(f"token ids DIFFER from padded eager: {difference}", style="bold red")
        raise typer.Exit(1)
    console.print(
        f"token ids are identical to padded eager: {num_tokens} tokens of {len(PROMPTS)} prompts",
        style="bold green",
    )


def headline(startup: dict[str, Any]) -> str:
    """What runs where, in one line."""
    return (
        f"{startup['architecture']} in {startup['dtype']} on {startup['device']}, graphs by the "
        f"{startup['graph_device']} device, attention by {startup['attention_backend']}\n"
    )


def first_difference(left: list[RequestOutput], right: list[RequestOutput]) -> str | None:
    """Where two runs of the same prompts part, in words; None when they are identical."""
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        tokens_a, tokens_b = (list(output.outputs[0].token_ids) for output in (a, b))
        if tokens_a == tokens_b:
            continue
        shortest = min(len(tokens_a), len(tokens_b))
        position = next((i for i in range(shortest) if tokens_a[i] != tokens_b[i]), shortest)
        found = [tokens[position] if position < len(tokens) else "the end" for tokens in (tokens_a, tokens_b)]
        return f"prompt {index + 1}, position {position}: {found[0]} with graphs, {found[1]} without"
    return None
