"""Latency: milliseconds of a prefill by its tokens, and of a decode step by its batch.

End to end through ``LLM.generate``, as a caller sees it. Prefill is one request with one new token. Decode is
the difference of a long and a short run of the same shape, divided by the difference in tokens, so that
prompts, start and end of a run cancel out. Prompts are fresh random ids for every run and are drawn outside
the clock. Sizes that the engine cannot hold are left out and noted, never replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gapless.bench.stats import spread
from gapless.bench.workload import PromptSource
from gapless.errors import ConfigError
from gapless.sampling.params import SamplingParams

if TYPE_CHECKING:
    from gapless.llm import LLM

PREFILL_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
DECODE_BATCHES = (1, 8, 32, 128)

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyOptions:
    prefill_tokens: tuple[int, ...] = PREFILL_TOKENS
    decode_batches: tuple[int, ...] = DECODE_BATCHES
    repeats: int = 15
    """Of each prefill, after ``warmups`` that do not count."""
    warmups: int = 3
    decode_repeats: int = 3
    """Pairs of a short and a long run."""
    prompt_tokens: int = 64
    short_tokens: int = 8
    decode_tokens: int = 200
    """How many tokens longer the long run is."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeShape:
    """Tokens of a decode run that fit into the model."""

    prompt: int
    short: int
    more: int

    @property
    def total(self) -> int:
        return self.prompt + self.short + self.more


def measure_latency(
    llm: LLM, options: LatencyOptions, *, on_row: Callable[[Row], None] = lambda row: None
) -> dict[str, Any]:
    """``rows`` as they were measured, their medians as ``prefill_ms`` and ``decode_ms``, and ``notes``."""
    source = PromptSource(llm.runner.vocab_size, seed=options.seed)
    rows: list[Row] = []
    notes: list[str] = []

    def add(row: Row) -> None:
        rows.append(row)
        on_row(row)

    llm.reset_report()
    for tokens in options.prefill_tokens:
        if tokens + 1 > llm.runner.max_model_len:
            notes.append(
                f"prefill of {tokens} tokens left out: with one answer token it is longer than the model "
                f"({llm.runner.max_model_len})"
            )
            continue
        add(_prefill(llm, source, tokens, options))
    shape = decode_shape(llm.runner.max_model_len, options)
    if options.decode_batches and shape.more != options.decode_tokens:
        notes.append(
            f"decode over {shape.more} tokens after prompts of {shape.prompt}: the model has only "
            f"{llm.runner.max_model_len} positions"
        )
    for batch in options.decode_batches:
        reason = _why_not(llm, batch, shape)
        if reason is not None:
            notes.append(f"decode of {batch} requests left out: {reason}")
            continue
        row = _decode(llm, source, batch, shape, options)
        if row["ms"]["min"] <= 0:
            notes.append(
                f"decode of {batch} requests is lost in noise: a run of {shape.more} more tokens was not "
                "slower; raise --decode-tokens, or measure on a quieter machine"
            )
        add(row)
    return {
        "rows": rows,
        "prefill_ms": {r["tokens"]: r["ms"]["median"] for r in rows if r["phase"] == "prefill"},
        "decode_ms": {r["requests"]: r["ms"]["median"] for r in rows if r["phase"] == "decode"},
        "notes": notes,
    }


def decode_shape(max_model_len: int, options: LatencyOptions) -> DecodeShape:
    """The asked shape, shrunk to ``max_model_len``. Raises ``ConfigError`` where nothing is left."""
    prompt = min(options.prompt_tokens, max(1, max_model_len // 4))
    short = min(options.short_tokens, max(1, max_model_len // 8))
    more = min(options.decode_tokens, max_model_len - prompt - short)
    if options.decode_batches and more < 1:
        raise ConfigError(f"decode needs a model of at least 3 positions; this one has {max_model_len}")
    return DecodeShape(prompt=prompt, short=short, more=more)


def greedy(max_tokens: int) -> SamplingParams:
    """Exactly ``max_tokens`` tokens, and no text."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def timed_generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds of one ``generate``. Raises ``RuntimeError`` if an answer is not what was asked for."""
    params = greedy(max_tokens)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    for output in outputs:
        (choice,) = output.outputs
        if len(choice.token_ids) != max_tokens:
            raise RuntimeError(
                f"request {output.request_id} ended after {len(choice.token_ids)} of {max_tokens} tokens: "
                f"{choice.error or choice.finish_reason}"
            )
    return seconds


def _prefill(llm: LLM, source: PromptSource, tokens: int, options: LatencyOptions) -> Row:
    runs = options.warmups + options.repeats
    seconds = [timed_generate(llm, [source.prompt(tokens)], 1) for _ in range(runs)][options.warmups :]
    ms = spread([1e3 * s for s in seconds])
    return {
        "phase": "prefill",
        "tokens": tokens,
        "requests": 1,
        "ms": ms,
        "tokens_per_s": _per_second(tokens, ms["median"]),
    }


def _decode(llm: LLM, source: PromptSource, batch: int, shape: DecodeShape, options: LatencyOptions) -> Row:
    lengths = [shape.prompt] * batch
    per_step = []
    for _ in range(options.decode_repeats):
        short = timed_generate(llm, source.prompts(lengths), shape.short)
        long = timed_generate(llm, source.prompts(lengths), shape.short + shape.more)
        per_step.append(1e3 * (long - short) / shape.more)
    ms = spread(per_step)
    return {
        "phase": "decode",
        "tokens": shape.prompt,
        "requests": batch,
        "ms": ms,
        "tokens_per_s": _per_second(batch, ms["median"]),
    }


def _why_not(llm: LLM, batch: int, shape: DecodeShape) -> str | None:
    if batch > llm.runner.max_num_reqs:
        return f"a step holds {llm.runner.max_num_reqs} (--max-running-requests)"
    capacity = llm.core.scheduler.allocator.capacity_tokens
    blocks_of_one = -(-shape.total // llm.runner.block_size)
    if batch * blocks_of_one * llm.runner.block_size > capacity:
        return f"they need {batch * shape.total} tokens of cache and there are {capacity}"
    return None


def _per_second(count: int, ms: float) -> float | None:
    return round(1e3 * count / ms, 1) if ms > 0 else None
