"""What a server costs on a CPU, in one run: per streamed token, over twenty thousand requests, in a queue.

*Cost*: both processes of a server around an engine that computes nothing. The engine draws tokens from a
formula and SmolLM2's tokenizer turns them into text; it sleeps between steps, so each token is an event of
its own. What is left is the engine's own bookkeeping, detokenisation, the wire between the processes, JSON,
and sockets. Costs are CPU seconds of each process as the kernel counts them, so neither the client nor other
load on the machine is in them (but caches are colder where others run, and after each sleep). A token that
comes by itself wakes four threads, two of each process, so what one wake-up costs here stands beside them.

*Streams*: ``serve_streams.py``, a thousand at once through ``gapless serve`` of a tiny random model.

*Fairness*: the first token of a request that comes behind others, against when the last of those ends.

The exit code is 1 if a figure misses its target.

    python benchmarks/serve_cpu.py --output benchmarks/results/serve_cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "serve"))

from engine_process_fakes import VOCAB_SIZE, CountingRunner, make_info
from serve_streams import cpu_s, engine_pid_of, measure_streams

from gapless.bench.meta import describe_run
from gapless.engine.core import EngineCore
from gapless.models.sources import open_tokenizer
from gapless.serve.app import create_app
from gapless.serve.engine_process import ReportProgress, ServedEngine
from gapless.serve.server import Announcements, run_server
from gapless.serve.settings import ServerSettings

BUDGET_US = 60.0
"""Of a streamed token where many are streamed; a lone stream's are spent on waking threads up."""
MANY = 256
"""Streams from which on the budget binds."""
FAIR_RATIO = 1.1
QUEUED, RUNNING = 200, 16
PACKAGES = ("fastapi", "uvicorn", "uvloop", "pyzmq", "msgspec")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFast:
    """A real tokenizer over the engine that draws from a formula."""

    max_num_reqs: int
    step_s: float = 0.0

    def __call__(self, progress: ReportProgress) -> ServedEngine:
        runner = CountingRunner(max_num_reqs=self.max_num_reqs, num_blocks=40_000, step_s=self.step_s)
        core = EngineCore(runner, tokenizer=open_tokenizer("smollm2"), eos_token_ids=[VOCAB_SIZE - 1])
        return ServedEngine(core=core, info=make_info(core))


def serve(address: str, opener: OpenFast) -> None:
    settings = ServerSettings(port=0, access_log="off", max_queued_requests=4096)
    announce = Announcements(
        progress=lambda stage, done, total: None,
        on_ready=lambda info: None,
        on_serving=lambda url: write_whole(Path(address), url),
    )
    tokenizer = open_tokenizer("smollm2")
    sys.exit(run_server(opener, lambda client: create_app(client, settings, tokenizer), settings, announce))


def write_whole(path: Path, text: str) -> None:
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


class Server:
    """A server in a process of its own; ends with the block."""

    def __init__(self, opener: OpenFast) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "address")
        self._process = get_context("spawn").Process(target=serve, args=(str(path), opener))
        self._process.start()
        while not path.exists():
            assert self._process.is_alive(), "the server has ended"
            time.sleep(0.02)
        host, port = path.read_text().removeprefix("http://").split(":")
        self.address = host, int(port)

    def cpu_s(self) -> dict[str, float]:
        assert self._process.pid is not None
        return {"http": cpu_s(self._process.pid), "engine": cpu_s(engine_pid_of(self._process.pid))}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()
        self._folder.cleanup()


def wakeup_us(num_times: int = 500) -> float:
    """CPU time of a thread that does nothing but sleep and wake up, each time."""
    start = time.thread_time()
    for _ in range(num_times):
        time.sleep(0.002)
    return 1e6 * (time.thread_time() - start) / num_times


