"""How many GPUs, as replicas or split: a simulation driven by measured step times and a trace of requests.

Each replica is the engine's loop in small: every step takes all running sequences and as much of waiting
prompts as the token budget holds; how long it takes is interpolated between measured times (``prefill_ms`` by
tokens of a step, ``decode_ms`` by sequences). Prompts find cached prefixes, caches forget what was used
longest ago, and the router is the server's own (``gapless/serve/routing.py``). What it does not know: that
attention costs more over longer contexts, preemption, and everything outside the engine. Times for a split
model (``--steps 2=FILE``) must have been measured on that many GPUs, or be assumed in so many words
(``--assume-split 2=0.6``: steps take 0.6 of those of one GPU), which the result then says of every row. Time
is simulated, so a seed gives the same numbers on every machine.

    python benchmarks/scale_sim.py --steps benchmarks/results/h200_acceptance.json --model llama-3.1-8b \\
        --replicas 1 2 4 8 --rate 24 --output scale_sim.json

A trace is a file of JSON lines with ``arrival_s``, ``prompt_tokens``, ``output_tokens`` and, where prompts
begin alike, ``prefix`` (any name) and ``prefix_tokens``; without ``--trace`` one is drawn.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import sys
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gapless.bench.meta import describe_run
from gapless.bench.stats import percentiles
from gapless.serve.routing import Router, expected_tokens

BLOCK = 16
POLICIES = ("prefix", "load", "turns", "random")
"""The server's two, and two that know nothing, to compare with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of a step: by its tokens when prompts are in it, else by its sequences."""

    prefill: tuple[tuple[int, float], ...]
    decode: tuple[tuple[int, float], ...]
    num_blocks: int = 1 << 30

    @classmethod
    def from_result(cls, result: Mapping[str, Any], model: str | None) -> StepTimes:
        """From a result file with ``dummy`` rows (``gpu_acceptance.py``)."""
        rows = {row["name"]: row for row in result["dummy"]}
        if model is None and len(rows) == 1:
            model = next(iter(rows))
        if model not in rows:
            raise SystemExit(f"--model={model}: the file has {', '.join(sorted(rows))}")
        row = rows[model]
        return cls(
            prefill=_table(row["prefill_ms"]),
            decode=_table(row["decode_ms"]),
            num_blocks=row.get("startup", {}).get("num_blocks", 1 << 30),
        )

    def scaled(self, factor: float) -> StepTimes:
        return StepTimes(
            prefill=tuple((size, factor * s) for size, s in self.prefill),
            decode=tuple((size, factor * s) for size, s in self.decode),
            num_blocks=self.num_blocks,
        )

    def step_s(self, *, num_decoding: int, prompt_tokens: int) -> float:
        if prompt_tokens:
            return interpolate(self.prefill, prompt_tokens + num_decoding)
        return interpolate(self.decode, num_decoding)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """``prefix_tokens`` of its prompt are those of all requests of the same ``prefix``."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: str = ""
    prefix_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    max_running: int = 256
    step_tokens: int = 4096
    """Tokens of one step."""
    num_blocks: int = 1 << 30


@dataclass(slots=True)
class _Sequence:
    request: Request
    names: list[bytes]
    prompt_load: int
    """What the router counts until its first token."""
    left: int = 0
    """Prompt tokens that are not computed yet."""
    emitted: int = 0
    last_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What callers have seen."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    end_s: float = 0.0
    busy_s: float = 0.0


class Replica:
    """One engine: ``begin_step`` when it is free and has work, ``end_step`` when that time has passed."""

    def __init__(self, times: StepTimes, limits: EngineLimits) -> None:
        self._times, self._limits = times, limits
        self.waiting: deque[_Sequence] = deque()
        self.running: list[_Sequence] = []
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        self._own_blocks = 0
        self._held: Counter[bytes] = Counter()
        self._finishing: list[_Sequence] = []
        self.is_busy = False

    def begin_step(self, outcome: Outcome) -> float | None:
        """Its duration, or None without work."""
        decoding = sum(1 for each in self.running if not each.left)
        budget = self._limits.step_tokens - decoding
        prompt_tokens = 0
        for each in self.running:
            taken = min(each.left, budget - prompt_tokens)
            if taken > 0:
                prompt_tokens += taken
                each.left -= taken
                if not each.left:
                    self._finishing.append(each)
        while self.waiting and prompt_tokens < budget and self._has_room(self.waiting[0]):
            each = self.waiting.popleft()
            self._admit(each, outcome)
            taken = min(each.left, budget - prompt_tokens)
            prompt_tokens += taken
            each.left -= taken
            if not each.left:
                self._finishing.append(each)
        if not prompt_tokens and not decoding:
            return None
        self.is_busy = True
        return self._times.step_s(num_decoding=decoding, prompt_tokens=prompt_tokens)

    def end_step(self, now_s: float, outcome: Outcome) -> tuple[list[_Sequence], list[_Sequence]]:
        """Tokens come out; returns the sequences that had their first and those that had their last."""
        self.is_busy = False
        begun, self._finishing = self._finishing, []
        fresh = {id(each) for each in begun}
        ended = []
        for each in self.running:
            if each.left:
                continue
            if id(each) in fresh:
                outcome.ttft_s.append(now_s - each.request.arrival_s)
                self._remember(each.names)
            else:
                outcome.itl_s.append(now_s - each.last_s)
            each.last_s = now_s
            each.emitted += 1
            outcome.output_tokens += 1
            if each.emitted >= each.request.output_tokens:
                ended.append(each)
                outcome.e2e_s.append(now_s - each.request.arrival_s)
                self._own_blocks -= _num_own_blocks(each)
                self._held -= Counter(each.names)
        if ended:
            gone = {id(each) for each in ended}
            self.running = [each for each in self.running if id(each) not in gone]
        return begun, ended

    def _has_room(self, sequence: _Sequence) -> bool:
        """A sequence reserves all it will need, and an empty engine takes any. Blocks that running sequences
        have in common are there once."""
        if not self.running:
            return True
        num_new = sum(1 for name in sequence.names if name not in self._held)
        needed = self._own_blocks + len(self._held) + num_new + _num_own_blocks(sequence)
        return len(self.running) < self._limits.max_running and needed <= self._limits.num_blocks

    def _admit(self, sequence: _Sequence, outcome: Outcome) -> None:
        depth = 0
        for name in sequence.names:
            if name not in self._cached:
                break
            self._cached.move_to_end(name)
            depth += 1
        cached = depth * BLOCK
        sequence.left = sequence.request.prompt_tokens - cached
        outcome.prompt_tokens += sequence.request.prompt_tokens
        outcome.cached_tokens += cached
        self._own_blocks += _num_own_blocks(sequence)
        self._held.update(sequence.names)
        self.running.append(sequence)

    def _remember(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._cached[name] = None
            self._cached.move_to_end(name)
        num_surplus = len(self._cached) - (self._limits.num_blocks - self._own_blocks)
        if num_surplus > 0:
            idle = (name for name in self._cached if name not in self._held)
            for name in list(itertools.islice(idle, num_surplus)):
                del self._cached[name]


def simulate(
    requests: Sequence[Request],
    times: StepTimes,
    *,
    num_replicas: int,
    policy: str = "prefix",
    limits: EngineLimits | None = None,
    seed: int = 0,
) -> Outcome:
    """Until the last token of the last request."""
    limits = limits or EngineLimits(num_blocks=times.num_blocks)
    replicas = [Replica(times, limits) for _ in range(num_replicas)]
    loads = dict.fromkeys(range(num_replicas), 0)
    choose = _chooser(policy, loads, random.Random(seed))
    outcome, order = Outcome(), itertools.count()
    events: list[tuple[float, int, Request | int]] = [(r.arrival_s, next(order), r) for r in requests]
    heapq.heapify(events)
    while events:
        now_s = outcome.end_s = events[0][0]
        touched: set[int] = set()
        while events and events[0][0] == now_s:  # what happens at once is in the same step
            event = heapq.heappop(events)[2]
            if isinstance(event, Request):
                names = _names_of(event)
                number, num_blocks = choose(names)
                sequence = _Sequence(event, names, event.prompt_tokens - num_blocks * BLOCK)
                loads[number] += sequence.prompt_load + expected_tokens(1, event.output_tokens)
                replicas[number].waiting.append(sequence)
            else:
                number = event
                begun, ended = replicas[number].end_step(now_s, outcome)
                loads[number] -= sum(each.prompt_load for each in begun)
                loads[number] -= sum(expected_tokens(1, each.request.output_tokens) for each in ended)
            touched.add(number)
        for number in sorted(touched):
            duration_s = None if replicas[number].is_busy else replicas[number].begin_step(outcome)
            if duration_s is not None:
                outcome.busy_s += duration_s
                heapq.heappush(events, (now_s + duration_s, next(order), number))
    return outcome


def draw_trace(
    *,
    num_requests: int,
    rate: float,
    prompt_tokens: int,
    output_tokens: int,
    num_prefixes: int,
    prefix_tokens: int,
    seed: int,
) -> list[Request]:
    """Poisson arrivals; lengths vary by a factor of two either way; popular prefixes are more popular than
    others (the k-th with weight 1/k)."""
    rng = random.Random(seed)
    weights = [1 / (k + 1) for k in range(num_prefixes)]
    now_s, requests = 0.0, []
    for _ in range(num_requests):
        now_s += rng.expovariate(rate)
        prefix = f"p{rng.choices(range(num_prefixes), weights)[0]}" if num_prefixes else ""
        own = max(1, round(prompt_tokens * 2 ** rng.uniform(-1, 1)))
        requests.append(
            Request(
                arrival_s=now_s,
                prompt_tokens=own + (prefix_tokens if prefix else 0),
                output_tokens=max(1, round(output_tokens * 2 ** rng.uniform(-1, 1))),
                prefix=prefix,
                prefix_tokens=prefix_tokens if prefix else 0,
            )
        )
    return requests


def read_trace(path: Path) -> list[Request]:
    requests = [Request(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()]
    if not requests:
        raise SystemExit(f"--trace={path}: there is no request in it")
    return requests


def interpolate(table: Sequence[tuple[int, float]], size: float) -> float:
    """Linear between measured sizes, constant below the first, along the last slope above the last."""
    sizes = [known for known, _ in table]
    index = bisect_left(sizes, size)
    if index == 0:
        return table[0][1]
    if index == len(table):
        if len(table) == 1:
            return table[0][1] * size / table[0][0]
        index -= 1
    (low, below), (high, above) = table[index - 1], table[index]
    return below + (above - below) * (size - low) / (high - low)


def summarise(outcome: Outcome, *, num_gpus: int) -> dict[str, Any]:
    """``gpu_s_per_million``: GPU seconds per million generated tokens, idle ones included."""
    return {
        "num_gpus": num_gpus,
        "ttft_ms": percentiles([1e3 * value for value in outcome.ttft_s]),
        "itl_ms": percentiles([1e3 * value for value in outcome.itl_s]),
        "e2e_ms": percentiles([1e3 * value for value in outcome.e2e_s]),
        "tokens_per_s": round(outcome.output_tokens / outcome.end_s, 1),
        "gpu_s_per_million": round(1e6 * num_gpus * outcome.end_s / outcome.output_tokens, 1),
        "cached_part": round(outcome.cached_tokens / max(1, outcome.prompt_tokens), 4),
        "seconds": round(outcome.end_s, 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    times = _times_by_split(options)
    trace = read_trace(options.trace) if options.trace else draw_trace(**_drawn(options))
    rows = list(_sweep(options, times, trace))
    _print_table(rows)
    result = {
        "benchmark": "scale_sim",
        "meta": describe_run(argv),
        "is_simulated": True,
        "steps": {str(split): asdict(each) for split, (each, _) in times.items()},
        "trace": str(options.trace.name) if options.trace else _drawn(options),
        "rows": rows,
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def _sweep(
    options: argparse.Namespace, times: Mapping[int, tuple[StepTimes, str]], trace: Sequence[Request]
) -> Iterator[dict[str, Any]]:
    for split, (each, source) in sorted(times.items()):
        limits = EngineLimits(
            max_running=options.max_running, step_tokens=options.step_tokens, num_blocks=each.num_blocks
        )
        for num_replicas, policy in itertools.product(options.replicas, options.policies):
            if num_replicas == 1 and policy != options.policies[0]:
                continue  # there is nothing to choose
            outcome = simulate(
                trace, each, num_replicas=num_replicas, policy=policy, limits=limits, seed=options.seed
            )
            summary = summarise(outcome, num_gpus=split * num_replicas)
            summary["busy_part"] = round(outcome.busy_s / outcome.end_s / num_replicas, 4)
            yield {"tp": split, "replicas": num_replicas, "routing": policy, "times": source, **summary}


def _chooser(policy: str, loads: dict[int, int], rng: random.Random) -> Any:
    """A function from the names of a prompt's blocks to a replica, and how many of them it should hold."""
    if policy == "random":
        return lambda names: (rng.randrange(len(loads)), 0)
    if policy == "turns":
        turns = itertools.cycle(loads)
        return lambda names: (next(turns), 0)
    if policy not in ("prefix", "load"):
        raise ValueError(f"policy={policy!r}: must be one of {', '.join(POLICIES)}")
    router = Router("prefix" if policy == "prefix" else "load")

    def choose(names: Sequence[bytes]) -> tuple[int, int]:
        choice = router.choose(loads, names)
        router.sent(choice.replica, names)
        return choice.replica, choice.num_blocks

    return choose


