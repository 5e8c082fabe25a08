"""What a vision tower's block spends most of its time on: attention in several tilings, and GELU with its
product or behind it.

Every tiling is checked against fp32 attention first, with NaN in the rows that pad, and for equal bits of
equal calls. Times are microseconds a launch, medians over replays of a CUDA graph that holds one launch for
each layer; the rule's own tiling is marked. Shapes are those of Qwen3-VL-8B: 16 heads of 72, products of
1152 by 4304. ``rows (real)`` are those of a budget and of the image in it.

    python benchmarks/encoder_kernels.py [--output FILE]

Prints a table to stderr and one line of JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from attention_kernels import replay_times
from torch import Tensor
from torch.nn.functional import gelu, linear

from gapless.attention.tile_rules import EncoderTile, encoder_tile
from gapless.attention.triton_varlen import launch_varlen
from gapless.bench.meta import describe_run
from gapless.kernels.launch import compiling_ahead

HEADS, HEAD_SIZE, HIDDEN, INNER = 16, 72, 1152, 4304
SIZES = ((896, 784), (1024, 1024), (2304, 2304), (5632, 5476))
"""Rows of a budget, and those of one image in it."""
TILES = {
    f"{q}x{n}, {stages} stages": EncoderTile(block_q=q, block_n=n, num_warps=q // 16, num_stages=stages)
    for q, n, stages in (
        (128, 64, 3),
        (64, 64, 2),
        (64, 64, 3),
        (64, 64, 4),
        (64, 128, 2),
        (128, 128, 2),
        (64, 32, 4),
    )
}
MOST_ERROR = 6e-3
"""Of norms, bf16 against fp32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Case:
    """Rows of one image, and the padding of a budget behind them."""

    num_real: int
    qk_SGD: Tensor  # queries and keys as the rotation leaves them, [S, 2 * H, D]
    qkv_SC: Tensor  # values are the last third of each row, as the product leaves them
    out_SHD: Tensor
    cu_seqlens: Tensor
    lengths_N: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        value_SHD = self.qkv_SC.unflatten(1, (-1, HEAD_SIZE))[:, 2 * HEADS :]
        return self.qk_SGD[:, :HEADS], self.qk_SGD[:, HEADS:], value_SHD, self.out_SHD

    def attend(self, tile: EncoderTile) -> None:
        launch_varlen(self.tensors(), self.cu_seqlens, self.lengths_N, HEAD_SIZE**-0.5, tile)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = [
        measure_size(num_rows, num_real, layers=arguments.layers, repeats=arguments.repeats)
        for num_rows, num_real in SIZES
    ]
    result = {
        "benchmark": "encoder_kernels",
        "unit": "us",
        "meta": describe_run(),
        "tiles": {name: asdict(tile) for name, tile in TILES.items()},
        "sizes": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def measure_size(num_rows: int, num_real: int, *, layers: int, repeats: int) -> dict[str, Any]:
    case, chosen = make_case(num_rows, num_real), rule(num_rows)
    with compiling_ahead():
        for tile in TILES.values():
            case.attend(tile)

    def timed(call: Callable[[], object]) -> float:
        times = replay_times(lambda _: call(), layers=layers, repeats=repeats)
        return round(statistics.median(times), 2)

    attention = {}
    for name, tile in TILES.items():
        error = check(case, tile)
        attention[name] = {"us": timed(lambda tile=tile: case.attend(tile)), "error": error}  # type: ignore[misc]
    products = {name: timed(call) for name, call in products_of(num_rows).items()}
    ours = next((name for name, tile in TILES.items() if tile == chosen), str(chosen))
    print(f"{num_rows} rows ({num_real} real); {products}", file=sys.stderr)
    for name, found in attention.items():
        mark = " <- the rule" if name == ours else ""
        print(f"  {name:18} {found['us']:8.2f} us, error {found['error']:.1e}{mark}", file=sys.stderr)
    return {
        "rows": num_rows,
        "real": num_real,
        "rule": ours,
        "attention": attention,
        "products": products,
    }


def rule(num_rows: int) -> EncoderTile:
    return encoder_tile(num_heads=HEADS, num_rows=num_rows, max_len=num_rows, itemsize=2)


def make_case(num_rows: int, num_real: int) -> Case:
    """As many slots for segments as a budget has."""
    segments = num_rows // 4
    lengths_N = torch.zeros(segments, dtype=torch.int32, device="cuda")
    lengths_N[0] = num_real
    cu_seqlens = torch.full((segments + 1,), num_real, dtype=torch.int32, device="cuda")
    cu_seqlens[0] = 0
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    case = Case(
        num_real=num_real,
        qk_SGD=torch.randn(num_rows, 2 * HEADS, HEAD_SIZE, **options),
        qkv_SC=torch.randn(num_rows, 3 * HEADS * HEAD_SIZE, **options),
        out_SHD=torch.empty(num_rows, HEADS, HEAD_SIZE, **options),
        cu_seqlens=cu_seqlens,
        lengths_N=lengths_N,
    )
    for tensor in (case.qk_SGD, case.qkv_SC):
        tensor[num_real:] = torch.nan
    return case


def check(case: Case, tile: EncoderTile) -> float:
    """The relative error of norms. Raises where it is large, two launches differ or pad rows are not zero."""
    query_SHD, key_SHD, value_SHD, out_SHD = case.tensors()
    query_HSD, key_HSD, value_HSD = (
        tensor[: case.num_real].transpose(0, 1).float() for tensor in (query_SHD, key_SHD, value_SHD)
    )
    score_HSS = query_HSD @ key_HSD.mT * HEAD_SIZE**-0.5
    expected_SHD = (score_HSS.softmax(-1) @ value_HSD).transpose(0, 1)
    found = []
    for _ in range(2):
        out_SHD.fill_(torch.nan)
        case.attend(tile)
        found.append(out_SHD.clone())
    if not torch.equal(found[0].view(torch.int16), found[1].view(torch.int16)):
        raise AssertionError(f"two launches differ: {tile}")
    if (found[0][case.num_real :] != 0).any():
        raise AssertionError(f"pad rows are not zero: {tile}")
    difference = (found[0][: case.num_real].float() - expected_SHD).norm() / expected_SHD.norm()
    if not difference < MOST_ERROR:
        raise AssertionError(f"error {float(difference):.1e}: {tile}")
    return float(difference)


def products_of(num_rows: int) -> dict[str, Callable[[], object]]:
    """The first product of an MLP: alone, with the activation behind it, and with the activation in it."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x_SH = torch.randn(num_rows, HIDDEN, **options)
    weight_IH = torch.randn(INNER, HIDDEN, **options) * HIDDEN**-0.5
    bias_I = torch.randn(INNER, **options)

    def behind() -> Tensor:
        return gelu(linear(x_SH, weight_IH, bias_I), approximate="tanh")

    def within() -> Tensor:
        return torch._addmm_activation(bias_I, x_SH, weight_IH.t(), use_gelu=True)

    before_SI = linear(x_SH.float(), weight_IH.float(), bias_I.float())
    forms = {form: gelu(before_SI, approximate=form) for form in ("tanh", "none")}
    errors = {form: float((within() - value).norm() / value.norm()) for form, value in forms.items()}
    assert errors["tanh"] < min(errors["none"], MOST_ERROR), f"GELU in the product is another: {errors}"
    return {
        "product": lambda: linear(x_SH, weight_IH, bias_I),
        "product, GELU behind": behind,
        "product, GELU in it": within,
    }


if __name__ == "__main__":
    main()
