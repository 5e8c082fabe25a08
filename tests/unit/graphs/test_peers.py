"""Captures that other processes make too: all keep a graph or none does."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gapless.errors import CaptureError, RankError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.breakable import eager_break
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.peers import PeerCaptureError
from gapless.graphs.store import GraphKey, GraphStore


class FakePeers:
    """Others that are well, but for ``problems``: by the number of the question, what the others have."""

    def __init__(self, problems: dict[int, str] | None = None) -> None:
        self.problems = problems or {}
        self.told: list[str | None] = []
        self.num_scopes = 0
        self.is_warming_up = False

    def first_problem(self, own: str | None = None) -> str | None:
        self.told.append(own)
        return own or self.problems.get(len(self.told) - 1)

    def wait_for(self, is_done: Any) -> None:
        raise AssertionError("a CPU is never waited for")

    @contextmanager
    def capturing(self):
        self.num_scopes += 1
        yield

    @contextmanager
    def warming_up(self):
        assert not self.is_warming_up
        self.is_warming_up = True
        yield
        self.is_warming_up = False


@eager_break
def body(x: torch.Tensor) -> None:
    x.add_(1)


def capture(device: EmulatedDevice, peers: Any, strategy: Strategy, *, fails_at: int | None = None):
    """Two breaks; reads from the device before break number ``fails_at``."""
    x = torch.zeros(4)

    def fn() -> torch.Tensor:
        for number in range(2):
            x.mul_(2)
            if number == fails_at:
                x.sum().item()
            body(x)
        return x * 1

    store = GraphStore(device, peers=peers)
    mode = strategy.runtime_mode
    key = GraphKey(Phase.PREFILL, mode, BatchDescriptor(num_tokens=4, num_reqs=1))
    with store.capturing():
        return store.capture(key, fn, strategy)


@pytest.mark.parametrize(("strategy", "questions"), [(Strategy.FULL, 2), (Strategy.BREAKABLE, 4)])
def test_every_process_is_asked_before_at_breaks_and_after(device, strategy, questions):
    peers = FakePeers()
    entry = capture(device, peers, strategy)
    assert peers.told == [None] * questions
    assert peers.num_scopes == 1
    assert entry.row.key.mode is (RuntimeMode.FULL if strategy is Strategy.FULL else RuntimeMode.PIECEWISE)


def test_what_runs_between_captures_is_a_warm_up_until_the_store_closes(device):
    peers = FakePeers()
    store = GraphStore(device, peers=peers)
    with store.capturing():
        assert peers.is_warming_up
    assert not peers.is_warming_up


@pytest.mark.parametrize(("fails_at", "questions_before"), [(0, 1), (1, 2)])
def test_a_failure_is_told_once_where_the_others_ask_next(device, fails_at, questions_before):
    peers = FakePeers()
    with pytest.raises(CaptureError, match="item"):
        capture(device, peers, Strategy.BREAKABLE, fails_at=fails_at)
    assert peers.told[:questions_before] == [None] * questions_before
    assert len(peers.told) == questions_before + 1
    assert "item" in peers.told[-1]


@pytest.mark.parametrize("question", range(4))
def test_what_fails_elsewhere_fails_here_with_its_reason(device, question):
    peers = FakePeers({question: "rank 3: no memory"})
    with pytest.raises(PeerCaptureError, match="rank 3: no memory"):
        capture(device, peers, Strategy.BREAKABLE)
    assert peers.told == [None] * (question + 1), "who learns of a failure does not tell it again"
    assert not device.is_recording()
    assert capture(device, FakePeers(), Strategy.BREAKABLE), "later captures work"


def test_the_end_of_a_process_is_no_failed_capture(device):
    class Gone(FakePeers):
        def first_problem(self, own: str | None = None) -> str | None:
            if len(self.told) == 1:
                raise RankError("rank 1 is gone")
            return super().first_problem(own)

    with pytest.raises(RankError, match="rank 1 is gone"):
        capture(device, Gone(), Strategy.BREAKABLE)
    assert not device.is_recording()
