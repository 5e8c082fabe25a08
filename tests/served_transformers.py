"""Unmodified Transformers decoders behind piecewise graphs, on either device: what tests of both share."""

from __future__ import annotations

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
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.capabilities import TcCompiler
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.device import get_device
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

    def __init__(
        self,
        family: str,
        compiler: TcCompiler = "eager",
        *,
        where: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.compiler = compiler
        experts = "grouped_mm" if family == "qwen3_moe" else None
        self.reference = make_model(family, experts=experts).to(where, dtype)
        self.model = make_model(family, experts=experts).to(where, dtype)
        backend, num_blocks = TorchReferenceBackend(), 1 + MAX_LEN // BLOCK
        for layer in attach_attention(self.model):
            shape = (num_blocks, BLOCK, layer.num_kv_heads, layer.head_size)
            caches = torch.full((2, *shape), torch.nan, device=where, dtype=dtype)
            layer.bind(backend, caches[0], caches[1])
        self.device = device = get_device(where)
        self.forward = install(
            self.model,
            config=PiecewiseConfig(split_ops=(ATTENTION_OP,), compiler=compiler),
            device=device,
            default_dim=1,
        )
        self.store = GraphStore(device)
        self.ids = {n: torch.arange(n, device=where)[None] % VOCAB for n in SIZES}
        self.positions = {n: torch.arange(n, device=where)[None] for n in SIZES}
        self.metadata = {n: one_request(n, where) for n in SIZES}
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
                for _ in range(device.num_warmups if where == "cuda" else 0):
                    self.run(n, NONE)
                device.synchronize()
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
        with torch.no_grad(), self.device.stream_scope(), use_forward_context(context):
            return self.graphs(n)


def one_request(num_tokens: int, where: str = "cpu") -> AttentionMetadata:
    """Its blocks lie in the cache from the last one on."""

    def array(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=where)

    num_blocks = MAX_LEN // BLOCK
    return AttentionMetadata(
        query_start_loc=array([0, num_tokens]),
        seq_lens=array([num_tokens]),
        block_table=array(list(range(num_blocks, 0, -1)))[None],
        slot_mapping=array([(num_blocks - p // BLOCK) * BLOCK + p % BLOCK for p in range(num_tokens)]),
        max_query_len=num_tokens,
        max_seq_len=MAX_LEN,
    )
