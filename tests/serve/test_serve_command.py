"""``gapless serve`` as a person starts it, with a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "options.toml").write_text(
        'port = 0\nserved_model_name = ["tiny", "alias"]\nmax_running_requests = 9\nload_format = "dummy"\n'
    )
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "gapless.launch_server", f"--model-path={folder}",
                "--config", str(folder / "options.toml"), "--max_running_requests", "4",
                "--cuda-graph-bs-decode", "1", "2", "--cuda-graph-bs-prefill=16", "--kv-cache-tokens", "512",
                "--access-log", "off",
            ],
            stderr=file,
            env={**os.environ, "GAPLESS_API_KEY": "key-1,key-2"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while (found := re.search(r"serving at (\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield process, found[1], log
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_what_was_resolved_and_the_plan_are_printed(started):
    text = started[2].read_text()
    assert "max_running_requests=4" in text, "the command line wins over the file"
    assert "load_format=dummy" in text
    assert "key-1" not in text
    assert re.search(r"decode +full, 1, 2(, \d)? requests", text)
    assert "the default mode" in text, "decisions come with their reasons"
    assert "start-up:" in text
    assert "gapless.plan" not in text, "the engine's log does not tell it a second time"


def test_the_same_is_served_to_whoever_has_a_key(started):
    _, url, log = started
    assert httpx.get(f"{url}/server_info").status_code == 401
    info = httpx.get(f"{url}/server_info", headers={"Authorization": "Bearer key-2"}).json()
    assert (info["config"]["max_running_requests"], info["config"]["load_format"]) == (4, "dummy")
    assert info["served_model_names"] == ["tiny", "alias"]
    assert (info["settings"]["num_api_keys"], info["settings"]["access_log"]) == (2, "off")
    assert "key-1" not in str(info)
    printed = log.read_text()
    for phase in ("prefill", "decode"):
        assert f"{phase:<9} {info['plan'][phase]['strategy']}, " in printed
    reasons = [decision["reason"] for decision in info["plan"]["decisions"]]
    assert reasons
    assert any(reason in printed for reason in reasons)
    assert {"steps", "eager", "graphs"} <= set(info["report"])


def test_it_answers_under_its_names_and_asks_for_a_key(started):
    _, url, _ = started
    body = {"model": "alias", "prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
    for key in ("key-1", "key-2"):
        answer = httpx.post(
            f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
    assert httpx.get(f"{url}/health").status_code == 200


def test_it_ends_with_0_and_takes_its_engine_along(started):
    process, _, _ = started
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)
