"""Sums over two GPUs in one kernel, in thousands of rounds: graphs of two sizes and eager calls of others."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize(
    "what", ["check", "check_many", "check_refused"], ids=["few rows", "many rows", "many refused"]
)
def test_sums_of_many_rounds_are_right_and_the_same_bits_everywhere(what: str):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("one_shot_ranks.py")
    command = [sys.executable, str(script), what]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    first, second = (json.loads(out.strip().rpartition("\n")[2]) for out, _ in told)
    assert first == second
    assert first["wrong"] == 0
    assert first["is_same_sum"]
    assert first["norm_ulps"] <= 1
