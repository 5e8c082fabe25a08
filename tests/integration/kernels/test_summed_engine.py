"""The decoder and the engine with products in parts (interpreted): as the unfused forward, in every way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from summed_cases import part_tile
from tiny_engines import CONFIG, generate, open_engine_of
from torch import Tensor

from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.modes import Phase
from gapless.kernels import summed_product
from gapless.kernels.linear_choice import forget_stored_choices, store_choices
from gapless.kernels.linear_tiles import Product
from gapless.models import decoder, layers
from gapless.models.config import parse_config
from gapless.models.decoder import Decoder
from gapless.models.dummy import fill_dummy_weights
from gapless.models.fused import fused_tail, fused_to_tail
from kernel_oracles import assert_close_to
from ragged_batches import make_batch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)
CPU = torch.device("cpu")
WIDE = {"intermediate_size": 96}
TILES = {64: part_tile(16, 16, 1, 1, 4), 96: part_tile(32, 16, 1, 0, 2)}
"""By input features: attention's output, and the feed-forward's last product."""


@pytest.fixture(autouse=True)
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every product that a norm follows is in parts; input features of each that was launched."""
    pytest.importorskip("triton")
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "store"))
    forget_stored_choices()
    buckets = [1 << n for n in range(9)]
    store_choices(
        {
            Product(num_tokens=t, num_in=i, num_out=48, is_gated=False, is_summed=True, dtype=dtype): tiles
            for t in buckets
            for i, tiles in TILES.items()
            for dtype in (torch.float32, torch.bfloat16)
        },
        CPU,
    )
    forget_stored_choices()
    noted, real = [], summed_product.launch_parts

    def launch(x_TI: Tensor, *args: Any) -> Tensor:
        noted.append(x_TI.shape[1])
        return real(x_TI, *args)

    monkeypatch.setattr(summed_product, "launch_parts", launch)
    monkeypatch.setattr(layers, "can_pack", lambda weight: False)  # as on a GPU
    yield noted
    forget_stored_choices()


def run(dtype: torch.dtype, changes: dict[str, Any], *, fused: bool, with_tail: bool = False) -> Tensor:
    """Hidden states of the real tokens of a padded batch."""
    config = parse_config({**CONFIG, **WIDE, **changes}, source="test")
    model = Decoder(config, max_positions=64, dtype=dtype, device=CPU)
    fill_dummy_weights(model, seed=0)
    model.has_fused_kernels = fused
    batch = make_batch(
        [(0, 5), (7, 1), (0, 0), (3, 2)], num_heads=4, num_kv_heads=2, head_size=16, pad_tokens=2, dtype=dtype
    )
    for layer in model.attention_layers():
        layer.bind(TorchReferenceBackend(), batch.k_cache.clone(), batch.v_cache.clone())
    positions = torch.tensor([0, 1, 2, 3, 4, 7, 3, 4, 0, 0], dtype=torch.int32)
    with torch.no_grad(), use_forward_context(ForwardContext(batch=batch.metadata)):
        hidden = model.embed(torch.arange(10, dtype=torch.int32))
        if with_tail:
            out = fused_tail(model, *fused_to_tail(model, hidden, positions))
        else:
            out = model.layers(hidden, positions)
    return out[: batch.num_real_tokens]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_products_in_parts_equal_the_unfused_forward(
    dtype: torch.dtype, launched: list[int]
) -> None:
    expected = run(dtype, {}, fused=False)
    assert launched == []
    actual = run(dtype, {}, fused=True)
    assert launched == [64, 96] * 2
    assert actual.isfinite().all()
    assert_close_to(actual, expected, ulps=4, fraction=0.2)
    assert torch.equal(run(dtype, {}, fused=True, with_tail=True), actual)
    assert launched[4:] == [64, 96] * 2, "the tail takes the same operator"


def test_products_with_a_bias_are_not_in_parts(launched: list[int]) -> None:
    changes = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": True}
    assert_close_to(run(torch.float32, changes, fused=True), run(torch.float32, changes, fused=False))
    assert launched == [64] * 2


@pytest.mark.parametrize("strategy", ["full", "breakable", "tc_piecewise"])
def test_graphs_equal_padded_eager_and_draw_what_unfused_ones_draw(
    strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launched: list[int]
) -> None:
    expected = generate(open_engine_of(tmp_path / "unfused", "full", "full", **WIDE))
    assert launched == []
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: True)
    opened = open_engine_of(tmp_path / "fused", strategy, strategy, **WIDE)
    opened.runner.graphs.keeps_logits = True
    assert generate(opened) == expected
    assert set(launched) == {64, 96}
    assert not opened.runner.report()["eager"], "every step ran as a graph"
    logits = opened.runner._graphs.logits.clone()
    with opened.runner.padded_eager():
        assert generate(opened) == expected
    assert torch.equal(opened.runner._graphs.logits, logits), "the last step's logits are bit-equal"
    if strategy == "full":
        store = opened.runner._graphs.store
        programs = [store.get(row.key).program for row in store.ledger if row.key.phase is Phase.DECODE]
        # A layer is six operators, of which two are a product and its norm; two lie around the layers.
        assert {program.num_nodes for program in programs} == {6 * CONFIG["num_hidden_layers"] + 2}
