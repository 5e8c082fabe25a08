"""Health, metrics, configuration, keys, request ids, the log, cross-origin rules."""

from __future__ import annotations

import hmac
import json
import logging
import re

import pytest
from http_fakes import MODEL, FakeClient, answer, call, chat_body, make_app, post, text_body

from gapless.serve.client import EngineDeadError
from gapless.serve.stats import Histogram

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROTECTED = ["/v1/models", "/v1/models/x", "/server_info", "/nowhere", "/v1/completions", "/tokenize"]
OPEN = ["/health", "/metrics", "/version", "/openapi.json"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", PROTECTED)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        bearer("secre"),
        bearer("secret2"),
        bearer("SECRET"),
        {"authorization": "secret"},
        {"authorization": "Basic secret"},
        {"authorization": "Bearer"},
        {"x-api-key": "secret"},
        [("authorization", "Bearer secret"), ("authorization", "Bearer wrong")],
        {"authorization": "Bearer s\xe9cret".encode("latin-1")},
    ],
    ids=str,
)
def test_without_the_key_everything_but_probes_is_401(path, headers):
    response = call(make_app(api_keys=("secret",)), "GET", path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert "secret" not in response.text


@pytest.mark.parametrize("key", ["one", "two", "schlüssel"])
def test_any_of_the_keys_opens(key):
    app = make_app(api_keys=("one", "two", "schlüssel"))
    headers = {"authorization": b"Bearer " + key.encode()}
    assert call(app, "GET", "/v1/models", headers=headers).status_code == 200
    assert (
        call(app, "GET", "/v1/models", headers={"authorization": b"bearer  " + key.encode()}).status_code
        == 200
    )


@pytest.mark.parametrize("path", OPEN)
def test_probes_need_no_key(path):
    assert call(make_app(api_keys=("secret",)), "GET", path).status_code == 200


@pytest.mark.parametrize("path", ["/health/../v1/models", "//health", "/health/", "/HEALTH", "/metrics/x"])
def test_paths_that_look_like_probes_are_not_open(path):
    assert call(make_app(api_keys=("secret",)), "GET", path).status_code == 401


def test_a_wrong_key_is_refused_before_the_body_is_read():
    app = make_app(api_keys=("secret",))
    assert call(app, "POST", CHAT, content=b"\xff" * 100).status_code == 401


def test_a_prefix_of_a_proxy_may_stay_on_the_path():
    app = make_app(api_keys=("secret",), root_path="/llm")
    assert call(app, "GET", "/llm/health").status_code == 200
    assert call(app, "GET", "/health").status_code == 200
    assert call(app, "GET", "/llm/v1/models").status_code == 401
    assert call(app, "GET", "/llm/v1/models", headers=bearer("secret")).status_code == 200


@pytest.mark.parametrize(
    ("is_healthy", "age_s", "status"),
    [(True, 0.0, 200), (True, 29.0, 200), (True, 31.0, 503), (True, None, 503), (False, 0.0, 503)],
)
def test_health_follows_the_engines_loop(is_healthy, age_s, status):
    client = FakeClient()
    client.is_healthy, client.age_s = is_healthy, age_s
    response = call(make_app(client), "GET", "/health")
    assert response.status_code == status
    assert ("error" in response.json()) == (status == 503)


@pytest.mark.parametrize("limit_s", [1, 600])
def test_the_age_at_which_health_turns_red_is_an_option(limit_s):
    client = FakeClient()
    app = make_app(client, health_stale_s=limit_s)
    for client.age_s, status in ((limit_s - 0.5, 200), (limit_s + 0.5, 503)):
        assert call(app, "GET", "/health").status_code == status
        assert call(app, "HEAD", "/health").status_code == status


def test_health_says_why_it_is_red():
    client = FakeClient()
    client.is_healthy, client.is_draining = False, True
    assert "shutting down" in call(make_app(client), "GET", "/health").text
    client.is_draining, client.age_s = False, 45.0
    assert "no life for 45 seconds" in call(make_app(client), "GET", "/health").text
    client.age_s = 0.1
    assert "has stopped" in call(make_app(client), "GET", "/health").text


def test_the_prefix_cache_is_reset_where_that_is_enabled_and_with_the_key():
    client = FakeClient()
    assert post(make_app(client), "/reset_prefix_cache").status_code == 404
    app = make_app(client, enable_cache_reset=True, api_keys=("secret",))
    assert post(app, "/reset_prefix_cache").status_code == 401
    assert call(app, "GET", "/reset_prefix_cache", headers=bearer("secret")).status_code == 405
    assert client.num_resets == 0
    response = post(app, "/reset_prefix_cache", headers=bearer("secret"))
    assert (response.status_code, response.content, client.num_resets) == (200, b"", 1)


def statistics() -> dict:
    queue, steps = Histogram([0.1, 1.0]), Histogram([0.1])
    queue.observe(0.05)
    queue.observe(5.0)
    return {
        "uptime_s": 12.5,
        "num_running": 3,
        "num_waiting": 4,
        "kv_usage": 0.25,
        "num_blocks": 63,
        "num_free_blocks": 47,
        "num_preemptions": 1,
        "prompt_tokens": 1000,
        "generation_tokens": 200,
        "num_steps": 77,
        "requests_finished": {"stop": 5, "length": 2},
        "requests_refused": 6,
        "replays": [
            {"phase": "decode", "strategy": "full", "bucket": 8, "count": 9, "tokens": 60, "padding": 12}
        ],
        "eager": [{"phase": "prefill", "reason": 'above "largest" size', "count": 2}],
        "num_graphs": 30,
        "capture_s": 1.5,
        "pool_bytes": 4096,
        "driver_bytes": 2048,
        "prefix_cache_queries": 50,
        "prefix_cache_hits": 20,
        "queue_time_s": queue.record(),
        "step_time_s": steps.record(),
    }


M = f'engine="0",model_name="{MODEL}"'
SAMPLES = [
    f"vllm:num_requests_running{{{M}}} 3.0",
    f"vllm:num_requests_waiting{{{M}}} 4.0",
    f"vllm:kv_cache_usage_perc{{{M}}} 0.25",
    f"vllm:prefix_cache_queries_total{{{M}}} 50.0",
    f"vllm:prefix_cache_hits_total{{{M}}} 20.0",
    f"vllm:prompt_tokens_total{{{M}}} 1000.0",
    f"vllm:generation_tokens_total{{{M}}} 200.0",
    f"vllm:num_preemptions_total{{{M}}} 1.0",
    f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{MODEL}"}} 5.0',
    f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{MODEL}"}} 2.0',
    f'vllm:request_success_total{{engine="0",finished_reason="abort",model_name="{MODEL}"}} 0.0',
    f'vllm:request_queue_time_seconds_bucket{{engine="0",le="0.1",model_name="{MODEL}"}} 1.0',
    f'vllm:request_queue_time_seconds_bucket{{engine="0",le="1.0",model_name="{MODEL}"}} 1.0',
    f'vllm:request_queue_time_seconds_bucket{{engine="0",le="+Inf",model_name="{MODEL}"}} 2.0',
    f"vllm:request_queue_time_seconds_count{{{M}}} 2.0",
    f"vllm:request_queue_time_seconds_sum{{{M}}} 5.05",
    f"vllm:time_to_first_token_seconds_count{{{M}}} 1.0",
    f"vllm:inter_token_latency_seconds_count{{{M}}} 2.0",
    f"vllm:time_per_output_token_seconds_count{{{M}}} 2.0",
    f"vllm:request_time_per_output_token_seconds_count{{{M}}} 1.0",
    f"vllm:e2e_request_latency_seconds_count{{{M}}} 1.0",
    f"vllm:request_generation_tokens_sum{{{M}}} 3.0",
    f"vllm:request_prompt_tokens_sum{{{M}}} 5.0",
    f"vllm:request_prompt_tokens_count{{{M}}} 1.0",
    'gapless:graph_replays_total{phase="decode",size="8",strategy="full"} 9.0',
    'gapless:graph_tokens_total{phase="decode",size="8",strategy="full"} 60.0',
    'gapless:graph_padding_tokens_total{phase="decode",size="8",strategy="full"} 12.0',
    'gapless:graph_eager_steps_total{phase="prefill",reason="above \\"largest\\" size"} 2.0',
    f"gapless:graph_capture_seconds{{{M}}} 1.5",
    f"gapless:graph_pool_bytes{{{M}}} 4096.0",
    f"gapless:graphs{{{M}}} 30.0",
    'gapless:http_responses_total{route="/v1/completions",status="200"} 1.0',
    'gapless:http_responses_total{route="other",status="404"} 2.0',
]


@pytest.fixture(scope="module")
def exposition() -> str:
    client = FakeClient(answer("abc"))
    client.statistics = statistics()
    app = make_app(client)
    assert post(app, TEXT, text_body(stream=True)).status_code == 200
    assert call(app, "GET", "/invented/1").status_code == 404
    assert call(app, "GET", "/invented/2").status_code == 404
    response = call(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return response.text


@pytest.mark.parametrize("sample", SAMPLES)
def test_metrics_have(exposition, sample):
    assert sample in exposition.splitlines()


def test_every_metric_has_help_and_type_once(exposition):
    for kind in ("HELP", "TYPE"):
        names = re.findall(rf"^# {kind} (\S+)", exposition, flags=re.MULTILINE)
        assert len(names) == len(set(names))
        assert all(name.startswith(("vllm:", "gapless:")) for name in names)


def test_before_the_first_heartbeat_engine_metrics_are_absent():
    text = call(make_app(), "GET", "/metrics").text
    assert "num_requests_running" not in text
    assert "vllm:time_to_first_token_seconds_count" in text


def test_server_info_shows_plan_config_and_report_but_no_key():
    response = call(make_app(api_keys=("secret",)), "GET", "/server_info", headers=bearer("secret"))
    info = response.json()
    assert info["plan"] == {"prefill": "piecewise"}
    assert info["config"] == {"dtype": "float32"}
    assert info["report"] == {"steps": [], "eager": []}
    assert info["settings"]["num_api_keys"] == 1
    assert "secret" not in response.text


def test_server_info_of_a_dead_engine_is_an_error():
    class Dead(FakeClient):
        async def report(self):
            raise EngineDeadError("killed")

    assert call(make_app(Dead()), "GET", "/server_info").status_code == 500


def test_tokenize_and_detokenize_have_vllms_shapes():
    app = make_app()
    tokens = post(app, "/tokenize", {"prompt": "añ"}).json()
    assert tokens == {"count": 4, "max_model_len": 4096, "tokens": [256, 97, 195, 177], "token_strs": None}
    bare = post(
        app, "/tokenize", {"prompt": "a", "add_special_tokens": False, "return_token_strs": True}
    ).json()
    assert (bare["tokens"], bare["token_strs"]) == ([97], ["a"])
    assert post(app, "/detokenize", {"tokens": [97, 195, 177]}).json() == {"prompt": "añ"}
    assert post(app, "/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert post(app, "/tokenize", {"prompt": ""}).json()["tokens"] == [256]
    chat = post(
        app, "/tokenize", {"messages": chat_body()["messages"], "add_generation_prompt": False}
    ).json()
    assert bytes(chat["tokens"]).decode() == '{"role": "user", "content": "Hi"}'


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "x", "messages": chat_body()["messages"]}, {"prompt": 5}, {"messages": []}]
)
def test_tokenize_refuses(body):
    assert post(make_app(), "/tokenize", body).status_code == 400


