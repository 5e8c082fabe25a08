"""The HTTP API over two engines in a Ray cluster of this machine, asked by the official client."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tiny_served_model import MAX_MODEL_LEN, NAME

from gapless.deploy.ray_serve import build

ray = pytest.importorskip("ray", reason="needs ray: pip install 'gapless[ray]'")
serve = pytest.importorskip("ray.serve", reason="needs ray[serve]: pip install 'gapless[ray]'")

SYSTEM = "You answer in one word and never explain yourself. " * 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[int]:
    """Its port for HTTP. When it has ended, no replica has left a folder behind."""
    folder = Path(tempfile.mkdtemp(prefix="gr-", dir="/tmp"))  # short: socket files are made below it
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as taken:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", tempfile.gettempdir())
        patch.setenv("TMPDIR", str(folder))  # of the replicas
        port = taken.getsockname()[1]
        taken.close()
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
        made = list(folder.glob("gapless-*"))
        serve.shutdown()
        left = list(folder.glob("gapless-*"))
        ray.shutdown()
    shutil.rmtree(folder)
    assert made
    assert not left


@pytest.fixture(scope="module")
def options(tiny_folder: Path) -> dict[str, Any]:
    return {
        "model_path": str(tiny_folder),
        "served_model_name": [NAME],
        "load_format": "dummy",
        "enforce_eager": True,
        "kv_cache_tokens": 4096,
        "max_running_requests": 2,
        "device": "cpu",
        "replicas": 2,
        "cpus_per_replica": 0.5,
        "access_log": "off",
    }


@pytest.fixture(scope="module")
def url(cluster: int, options: dict[str, Any]) -> str:
    serve.run(build(options), name="gapless", route_prefix="/")
    url = f"http://127.0.0.1:{cluster}"
    until(lambda: len(replicas(url)) == 2)
    return url


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def until(condition: Callable[[], Any], limit_s: float = 90) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.1)


def replicas(url: str) -> list[dict[str, Any]]:
    return httpx.get(f"{url}/server_info", timeout=30).json().get("replicas", [])


def stream(api: openai.OpenAI, number: int, num_tokens: int, begun: set[int]) -> int | None:
    """Tokens that came; None when the replica died after some of them."""
    events = api.completions.create(
        model=NAME,
        prompt=f"{number} " * 20,
        max_tokens=num_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    usage = None
    try:
        for event in events:
            usage = event.usage or usage
            begun.add(number)
    except openai.APIError as error:
        return None if number in begun and error.code == "replica_died" else -1
    return -1 if usage is None else usage.completion_tokens


def test_routes_bodies_and_errors_are_those_of_the_server(api, url):
    assert [model.id for model in api.models.list()] == [NAME]
    assert stream(api, 0, 20, set()) == 20
    choices = api.completions.create(model=NAME, prompt="x", n=2, seed=1, temperature=1, max_tokens=3).choices
    assert [choice.index for choice in choices] == [0, 1]
    with pytest.raises(openai.BadRequestError, match=f"maximum context length of {MAX_MODEL_LEN}") as caught:
        api.completions.create(model=NAME, prompt="x", max_tokens=99_999)
    assert caught.value.status_code == 400
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(model="another", prompt="x")
    assert missing.value.code == "model_not_found"
    assert httpx.get(f"{url}/nowhere").json()["error"]["code"] == "not_found"
    assert httpx.get(f"{url}/health").json()["replicas"] == 2
    assert len(api.embeddings.create(model=NAME, input="x").data[0].embedding) > 1


def test_a_caller_who_leaves_ends_the_request_where_it_runs(api, url):
    events = api.completions.create(
        model=NAME, prompt="x", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(events))
    events.close()
    until(
        lambda: sum(replica["stats"]["requests_finished"].get("abort", 0) for replica in replicas(url)) == 1
    )
    assert sum(replica["num_inside"] for replica in replicas(url)) == 0


def test_conversations_return_to_the_replica_that_holds_their_beginning(api):
    messages: Any = [{"role": "system", "content": SYSTEM}]
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn}?"})
        answer = api.chat.completions.create(model=NAME, messages=messages, max_tokens=4, temperature=0)
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert (cached > len(SYSTEM) // 2) == (turn > 0)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def test_an_engine_killed_under_load_loses_no_request_that_had_not_begun_and_is_replaced(api, url):
    begun: set[int] = set()
    before = replicas(url)
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(stream, api, number, 100, begun) for number in range(12)]
        until(lambda: len(begun) >= 4)
        os.kill(before[1]["pid"], signal.SIGKILL)
        results = [answer.result() for answer in answers]
    assert set(results) <= {100, None}
    assert results.count(None) <= 2
    gone = before[1]["environment"]["replica"]
    until(
        lambda: (
            (now := [replica["environment"]["replica"] for replica in replicas(url)]).count(gone) == 0
            and len(now) == 2
        )
    )
    assert httpx.get(f"{url}/health").json()["status"] == "ok"
    assert stream(api, 99, 5, set()) == 5


def test_a_replica_that_is_taken_away_finishes_what_it_runs(api, url, options):
    begun: set[int] = set()
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(stream, api, number, 300, begun) for number in range(4)]
        until(lambda: len(begun) == 4)
        serve.run(build({**options, "replicas": 1}), name="gapless", route_prefix="/")
        assert [answer.result() for answer in answers] == [300] * 4
    until(lambda: len(replicas(url)) == 1)
    assert stream(api, 5, 5, set()) == 5
