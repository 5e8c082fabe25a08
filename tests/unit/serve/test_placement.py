"""Which GPUs or cores each replica gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gapless.env import changed_environment
from gapless.errors import ConfigError
from gapless.serve import placement
from gapless.serve.placement import place_replicas, visible_gpus


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(placement, "visible_gpus", lambda: [])


def gpus(monkeypatch, *names: str) -> None:
    monkeypatch.setattr(placement, "visible_gpus", lambda: list(names))


def test_each_replica_sees_a_gpu_of_its_own(monkeypatch):
    gpus(monkeypatch, "0", "1", "2")
    assert place_replicas(2) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]


def test_with_several_gpus_each_they_are_neighbours(monkeypatch):
    gpus(monkeypatch, "4", "5", "MIG-a", "MIG-b")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in place_replicas(2, gpus_each=2)] == ["4,5", "MIG-a,MIG-b"]


@pytest.mark.parametrize(("replicas", "each"), [(3, 1), (2, 2), (1, 3)])
def test_too_few_gpus_are_refused_before_anything_starts(monkeypatch, replicas, each):
    gpus(monkeypatch, "0", "1")
    with pytest.raises(ConfigError, match=rf"--replicas={replicas}.* needs {replicas * each} GPUs and 2"):
        place_replicas(replicas, gpus_each=each)


def test_no_gpu_at_all_is_refused_only_where_one_is_asked_for():
    with pytest.raises(ConfigError, match="0 can be seen"):
        place_replicas(2, device="cuda")
    assert place_replicas(2, device="auto") == [{"OMP_NUM_THREADS": "4"}] * 2


def test_on_a_cpu_the_cores_are_divided_unless_somebody_has_said_how_many(monkeypatch):
    gpus(monkeypatch, "0", "1")
    assert place_replicas(3, device="cpu") == [{"OMP_NUM_THREADS": "2"}] * 3
    assert place_replicas(20, device="cpu") == [{"OMP_NUM_THREADS": "1"}] * 20
    assert place_replicas(1, device="cpu") == [{}]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert place_replicas(2, device="cpu") == [{}, {}]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("", []),
        ("0", ["0"]),
        ("3, 1", ["3", "1"]),
        ("0,-1,2", ["0"]),
        ("GPU-ab,MIG-cd", ["GPU-ab", "MIG-cd"]),
    ],
)
def test_the_list_that_cuda_reads_is_read_as_cuda_does(monkeypatch, listed, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_gpus(Path("/nowhere")) == expected


def test_without_a_list_device_files_are_counted(tmp_path):
    for name in ("nvidia0", "nvidia7", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "1"]


def test_an_environment_is_changed_for_the_block_only(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with changed_environment({"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "5"}):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("2", "5")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
