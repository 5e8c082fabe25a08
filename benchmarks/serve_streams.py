"""A thousand streams at once, twenty thousand in all, through ``gapless serve`` of a tiny random model.

Every answer is known beforehand: prompts are asked alone first, and those are kept whose greedy answer meets
no near tie (a batch of another size rounds differently) and is nobody else's. A token that is lost, comes
twice or reaches another stream then changes a text. Blocks, requests and open files must be back where they
were, and memory of both processes must not grow after the first requests. ``serve_cpu.py`` runs it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from gapless.bench.http_stream import Endpoint, HttpClient

VOCAB_SIZE = 2048
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": VOCAB_SIZE - 1,
}
OPTIONS = (
    "--load-format", "dummy", "--port", "0", "--kv-cache-tokens", "65536", "--max-running-requests", "256",
    "--chunked-prefill-size", "2048", "--max-queued-requests", "4096", "--access-log", "off",
    "--enable-cache-reset",
)  # fmt: skip
TIE = 1e-3
"""Log-probabilities of the best two tokens further apart than this do not change places by rounding."""
SETTLED = 0.1
"""The part of the requests after which memory may not grow: until then caches fill."""
MAX_GROWTH_MB = 32.0
"""In all: what the allocator keeps after the longest backlog there was, which a loaded machine makes."""
MAX_USUAL_GROWTH_MB = 0.25
"""In the median twentieth: a leak grows in each of them, a backlog in few. 250 bytes a request of 20,000."""
HEARTBEAT_S = 1.5
"""The engine tells its numbers once a second."""
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A prompt and the one right answer."""

    prompt: list[int]
    text: str


class Server:
    """What can be seen of a running server from outside."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid
        self.engine_pid = engine_pid_of(pid)

    def metric(self, name: str) -> float:
        """The sum over its labels; 0 before there are any."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in found)

    def reset_prefix_cache(self) -> None:
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(request).close()

    def memory_mb(self) -> dict[str, float]:
        return {"http": resident_mb(self.pid), "engine": resident_mb(self.engine_pid)}

    def cpu_s(self) -> dict[str, float]:
        return {"http": cpu_s(self.pid), "engine": cpu_s(self.engine_pid)}

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@contextmanager
def serving() -> Iterator[Server]:
    """The command as a person gives it, ended with the block."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        log = folder / "log"
        command = [sys.executable, "-m", "gapless.launch_server", "--model-path", name, *OPTIONS]
        with log.open("w") as file:
            process = subprocess.Popen(command, stderr=file)
        try:
            while (found := re.search(r"serving at (\S+)", log.read_text())) is None:
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            yield Server(found[1], process.pid)
        finally:
            process.terminate()
            assert process.wait(60) == 0, log.read_text()


def write_model(folder: Path) -> None:
    """Token 12 is the text `` w12``, so that texts differ where tokens do."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = {f" w{token}": token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" w0"))
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def measure_streams(*, num_requests: int, num_streams: int, num_tokens: int) -> dict[str, Any]:
    """``num_requests`` streamed answers of ``num_tokens``, ``num_streams`` of them at any time."""
    with serving() as server:
        return asyncio.run(_measure(server, num_requests, num_streams, num_tokens))