async def stream(server: Server, path: str, number: int, num_tokens: int) -> tuple[float, int]:
    """Read one answer to its end; the seconds to its first event, and how many there were."""
    reader, writer = await asyncio.open_connection(*server.address)
    fields: dict[str, Any] = {"max_tokens": num_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    if path.endswith("chat/completions"):
        fields["messages"] = [{"role": "user", "content": f"number {number}"}]
    else:
        fields["prompt"] = [number + 1, 5]
    body = json.dumps(fields).encode()
    start, first_s = time.perf_counter(), 0.0
    writer.write(
        b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
        % (path.encode(), len(body), body)
    )
    end, num_events = b"", 0
    while part := await reader.read(1 << 16):
        first_s = first_s or time.perf_counter() - start
        num_events += part.count(b"data: ")
        end = (end + part)[-64:]
    assert b"[DONE]" in end, end
    writer.close()
    return first_s, num_events


async def load(server: Server, path: str, num_streams: int, num_tokens: int) -> int:
    """How many events came."""
    answers = await asyncio.gather(*(stream(server, path, i, num_tokens) for i in range(num_streams)))
    return sum(num_events for _, num_events in answers)


def measure_cost(path: str, num_streams: int, num_tokens: int, step_s: float) -> dict[str, Any]:
    with Server(OpenFast(max_num_reqs=1024, step_s=step_s)) as server:
        asyncio.run(load(server, path, num_streams, max(1, num_tokens // 10)))
        before = server.cpu_s()
        start = time.perf_counter()
        num_events = asyncio.run(load(server, path, num_streams, num_tokens))
        wall_s = time.perf_counter() - start
        after = server.cpu_s()
    total = num_streams * num_tokens
    costs = {name: 1e6 * (after[name] - before[name]) / total for name in before}
    return {
        "path": path,
        "streams": num_streams,
        "step_ms": 1e3 * step_s,
        "tokens": total,
        "tokens_per_event": round(total / num_events, 2),
        "http_us_per_token": round(costs["http"], 1),
        "engine_us_per_token": round(costs["engine"], 1),
        "both_us_per_token": round(sum(costs.values()), 1),
        "tokens_per_s": round(total / wall_s),
    }


def measure_fairness(num_tokens: int) -> dict[str, Any]:
    """``num_tokens`` each, ``RUNNING`` at a time: a fair queue gives the newcomer its first token about when
    the last of those before it ends."""

    async def scenario(server: Server) -> tuple[float, float]:
        path = "/v1/completions"
        start = time.perf_counter()
        before = [asyncio.create_task(stream(server, path, i, num_tokens)) for i in range(QUEUED)]
        await asyncio.sleep(0.3)
        arrived = time.perf_counter()
        newcomer = asyncio.create_task(stream(server, path, QUEUED, num_tokens))
        await asyncio.sleep(0.1)
        after = [asyncio.create_task(stream(server, path, QUEUED + 1 + i, num_tokens)) for i in range(QUEUED)]
        await asyncio.gather(*before)
        fair_s = time.perf_counter() - arrived
        ttft_s, _ = await newcomer
        await asyncio.gather(*after)
        assert arrived - start < fair_s, "the queue has emptied before the newcomer came"
        return ttft_s, fair_s

    with Server(OpenFast(max_num_reqs=RUNNING, step_s=0.002)) as server:
        ttft_s, fair_s = asyncio.run(scenario(server))
    return {
        "queued_before": QUEUED,
        "running": RUNNING,
        "tokens_each": num_tokens,
        "ttft_s": round(ttft_s, 3),
        "last_before_ends_s": round(fair_s, 3),
        "ratio": round(ttft_s / fair_s, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream whose cost is measured")
    parser.add_argument("--requests", type=int, default=20_000, help="in all, through the tiny model")
    parser.add_argument("--streams", type=int, default=1000, help="of them at once")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    one_wakeup_us = round(wakeup_us(), 1)
    print(f"one wake-up of a sleeping thread: {one_wakeup_us} us")
    rows = measure_costs(arguments.tokens)
    fairness = measure_fairness(min(100, arguments.tokens))
    print(
        f"first token behind {QUEUED} others: {fairness['ratio']:.2f}x the time until the last of them ends"
    )
    streams = measure_streams(num_requests=arguments.requests, num_streams=arguments.streams, num_tokens=24)
    print(
        f"{streams['requests']} requests, {streams['streams']} at once: {streams['wrong_answers']} wrong,"
        f" left {streams['left']}, grown by {streams['growth_mb']} MB in all,"
        f" {streams['usual_growth_mb']} in a twentieth of them"
    )
    dearest_us = max(row["both_us_per_token"] for row in rows if row["streams"] >= MANY)
    result = {
        "benchmark": "serve_cpu",
        "meta": describe_run() | {name: metadata.version(name) for name in PACKAGES},
        "load_average": os.getloadavg(),
        "wakeup_us": one_wakeup_us,
        "rows": rows,
        "fairness": fairness,
        "streams": streams,
        "targets": {
            f"us per token of {MANY} and more streams": [dearest_us, BUDGET_US, dearest_us <= BUDGET_US],
            "first token behind the queue": [fairness["ratio"], FAIR_RATIO, fairness["ratio"] <= FAIR_RATIO],
            "streams": [streams["wrong_answers"], 0, streams["is_ok"]],
        },
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if all(is_met for _, _, is_met in result["targets"].values()) else 1


def measure_costs(num_tokens: int) -> list[dict[str, Any]]:
    rows = []
    print(
        f"{'path':<22}{'streams':>8}{'HTTP us':>9}{'engine us':>11}{'both us':>9}{'tokens/s':>10}"
        f"{'tokens/event':>14}"
    )
    for path in ("/v1/completions", "/v1/chat/completions"):
        for num_streams, times, step_s in ((1, 8, 0.002), (16, 4, 0.004), (256, 1, 0.04), (1000, 1, 0.16)):
            row = measure_cost(path, num_streams, num_tokens * times, step_s)
            rows.append(row)
            print(
                f"{path:<22}{num_streams:>8}{row['http_us_per_token']:>9}{row['engine_us_per_token']:>11}"
                f"{row['both_us_per_token']:>9}{row['tokens_per_s']:>10}{row['tokens_per_event']:>14}",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
