"""A server as an operating system sees it: signals, exit codes, dying processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

SCRIPT = Path(__file__).with_name("fake_server.py")


class Server:
    def __init__(self, process: subprocess.Popen, url: str) -> None:
        self.process, self.url = process, url
        limits = httpx.Limits(max_connections=50)
        self.client = httpx.Client(base_url=url, timeout=20, verify=False, limits=limits)

    def engine_pid(self) -> int:
        """The child that is not multiprocessing's own helper."""
        for pid in children_of(self.process.pid):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError("no engine process")

    def complete(self, first: int, num_tokens: int, *, stream: bool = False) -> httpx.Response:
        body = {
            "model": "fake",
            "prompt": [first],
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": stream,
        }
        return self.client.post("/v1/completions", json=body)

    def wait(self, limit_s: float = 10) -> int:
        return self.process.wait(limit_s)


@contextmanager
def running(tmp_path: Path, **options: Any) -> Iterator[Server]:
    port_file = tmp_path / "address"
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(port_file), json.dumps(options)])
    try:
        deadline = time.monotonic() + 30
        while not port_file.exists():
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not come up"
            time.sleep(0.02)
        yield Server(process, port_file.read_text())
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pid: int, limit_s: float = 5) -> None:
    deadline = time.monotonic() + limit_s
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish_and_exits_with_0(tmp_path, number):
    with running(tmp_path, engine={"step_s": 0.01}) as server, ThreadPoolExecutor(8) as pool:
        engine = server.engine_pid()
        answers = [pool.submit(server.complete, i + 1, 200) for i in range(8)]
        time.sleep(0.3)
        server.process.send_signal(number)
        time.sleep(0.1)
        late = server.complete(1, 1)
        health = server.client.get("/health")
        assert (late.status_code, health.status_code) == (503, 503)
        for answer in answers:
            response = answer.result()
            assert response.status_code == 200
            assert response.json()["usage"]["completion_tokens"] == 200
        assert server.wait() == 0
        assert not is_running(engine)


def test_what_does_not_finish_within_the_limit_is_ended_and_the_exit_is_still_clean(tmp_path):
    options = {"engine": {"step_s": 0.01}, "settings": {"drain_s": 0.3}}
    with running(tmp_path, **options) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, 1, 4000, stream=True)
        time.sleep(0.3)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        answer.result()
        assert server.wait() == 0
        assert time.monotonic() - start < 5


def test_a_second_signal_ends_the_drain(tmp_path):
    with running(tmp_path, engine={"step_s": 0.01}) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, 1, 4000, stream=True)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        answer.result()
        assert server.wait() == 0


def test_a_killed_engine_fails_what_waits_turns_health_red_and_ends_the_server(tmp_path):
    with running(tmp_path, engine={"step_s": 0.01}) as server, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(server.complete, i + 1, 4000) for i in range(8)]
        time.sleep(0.5)
        os.kill(server.engine_pid(), signal.SIGKILL)
        killed = time.monotonic()
        statuses = [answer.result().status_code for answer in answers]
        assert time.monotonic() - killed < 2
        assert all(500 <= status <= 599 for status in statuses), statuses
        assert server.client.get("/health").status_code == 503
        assert server.wait() == 1


def test_an_engine_does_not_outlive_a_killed_server(tmp_path):
    with running(tmp_path) as server:
        engine = server.engine_pid()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        wait_gone(engine)


def test_a_signal_while_the_engine_starts_ends_everything(tmp_path):
    port_file = tmp_path / "address"
    options = json.dumps({"engine": {"open_s": 60}})
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(port_file), options])
    deadline = time.monotonic() + 20
    while len(children := children_of(process.pid)) < 2:  # the engine and multiprocessing's helper
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    for pid in children:
        wait_gone(pid)


def test_readers_that_leave_abort_their_requests(tmp_path):
    with running(tmp_path, engine={"step_s": 0.005}) as server:
        body = {"model": "fake", "prompt": [1], "max_tokens": 4000, "stream": True, "temperature": 0}
        for _ in range(5):
            with server.client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        deadline = time.monotonic() + 5
        while (running_now := metric(server, "vllm:num_requests_running")) != 0.0:
            assert time.monotonic() < deadline, running_now
            time.sleep(0.1)


def metric(server: Server, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def test_a_full_queue_is_429_with_the_time_to_wait_and_takes_requests_again(tmp_path):
    options = {"engine": {"step_s": 0.005, "max_num_reqs": 2}, "settings": {"max_queued_requests": 3}}
    with running(tmp_path, **options) as server, ThreadPoolExecutor(20) as pool:
        futures = [pool.submit(server.complete, i + 1, 100) for i in range(20)]
        answers = [future.result() for future in futures]
        refused = [response for response in answers if response.status_code == 429]
        served = [response for response in answers if response.status_code == 200]
        assert len(refused) + len(served) == 20
        assert len(served) >= 5, "two run, three wait"
        assert refused
        for response in refused:
            assert int(response.headers["retry-after"]) >= 1
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert server.complete(1, 5, stream=True).status_code == 200, "there is room again"


def test_a_reader_that_takes_nothing_does_not_hold_up_the_end(tmp_path):
    fields = {"prompt": [1], "n": 16, "max_tokens": 1000, "stream": True, "temperature": 0, "logprobs": 20}
    body = json.dumps(fields)
    with running(tmp_path, settings={"drain_s": 1}) as server, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        host, port = server.url.removeprefix("http://").split(":")
        reader.connect((host, int(port)))
        reader.sendall(f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        deadline = time.monotonic() + 10
        while metric(server, "vllm:request_success_total") != 16.0:  # others are served, and it is generated
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert metric(server, "gapless:http_requests_open") == 2.0, "its answer waits for it"
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(15) == 0