@pytest.mark.parametrize("given", ["abc-1", "A.b:c_9", "x" * 128])
def test_a_plain_request_id_is_kept(given):
    response = call(make_app(), "GET", "/version", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "{}", "é".encode("latin-1"), None])
def test_any_other_request_id_is_replaced(given):
    headers = {} if given is None else {"x-request-id": given}
    response = call(make_app(), "GET", "/version", headers=headers)
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])


def test_errors_have_request_ids_too():
    app = make_app(FakeClient(lambda request: [RuntimeError("x")]), api_keys=("k",))
    assert "x-request-id" in call(app, "GET", "/v1/models").headers
    assert "x-request-id" in post(app, CHAT, chat_body(), headers=bearer("k")).headers


def test_the_access_log_is_one_line_of_json_without_secrets(caplog):
    app = make_app(api_keys=("secret",), access_log="json")
    with caplog.at_level(logging.INFO, logger="gapless.access"):
        call(
            app,
            "POST",
            f"{CHAT}?key=secret",
            json=chat_body(),
            headers={**bearer("secret"), "x-request-id": "r1"},
        )
        call(app, "GET", "/a%0Ab", headers=bearer("secret"))
    first, second = (json.loads(record.getMessage()) for record in caplog.records)
    assert first["request_id"] == "r1"
    assert (first["method"], first["path"], first["status"]) == ("POST", CHAT, 200)
    assert 0 <= first["first_byte_s"] <= first["duration_s"]
    assert second["status"] == 404
    assert not any(
        "\n" in record.getMessage() or "secret" in record.getMessage() for record in caplog.records
    )


