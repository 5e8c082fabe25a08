"""A model's matrices: which products it has, timed if asked for, their kernels compiled at start-up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from product_shapes import GEMV, PARTS, TILE

from gapless.kernels import head, head_product, linear, linear_tuner, matrices, norm
from gapless.kernels.head_tiles import default_head_tiles
from gapless.kernels.matrices import Matrices, compile_products
from gapless.models import fused
from gapless.models.layers import Linear

pytestmark = pytest.mark.usefixtures("own_store")


class RecordingKernel:
    def __init__(self) -> None:
        self.compiled: list[dict[str, object]] = []

    def warmup(self, *args: object, grid: tuple[int, ...], **constants: object) -> None:
        self.compiled.append(constants)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_kernels_of_every_bucket_are_compiled_before_they_are_needed(
    is_gated: bool, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemv, tile = RecordingKernel(), RecordingKernel()
    monkeypatch.setattr(linear, "_kernels", lambda: SimpleNamespace(gemv_kernel=gemv, tile_kernel=tile))
    built_in = {1: GEMV, **dict.fromkeys((2, 4, 8, 16, 32, 64), TILE)}
    monkeypatch.setattr(matrices, "choose", lambda p, device: built_in.get(p.num_tokens))
    weight, bias = torch.randn(32, 64).bfloat16(), torch.randn(32).bfloat16() if has_bias else None
    compile_products([Matrices(weights=(weight,), bias=bias, is_gated=is_gated)])
    assert [constants["NUM_TOKENS"] for constants in gemv.compiled] == [1]
    assert [constants["TOKENS_PAD"] for constants in tile.compiled] == [8, 16, 32, 64]  # each once
    for constants in (*gemv.compiled, *tile.compiled):
        assert (constants["IS_GATED"], constants["HAS_BIAS"]) == (is_gated, has_bias)
        assert constants["NUM_IN"] == 64


def test_kernels_in_parts_and_their_norms_are_compiled_before_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tile, norms = RecordingKernel(), RecordingKernel()
    monkeypatch.setattr(linear, "_kernels", lambda: SimpleNamespace(tile_kernel=tile))
    monkeypatch.setattr(norm, "kernels", lambda: SimpleNamespace(rms_norm_kernel=norms))
    stored = {16: PARTS, 128: replace(PARTS, parts=8), 256: replace(PARTS, parts=8)}
    monkeypatch.setattr(matrices, "choose", lambda p, device: stored.get(p.num_tokens))
    weights = (torch.randn(32, 256).bfloat16(),)
    compile_products([Matrices(weights=weights, bias=None, is_gated=False, is_summed=True)])
    assert [(c["TOKENS_PAD"], c["PARTS"]) for c in tile.compiled] == [(16, 4), (128, 8), (256, 8)]
    assert [c["NUM_PARTS"] for c in norms.compiled] == [4, 8]


@pytest.mark.parametrize("asked", [False, True])
def test_a_loaded_model_times_its_products_only_when_asked(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAPLESS_TUNE_LINEAR", "1" if asked else "0")
    calls: list[tuple[object, ...]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda groups, *heads: calls.append(
            (name, [(len(g.weights), g.is_gated, g.is_summed) for g in groups], *heads)
        )

    monkeypatch.setattr(linear_tuner, "tune_products", note("time"))
    monkeypatch.setattr(fused, "compile_products", note("compile"))
    blocks = [
        SimpleNamespace(
            attention=SimpleNamespace(qkv=make_linear(), out=make_linear()),
            mlp=SimpleNamespace(gate_up=make_linear(), down=make_linear()),
        )
        for _ in range(3)
    ]
    model = SimpleNamespace(
        blocks=blocks,
        lm_head=make_linear(),
        head_rows=(head_rows := torch.randn(4, 4)),
        expert_layers=dict,
        shard=SimpleNamespace(is_whole=True),
        info=SimpleNamespace(num_deepstack=2, is_pooling=False),
    )
    fused.prepare_products(model)  # type: ignore[arg-type]
    qkv, out, gate_up, down = (3, False, False), (3, False, True), (3, True, False), (3, False, True)
    down_with_media, head = (2, False, False), (1, False, False)
    products = [qkv, out, gate_up, down, down_with_media, head]
    assert calls == [("time", products), ("compile", products, head_rows)][0 if asked else 1 :]


def test_heads_of_every_bucket_are_compiled_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    product, row = RecordingKernel(), RecordingKernel()
    monkeypatch.setattr(head_product, "_kernels", lambda: SimpleNamespace(head_product_kernel=product))
    monkeypatch.setattr(head, "kernels", lambda: SimpleNamespace(best_of_row_kernel=row))
    monkeypatch.setattr(head_product, "head_tiles", lambda num_rows, *rest: default_head_tiles(num_rows))
    compile_products([], torch.randn(600, 64).bfloat16())
    assert [c["ROWS_PAD"] for c in product.compiled] == [8, 16, 32, 64, 128]  # each once
    assert {c["NUM_IN"] for c in product.compiled} == {64}
    assert {c["NUM_CHUNKS"] for c in row.compiled} == {10, 5}


def make_linear() -> Linear:
    return Linear(torch.nn.Parameter(torch.randn(4, 4), requires_grad=False))
