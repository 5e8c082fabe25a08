"""A short warm-up launches every kernel that a whole run launches, in the same shapes, with fewer layers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from encoder_cases import media
from gapless.config import EngineConfig
from gapless.engine.build import open_engine
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.encoder_graphs import run_fresh
from gapless.models import decoder
from gapless.models.vision.tower import make_tower

CPU = torch.device("cpu")
DENSE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
MIXTURE = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "one kind": (DENSE, 1),
    "windows": ({**DENSE, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, 2),
    "mixtures and dense layers": ({**MIXTURE, "mlp_only_layers": [0, 3]}, 2),
}
"""A config, and how many kinds of layers it has."""
TOWER = {
    "depth": 7,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 24,
    "patch_size": 4,
    "spatial_merge_size": 2,
}
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows first": ("qwen2_5_vl", {"fullatt_block_indexes": [3, 6], "window_size": 16}),
    "whole images first": ("qwen2_5_vl", {"fullatt_block_indexes": [0, 5], "window_size": 16}),
    "no windows": ("qwen2_5_vl", {"fullatt_block_indexes": list(range(7)), "window_size": 16}),
    "deepstack": ("qwen3_vl", {"num_position_embeddings": 16, "deepstack_visual_indexes": [2, 4]}),
}


class Launches(TorchDispatchMode):
    """How often each operator ran: by shapes, strides and dtypes of its tensors and its other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outlines = _outlines([*args, *(kwargs or {}).items()])
        if func.name() == "gapless::packed_linear":
            del outlines[1]  # the number of a matrix, not a property of it
        self.counts[func.name(), repr(outlines)] += 1
        return func(*args, **(kwargs or {}))


def _outlines(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return [_outlines(part) for part in value] if isinstance(value, list | tuple) else value


def assert_same_kinds_in_fewer_launches(short: Launches, whole: Launches) -> None:
    assert set(short.counts) == set(whole.counts)
    assert sum(short.counts.values()) < 0.75 * sum(whole.counts.values())


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_decoders(name: str, is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: is_fused)
    config, num_kinds = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {
        "model": str(tmp_path),
        "load_format": "dummy",
        "device": "cpu",
        "max_running_requests": 2,
        "chunked_prefill_size": 8,
        "kv_cache_tokens": 256,
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_backend_decode": "disabled",
    }
    opened = open_engine(EngineConfig.from_sources(python=options))
    assert len(opened.loaded.model.first_of_each_kind) == num_kinds
    graphs = opened.runner.graphs
    for runner, num_reqs in ((graphs.prefill, 1), (graphs.decode, 2)):
        size = BatchDescriptor(num_tokens=2, num_reqs=num_reqs, uniform=runner is graphs.decode)
        launches = {}
        runner._warm_up(size, times=1)  # what is made once does not count
        for is_short in (False, True):
            with Launches() as launches[is_short]:
                runner._warm_up(size, times=1, is_short=is_short)
        assert_same_kinds_in_fewer_launches(launches[True], launches[False])


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", TOWERS)
def test_towers(name: str, is_fused: bool) -> None:
    model_type, config = TOWERS[name]
    tower = make_tower(model_type, {**TOWER, **config}, dtype=torch.float32, device=CPU, is_fused=is_fused)
    item = media(tower, (1, 4, 6), is_pixels=True)
    run_fresh(tower, [item], tower.sizes_of(item), CPU)  # what follows from a grid is made once
    launches = {}
    for is_short in (False, True):
        context = ForwardContext(is_short_warm_up=is_short)
        with use_forward_context(context), torch.no_grad(), Launches() as launches[is_short]:
            run_fresh(tower, [item], tower.sizes_of(item), CPU)
    assert_same_kinds_in_fewer_launches(launches[True], launches[False])