@pytest.mark.parametrize(("form", "num_lines"), [("json", 1), ("text", 1), ("off", 0)])
def test_forms_of_the_access_log(caplog, form, num_lines):
    with caplog.at_level(logging.INFO, logger="gapless.access"):
        call(make_app(access_log=form), "GET", "/version")
    assert len(caplog.records) == num_lines


def test_a_fault_leaves_its_traceback_in_the_log_and_nothing_in_the_answer(caplog):
    app = make_app(FakeClient(lambda request: [RuntimeError("private detail")]))
    response = post(app, CHAT, chat_body())
    assert response.status_code == 500
    assert "private" not in response.text
    assert "private detail" in caplog.text


@pytest.mark.parametrize(
    ("origins", "allowed"), [((), None), (("*",), "*"), (("http://page",), "http://page")]
)
def test_cross_origin_rules(origins, allowed):
    app = make_app(cors_origins=origins, api_keys=("k",))
    headers = {"origin": "http://page", "access-control-request-method": "POST"}
    preflight = call(app, "OPTIONS", CHAT, headers=headers)
    assert preflight.headers.get("access-control-allow-origin") == allowed
    refused = call(app, "POST", CHAT, headers={"origin": "http://page"})
    assert refused.status_code == 401
    assert refused.headers.get("access-control-allow-origin") == allowed


def test_the_first_name_stands_in_answers_that_name_no_model():
    app = make_app(served_model_names=("a", "b"))
    assert post(app, TEXT, {"prompt": "x"}).json()["model"] == "a"
    assert post(app, TEXT, {"prompt": "x", "model": "b"}).json()["model"] == "b"


def test_every_key_is_compared_in_constant_time_over_digests_of_one_length(monkeypatch):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    app = make_app(api_keys=("first", "second", "third"))
    for given in ("first", "third", "f", "x" * 5000, ""):
        compared.clear()
        call(app, "GET", "/v1/models", headers={"authorization": f"Bearer {given}"})
        assert len(compared) == 3, "a match does not end the comparison"
        assert {len(digest) for pair in compared for digest in pair} == {32}
