"""A server whose engine has two ranks: it answers, and the death of one rank is seen from outside."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
from tiny_served_model import NAME, served, write_model

BODY = {"model": NAME, "prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


def test_two_ranks_serve_until_one_is_killed(tmp_path: Path):
    write_model(tmp_path)
    with served(tmp_path, "--tp", "2") as url:
        answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert httpx.get(f"{url}/health").status_code == 200
        (rank,) = ranks_below(str(tmp_path))
        os.kill(rank, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while is_healthy(url):
            assert time.monotonic() < deadline, "nobody has noticed"
            time.sleep(0.05)
    assert "rank 1 was killed by SIGKILL" in (tmp_path / "log").read_text()
    assert not ranks_below(str(tmp_path))


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def ranks_below(command: str) -> list[int]:
    """Processes of other ranks that a server with ``command`` in its command line has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if "rank_worker:main" in _command_line(entry) and _is_below(entry, command):
            found.append(int(entry.name))
    return found


def _is_below(entry: Path, command: str) -> bool:
    while entry.name not in ("0", "1"):
        if command in _command_line(entry):
            return True
        try:
            status = (entry / "stat").read_text()
        except OSError:
            return False
        entry = entry.parent / status.rpartition(")")[2].split()[1]
    return False


def _command_line(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
