"""Throughput: many requests of mixed lengths, all at once or arriving over time.

All at once is timed end to end through ``LLM.generate``; time to the first token and between tokens come from
one more run through the step loop, because handing out every token costs time that the first figure should
not pay. With a request rate, arrivals are a Poisson process and every run goes through the step loop: that is
a serving load, and its latencies are the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gapless.bench.latency import greedy, timed_generate
from gapless.bench.serving import Arrival, Served, latencies, serve
from gapless.bench.stats import spread
from gapless.bench.workload import Lengths, PromptSource, poisson_arrivals
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.llm import LLM

Row = dict[str, Any]
_WARMUP_REQUESTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputOptions:
    requests: int = 256
    lengths: Lengths = field(default_factory=lambda: Lengths(low=128, high=1024))
    output_tokens: int = 128
    repeats: int = 3
    request_rate: float | None = None
    """Requests a second on average; None: all at once."""
    seed: int = 0


def measure_throughput(
    llm: LLM, options: ThroughputOptions, *, on_row: Callable[[Row], None] = lambda row: None
) -> dict[str, Any]:
    """A row per repeat, the spread of tokens per second over them, ``latency`` percentiles and ``notes``."""
    lengths, notes = fitting_lengths(llm.runner.max_model_len, options)
    source = PromptSource(llm.runner.vocab_size, seed=options.seed)
    served: list[Served] = []

    def run(prompts: list[list[int]], output_tokens: int) -> float:
        if options.request_rate is None:
            return timed_generate(llm, prompts, output_tokens)
        arrivals = poisson_arrivals(source.rng, len(prompts), rate=options.request_rate)
        finished, seconds = _serve(llm, prompts, arrivals, options)
        served.extend(finished)
        return seconds

    def start_counting() -> None:
        served.clear()
        llm.reset_report()

    rows = offline_runs(run, source, lengths, options, on_warm=start_counting, on_row=on_row)
    if options.request_rate is None:
        prompts = source.prompts(lengths.draw(source.rng, options.requests))
        served, _ = _serve(llm, prompts, [0.0] * len(prompts), options)
    return {
        "rows": rows,
        "requests": options.requests,
        "lengths": str(lengths),
        "output_tokens": options.output_tokens,
        "request_rate": options.request_rate,
        **summary(rows),
        "latency": latencies(served),
        "notes": notes,
    }


def offline_runs(
    run: Callable[[list[list[int]], int], float],
    source: PromptSource,
    lengths: Lengths,
    options: ThroughputOptions,
    *,
    on_warm: Callable[[], None] = lambda: None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """A warm-up and the repeats of any engine: ``run`` takes prompts and answer tokens, and gives seconds."""
    run(source.prompts(lengths.draw(source.rng, _WARMUP_REQUESTS)), options.output_tokens)
    on_warm()
    rows = []
    for repeat in range(options.repeats):
        prompts = source.prompts(lengths.draw(source.rng, options.requests))
        rows.append(_row(repeat, prompts, run(prompts, options.output_tokens), options))
        on_row(rows[-1])
    return rows


def summary(rows: list[Row]) -> Row:
    """The spread of what ran per second over the repeats."""
    return {
        "output_tokens_per_s": spread([row["output_tokens_per_s"] for row in rows], digits=1),
        "total_tokens_per_s": spread([row["total_tokens_per_s"] for row in rows], digits=1),
        "requests_per_s": spread([row["requests_per_s"] for row in rows]),
    }


def fitting_lengths(max_model_len: int, options: ThroughputOptions) -> tuple[Lengths, list[str]]:
    """The lengths with room for the answer, and a note if that cut some. Raises ``ConfigError``."""
    room = max_model_len - options.output_tokens
    if room < 1:
        raise ConfigError(
            f"--output-tokens={options.output_tokens} leaves no room for a prompt: the model has "
            f"{max_model_len} positions"
        )
    if options.lengths.high <= room:
        return options.lengths, []
    lengths = options.lengths.capped(room)
    return lengths, [
        f"prompt lengths {options.lengths} cut to {lengths}: with {options.output_tokens} answer tokens they "
        f"must fit into {max_model_len} positions"
    ]


def _serve(
    llm: LLM, prompts: list[list[int]], arrivals: list[float], options: ThroughputOptions
) -> tuple[list[Served], float]:
    params = greedy(options.output_tokens)
    work = [Arrival(at_s=at, prompt=p, params=params) for at, p in zip(arrivals, prompts, strict=True)]
    return serve(llm.core, work)


def _row(repeat: int, prompts: list[list[int]], seconds: float, options: ThroughputOptions) -> Row:
    num_input = sum(len(prompt) for prompt in prompts)
    num_output = len(prompts) * options.output_tokens
    return {
        "repeat": repeat,
        "seconds": round(seconds, 4),
        "input_tokens": num_input,
        "output_tokens": num_output,
        "output_tokens_per_s": round(num_output / seconds, 1),
        "total_tokens_per_s": round((num_input + num_output) / seconds, 1),
        "requests_per_s": round(len(prompts) / seconds, 3),
    }
