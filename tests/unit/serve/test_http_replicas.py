"""What the HTTP side shows of several replicas, and how it says that one has died."""

from __future__ import annotations

import re

import pytest
from http_fakes import FakeClient, answer, call, chat_body, make_app, post, text_body
from test_replica_stats import stats

from gapless.serve.client import (
    EngineDeadError,
    EngineRestartingError,
    ReplicaLostError,
    ReplicaView,
)
from gapless.serve.replica_stats import add_stats


class TwoReplicas(FakeClient):
    """The second may be down."""

    second_is_healthy = True

    def replicas(self) -> list[ReplicaView]:
        return [
            ReplicaView(
                index=0,
                state="ready",
                is_healthy=True,
                pid=7,
                load_tokens=300,
                num_routed={"prefix": 4, "load": 2},
                environment={"CUDA_VISIBLE_DEVICES": "0"},
                stats=stats(1),
            ),
            ReplicaView(
                index=1,
                state="ready" if self.second_is_healthy else "starting",
                is_healthy=self.second_is_healthy,
                pid=8,
                num_restarts=3,
                last_death="signal 9",
                stats=stats(2),
            ),
        ]

    def stats(self):
        return add_stats([replica.stats for replica in self.replicas()])


@pytest.fixture
def client() -> TwoReplicas:
    return TwoReplicas()


def test_health_says_degraded_and_stays_green_while_one_replica_lives(client):
    app = make_app(client)
    assert call(app, "GET", "/health").json()["status"] == "ok"
    client.second_is_healthy = False
    response = call(app, "GET", "/health")
    assert response.status_code == 200
    body = response.json()
    assert (body["status"], body["replicas"], body["healthy_replicas"]) == ("degraded", 2, 1)
    client.is_healthy = False
    assert call(app, "GET", "/health").status_code == 503


def test_server_info_lists_replicas(client):
    replicas = call(make_app(client), "GET", "/server_info").json()["replicas"]
    assert [replica["pid"] for replica in replicas] == [7, 8]
    assert replicas[0]["environment"] == {"CUDA_VISIBLE_DEVICES": "0"}
    assert (replicas[1]["num_restarts"], replicas[1]["last_death"]) == (3, "signal 9")


@pytest.mark.parametrize(
    "sample",
    [
        'vllm:generation_tokens_total{engine="0",model_name="fake-model"} 60.0',
        'vllm:generation_tokens_total{engine="1",model_name="fake-model"} 120.0',
        'vllm:num_requests_running{engine="1",model_name="fake-model"} 4.0',
        'vllm:request_success_total{engine="1",finished_reason="length",model_name="fake-model"} 4.0',
        'vllm:request_queue_time_seconds_count{engine="1",model_name="fake-model"} 2.0',
        'vllm:time_to_first_token_seconds_count{engine="all",model_name="fake-model"} 0.0',
        'gapless:graph_replays_total{phase="decode",size="4",strategy="full"} 3.0',
        'gapless:replica_up{engine="0",model_name="fake-model"} 1.0',
        'gapless:replica_up{engine="1",model_name="fake-model"} 0.0',
        'gapless:replica_restarts_total{engine="1",model_name="fake-model"} 3.0',
        'gapless:replica_load_tokens{engine="0",model_name="fake-model"} 300.0',
        'gapless:replica_requests_total{engine="0",model_name="fake-model",reason="prefix"} 4.0',
    ],
)
def test_metrics_carry_the_replica_as_label(client, sample):
    client.second_is_healthy = False
    text = call(make_app(client), "GET", "/metrics").text
    assert sample in text.splitlines()
    names = re.findall(r"^# TYPE (\S+)", text, flags=re.MULTILINE)
    assert len(names) == len(set(names))


def test_one_engine_has_no_metrics_of_replicas():
    assert "gapless:replica" not in call(make_app(), "GET", "/metrics").text


def test_the_dashboard_adds_up_and_names_who_is_down(client):
    client.second_is_healthy = False
    data = call(make_app(client), "GET", "/dashboard/data").json()
    assert (data["now"]["generation_tokens"], data["now"]["num_blocks"]) == (180, 300)
    assert [replica["is_healthy"] for replica in data["health"]["replicas"]] == [True, False]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ReplicaLostError("replica 1"), 500, "replica_died"),
        (EngineRestartingError("all replicas"), 503, "engine_restarting"),
        (EngineDeadError("gone"), 500, "engine_dead"),
    ],
)
def test_deaths_have_their_own_errors(error, status, code):
    response = post(make_app(FakeClient(lambda request: [error])), "/v1/chat/completions", chat_body())
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert ("retry-after" in response.headers) == (status == 503)


def test_a_stream_whose_replica_dies_ends_with_the_error_and_without_done():
    def script(request):
        from http_fakes import spell

        return [[spell(request, "Hello")[0]], ReplicaLostError("replica 1")]

    response = post(make_app(FakeClient(script)), "/v1/chat/completions", chat_body(stream=True))
    assert response.status_code == 200
    events = [line for line in response.text.split("\n\n") if line]
    assert "replica_died" in events[-1]
    assert "[DONE]" not in response.text


class LosesTheFirst(FakeClient):
    """A replica dies in the middle of its first ``num_lost`` requests."""

    def __init__(self, num_lost: int, *, may_restart: bool = True) -> None:
        super().__init__(self._script)
        self.num_left, self.may_restart = num_lost, may_restart

    def _script(self, request):
        whole = list(answer("Hello")(request))
        if not self.num_left:
            return whole
        self.num_left -= 1
        return [whole[0], ReplicaLostError("replica 1", may_restart=self.may_restart and request.is_whole)]


BODIES = {"/v1/chat/completions": chat_body, "/v1/completions": text_body}


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_is_not_streamed_begins_anew_when_its_replica_dies(path):
    client = LosesTheFirst(1)
    app = make_app(client)
    response = post(app, path, BODIES[path]())
    assert response.status_code == 200
    choice = response.json()["choices"][0]
    assert choice.get("text", choice.get("message", {}).get("content")) == "Hello"
    assert response.json()["usage"]["completion_tokens"] == 5
    first, second = client.requests
    assert (first.is_whole, first.num_deaths, second.num_deaths) == (True, 0, 1)
    assert first.request_id != second.request_id
    metrics = call(app, "GET", "/metrics").text
    assert 'vllm:request_generation_tokens_sum{engine="0",model_name="fake-model"} 5.0' in metrics


def test_all_prompts_of_a_request_begin_anew_together():
    client = LosesTheFirst(1)
    response = post(make_app(client), "/v1/completions", text_body(prompt=["a", "b", "c"]))
    assert [choice["text"] for choice in response.json()["choices"]] == ["Hello"] * 3
    assert not client.running


@pytest.mark.parametrize(("num_lost", "may_restart"), [(2, True), (1, False)])
def test_a_whole_answer_is_not_tried_for_ever(num_lost, may_restart):
    client = LosesTheFirst(num_lost, may_restart=may_restart)
    response = post(make_app(client), "/v1/chat/completions", chat_body())
    assert (response.status_code, response.json()["error"]["code"]) == (500, "replica_died")
    assert len(client.requests) == num_lost


def test_a_stream_that_has_begun_does_not_begin_anew():
    client = LosesTheFirst(1)
    response = post(make_app(client), "/v1/chat/completions", chat_body(stream=True))
    assert "replica_died" in response.text
    assert len(client.requests) == 1
