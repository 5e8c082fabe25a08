"""Engine processes and their wires without either, for clients under test: what an engine says and when it
dies is the test's to choose, and what the client sends is kept."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import Any

import pytest
from engine_process_fakes import make_core, make_info

from gapless.serve import process_client
from gapless.serve.messages import AbortRequest, Delta, GenerateRequest, Ready, StepOutput

INFO = make_info(make_core())


class FakeChannel:
    """Both ends of the wire. ``running``: what the engine has been asked for and not told to end."""

    def __init__(self, addresses: Any) -> None:
        self.fd, self._wake = os.pipe()
        os.set_blocking(self.fd, False)
        self._inbox: deque[Any] = deque()
        self.running: dict[str, list[int]] = {}
        self.requests: list[GenerateRequest] = []
        self.is_closed = False
        self.say(Ready(info=INFO))

    def say(self, message: Any) -> None:
        self._inbox.append(message)
        if not self.is_closed:
            os.write(self._wake, b"x")

    def receive(self) -> Any:
        if self._inbox:
            return self._inbox.popleft()
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 1 << 16)
        return None

    def send(self, message: Any) -> None:
        if isinstance(message, GenerateRequest):
            assert message.request_id not in self.running
            self.running[message.request_id] = [0] * message.params.get("n", 1)
            self.requests.append(message)
        elif isinstance(message, AbortRequest):
            self.running.pop(message.request_id, None)

    def close(self) -> None:
        self.is_closed = True
        os.close(self.fd)
        os.close(self._wake)


class FakeProcess:
    def __init__(self, life: int) -> None:
        self.life, self.pid, self.exitcode = life, 1000 + life, None
        self.sentinel, self._held = os.pipe()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        if self.exitcode is None:
            self.exitcode = -9
            os.close(self._held)


class World:
    """Every process and channel that there has been, by life."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: list[FakeProcess] = []
        self.channels: list[FakeChannel] = []
        self.launch_errors: list[Exception] = []
        monkeypatch.setattr(process_client, "ClientChannel", self._connect)
        monkeypatch.setattr(process_client, "launch", self._launch)

    def _connect(self, addresses: Any) -> FakeChannel:
        self.channels.append(FakeChannel(addresses))
        return self.channels[-1]

    def _launch(self, *_: Any, **__: Any) -> FakeProcess:
        if self.launch_errors:
            self.processes.append(FakeProcess(len(self.processes)))  # keeps step with the channels
            self.processes[-1].kill()
            raise self.launch_errors.pop(0)
        self.processes.append(FakeProcess(len(self.processes)))
        return self.processes[-1]

    def alive(self) -> list[tuple[FakeProcess, FakeChannel]]:
        pairs = zip(self.processes, self.channels, strict=True)
        return [(process, channel) for process, channel in pairs if process.is_alive()]

    def holder(self, request_id: str) -> tuple[FakeProcess, FakeChannel]:
        (found,) = [pair for pair in self.alive() if request_id in pair[1].running]
        return found

    def step(self, process: FakeProcess, channel: FakeChannel, name: str, *, ends: bool = False) -> None:
        """The next token of each choice, which says in which life it was made."""
        counts = channel.running[name]
        deltas = [
            Delta(name, i, "", [process.life * 1000 + n], finish_reason="stop" if ends else None)
            for i, n in enumerate(counts)
        ]
        channel.running[name] = [n + 1 for n in counts]
        if ends:
            del channel.running[name]
        channel.say(StepOutput(deltas))
