"""The table of attention backends: what is declared, what this build can make, and what a bad name says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from gapless.attention import registry
from gapless.attention.registry import (
    available_backends,
    create_backend,
    get_backend_support,
    get_support,
    known_backends,
    register_backend,
    select_backend,
)
from gapless.errors import ConfigError
from gapless.graphs.modes import AttentionSupport, GraphMode

DECLARED = {
    "torch_reference": AttentionSupport.ALWAYS,
    "triton_paged": AttentionSupport.ALWAYS,
    "flash_attention_2": AttentionSupport.UNIFORM_BATCH,
    "flash_attention_3": AttentionSupport.ALWAYS,
    "triton_attention": AttentionSupport.ALWAYS,
    "aiter_flash_attention": AttentionSupport.UNIFORM_BATCH,
    "flashinfer": AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    "flashinfer_trtllm": AttentionSupport.UNIFORM_BATCH,
    "flashmla": AttentionSupport.UNIFORM_BATCH,
    "flashinfer_mla": AttentionSupport.UNIFORM_BATCH,
    "flashinfer_mla_sparse": AttentionSupport.UNIFORM_BATCH,
    "aiter_mla": AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    "cutlass_mla": AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    "mamba": AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE,
}


@pytest.fixture
def table(monkeypatch):
    """A copy of the table that a test may add to."""
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))


@pytest.mark.parametrize("name", DECLARED)
def test_every_known_backend_declares_its_documented_support(name):
    assert get_support(name) is DECLARED[name]
    assert get_backend_support(name).support is DECLARED[name]


def test_the_table_holds_nothing_undocumented():
    assert {row.name for row in known_backends()} == set(DECLARED)


@pytest.mark.parametrize("name", ["", "auto", "flash_attention_9", "FLASHINFER"])
def test_an_undeclared_backend_supports_nothing(name):
    assert get_support(name) is AttentionSupport.NEVER
    assert get_backend_support(name).preferred is None


def test_only_one_kernel_for_both_kinds_of_batch_prefers_full():
    assert get_backend_support("flash_attention_3").preferred is GraphMode.FULL
    assert get_backend_support("triton_attention").preferred is GraphMode.FULL_AND_PIECEWISE


@pytest.mark.parametrize(("device", "default"), [("cpu", "torch_reference"), ("cuda", "triton_paged")])
def test_auto_is_the_default_of_the_device(device, default):
    assert select_backend("auto", device_type=device) == default
    assert select_backend(default, device_type=device) == default
    assert default in available_backends(device)


@pytest.mark.parametrize(
    ("name", "device", "words"),
    [
        (
            "torch_referense",
            "cpu",
            r"unknown .*'torch_referense'; did you mean 'torch_reference'\? .*auto, torch_ref",
        ),
        ("xyzzy", "cpu", r"unknown attention backend 'xyzzy'\. Available on cpu"),
        (
            "flash_attention_3",
            "cuda",
            "known but not part of this build; available on cuda: auto, .*triton_paged",
        ),
        ("triton_paged", "cpu", "runs on cuda, not on cpu; available there: auto, torch_reference"),
        ("auto", "tpu", "no attention backend for device 'tpu'; devices: cpu, cuda"),
    ],
)
def test_a_backend_that_cannot_be_had_is_an_error_that_lists_what_can(name, device, words):
    with pytest.raises(ConfigError, match=words):
        select_backend(name, device_type=device)


def test_a_registered_backend_is_made_by_its_factory(table):
    backend = object()
    register_backend("mine", support=AttentionSupport.NEVER, factory=lambda: backend, devices=("cpu",))  # type: ignore[arg-type,return-value]
    assert create_backend("mine", device_type="cpu") is backend
    assert get_support("mine") is AttentionSupport.NEVER
    assert "mine" in available_backends("cpu")
    assert "mine" not in available_backends("cuda")


def test_a_known_backend_may_get_an_implementation_once(table):
    def make(name: str) -> None:
        register_backend(name, support=AttentionSupport.ALWAYS, factory=object)  # type: ignore[arg-type]

    make("flashinfer")
    assert get_support("flashinfer") is AttentionSupport.ALWAYS
    with pytest.raises(ConfigError, match="registered already"):
        make("flashinfer")
    with pytest.raises(ConfigError, match="registered already"):
        make("torch_reference")


@pytest.mark.parametrize("name", available_backends())
def test_an_implementation_declares_what_the_table_says(name):
    if name == "triton_paged" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    row = next(row for row in known_backends() if row.name == name)
    backend = create_backend(name, device_type=row.devices[0])
    assert backend.name == name
    assert backend.support is row.support


def test_reading_the_table_imports_no_torch():
    code = (
        "import sys; from gapless.attention.registry import select_backend; "
        "select_backend('auto', device_type='cpu'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