def _names_of(request: Request) -> list[bytes]:
    """Of the blocks that requests of the same prefix share; the last token is computed in any case."""
    shared = min(request.prefix_tokens, request.prompt_tokens - 1)
    return (
        [f"{request.prefix}/{index}".encode() for index in range(shared // BLOCK)] if request.prefix else []
    )


def _num_own_blocks(sequence: _Sequence) -> int:
    """Those it shares with nobody."""
    return _num_blocks(sequence.request) - len(sequence.names)


def _num_blocks(request: Request) -> int:
    return math.ceil((request.prompt_tokens + request.output_tokens) / BLOCK)


def _table(by_size: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(size), milliseconds / 1e3) for size, milliseconds in by_size.items()))


def _times_by_split(options: argparse.Namespace) -> dict[int, tuple[StepTimes, str]]:
    """By GPUs per replica: times, and whether they were measured or assumed."""
    found: dict[int, tuple[StepTimes, str]] = {}
    for word in options.steps:
        split, equals, name = word.partition("=")
        number, path = (int(split), Path(name)) if equals else (1, Path(word))
        times = StepTimes.from_result(json.loads(path.read_text()), options.model)
        found[number] = (times, f"measured ({path.name})")
    for word in options.assume_split:
        split, _, factor = word.partition("=")
        if 1 not in found:
            raise SystemExit(f"--assume-split={word}: needs the times of one GPU in --steps")
        found[int(split)] = (found[1][0].scaled(float(factor)), f"assumed ({factor} of one GPU)")
    return found


