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
from gapless.engine.request import Sequence
from gapless.engine.step import ScheduledBatch, ScheduledSequence
from gapless.graphs.buffers import InputField


def token_fields(*, max_blocks: int, vocab_size: int, max_num_reqs: int) -> tuple[InputField, ...]:
    """The static inputs of a forward pass over ``tokens`` tokens of ``reqs`` requests (all int32).

    ``drawn_rows``: where a token that the host does not know yet lies among the tokens that the step before
    drew; ``max_num_reqs``, a row that always holds 0, where the host knows it.
    """
    return (
        InputField(name="input_ids", dims=("tokens",), pad=0, poison=vocab_size - 1),
        InputField(name="drawn_rows", dims=("tokens",), pad=max_num_reqs),
        InputField(name="positions", dims=("tokens",), pad=0, poison=1),
        InputField(name="slot_mapping", dims=("tokens",), pad=SINK_BLOCK),
        InputField(name="query_start_loc", dims=("reqs+1",), pad="last"),
        InputField(name="seq_lens", dims=("reqs",), pad=0),
        InputField(name="block_table", dims=("reqs", max_blocks), pad=SINK_BLOCK, by_column=True),
    )


def hidden_field(*, hidden_size: int, dtype: torch.dtype) -> InputField:
    """The embeddings a breakable graph starts from; poisoned with NaN, which no real row may pick up."""
    return InputField(
        name="hidden", dims=("tokens", hidden_size), dtype=dtype, pad=0, poison=float("nan"), on_device=True
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchArrays:
    """``values``: one array per field of ``token_fields``; ``sampled_rows``: token rows a token is drawn
    from; ``has_unknown``: some input token is known to the device only."""

    values: dict[str, np.ndarray]
    query_lens: tuple[int, ...]
    sampled_rows: np.ndarray
    has_unknown: bool


class BatchBuilder:
    """Builds ``BatchArrays`` and keeps the host mirror of block tables."""

    def __init__(self, *, block_size: int, max_num_reqs: int, max_blocks: int) -> None:
        self._block_size, self._max_num_reqs = block_size, max_num_reqs
        self._drawn: dict[
            Sequence, int
        ] = {}  # sequence → row of the token that the last step built drew for it
        self._tables = np.full((max_num_reqs, max_blocks), SINK_BLOCK, dtype=np.int32)
        self._rows: dict[Sequence, _Row] = {}  # by identity: numbers repeat between engines
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
            input_ids = np.fromiter((_first_token(e) for e in entries), dtype=np.int32, count=num_tokens)
        else:
            positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(starts - query_start_loc[:-1], lens)
            table_rows = np.repeat(rows, lens)
            input_ids = np.zeros(num_tokens, dtype=np.int32)
            for first, entry in zip(query_start_loc.tolist(), entries, strict=False):
                known = entry.sequence.token_ids[entry.start : entry.end]
                input_ids[first : first + len(known)] = known
        drawn_rows = np.full(num_tokens, self._max_num_reqs, dtype=np.int32)
        unknown = [(i, e) for i, e in enumerate(entries) if e.end > len(e.sequence.token_ids)]
        for i, entry in unknown:
            drawn_rows[query_start_loc[i + 1] - 1] = self._drawn[entry.sequence]
        self._drawn = {e.sequence: row for row, e in enumerate(batch.sampled_entries)}
        blocks = self._tables[table_rows, positions // self._block_size]
        samples = np.fromiter((e.samples for e in entries), dtype=np.bool_, count=len(entries))
        widest = int((starts + lens - 1).max()) // self._block_size + 1
        return BatchArrays(
            values={
                "input_ids": input_ids,
                "drawn_rows": drawn_rows,
                "positions": positions,
                "slot_mapping": blocks * self._block_size + positions % self._block_size,
                "query_start_loc": query_start_loc,
                "seq_lens": starts + lens,
                "block_table": self._tables[rows, :widest],
            },
            query_lens=tuple(lens.tolist()),
            sampled_rows=query_start_loc[1:][samples] - 1,
            has_unknown=bool(unknown),
        )

    def _mirror(self, entries: tuple[ScheduledSequence, ...]) -> np.ndarray:
        current = {e.sequence for e in entries}
        for entry in entries:
            row = self._rows.get(entry.sequence)
            if row is None:
                row = self._rows[entry.sequence] = _Row(self._take_row(current))
            if row.generation != entry.generation:
                row.generation, row.num_blocks = entry.generation, 0
            new = entry.block_table[row.num_blocks :]
            if new:
                self._tables[row.index, row.num_blocks : row.num_blocks + len(new)] = new
                row.num_blocks += len(new)
        return np.fromiter((self._rows[e.sequence].index for e in entries), np.int64, len(entries))

    def _take_row(self, current: set[Sequence]) -> int:
        if not self._free_rows:
            # Rows of sequences outside this step: finished ones, or running ones that are filled again when
            # they return.
            idle = [sequence for sequence in self._rows if sequence not in current]
            self._free_rows = [self._rows.pop(sequence).index for sequence in idle]
        return self._free_rows.pop()


def _first_token(entry: ScheduledSequence) -> int:
    token_ids = entry.sequence.token_ids
    return token_ids[entry.start] if entry.start < len(token_ids) else 0


@dataclass(slots=True)
class _Row:
    index: int
    generation: int = -1
    num_blocks: int = 0
