"""The decoder and the engine on fused kernels (interpreted), against the unfused forward and padded eager.

The emulated device records each fused operator as one node and replays it on fixed addresses, as CUDA would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import CONFIG, generate, open_engine_of
from torch import Tensor

from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.modes import Phase
from gapless.models import decoder
from gapless.models.config import parse_config
from gapless.models.decoder import Decoder
from gapless.models.dummy import fill_dummy_weights
from kernel_oracles import assert_close_to
from ragged_batches import make_batch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": LLAMA,
    "llama with biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "head size 80": {"head_dim": 80},
    "one head each": {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3},
}
STRATEGIES: dict[str, tuple[str, str]] = {
    "full": ("full", "full"),
    "breakable": ("breakable", "breakable"),
    "piecewise": ("tc_piecewise", "tc_piecewise"),
}


def run_layers(changes: dict[str, Any], dtype: torch.dtype, *, fused: bool) -> tuple[Tensor, list[Tensor]]:
    """Hidden states of the real tokens of a padded batch, and the caches it left."""
    config = parse_config({**CONFIG, **changes}, source="test")
    model = Decoder(config, max_positions=64, dtype=dtype, device=torch.device("cpu"))
    fill_dummy_weights(model, seed=0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter))
    model.has_fused_kernels = fused
    info = model.info
    batch = make_batch(
        [(0, 5), (7, 1), (0, 0), (3, 2)],
        num_heads=info.num_heads,
        num_kv_heads=info.num_kv_heads,
        head_size=info.head_size,
        pad_tokens=2,
        dtype=dtype,
    )
    for layer in model.attention_layers():
        layer.bind(TorchReferenceBackend(), batch.k_cache.clone(), batch.v_cache.clone())
    positions = torch.tensor([0, 1, 2, 3, 4, 7, 3, 4, 0, 0], dtype=torch.int32)
    ids = torch.arange(10, dtype=torch.int32)
    with use_forward_context(ForwardContext(batch=batch.metadata)):
        hidden = model.embed(ids)
        kept = hidden.clone()
        out = model.layers(hidden, positions)
    assert torch.equal(hidden, kept), "the input may be a static buffer"
    caches = [cache for layer in model.attention_layers() for cache in layer.caches]
    return out[: batch.num_real_tokens], caches


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.bfloat16) for family in FAMILIES), ("qwen3", torch.float32), ("qwen3", torch.float16)],
)
def test_fused_layers_equal_the_unfused_forward(family: str, dtype: torch.dtype) -> None:
    expected, expected_caches = run_layers(FAMILIES[family], dtype, fused=False)
    actual, caches = run_layers(FAMILIES[family], dtype, fused=True)
    assert actual.isfinite().all()
    assert_close_to(actual, expected, ulps=4, fraction=0.2)
    for cache, wanted in zip(caches, expected_caches, strict=True):
        # What no token was written to is still poison; the sink block holds what pad tokens computed.
        assert_close_to(cache[1:], wanted[1:], ulps=4, fraction=0.2)


@pytest.mark.parametrize("fused", [False, True])
def test_ids_drawn_on_the_device_stand_in_for_those_of_the_host(fused: bool) -> None:
    config = parse_config(CONFIG, source="test")
    model = Decoder(config, max_positions=64, dtype=torch.float32, device=torch.device("cpu"))
    fill_dummy_weights(model, seed=0)
    model.has_fused_kernels = fused
    batch = make_batch([(0, 3), (4, 1)], num_heads=4, num_kv_heads=2, head_size=16)
    for layer in model.attention_layers():
        layer.bind(TorchReferenceBackend(), batch.k_cache.clone(), batch.v_cache.clone())
    positions = torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    drawn = torch.tensor([60, 61, 62, 0])
    with use_forward_context(ForwardContext(batch=batch.metadata)):
        expected = model.layers(model.embed(torch.tensor([5, 6, 62, 60])), positions)
        actual = model.hidden_states_of_drawn(
            torch.tensor([5, 6, 0, 0], dtype=torch.int32),
            positions,
            drawn_rows_T=torch.tensor([3, 3, 2, 0], dtype=torch.int32),
            drawn_R=drawn,
        )
    assert torch.equal(actual, expected)


@pytest.fixture(scope="module")
def unfused_tokens(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return generate(open_engine_of(tmp_path_factory.mktemp("unfused"), "full", "full"))


@pytest.mark.parametrize(("prefill", "decode"), STRATEGIES.values(), ids=STRATEGIES.keys())
def test_graphs_of_fused_kernels_equal_padded_eager_and_draw_what_unfused_ones_draw(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    unfused_tokens: list[list[int]],
    prefill: str,
    decode: str,
) -> None:
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: True)
    opened = open_engine_of(tmp_path / "fused", prefill, decode)
    opened.runner.graphs.keeps_logits = True
    assert generate(opened) == unfused_tokens
    assert not opened.runner.report()["eager"], "every step ran as a graph"
    logits = opened.runner._graphs.logits.clone()
    opened.runner.max_steps_ahead = 1
    assert generate(opened) == unfused_tokens, "drawn tokens that only the device knows"
    opened.runner.max_steps_ahead = 0
    with opened.runner.padded_eager():
        assert generate(opened) == unfused_tokens
    assert torch.equal(opened.runner._graphs.logits, logits), "the last step's logits are bit-equal"


def test_a_layer_is_nine_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four products, attention and four fused kernels; embedding and first norm, and the head."""
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: True)
    opened = open_engine_of(tmp_path / "fused", "full", "full")
    store = opened.runner._graphs.store
    decode = [row.key for row in store.ledger if row.key.phase is Phase.DECODE]
    assert decode
    for key in decode:
        entry = store.get(key)
        assert entry is not None
        assert entry.program.num_nodes == 9 * CONFIG["num_hidden_layers"] + 3
