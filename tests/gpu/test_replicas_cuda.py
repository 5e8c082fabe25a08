"""Two replicas on two GPUs behind one address: a GPU each, the same answers, and one dying."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from tiny_served_model import NAME, served, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def until(condition: Callable[[], Any], limit_s: float = 90) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.1)


def complete(url: str, prompt: str) -> str:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_two_replicas_have_a_gpu_each_and_one_that_dies_comes_back(tmp_path):
    write_model(tmp_path)
    with served(tmp_path, "--replicas", "2", "--routing", "load", "--access-log", "off") as url:

        def replicas() -> list[dict[str, Any]]:
            return httpx.get(f"{url}/server_info", timeout=30).json()["replicas"]

        gpus = [replica["environment"]["CUDA_VISIBLE_DEVICES"] for replica in replicas()]
        assert len(set(gpus)) == 2
        answers = {complete(url, "the same prompt") for _ in range(4)}
        assert len(answers) == 1
        assert [replica["num_routed"] for replica in replicas()] == [{"load": 2}] * 2
        os.kill(replicas()[0]["pid"], signal.SIGKILL)
        until(lambda: httpx.get(f"{url}/health").json()["status"] == "degraded")
        assert {complete(url, "the same prompt")} == answers
        until(lambda: httpx.get(f"{url}/health").json()["status"] == "ok")
        assert {complete(url, "the same prompt") for _ in range(2)} == answers
