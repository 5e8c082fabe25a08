"""Load for an OpenAI-compatible server over HTTP: how long tokens take to reach a client.

Open loop: requests arrive by themselves at a rate (gamma-distributed gaps, of which Poisson is the case
``burstiness`` 1), whether or not earlier ones are done. Closed loop: at most so many at once, the next when
one ends. Both can be combined. Prompts are random token ids, so no tokenizer is needed and no prompt is
found in a cache. Invariant: a request counts as completed only if its stream came to its proper end with
the usage the server counted. Read ``serve_figures.py`` for the figures, ``http_stream.py`` for the client.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gapless.bench.http_stream import Endpoint, Exchange, HttpClient, HttpFailure, check_end, loop_factory
from gapless.bench.serve_figures import Outcome, check_answers, summary
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
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Limits in milliseconds by name (``GOODPUT_NAMES``) that a request must keep to count as good."""

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate={self.request_rate}: must be above 0")
        if not (self.burstiness > 0 and math.isfinite(self.burstiness)):
            raise ConfigError(f"--burstiness={self.burstiness}: must be above 0; 1 is Poisson")
        if self.check and self.temperature != 0.0:
            raise ConfigError("--check compares greedy answers: leave --temperature at 0")
        Endpoint.parse(self.url)


OnDone = Callable[[int, int], None]
"""How many requests are done, of how many."""


def measure_serving(options: LoadOptions, *, on_done: OnDone = lambda done, total: None) -> dict[str, Any]:
    """Send the load and wait for all of it. Raises ``HttpFailure`` if the server refuses the first request,
    ``OSError`` if there is none."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_measure(options, on_done))


async def _measure(options: LoadOptions, on_done: OnDone) -> dict[str, Any]:
    client = HttpClient(Endpoint.parse(options.url), api_key=options.api_key)
    try:
        model = options.model or await _first_model(client)
        requests = _requests(model, options)
        warmup = PromptSource(options.vocab_size, seed=options.seed + 1)
        for _ in range(options.num_warmups):
            prompt = warmup.prompt(options.lengths.low)
            first = await _send(client, _request(model, -1, prompt, options), options.timeout_s)
            if first.error is not None:
                raise HttpFailure(f"a first request failed: {first.error}")
        start = time.perf_counter()
        outcomes = await _send_all(client, requests, options, on_done)
        duration_s = time.perf_counter() - start
    finally:
        await client.close()
    result = {"model_id": model, **_settings(options), **summary(outcomes, duration_s, options.goodput)}
    if options.check:
        result["check"] = check_answers(outcomes, options.output_len if options.ignore_eos else None)
    return result


@dataclass(frozen=True, slots=True)
class _Request:
    """Encoded before the clock starts."""

    prompt_index: int
    """The number of its prompt's text."""
    prompt_len: int
    body: bytes


def _request(model: str, index: int, prompt: list[int], options: LoadOptions) -> _Request:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": options.output_len,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return _Request(index, len(prompt), json.dumps(body).encode())


def _requests(model: str, options: LoadOptions) -> list[_Request]:
    """In the order of sending."""
    source = PromptSource(options.vocab_size, seed=options.seed)
    num_different = min(CHECK_PROMPTS, options.num_prompts) if options.check else options.num_prompts
    different = [
        _request(model, index, prompt, options)
        for index, prompt in enumerate(source.prompts(options.lengths.draw(source.rng, num_different)))
    ]
    return [different[i % num_different] for i in range(options.num_prompts)]


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
    client: HttpClient, requests: Sequence[_Request], options: LoadOptions, on_done: OnDone
) -> list[Outcome]:
    rng = random.Random(options.seed)
    times = arrival_times(len(requests), rate=options.request_rate, burstiness=options.burstiness, rng=rng)
    slots = asyncio.Semaphore(options.max_concurrency or len(requests))
    num_done = 0

    async def one(request: _Request) -> Outcome:
        nonlocal num_done
        async with slots:
            outcome = await _send(client, request, options.timeout_s)
        num_done += 1
        on_done(num_done, len(requests))
        return outcome

    start = time.perf_counter()
    tasks = []
    for at_s, request in zip(times, requests, strict=True):
        wait_s = start + at_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(one(request)))
    return await asyncio.gather(*tasks)


async def _send(client: HttpClient, request: _Request, timeout_s: float) -> Outcome:
    """Never raises for what a server may do wrong."""
    outcome = Outcome(prompt_index=request.prompt_index, prompt_len=request.prompt_len)
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.exchange("POST", "/v1/completions", request.body) as exchange,
        ):
            outcome.start_s = exchange.sent_s
            await exchange.whole()
        _read_answer(exchange, outcome)
    except TimeoutError:
        outcome.error = f"no whole answer within {timeout_s:g} s"
    except (HttpFailure, OSError) as error:
        outcome.error = str(error) or type(error).__name__
    except (ValueError, KeyError, IndexError, TypeError) as error:
        outcome.error = f"an event that cannot be read: {type(error).__name__}: {error}"
    return outcome


def _read_answer(exchange: Exchange, outcome: Outcome) -> None:
    """Of a stream that has ended: what its events say is read only now, their times are of their arrival."""
    start = last = exchange.sent_s
    is_finished = is_whole = False
    usage: dict[str, Any] | None = None
    texts: list[str] = []
    for arrived_s, data in exchange.events:
        if data == b"[DONE]":
            is_whole = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise HttpFailure(str(event["error"]["message"]))
        usage = event.get("usage") or usage
        if event["choices"]:
            choice = event["choices"][0]
            if not texts:
                outcome.ttft_s = arrived_s - start
            else:
                outcome.itl_s.append(arrived_s - last)
            last = arrived_s
            texts.append(choice["text"])
            is_finished = is_finished or choice["finish_reason"] is not None
    check_end(exchange)
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
        "endpoint_type": "openai",
        "num_prompts": options.num_prompts,
        "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "input_lengths": str(options.lengths),
        "output_len": options.output_len,
    }
