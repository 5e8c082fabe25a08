"""Load for an OpenAI-compatible server over HTTP: how long tokens take to reach a client.

Open loop: requests arrive by themselves at a rate (gamma-distributed gaps, of which Poisson is the case
``burstiness`` 1), whether or not earlier ones are done. Closed loop: at most so many at once, the next when
one ends. Both can be combined. Prompts are random token ids, so no tokenizer is needed and no prompt is
found in a cache. Fields of the result are named as in ``vllm bench serve`` and mean the same: TTFT from
sending to the first event with a token, TPOT the mean of a request without its first token, ITL the gap
between two events. Invariant: a request counts as completed only if its stream came to its proper end with
the usage the server counted. Read ``http_stream.py`` for the client.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from gapless.bench.http_stream import Endpoint, HttpClient, HttpFailure
from gapless.bench.stats import percentile
from gapless.bench.workload import Lengths, PromptSource
from gapless.errors import ConfigError

CHECK_PROMPTS = 4
"""Different prompts of a run with ``check``; each is sent many times, next to the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """What is sent. Raises ``ConfigError``."""

    url: str
    model: str | None = None
    """None: the first of ``/v1/models``."""
    api_key: str | None = None
    num_prompts: int = 100
    lengths: Lengths = field(default_factory=lambda: Lengths(low=512, high=512))
    output_len: int = 128
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    vocab_size: int = 32_000
    seed: int = 0
    num_warmups: int = 1
    temperature: float = 0.0
    ignore_eos: bool = True
    check: bool = False
    """Send few different prompts many times and compare the answers."""
    timeout_s: float = 600.0
    """For one request."""

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate={self.request_rate}: must be above 0")
        if not (self.burstiness > 0 and math.isfinite(self.burstiness)):
            raise ConfigError(f"--burstiness={self.burstiness}: must be above 0; 1 is Poisson")
        if self.check and self.temperature != 0.0:
            raise ConfigError("--check compares greedy answers: leave --temperature at 0")
        Endpoint.parse(self.url)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One request. Times in seconds from when it was sent; ``error`` is None when all went well."""

    prompt_index: int
    prompt_len: int
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    output_len: int = 0
    text: str = ""
    error: str | None = None


OnDone = Callable[[int, int], None]
"""How many requests are done, of how many."""


def measure_serving(options: LoadOptions, *, on_done: OnDone = lambda done, total: None) -> dict[str, Any]:
    """Send the load and wait for all of it. Raises ``HttpFailure`` if the server refuses the first request,
    ``OSError`` if there is none."""
    return asyncio.run(_measure(options, on_done))


async def _measure(options: LoadOptions, on_done: OnDone) -> dict[str, Any]:
    client = HttpClient(Endpoint.parse(options.url), api_key=options.api_key)
    try:
        model = options.model or await _first_model(client)
        prompts = _prompts(options)
        warmup = PromptSource(options.vocab_size, seed=options.seed + 1)
        for _ in range(options.num_warmups):
            first = await _send(client, model, -1, warmup.prompt(options.lengths.low), options)
            if first.error is not None:
                raise HttpFailure(f"a first request failed: {first.error}")
        start = time.perf_counter()
        outcomes = await _send_all(client, model, prompts, options, on_done)
        duration_s = time.perf_counter() - start
    finally:
        await client.close()
    result = {"model_id": model, **_settings(options), **summary(outcomes, duration_s)}
    if options.check:
        result["check"] = check_answers(outcomes, options.output_len if options.ignore_eos else None)
    return result


def _prompts(options: LoadOptions) -> list[tuple[int, list[int]]]:
    """In the order of sending, each with the number of its text."""
    source = PromptSource(options.vocab_size, seed=options.seed)
    num_different = min(CHECK_PROMPTS, options.num_prompts) if options.check else options.num_prompts
    different = source.prompts(options.lengths.draw(source.rng, num_different))
    return [(i % num_different, different[i % num_different]) for i in range(options.num_prompts)]


def arrival_times(count: int, *, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds at which requests are sent, ``rate`` a second on average, the first at 0."""
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times


async def _send_all(
    client: HttpClient,
    model: str,
    prompts: Sequence[tuple[int, list[int]]],
    options: LoadOptions,
    on_done: OnDone,
) -> list[Outcome]:
    rng = random.Random(options.seed)
    times = arrival_times(len(prompts), rate=options.request_rate, burstiness=options.burstiness, rng=rng)
    slots = asyncio.Semaphore(options.max_concurrency or len(prompts))
    num_done = 0

    async def one(index: int, prompt: list[int]) -> Outcome:
        nonlocal num_done
        async with slots:
            outcome = await _send(client, model, index, prompt, options)
        num_done += 1
        on_done(num_done, len(prompts))
        return outcome

    start = time.perf_counter()
    tasks = []
    for at_s, (index, prompt) in zip(times, prompts, strict=True):
        wait_s = start + at_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(one(index, prompt)))
    return await asyncio.gather(*tasks)


