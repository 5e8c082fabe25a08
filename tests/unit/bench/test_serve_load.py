"""Load over HTTP: arrivals, figures by hand, and every way in which a server can answer wrongly."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from gapless.bench.http_stream import Endpoint, HttpClient, HttpFailure
from gapless.bench.serve_figures import Outcome, check_answers, parse_goodput, summary
from gapless.bench.serve_load import LoadOptions, arrival_times, measure_serving
from gapless.bench.workload import Lengths
from gapless.errors import ConfigError

FIELDS_OF_VLLM = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("output_throughput", "total_token_throughput", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms"),
    *("p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms", "mean_itl_ms"),
    *("median_itl_ms", "std_itl_ms", "p99_itl_ms", "model_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "request_goodput", "max_output_tokens_per_s", "max_concurrent_requests"),
    "endpoint_type",
}


def event(text: str = "a", finish: str | None = None) -> bytes:
    return frame({"choices": [{"text": text, "finish_reason": finish}]})


def usage(tokens: int, prompt: int = 3) -> bytes:
    return frame({"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": prompt}})


def frame(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
GOOD = [event("a"), event("b"), event("", "length"), usage(2), DONE]


def chunked(parts: list[bytes]) -> bytes:
    body = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def plain(body: bytes, *, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class RawServer:
    """Answers each request with the bytes that ``reply`` gives for its number and body."""

    def __init__(self, reply: Callable[[int, dict], bytes], *, closes: bool = False) -> None:
        self._reply, self._closes = reply, closes
        self.bodies: list[dict] = []
        self.heads: list[str] = []
        self.num_connections = self.num_open = self.most_open = 0
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        def work() -> None:
            asyncio.set_event_loop(self._loop)
            self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
            ready.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        assert ready.wait(5)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = next(
                    (int(v) for k, _, v in map(split, head.splitlines()) if k == "content-length"), 0
                )
                body = json.loads(await reader.readexactly(length)) if length else {}
                if head.startswith("GET"):
                    writer.write(plain(b'{"data": [{"id": "found"}]}'))
                    continue
                self.bodies.append(body)
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                await asyncio.sleep(0.005)
                self.num_open -= 1
                writer.write(self._reply(len(self.bodies) - 1, body))
                await writer.drain()
                if self._closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def close(self) -> None:
        def end() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_later(0.01, self._loop.stop)

        self._loop.call_soon_threadsafe(end)
        self._thread.join(5)


def split(line: str) -> tuple[str, str, str]:
    name, colon, value = line.partition(":")
    return name.strip().lower(), colon, value.strip()


@pytest.fixture
def serve() -> Iterator[Callable[..., RawServer]]:
    made: list[RawServer] = []

    def start(reply: Callable[[int, dict], bytes] | bytes, **options) -> RawServer:
        made.append(RawServer(reply if callable(reply) else lambda n, body: reply, **options))
        return made[-1]

    yield start
    for server in made:
        server.close()


def load(server: RawServer, **options) -> dict:
    options = {
        "num_prompts": 6,
        "output_len": 2,
        "lengths": Lengths(low=3, high=3),
        "num_warmups": 0,
        **options,
    }
    return measure_serving(LoadOptions(url=server.url, **options))


def test_fields_have_the_names_of_vllm(serve):
    assert set(load(serve(chunked(GOOD)))) >= FIELDS_OF_VLLM


def test_all_requests_are_counted_with_the_servers_usage(serve):
    server = serve(chunked(GOOD))
    found = load(server)
    assert (found["completed"], found["failed"]) == (6, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (18, 12)
    assert found["model_id"] == "found"
    assert found["output_throughput"] == pytest.approx(12 / found["duration"], rel=0.01)


def test_requests_are_greedy_streamed_token_ids_of_full_length(serve):
    server = serve(chunked(GOOD))
    load(server, vocab_size=50, model="m")
    for body in server.bodies:
        assert all(0 <= token < 50 for token in body.pop("prompt"))
        assert body == {
            **{"model": "m", "max_tokens": 2, "temperature": 0.0, "ignore_eos": True, "stream": True},
            "stream_options": {"include_usage": True},
        }


def test_prompts_differ_and_are_the_same_for_the_same_seed(serve):
    server = serve(chunked(GOOD))
    for _ in range(2):
        load(server, seed=7)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert sorted(prompts[:6]) == sorted(prompts[6:])
    assert len(set(prompts)) == 6


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_closed_loop_never_has_more_at_once(serve, limit):
    server = serve(chunked(GOOD))
    load(server, max_concurrency=limit, num_prompts=12)
    assert server.most_open == limit


def test_connections_are_used_again(serve):
    server = serve(chunked(GOOD))
    load(server, max_concurrency=1, model="m")
    assert server.num_connections == 1


def test_a_server_that_closes_connections_is_served_too(serve):
    body = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"".join(GOOD)
    assert load(serve(body, closes=True))["completed"] == 6


def test_the_key_and_the_path_are_sent(serve):
    server = serve(chunked(GOOD))
    measure_serving(
        LoadOptions(
            url=server.url + "/prefix/v1/",
            api_key="k",
            num_prompts=1,
            lengths=Lengths(low=3, high=3),
            output_len=2,
        )
    )
    assert all("Authorization: Bearer k" in head for head in server.heads)
    assert any(head.startswith("POST /prefix/v1/completions HTTP/1.1") for head in server.heads)


WRONG = {
    "no end": (chunked(GOOD[:-1]), "ended before the answer did"),
    "no finish": (chunked([GOOD[0], usage(2), DONE]), "ended before the answer did"),
    "no usage": (chunked([*GOOD[:3], DONE]), "counted no tokens"),
    "an error event": (chunked([GOOD[0], frame({"error": {"message": "out of luck"}})]), "out of luck"),
    "another prompt": (chunked([*GOOD[:3], usage(2, prompt=4), DONE]), "3 tokens were sent, 4 were counted"),
    "not JSON": (chunked([b"data: {\n\n"]), "cannot be read"),
    "half an event": (chunked([b"data: {}"]), "ends within an event"),
    "500": (plain(b'{"error": {"message": "a bug"}}', status="500 Oops"), "500, a bug"),
    "an error that is no JSON": (plain(b"<html>", status="502 Bad Gateway"), "502, <html>"),
    "not HTTP": (b"SSH-2.0\r\n\r\n", "not HTTP"),
    "no choices": (chunked([frame({})]), "cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_fails_its_request_and_no_other(serve, name):
    reply, message = WRONG[name]
    server = serve(lambda n, body: reply if n == 2 else chunked(GOOD))
    found = load(server, max_concurrency=1)
    assert (found["completed"], found["failed"]) == (5, 1)
    assert message in found["errors"][0]


def test_a_connection_that_is_cut_fails_its_request(serve):
    found = load(serve(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nabc", closes=True))
    assert found["failed"] == 6
    assert "closed within the answer" in found["errors"][0]


def test_a_first_request_that_fails_stops_the_run(serve):
    server = serve(plain(b'{"error": {"message": "no such model"}}', status="404 Not Found"))
    with pytest.raises(HttpFailure, match="no such model"):
        load(server, num_warmups=1)
    assert len(server.bodies) == 1


def test_a_server_that_hangs_is_given_up(serve):
    server = serve(b"")
    found = load(server, timeout_s=0.2, num_prompts=2)
    assert found["errors"] == ["no whole answer within 0.2 s"]


def test_events_cut_anywhere_are_the_same(serve):
    whole = b"".join(GOOD)
    server = serve(chunked([whole[i : i + 7] for i in range(0, len(whole), 7)]))
    assert load(server)["total_output_tokens"] == 12


def test_check_finds_an_answer_that_deviates(serve):
    def reply(number: int, body: dict) -> bytes:
        text = str(body["prompt"]) if number != 9 else "another stream's"
        return chunked([event(text), event("", "length"), usage(2), DONE])

    found = load(serve(reply), check=True, num_prompts=20, max_concurrency=1)["check"]
    assert found == {
        **{"ok": False, "prompts": 4, "answers": 20, "deviating": 1},
        **{"of_wrong_length": 0, "failed": 0},
    }


def test_check_of_equal_answers_is_ok(serve):
    found = load(serve(chunked(GOOD)), check=True, num_prompts=20)["check"]
    assert found["ok"]
    assert found["answers"] == 20


@pytest.mark.parametrize(
    ("outcomes", "ok"),
    [
        ([Outcome(prompt_index=0, prompt_len=1, output_len=2, text="a")] * 3, True),
        ([Outcome(prompt_index=0, prompt_len=1, output_len=1, text="a")], False),
        ([Outcome(prompt_index=0, prompt_len=1, error="gone")], False),
        ([Outcome(prompt_index=i, prompt_len=1, output_len=2, text=str(i)) for i in range(3)], True),
    ],
)
def test_check_wants_equal_answers_of_full_length(outcomes, ok):
    assert check_answers(outcomes, 2)["ok"] is ok


def test_answers_may_end_early_when_they_are_allowed_to():
    assert check_answers([Outcome(prompt_index=0, prompt_len=1, output_len=1, text="a")], None)["ok"]


def test_figures_by_hand():
    one = Outcome(prompt_index=0, prompt_len=4, ttft_s=0.1, latency_s=0.5, itl_s=[0.1, 0.3], output_len=3)
    two = Outcome(prompt_index=1, prompt_len=6, ttft_s=0.3, latency_s=0.3, itl_s=[], output_len=1)
    bad = Outcome(prompt_index=2, prompt_len=9, ttft_s=9.0, latency_s=9.0, output_len=9, error="gone")
    found = summary([one, two, bad], 2.0)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, ["gone"])
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (10, 4)
    assert (found["request_throughput"], found["output_throughput"]) == (1.0, 2.0)
    assert found["total_token_throughput"] == 7.0
    assert (found["mean_ttft_ms"], found["median_ttft_ms"], found["std_ttft_ms"]) == (200.0, 200.0, 100.0)
    assert found["mean_tpot_ms"] == 200.0, "one token has no time per output token"
    assert found["median_itl_ms"] == 200.0
    assert found["mean_e2el_ms"] == 400.0


def test_peaks_are_of_whole_seconds_from_the_first_request():
    one = Outcome(prompt_index=0, prompt_len=1, start_s=7.0, ttft_s=0.5, latency_s=1.7, itl_s=[0.2, 0.6, 0.4])
    two = Outcome(prompt_index=1, prompt_len=1, start_s=8.6, ttft_s=0.1, latency_s=2.0, itl_s=[0.2, 1.7])
    bad = Outcome(prompt_index=2, prompt_len=1, start_s=1.0, ttft_s=0.1, latency_s=9.0, error="gone")
    found = summary([one, two, bad], 4.0)
    assert found["max_output_tokens_per_s"] == 4.0, "at 1.3, 1.7, 1.7 and 1.9 s"
    assert found["max_concurrent_requests"] == 2


def test_goodput_counts_requests_that_keep_every_limit():
    quick = Outcome(prompt_index=0, prompt_len=1, ttft_s=0.1, latency_s=0.3, output_len=3)
    slow = Outcome(prompt_index=1, prompt_len=1, ttft_s=0.1, latency_s=2.1, output_len=3)
    late = Outcome(prompt_index=2, prompt_len=1, ttft_s=0.9, latency_s=0.9, output_len=1)
    all_of_them = [quick, slow, late]
    assert summary(all_of_them, 2.0)["request_goodput"] is None
    assert summary(all_of_them, 2.0, parse_goodput(["ttft:100"]))["request_goodput"] == 1.0
    assert summary(all_of_them, 2.0, parse_goodput(["tpot:100"]))["request_goodput"] == 1.0
    assert summary(all_of_them, 2.0, parse_goodput(["ttft:500", "tpot:100.0"]))["request_goodput"] == 0.5
    assert summary(all_of_them, 2.0, parse_goodput(["e2el:900"]))["request_goodput"] == 1.0


@pytest.mark.parametrize("limit", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "itl:5", ":5", "ttft=5", ""])
def test_limits_that_make_no_sense_are_refused(limit):
    with pytest.raises(ConfigError, match="--goodput="):
        parse_goodput([limit])


def test_a_run_without_a_good_answer_has_no_times():
    found = summary([Outcome(prompt_index=0, prompt_len=1, error="gone")], 1.0)
    assert found["mean_ttft_ms"] is None
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5), (100.0, 0.1)])
def test_gaps_have_the_rate_and_the_burstiness(burstiness, variation):
    times = arrival_times(20_001, rate=5.0, burstiness=burstiness, rng=random.Random(1))
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.06)


def test_without_a_rate_everything_comes_at_once():
    assert arrival_times(3, rate=math.inf, burstiness=1.0, rng=random.Random(0)) == [0.0] * 3


def test_open_loop_does_not_wait_for_answers(serve):
    server = serve(chunked(GOOD))
    load(server, request_rate=2000.0, num_prompts=20)
    assert server.most_open > 1


@pytest.mark.parametrize(
    "options",
    [
        *({"request_rate": 0.0}, {"request_rate": -1.0}, {"request_rate": math.nan}, {"burstiness": 0.0}),
        *({"burstiness": math.inf}, {"check": True, "temperature": 0.5}, {"url": "ftp://x"}),
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        LoadOptions(**{"url": "http://x", **options})


@pytest.mark.parametrize(
    ("url", "host", "port", "is_tls", "base_path"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, False, ""),
        ("localhost:80", "localhost", 80, False, ""),
        ("https://x/v1", "x", 443, True, ""),
        ("https://x:1/a/b/", "x", 1, True, "/a/b"),
        ("http://[::1]:5", "::1", 5, False, ""),
    ],
)
def test_addresses(url, host, port, is_tls, base_path):
    assert Endpoint.parse(url) == Endpoint(host=host, port=port, is_tls=is_tls, base_path=base_path)


def test_an_error_answer_is_told_with_its_message(serve):
    server = serve(plain(b"{}"))

    async def go() -> None:
        client = HttpClient(Endpoint.parse(server.url))
        try:
            async for _ in client.events("/v1/completions", {}):
                pass
        finally:
            await client.close()

    with pytest.raises(HttpFailure, match="within an event"):
        asyncio.run(go())
