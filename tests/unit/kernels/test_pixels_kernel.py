"""Values of pixels by the kernel, against a look-up by torch."""

from __future__ import annotations

import pytest
import torch

from gapless.errors import ConfigError
from gapless.kernels.pixels import write_values

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_patches", "size", "num_repeats"), [(1, 1, 1), (3, 16, 2), (2, 196, 2), (5, 300, 1), (0, 16, 2)]
)
def test_the_kernel_writes_what_is_in_the_table_and_nothing_else(
    num_patches: int, size: int, num_repeats: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    bytes_PB = torch.randint(256, (num_patches, 3 * size), dtype=torch.uint8)
    table_KV = torch.randn(3, 256).to(dtype)
    expected, room = (
        torch.empty(num_patches, 3 * num_repeats * size, dtype=dtype),
        torch.full((num_patches + 1, 3 * num_repeats * size), torch.nan, dtype=dtype),
    )
    write_values(bytes_PB, table_KV, num_repeats, expected, is_fused=False)
    write_values(bytes_PB, table_KV, num_repeats, room[:num_patches], is_fused=True)
    assert torch.equal(room[:num_patches], expected)
    assert room[num_patches:].isnan().all()
    for patch, channel, moment in ((0, 0, 0), (num_patches - 1, 2, num_repeats - 1)):
        if num_patches:
            row = room[patch].view(3, num_repeats, size)[channel, moment]
            assert torch.equal(row, table_KV[channel][bytes_PB[patch].view(size, 3)[:, channel].long()])


def test_other_shapes_and_types_are_refused() -> None:
    bytes_PB, table_KV = torch.zeros(2, 6, dtype=torch.uint8), torch.zeros(3, 256)
    for arguments, message in (
        ((bytes_PB, table_KV, 1, torch.zeros(2, 12)), "are no values of shape"),
        ((bytes_PB, table_KV[:2], 2, torch.zeros(2, 11)), "are no values of shape"),
        ((bytes_PB[:, :5], table_KV, 1, torch.zeros(2, 5)), "are no values of shape"),
        ((bytes_PB, table_KV, 1, torch.zeros(2, 6).half()), "are no torch.float16"),
        ((bytes_PB.int(), table_KV, 1, torch.zeros(2, 6)), "bytes of torch.int32"),
        ((bytes_PB, table_KV, 1, torch.zeros(6, 2).t()), "contiguous"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_values(*arguments)
