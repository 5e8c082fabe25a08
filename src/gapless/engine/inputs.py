"""From a scheduled batch to the numpy arrays the graphs' static inputs are filled with.

No loop over tokens: one pass over requests, the rest is numpy. Block tables are mirrored in one host array, a
row per sequence, extended by the blocks that are new since the sequence was last seen; a preempted sequence
(its generation changed) starts over. What the arrays mean: ``attention/base.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gapless.attention.base import SINK_BLOCK
from gapless.engine.step import ScheduledBatch, ScheduledSequence
from gapless.graphs.buffers import InputField


def token_fields(*, max_blocks: int, vocab_size: int) -> tuple[InputField, ...]:
    """The static inputs of a forward pass over ``tokens`` tokens of ``reqs`` requests (all int32)."""
    return (
        InputField(name="input_ids", dims=("tokens",), pad=0, poison=vocab_size - 1),
        InputField(name="positions", dims=("tokens",), pad=0, poison=1),
        InputField(name="slot_mapping", dims=("tokens",), pad=SINK_BLOCK),
        InputField(name="query_start_loc", dims=("reqs+1",), pad="last"),
        InputField(name="seq_lens", dims=("reqs",), pad=0),
        InputField(name="block_table", dims=("reqs", max_blocks), pad=SINK_BLOCK),
    )


def hidden_field(*, hidden_size: int, dtype: torch.dtype) -> InputField:
    """The embeddings a breakable graph starts from; poisoned with NaN, which no real row may pick up."""
    return InputField(
        name="hidden", dims=("tokens", hidden_size), dtype=dtype, pad=0, poison=float("nan"), on_device=True
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchArrays:
    """``values``: one array per field of ``token_fields``; ``sampled_rows``: token rows a token is drawn
    from."""

    values: dict[str, np.ndarray]
    query_lens: tuple[int, ...]
    sampled_rows: np.ndarray


class BatchBuilder:
    """Builds ``BatchArrays`` and keeps the host mirror of block tables."""

    def __init__(self, *, block_size: int, max_num_reqs: int, max_blocks: int) -> None:
        self._block_size = block_size
        self._tables = np.full((max_num_reqs, max_blocks), SINK_BLOCK, dtype=np.int32)
        self._rows: dict[int, _Row] = {}
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))

    def build(self, batch: ScheduledBatch) -> BatchArrays:
        entries = batch.entries
        rows = self._mirror(entries)
        lens = np.fromiter((e.num_new_tokens for e in entries), dtype=np.int32, count=len(entries))
        starts = np.fromiter((e.start for e in entries), dtype=np.int32, count=len(entries))
        query_start_loc = np.zeros(len(entries) + 1, dtype=np.int32)
        np.cumsum(lens, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        if num_tokens == len(entries):
            positions, table_rows = starts, rows
            input_ids = np.fromiter(
                (e.sequence.token_ids[e.start] for e in entries), dtype=np.int32, count=num_tokens
            )
        else:
            positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(starts - query_start_loc[:-1], lens)
            table_rows = np.repeat(rows, lens)
            chunks = [e.sequence.token_ids[e.start : e.start + e.num_new_tokens] for e in entries]
            input_ids = np.concatenate([np.asarray(chunk, dtype=np.int32) for chunk in chunks])
        blocks = self._tables[table_rows, positions // self._block_size]
        samples = np.fromiter((e.samples for e in entries), dtype=np.bool_, count=len(entries))
        widest = int((starts + lens - 1).max()) // self._block_size + 1
        return BatchArrays(
            values={
                "input_ids": input_ids,
                "positions": positions,
                "slot_mapping": blocks * self._block_size + positions % self._block_size,
                "query_start_loc": query_start_loc,
                "seq_lens": starts + lens,
                "block_table": self._tables[rows, :widest],
            },
            query_lens=tuple(lens.tolist()),
            sampled_rows=query_start_loc[1:][samples] - 1,
        )

    def _mirror(self, entries: tuple[ScheduledSequence, ...]) -> np.ndarray:
        current = {e.sequence.arrival for e in entries}
        for entry in entries:
            name = entry.sequence.arrival
            row = self._rows.get(name)
            if row is None:
                row = self._rows[name] = _Row(self._take_row(current))
            if row.generation != entry.generation:
                row.generation, row.num_blocks = entry.generation, 0
            new = entry.block_table[row.num_blocks :]
            if new:
                self._tables[row.index, row.num_blocks : row.num_blocks + len(new)] = new
                row.num_blocks += len(new)
        return np.fromiter((self._rows[e.sequence.arrival].index for e in entries), np.int64, len(entries))

    def _take_row(self, current: set[int]) -> int:
        if not self._free_rows:
            # Rows of sequences outside this step: finished ones, or running ones that are filled again when
            # they return.
            idle = [name for name in self._rows if name not in current]
            self._free_rows = [self._rows.pop(name).index for name in idle]
        return self._free_rows.pop()


@dataclass(slots=True)
class _Row:
    index: int
    generation: int = -1
    num_blocks: int = 0