async def _send(
    client: HttpClient, model: str, index: int, prompt: list[int], options: LoadOptions
) -> Outcome:
    """Never raises for what a server may do wrong."""
    outcome = Outcome(prompt_index=index, prompt_len=len(prompt))
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": options.output_len,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with asyncio.timeout(options.timeout_s):
            await _read_answer(client, body, outcome)
    except TimeoutError:
        outcome.error = f"no whole answer within {options.timeout_s:g} s"
    except (HttpFailure, OSError) as error:
        outcome.error = str(error) or type(error).__name__
    except (ValueError, KeyError, IndexError, TypeError) as error:
        outcome.error = f"an event that cannot be read: {type(error).__name__}: {error}"
    return outcome


async def _read_answer(client: HttpClient, body: dict[str, Any], outcome: Outcome) -> None:
    clock = time.perf_counter
    start = last = clock()
    is_finished = is_whole = False
    usage: dict[str, Any] | None = None
    texts: list[str] = []
    async with aclosing(client.events("/v1/completions", body)) as events:
        async for data in events:
            now = clock()
            if data == b"[DONE]":
                is_whole = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise HttpFailure(str(event["error"]["message"]))
            usage = event.get("usage") or usage
            if event["choices"]:
                choice = event["choices"][0]
                if outcome.ttft_s == 0.0:
                    outcome.ttft_s = now - start
                else:
                    outcome.itl_s.append(now - last)
                last = now
                texts.append(choice["text"])
                is_finished = is_finished or choice["finish_reason"] is not None
    outcome.latency_s = last - start
    outcome.text = "".join(texts)
    if not (is_whole and is_finished):
        raise HttpFailure("the stream ended before the answer did")
    if usage is None:
        raise HttpFailure("the server counted no tokens: it ignores stream_options.include_usage")
    outcome.output_len = usage["completion_tokens"]
    if usage["prompt_tokens"] != outcome.prompt_len:
        raise HttpFailure(f"{outcome.prompt_len} tokens were sent, {usage['prompt_tokens']} were counted")


async def _first_model(client: HttpClient) -> str:
    models = (await client.get_json("/v1/models"))["data"]
    if not models:
        raise HttpFailure("the server names no model; give --model")
    return str(models[0]["id"])


def _settings(options: LoadOptions) -> dict[str, Any]:
    return {
        "backend": "openai",
        "num_prompts": options.num_prompts,
        "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "input_lengths": str(options.lengths),
        "output_len": options.output_len,
    }


def summary(outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """The figures. Times of requests that failed are in none of them."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    tokens_in, tokens_out = sum(o.prompt_len for o in good), sum(o.output_len for o in good)
    tpot = [(o.latency_s - o.ttft_s) / (o.output_len - 1) for o in good if o.output_len > 1]
    return {
        "duration": round(duration_s, 4),
        "completed": len(good),
        "failed": len(failed),
        "errors": sorted({str(error) for error in failed})[:10],
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": round(len(good) / duration_s, 3),
        "output_throughput": round(tokens_out / duration_s, 2),
        "total_token_throughput": round((tokens_in + tokens_out) / duration_s, 2),
        **_figures("ttft", [o.ttft_s for o in good]),
        **_figures("tpot", tpot),
        **_figures("itl", [gap for o in good for gap in o.itl_s]),
        **_figures("e2el", [o.latency_s for o in good]),
    }


def _figures(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    names = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p90", "p99")]
    if not values_s:
        return dict.fromkeys(names)
    ms = [1e3 * value for value in values_s]
    found = (
        *(statistics.fmean(ms), statistics.median(ms), statistics.pstdev(ms)),
        *(percentile(ms, 90), percentile(ms, 99)),
    )
    return {name: round(value, 4) for name, value in zip(names, found, strict=True)}


def check_answers(outcomes: Sequence[Outcome], output_len: int | None) -> dict[str, Any]:
    """Whether the same prompt always had the same answer, and every answer all its tokens. A token that was
    lost, sent twice or given to another stream shows as a second answer to some prompt."""
    answers: dict[int, dict[str, int]] = {}
    for outcome in outcomes:
        if outcome.error is None:
            texts = answers.setdefault(outcome.prompt_index, {})
            texts[outcome.text] = texts.get(outcome.text, 0) + 1
    num_failed = sum(outcome.error is not None for outcome in outcomes)
    short = [o for o in outcomes if o.error is None and output_len is not None and o.output_len != output_len]
    deviating = sum(sum(texts.values()) - max(texts.values()) for texts in answers.values())
    return {
        "ok": not deviating and not short and not num_failed,
        "prompts": len(answers),
        "answers": sum(sum(texts.values()) for texts in answers.values()),
        "deviating": deviating,
        "of_wrong_length": len(short),
        "failed": num_failed,
    }