def _drawn(options: argparse.Namespace) -> dict[str, Any]:
    names = (
        "num_requests",
        "rate",
        "prompt_tokens",
        "output_tokens",
        "num_prefixes",
        "prefix_tokens",
        "seed",
    )
    return {name: getattr(options, name) for name in names}


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    print(
        "tp replicas routing GPUs | TTFT p50 / p99 ms | ITL p50 / p99 ms | tokens/s | cached busy",
        file=sys.stderr,
    )
    for row in rows:
        ttft, itl = row["ttft_ms"], row["itl_ms"] or {"p50": 0.0, "p99": 0.0}
        print(
            f"{row['tp']:2} {row['replicas']:8} {row['routing']:7} {row['num_gpus']:4} | "
            f"{ttft['p50']:8.1f} {ttft['p99']:9.1f} | {itl['p50']:7.2f} {itl['p99']:8.2f} | "
            f"{row['tokens_per_s']:8.0f} | {row['cached_part']:5.2f} {row['busy_part']:5.2f}",
            file=sys.stderr,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", nargs="+", required=True, metavar="[TP=]FILE", help="measured step times")
    parser.add_argument("--assume-split", nargs="*", default=[], metavar="TP=FACTOR")
    parser.add_argument("--model", help="which row of the file")
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--trace", type=Path, help="JSON lines; else a trace is drawn")
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=16.0, help="requests per second")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of a prompt, beside its prefix")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--num-prefixes", type=int, default=32)
    parser.add_argument("--prefix-tokens", type=int, default=1024)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