async def _measure(server: Server, num_requests: int, num_streams: int, num_tokens: int) -> dict[str, Any]:
    client = HttpClient(Endpoint.parse(server.url))
    asked = await known_answers(client, min(num_streams, 500), num_tokens)
    server.reset_prefix_cache()
    await asyncio.sleep(HEARTBEAT_S)  # then the metrics have all of that
    num_before, files_before = server.metric("vllm:request_success_total"), server.num_files()
    numbers, wrong, num_events, num_done = itertools.count(), [], 0, 0
    memory: list[dict[str, float]] = []
    most = {"http_requests_open": 0.0, "running": 0.0, "waiting": 0.0}

    async def stream_after_stream() -> None:
        nonlocal num_events, num_done
        while (number := next(numbers)) < num_requests:
            one = asked[number % len(asked)]
            text, events = await answer(client, one.prompt, num_tokens)
            num_events += events
            num_done += 1
            if text != one.text:
                wrong.append(number)
            if num_done % max(1, num_requests // 20) == 0:
                memory.append({"requests": num_done, **_rounded(server.memory_mb())})

    async def look() -> None:
        while True:
            await asyncio.sleep(0.5)
            for key, name in (
                ("http_requests_open", "gapless:http_requests_open"),
                ("running", "vllm:num_requests_running"),
                ("waiting", "vllm:num_requests_waiting"),
            ):
                most[key] = max(most[key], await asyncio.to_thread(server.metric, name))

    looking = asyncio.create_task(look())
    cpu_before, start = server.cpu_s(), time.perf_counter()
    await asyncio.gather(*(stream_after_stream() for _ in range(num_streams)))
    wall_s, cpu_after = time.perf_counter() - start, server.cpu_s()
    looking.cancel()
    await client.close()
    left = await _what_is_left(server, files_before)
    total = num_requests * num_tokens
    settled = [row for row in memory if row["requests"] >= SETTLED * num_requests]
    names = ("http", "engine")
    growth = {name: round(settled[-1][name] - settled[0][name], 1) for name in names}
    usual = {name: statistics.median(b[name] - a[name] for a, b in pairwise(settled)) for name in names}
    return {
        "requests": num_requests,
        "streams": num_streams,
        "tokens_each": num_tokens,
        "different_answers": len(asked),
        "wrong_answers": len(wrong),
        "ended_well": int(server.metric("vllm:request_success_total") - num_before),
        "most_at_once": most,
        "left": left,
        "memory_mb": memory,
        "growth_mb": growth,
        "usual_growth_mb": _rounded(usual),
        "tokens_per_s": round(total / wall_s),
        "tokens_per_event": round(total / (num_events - num_requests), 2),  # each ends with a [DONE]
        "http_us_per_token": round(1e6 * (cpu_after["http"] - cpu_before["http"]) / total, 1),  # and request
        "is_ok": not wrong
        and not any(left.values())
        and max(growth.values()) <= MAX_GROWTH_MB
        and max(usual.values()) <= MAX_USUAL_GROWTH_MB,
    }


async def known_answers(client: HttpClient, num_wanted: int, num_tokens: int) -> list[Asked]:
    """Prompts of 8 to 40 tokens with answers that differ, asked one after the other."""
    chance = random.Random(0)
    found: dict[str, Asked] = {}
    while len(found) < num_wanted:
        prompt = [chance.randrange(VOCAB_SIZE - 1) for _ in range(chance.randint(8, 40))]
        text, gap = "", float("inf")
        async for event in client.events("/v1/completions", _body(prompt, num_tokens) | {"logprobs": 2}):
            choice = {} if event == b"[DONE]" else json.loads(event)["choices"][0]
            text += choice.get("text", "")
            for values in (choice.get("logprobs") or {}).get("top_logprobs", []):
                best, second, *_ = sorted(values.values(), reverse=True)
                gap = min(gap, best - second)
        if gap > TIE:
            found[text] = Asked(prompt=prompt, text=text)
    return list(found.values())


async def answer(client: HttpClient, prompt: list[int], num_tokens: int) -> tuple[str, int]:
    """The text of a streamed answer, and of how many events it was."""
    text, events = "", [event async for event in client.events("/v1/completions", _body(prompt, num_tokens))]
    assert events[-1] == b"[DONE]", events[-1]
    for event in events[:-1]:
        text += json.loads(event)["choices"][0]["text"]
    return text, len(events)


def _body(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}


async def _what_is_left(server: Server, files_before: int) -> dict[str, float]:
    """Of what the requests held, once a heartbeat has told of their end."""
    await asyncio.sleep(HEARTBEAT_S)
    deadline = time.monotonic() + 10
    while True:
        left = {
            "blocks": server.metric("gapless:kv_blocks") - server.metric("gapless:kv_blocks_free"),
            "running": server.metric("vllm:num_requests_running"),
            "waiting": server.metric("vllm:num_requests_waiting"),
            "http_requests": server.metric("gapless:http_requests_open") - 1,  # the one that asks
            "files": max(0, server.num_files() - files_before),
        }
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.2)


def engine_pid_of(pid: int) -> int:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("no engine process")


def cpu_s(pid: int) -> float:
    """Of all its threads, in the scheduler's own nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}
