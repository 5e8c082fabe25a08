"""Two replicas of a tiny model behind one address: what a client and an operating system see of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engine_process_fakes import expected_answer
from test_server_life import is_running, running
from tiny_served_model import NAME, served

SYSTEM = "You answer in one word and never explain yourself. " * 4


@pytest.fixture(scope="module")
def url(tiny_folder: Path) -> Iterator[str]:
    limits = ("--max-running-requests", "2", "--access-log", "off")
    with served(tiny_folder, "--replicas", "2", *limits) as address:
        yield address


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def until(condition: Callable[[], Any], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.05)


def replicas(url: str) -> list[dict[str, Any]]:
    return httpx.get(f"{url}/server_info", timeout=20).json()["replicas"]


def chat(api: openai.OpenAI, *texts: str, **fields: Any) -> Any:
    roles = ("user", "assistant")
    messages: Any = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return api.chat.completions.create(
        **{"model": NAME, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    )


def test_two_processes_answer_and_conversations_stay_where_their_prefix_lies(api, url):
    for number in range(2):
        first = api.completions.create(
            model=NAME, prompt=f"{number} " * 40, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
        )
        assert first.usage.completion_tokens == 4
    assert [replica["num_routed"] for replica in replicas(url)] == [{"load": 1}, {"load": 1}]

    answer = chat(api, "Hello").choices[0].message.content
    again = chat(api, "Hello", answer, "And now?")
    assert again.usage.prompt_tokens_details.cached_tokens > len(SYSTEM) // 2
    assert sum(replica["num_routed"].get("prefix", 0) for replica in replicas(url)) == 1
    assert len({replica["pid"] for replica in replicas(url)}) == 2
    assert httpx.get(f"{url}/health").json()["status"] == "ok"


def test_a_replica_killed_under_load_loses_no_request_that_had_not_begun_and_comes_back(api, url):
    begun: set[int] = set()
    lost: list[int] = []

    def whole(number: int) -> None:
        """Its caller sees nothing before the end, so it begins anew wherever it was."""
        answer = api.completions.create(
            model=NAME,
            prompt=f"{number} " * 20,
            max_tokens=100,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage.completion_tokens == 100

    def one(number: int) -> None:
        stream = api.completions.create(
            model=NAME,
            prompt=f"{number} " * 20,
            max_tokens=100,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        usage: Any = None
        failure: Any = None
        try:
            for event in stream:
                usage = event.usage or usage
                begun.add(number)
        except openai.APIError as error:
            failure = error
        if failure is None:
            assert usage.completion_tokens == 100
        else:
            assert number in begun
            assert failure.code == "replica_died"
            lost.append(number)

    victim = replicas(url)[1]["pid"]
    with ThreadPoolExecutor(18) as pool:
        answers = [pool.submit(whole if number % 3 == 1 else one, number) for number in range(18)]
        until(lambda: len(begun) >= 4)
        os.kill(victim, signal.SIGKILL)
        until(lambda: httpx.get(f"{url}/health").json()["status"] == "degraded")
        assert httpx.get(f"{url}/health").status_code == 200
        for answer in answers:
            answer.result()
    assert len(lost) <= 2
    assert replicas(url)[0]["num_routed"]["retry"] >= 1
    until(lambda: httpx.get(f"{url}/health").json()["status"] == "ok")
    back = replicas(url)[1]
    assert (back["state"], back["num_restarts"]) == ("ready", 1)
    assert back["pid"] != victim
    assert "signal 9" in back["last_death"]
    metrics = httpx.get(f"{url}/metrics").text
    assert f'gapless:replica_restarts_total{{engine="1",model_name="{NAME}"}} 1.0' in metrics


@pytest.mark.parametrize("restarts", [0, 5])
def test_a_signal_drains_all_replicas_also_a_degraded_set_and_leaves_no_process(tmp_path, restarts):
    options = {
        "engine": {"step_s": 0.01},
        "settings": {"replicas": 2, "max_replica_restarts": restarts},
    }
    with running(tmp_path, **options) as server, ThreadPoolExecutor(6) as pool:
        pids = [replica["pid"] for replica in replicas(server.url)]
        if restarts == 0:
            os.kill(pids[0], signal.SIGKILL)
            until(lambda: server.client.get("/health").json()["status"] == "degraded")
        answers = [pool.submit(server.complete, i + 1, 100) for i in range(6)]
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert server.complete(1, 1).status_code == 503
        for number, answer in enumerate(answers):
            text = answer.result().json()["choices"][0]["text"]
            assert text == "".join(f" {token}" for token in expected_answer([number + 1], 100))
        assert server.wait() == 0
        assert not any(is_running(pid) for pid in pids)


def test_when_every_replica_is_given_up_the_server_ends_with_1(tmp_path):
    with running(tmp_path, settings={"replicas": 2, "max_replica_restarts": 0}) as server:
        for replica in replicas(server.url):
            os.kill(replica["pid"], signal.SIGKILL)
        assert server.wait() == 1
