"""Unmodified Transformers decoders under piecewise graphs, with our attention in their AttentionInterface."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gapless.attention.base import ATTENTION_OP
from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.attention.transformers_interface import attach_attention
from gapless.errors import CompileError, ModelError
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.piecewise import PiecewiseConfig, install
from served_transformers import (
    BLOCK,
    CONFIGS,
    LAYERS,
    NONE,
    PIECEWISE,
    SIZES,
    VOCAB,
    Served,
    make_model,
    one_request,
)


def _cases() -> Iterator[Any]:
    yield from (pytest.param((family, "eager"), id=family) for family in CONFIGS)
    has_compiler = shutil.which("g++") is not None
    mark = pytest.mark.skipif(not has_compiler, reason="Inductor needs a C++ compiler on a CPU")
    yield pytest.param(("llama", "inductor"), id="llama-inductor", marks=mark)


@pytest.fixture(scope="module", params=_cases())
def served(request: pytest.FixtureRequest) -> Served:
    return Served(*request.param)


@pytest.mark.parametrize("n", SIZES)
def test_logits_equal_transformers_and_padded_eager_on_new_tokens(served: Served, n: int) -> None:
    for seed in range(2):
        served.ids[n].copy_(torch.randint(VOCAB, (1, n), generator=torch.Generator().manual_seed(seed)))
        graph = served.run(n, PIECEWISE).clone()
        assert torch.equal(graph, served.run(n, NONE))
        plain = served.run(n, NONE, compiled=False)
        if served.compiler == "eager":
            assert torch.equal(graph, plain)
        torch.testing.assert_close(graph, plain, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            expected = served.reference(served.ids[n], use_cache=False).logits[0]
        torch.testing.assert_close(graph, expected, rtol=1e-4, atol=1e-4)


def test_each_layer_is_a_break_and_a_model_has_few_kinds_of_pieces(served: Served) -> None:
    stats = served.forward.stats
    assert (stats.num_splits, stats.num_pieces) == (LAYERS, LAYERS + 1)
    assert stats.num_distinct <= 4 * stats.num_traces
    assert {row.num_breaks for row in served.store.ledger} == {LAYERS}


def test_no_size_needed_a_trace_of_its_own(served: Served) -> None:
    """But size 1 of Inductor, before it is captured: its products in three dimensions hold for two rows and
    more (``Ne(s, 1)``, a guard of PyTorch's decompositions)."""
    for n in SIZES:
        served.run(n, PIECEWISE)
        served.run(n, NONE)
    assert served.forward.stats.num_traces == (1 if served.compiler == "eager" else 2)


def test_experts_that_are_looped_over_on_the_host_are_refused_by_name() -> None:
    model = make_model("qwen3_moe", experts="eager")
    for layer in attach_attention(model):
        shape = (9, BLOCK, layer.num_kv_heads, layer.head_size)
        layer.bind(TorchReferenceBackend(), torch.zeros(shape), torch.zeros(shape))
    config = PiecewiseConfig(split_ops=(ATTENTION_OP,))
    install(model, config=config, device=EmulatedDevice(), default_dim=1)
    context = ForwardContext(batch=one_request(4), use_compiled=True)
    with torch.no_grad(), use_forward_context(context):
        with pytest.raises(CompileError, match=r"modeling_qwen3_moe\.py:\d+ in forward: for expert_idx"):
            model(input_ids=torch.arange(4)[None], position_ids=torch.arange(4)[None], use_cache=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.zeros(2, 4, dtype=torch.long)}, "got 2 rows"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "mask True"),
    ],
)
def test_calls_that_paged_attention_cannot_serve_are_refused(change: dict, message: str) -> None:
    model = make_model("llama")
    attach_attention(model)
    arguments = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "use_cache": False, **change}
    with pytest.raises(ModelError, match=message):
        model(**arguments)


def test_windows_and_scales_of_the_layers_are_the_models() -> None:
    layers = attach_attention(make_model("gemma3"))
    assert [layer.window for layer in layers] == [6, None, 6, None]
    assert {layer.scale for layer in layers} == {20**-0.5}


def test_a_model_without_such_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="no attention modules"):
        attach_attention(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
