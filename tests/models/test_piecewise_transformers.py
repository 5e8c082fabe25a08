"""Unmodified Transformers decoders under piecewise graphs, with our attention in their AttentionInterface."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from gapless.attention.base import ATTENTION_OP, AttentionMetadata
from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.attention.transformers_interface import attach_attention
from gapless.errors import CompileError, ModelError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.capabilities import TcCompiler
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.piecewise import PiecewiseConfig, install
from gapless.graphs.store import GraphStore
from gapless.graphs.wrapper import GraphWrapper

VOCAB, LAYERS, MAX_LEN, BLOCK = 96, 4, 32, 4
SIZES = (16, 8, 3, 1)
NONE, PIECEWISE = RuntimeMode.NONE, RuntimeMode.PIECEWISE

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_COMMON),
    "qwen3": Qwen3Config(**_COMMON),
    "qwen3_moe": Qwen3MoeConfig(**_COMMON, **_MOE),
    "gemma3": Gemma3TextConfig(
        **_COMMON,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=20,
    ),
}


def make_model(family: str, *, experts: str | None = None) -> PreTrainedModel:
    torch.manual_seed(0)
    config = type(CONFIGS[family]).from_dict(CONFIGS[family].to_dict())
    if experts is not None:
        config._experts_implementation = experts
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False).normal_(0.0, 0.3)
    return model


class Served:
    """A model behind piecewise graphs of ``SIZES`` tokens: one request whose tokens fill the bucket."""

    def __init__(self, family: str, compiler: TcCompiler = "eager") -> None:
        self.compiler = compiler
        experts = "grouped_mm" if family == "qwen3_moe" else None
        self.reference = make_model(family, experts=experts)
        self.model = make_model(family, experts=experts)
        backend, num_blocks = TorchReferenceBackend(), 1 + MAX_LEN // BLOCK
        for layer in attach_attention(self.model):
            shape = (num_blocks, BLOCK, layer.num_kv_heads, layer.head_size)
            layer.bind(backend, torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        device = EmulatedDevice()
        self.forward = install(
            self.model,
            config=PiecewiseConfig(split_ops=(ATTENTION_OP,), compiler=compiler),
            device=device,
            default_dim=1,
        )
        self.store = GraphStore(device)
        self.ids = {n: torch.arange(n)[None] % VOCAB for n in SIZES}
        self.positions = {n: torch.arange(n)[None] for n in SIZES}
        self.metadata = {n: _one_request(n) for n in SIZES}
        self.graphs = GraphWrapper(
            self.logits,
            runtime_mode=PIECEWISE,
            phase=Phase.PREFILL,
            strategy=Strategy.TC_PIECEWISE,
            store=self.store,
        )
        self.run(3, NONE)
        with self.store.capturing():
            for n in SIZES:
                self.run(n, PIECEWISE)

    def logits(self, n: int) -> Tensor:
        output = self.model(input_ids=self.ids[n], position_ids=self.positions[n], use_cache=False)
        return output.logits[0]

    def run(self, n: int, mode: RuntimeMode, *, compiled: bool = True) -> Tensor:
        context = ForwardContext(
            mode=mode,
            descriptor=BatchDescriptor(num_tokens=n, num_reqs=1),
            batch=self.metadata[n],
            use_compiled=compiled,
        )
        with torch.no_grad(), use_forward_context(context):
            return self.graphs(n)


def _one_request(num_tokens: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_table=torch.arange(1, 1 + MAX_LEN // BLOCK, dtype=torch.int32).flip(0)[None].contiguous(),
        slot_mapping=torch.tensor(
            [(MAX_LEN // BLOCK - p // BLOCK) * BLOCK + p % BLOCK for p in range(num_tokens)],
            dtype=torch.int32,
        ),
        max_query_len=num_tokens,
        max_seq_len=MAX_LEN,
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
    context = ForwardContext(batch=_one_request(4), use_compiled=True)
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
