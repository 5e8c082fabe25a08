"""Steps for ``kernels/step_arrays.py``: what is staged of one, and token by token what is to come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.kernels.step_arrays import write_step_arrays

UNWRITTEN, NOT_READ = -7, 1 << 28
MAX_BLOCK = 9_999
"""Where all tables together have no more blocks than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    staged: tuple[Tensor, Tensor, Tensor]
    """Starts, lengths, tables side by side with rubbish behind."""
    expected: tuple[Tensor, Tensor, Tensor]
    """Positions, slots, block table."""
    block_size: int

    def run(self, outputs: Sequence[Tensor]) -> None:
        starts, lengths, tables = (staged.to(outputs[0].device) for staged in self.staged)
        write_step_arrays(starts, lengths, tables, *outputs, self.block_size)

    def outputs(self, device: str = "cpu") -> list[Tensor]:
        """The block table by column, as the engine stores it."""
        positions, slots, table = (torch.full_like(e, UNWRITTEN, device=device) for e in self.expected)
        return [positions, slots, table.t().contiguous().t()]


def make_case(
    requests: Sequence[tuple[int, int]],
    *,
    block_size: int,
    num_tokens: int | None = None,
    num_reqs: int | None = None,
    num_columns: int | None = None,
    seed: int = 0,
) -> StepCase:
    """``requests``: tokens in the cache, and new ones. Every block is one request's. The sizes are the
    bucket's; None: no padding."""
    generator = torch.Generator().manual_seed(seed)
    lens, contexts = [new for _, new in requests], [context for context, _ in requests]
    lengths = [context + new if new else 0 for context, new in requests]
    width = -(-max(lengths, default=0) // block_size)
    num_tokens = sum(lens) if num_tokens is None else num_tokens
    num_reqs = len(requests) if num_reqs is None else num_reqs
    num_columns = width if num_columns is None else num_columns
    num_blocks = len(requests) * width
    blocks = torch.randperm(max(MAX_BLOCK, num_blocks), generator=generator)[:num_blocks] + 1
    tables = blocks.to(torch.int32).view(len(requests), width)
    positions, slots = torch.zeros(2, num_tokens, dtype=torch.int32)
    token = 0
    for table, context, new in zip(tables.tolist(), contexts, lens, strict=True):
        for position in range(context, context + new):
            positions[token] = position
            slots[token] = table[position // block_size] * block_size + position % block_size
            token += 1
    block_table = torch.zeros(num_reqs, num_columns, dtype=torch.int32)
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        if length:
            block_table[row, :width] = table
    starts = torch.full((num_reqs + 1,), token, dtype=torch.int32)
    starts[: len(lens)] = torch.tensor([sum(lens[:i]) for i in range(len(lens))], dtype=torch.int32)
    padded = torch.zeros(num_reqs, dtype=torch.int32)
    padded[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32)
    packed = torch.full((num_reqs * num_columns,), NOT_READ, dtype=torch.int32)
    packed[: tables.numel()] = tables.flatten()
    return StepCase(
        staged=(starts, padded, packed), expected=(positions, slots, block_table), block_size=block_size
    )
