"""What a Ray Serve application is told, and what crosses between its processes; no cluster is needed."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType
from typing import Any

import pytest

from gapless.cli.main import main
from gapless.deploy import ray_serve
from gapless.deploy.ray_options import RayOptions, split_options
from gapless.deploy.ray_serve import engine_needs
from gapless.deploy.wire import FAULTS, Part, decode, encode, fault_of
from gapless.env import Env
from gapless.errors import ConfigError, RequestError
from gapless.serve.client import EngineBusyError, EngineDeadError, EngineDrainingError
from gapless.serve.messages import Delta, GenerateRequest


@pytest.mark.parametrize(
    ("text", "expected"), [("1", (1, 1)), ("8", (8, 8)), ("1..4", (1, 4)), ("3..3", (3, 3)), (2, (2, 2))]
)
def test_replicas_are_a_number_or_a_range(text, expected):
    ours, _ = split_options({"model_path": "m", "replicas": text})
    assert ours.bounds == expected


@pytest.mark.parametrize("text", ["0", "4..1", "1..", "..2", "1-4", "two", "-1", "", "1..99999"])
def test_other_replicas_are_refused(text):
    with pytest.raises(ConfigError, match="replicas="):
        RayOptions(replicas=text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("http_replicas", 0),
        ("target_ongoing_requests", 0),
        ("max_ongoing_requests", True),
        ("cpus_per_replica", 0),
        ("gpus_per_replica", -1),
        ("gpus_per_replica", 0.5),
        ("app_name", "a b"),
    ],
)
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(ConfigError, match=f"{name}="):
        RayOptions(**{name: value})


def test_one_mapping_holds_the_options_of_all_three():
    args = {
        "model-path": "folder",
        "tensor_parallel_size": 2,
        "max_queued_requests": 7,
        "routing": "load",
        "replicas": "1..3",
        "cpus_per_replica": 2,
    }
    ours, options = split_options(args, Env(api_keys=("k",)))
    assert (ours.bounds, ours.cpus_per_replica) == ((1, 3), 2)
    assert (options.engine.model, options.engine.tensor_parallel_size) == ("folder", 2)
    assert (options.server.max_queued_requests, options.server.routing) == (7, "load")
    assert options.server.api_keys == ("k",)
    assert options.server.served_model_names == ("folder",)
    assert args["replicas"] == "1..3"


def test_flags_win_over_the_mapping():
    _, options = split_options(
        {"model_path": "a", "port": 1}, engine_flags={"model": "b"}, server_flags={"port": 2}
    )
    assert (options.engine.model, options.server.port) == ("b", 2)


def needs_of(args: dict[str, Any], *, num_gpus: int = 0) -> dict[str, Any]:
    ours, options = split_options(args)
    return engine_needs(ours, options.server, num_gpus=num_gpus)


def test_a_range_scales_by_ongoing_requests_and_a_number_does_not():
    args = {"model_path": "m", "replicas": "2..5", "target_ongoing_requests": 9, "drain_seconds": 7}
    needs = needs_of(args)
    assert needs["autoscaling_config"] == {
        "min_replicas": 2,
        "max_replicas": 5,
        "target_ongoing_requests": 9,
    }
    assert "num_replicas" not in needs
    assert needs["graceful_shutdown_timeout_s"] == 7
    assert needs["health_check_timeout_s"] >= needs["health_check_period_s"] > 0
    fixed = needs_of({**args, "replicas": 3})
    assert fixed["num_replicas"] == 3
    assert "autoscaling_config" not in fixed


@pytest.mark.parametrize(
    ("num_gpus", "bundle"), [(0, {"CPU": 2.0}), (1, {"CPU": 2.0, "GPU": 1}), (4, {"CPU": 2.0, "GPU": 4})]
)
def test_all_gpus_of_a_replica_are_one_bundle_of_a_strictly_packed_group(num_gpus, bundle):
    needs = needs_of({"model_path": "m", "cpus_per_replica": 2.0}, num_gpus=num_gpus)
    assert needs["placement_group_bundles"] == [bundle]
    assert needs["placement_group_strategy"] == "STRICT_PACK"
    assert needs["ray_actor_options"] == {"num_cpus": 2.0, "num_gpus": num_gpus}


class FakeRay(ModuleType):
    """As much of Ray as is asked how many GPUs its cluster has."""

    def __init__(self, num_gpus: int | None) -> None:
        super().__init__("ray")
        self.num_gpus = num_gpus

    def is_initialized(self) -> bool:
        return self.num_gpus is not None

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": float(self.num_gpus)} if self.num_gpus else {}


@pytest.mark.parametrize(
    ("device", "gpus_of_cluster", "expected"),
    [("cuda", 0, 4), ("cuda", None, 4), ("cpu", 8, 0), ("auto", 8, 4), ("auto", 0, 0), ("auto", None, 0)],
)
def test_a_replica_asks_for_a_gpu_per_rank_where_there_are_gpus(
    monkeypatch, device, gpus_of_cluster, expected
):
    monkeypatch.setitem(sys.modules, "ray", FakeRay(gpus_of_cluster))
    assert ray_serve._num_gpus(device, tp=4) == expected


@pytest.mark.parametrize("args", [{}, {"replicas": 2}])
def test_without_a_model_there_is_nothing_to_deploy(args):
    with pytest.raises(ConfigError, match="no model"):
        split_options(args)


def test_an_unknown_option_is_refused_with_its_neighbour():
    with pytest.raises(ConfigError, match=r"max_queud_requests.*did you mean"):
        split_options({"model_path": "m", "max_queud_requests": 3})


def test_the_command_finds_mistakes_before_it_needs_a_cluster(capsys):
    assert main(["deploy", "ray", "--model", "m", "--replicas", "4..1"]) == 2
    assert "replicas=4..1" in capsys.readouterr().err
    assert main(["deploy", "ray"]) == 2
    assert "no model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        RequestError("temperature=-1: must be at least 0"),
        EngineBusyError("full", retry_after_s=7.5),
        EngineDrainingError("down"),
        EngineDeadError("gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_as_what_they_were(error):
    assert isinstance(error, FAULTS)
    with pytest.raises(type(error), match=str(error)) as caught:
        decode(encode(Part(fault=fault_of(error))))
    assert getattr(caught.value, "retry_after_s", None) == getattr(error, "retry_after_s", None)


def test_answers_arrive_whole():
    deltas = [Delta("a", 0, "text", [1, 2], finish_reason="stop", num_cached_tokens=3)]
    assert decode(encode(Part(deltas))).deltas == deltas
    assert decode(encode(Part(values=[0.5, -1.0]))).values == [0.5, -1.0]


def test_requests_survive_pickling():
    request = GenerateRequest(request_id="r", prompt_token_ids=[1, 2], params={"n": 2}, cache_extra=b"salt")
    assert pickle.loads(pickle.dumps(request)) == request
