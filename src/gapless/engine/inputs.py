"""From a scheduled batch to the numpy arrays the graphs' static inputs are filled with.

No loop over tokens: one pass over requests, the rest is numpy. Block tables are mirrored in one host array, a
row per sequence, extended by the blocks that are new since the sequence was last seen; a preempted sequence
(its generation changed) starts over. A decode step over the sequences of the step before is made of that
one's arrays; invariant: they equal what building it anew would give. Where prefill graphs make positions and
slots themselves (``GraphSet.makes_slots``), steps of prompts bring what these take. What the arrays mean:
``attention/base.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from gapless.attention.base import SINK_BLOCK
from gapless.engine.request import Sequence
from gapless.engine.rope_inputs import rope_positions
from gapless.engine.step import DecodeRun, ScheduledBatch, ScheduledSequence
from gapless.graphs.buffers import StaticInputs
from gapless.graphs.frozen_arrays import frozen
from gapless.graphs.input_field import InputField

NO_DRAWN_ROWS = frozen(np.zeros(0, dtype=np.int32))
"""``drawn_rows`` of a batch whose tokens are all known; frozen, so that it is looked at once."""

PACKED_TABLES = "packed_tables"

NEEDS_LOGITS = InputField(name="needs_logits", dims=(1,), pad=0)
"""Of graphs that end in tokens: whether somebody reads the step's float32 logits. One number for all rows,
since a draw reads every row of its batch. Where it is 0, fused kernels leave the buffer as it was; a forward
without them finds the best token among float32 logits, which it writes whatever this says."""

_LOGITS_FLAGS = tuple(frozen(np.full(1, value, dtype=np.int32)) for value in (0, 1))


def logits_flag(*, is_needed: bool) -> np.ndarray:
    """The value of ``NEEDS_LOGITS``; one object for each, so that steps alike do not stage it again."""
    return _LOGITS_FLAGS[is_needed]


def token_fields(
    *,
    max_blocks: int,
    vocab_size: int,
    max_num_reqs: int,
    rope_axes: int = 1,
    has_media: bool = False,
    makes_slots: bool = False,
) -> tuple[InputField, ...]:
    """The static inputs of a forward pass over ``tokens`` tokens of ``reqs`` requests (all int32).

    ``drawn_rows``: where a token that the host does not know yet lies among the tokens that the step before
    drew; ``max_num_reqs``, a row that always holds 0, where the host knows it. That is the padding too, so a
    batch whose tokens are all known has none of these rows. ``rope_positions``, with
    several axes: what the model rotates by (``positions`` are indices). ``is_media``, with ``has_media``: 1
    where an encoder's row takes the place of the token's embedding. ``packed_tables``, with ``makes_slots``:
    what the forward makes positions, slots and block tables of (``kernels/step_arrays.py``); in two
    dimensions, so that only as much of it is staged as there is.
    """
    rope = InputField(name="rope_positions", dims=(rope_axes, "tokens"), pad=0, poison=1)
    packed = InputField(name=PACKED_TABLES, dims=(1, f"{max_blocks}*reqs"), pad=SINK_BLOCK, by_column=True)
    is_media = InputField(name="is_media", dims=("tokens",), pad=0, poison=1)
    return (
        InputField(name="input_ids", dims=("tokens",), pad=0, poison=vocab_size - 1),
        InputField(name="drawn_rows", dims=("tokens",), pad=max_num_reqs),
        InputField(
            name="positions", dims=("tokens",), pad=0, poison=None if makes_slots else 1, is_made=makes_slots
        ),
        *((rope,) if rope_axes > 1 else ()),
        *((is_media,) if has_media else ()),
        InputField(name="slot_mapping", dims=("tokens",), pad=SINK_BLOCK, is_made=makes_slots),
        InputField(name="query_start_loc", dims=("reqs+1",), pad="last"),
        InputField(name="seq_lens", dims=("reqs",), pad=0),
        InputField(
            name="block_table", dims=("reqs", max_blocks), pad=SINK_BLOCK, by_column=True, is_made=makes_slots
        ),
        *((packed,) if makes_slots else ()),
    )


def select_inputs(values: Mapping[str, np.ndarray], inputs: StaticInputs) -> dict[str, np.ndarray]:
    """Those among ``values`` that ``inputs`` has on the host; ``packed_tables`` is the block table's rows."""
    return {
        name: values["block_table"].reshape(1, -1) if name == PACKED_TABLES else values[name]
        for name in inputs.host_names
    }


def hidden_field(*, hidden_size: int, dtype: torch.dtype) -> InputField:
    """The embeddings a breakable graph starts from; poisoned with NaN, which no real row may pick up."""
    return InputField(
        name="hidden", dims=("tokens", hidden_size), dtype=dtype, pad=0, poison=float("nan"), on_device=True
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchArrays:
    """``values``: arrays by field of ``token_fields``, the block table as wide as the longest request needs;
    ``sampled_rows``: token rows a token is drawn from; ``has_unknown``: some input token is known to the
    device only."""

    values: dict[str, np.ndarray]
    query_lens: tuple[int, ...]
    sampled_rows: np.ndarray
    has_unknown: bool


class BatchBuilder:
    """Builds ``BatchArrays`` and keeps the host mirror of block tables. The arrays of one step are written
    again by the next."""

    def __init__(
        self,
        *,
        block_size: int,
        max_num_reqs: int,
        max_num_tokens: int,
        max_blocks: int,
        rope_axes: int = 1,
        makes_slots: bool = False,
    ) -> None:
        """``makes_slots``: whether prefill graphs make positions, slots and tables. Steps with more tokens
        than requests are built for these graphs, steps of single tokens as for any other."""
        self._block_size, self._max_num_reqs = block_size, max_num_reqs
        self._rope_axes, self._makes_slots = rope_axes, makes_slots
        self._drawn: dict[
            Sequence, int
        ] = {}  # sequence → row of the token that the last step built drew for it
        self._tables = np.full((max_num_reqs, max_blocks), SINK_BLOCK, dtype=np.int32)
        self._rows: dict[Sequence, _Row] = {}  # by identity: numbers repeat between engines
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))
        self._last: _Built | None = None
        # Constants that arrays are cut from.
        self._count = frozen(np.arange(max(max_blocks * block_size, max_num_tokens) + 1, dtype=np.int32))
        self._zeros = frozen(np.zeros(max_num_reqs, dtype=np.int32))
        self._chunks: dict[tuple[int, int], _Chunk] = {}

    def build(self, batch: ScheduledBatch) -> BatchArrays:
        last, run = self._last, batch.run
        if last is not None and run is last.run and batch.step_id == last.step_id + 1:
            last.step_id += 1
            return self._advance(batch.entries, last)
        rows = self._mirror(batch.entries)
        if len(batch.entries) == 1:
            arrays = self._build_one(batch.entries[0], rows)
        else:
            arrays = self._build_any(batch.entries, rows)
        if self._rope_axes > 1:
            positions = arrays.values["positions"]
            arrays.values["rope_positions"] = rope_positions(batch.entries, positions, axes=self._rope_axes)
        self._drawn = {e.sequence: row for row, e in enumerate(batch.sampled_entries)}
        self._last = None
        if run is not None:
            frozen(arrays.values["query_start_loc"])  # the same in every step of the run
            unknown = self._zeros[: len(rows)], self._count[: len(rows)]
            self._last = _Built(run, batch.step_id, rows, arrays, self._deltas(batch), unknown)
        return arrays

    def _build_any(self, entries: tuple[ScheduledSequence, ...], rows: np.ndarray) -> BatchArrays:
        lens = np.fromiter((e.num_new_tokens for e in entries), dtype=np.int32, count=len(entries))
        starts = np.fromiter((e.start for e in entries), dtype=np.int32, count=len(entries))
        query_start_loc = np.zeros(len(entries) + 1, dtype=np.int32)
        np.cumsum(lens, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        seq_lens = starts + lens
        table = self._tables[rows, : int((seq_lens - 1).max()) // self._block_size + 1]
        if num_tokens == len(entries):
            places = _places(starts, self._slots(rows, starts), table)
            input_ids = np.fromiter((_first_token(e) for e in entries), dtype=np.int32, count=num_tokens)
        else:
            if self._makes_slots:
                places = {PACKED_TABLES: table.reshape(1, -1)}
            else:
                offsets = np.repeat(starts - query_start_loc[:-1], lens)
                positions = np.arange(num_tokens, dtype=np.int32) + offsets
                places = _places(positions, self._slots(np.repeat(rows, lens), positions), table)
            input_ids = np.zeros(num_tokens, dtype=np.int32)
            for first, entry in zip(query_start_loc.tolist(), entries, strict=False):
                known = _known_tokens(entry)
                input_ids[first : first + len(known)] = known
        drawn_rows = NO_DRAWN_ROWS
        unknown = [(i, e) for i, e in enumerate(entries) if e.end > len(e.sequence.token_ids)]
        if unknown:
            drawn_rows = np.full(num_tokens, self._max_num_reqs, dtype=np.int32)
            for i, entry in unknown:
                drawn_rows[query_start_loc[i + 1] - 1] = self._drawn[entry.sequence]
        samples = np.fromiter((e.samples for e in entries), dtype=np.bool_, count=len(entries))
        return BatchArrays(
            values={
                "input_ids": input_ids,
                "drawn_rows": drawn_rows,
                "query_start_loc": query_start_loc,
                "seq_lens": seq_lens,
                **places,
            },
            query_lens=tuple(lens.tolist()),
            sampled_rows=query_start_loc[1:][samples] - 1,
            has_unknown=bool(unknown),
        )

    def _build_one(self, entry: ScheduledSequence, rows: np.ndarray) -> BatchArrays:
        """``_build_any`` for one sequence: most of it is cut from constants (half the time to a first
        token)."""
        start, num_tokens, row = entry.start, entry.num_new_tokens, int(rows[0])
        end, block_size = start + num_tokens, self._block_size
        first, widest = start // block_size, (end - 1) // block_size + 1
        chunk = self._chunks.get((start, num_tokens)) or self._make_chunk(start, num_tokens)
        positions, seq_lens, drawn_rows = chunk.positions, chunk.seq_lens, NO_DRAWN_ROWS
        if num_tokens == 1:  # the step after it may go on from these in place
            positions, seq_lens = positions.copy(), seq_lens.copy()
        table = self._tables[row : row + 1, :widest]
        if num_tokens > 1 and self._makes_slots:
            places = {PACKED_TABLES: table}
        else:
            slots_BS = self._tables[row, first:widest, None] * block_size + self._count[:block_size]
            slots = slots_BS.ravel()[start - first * block_size :][:num_tokens]
            places = _places(positions, slots, table)
        input_ids = _known_tokens(entry)
        has_unknown = len(input_ids) < num_tokens
        if has_unknown:
            input_ids = np.append(input_ids, np.int32(0))
            drawn_rows = np.full(num_tokens, self._max_num_reqs, dtype=np.int32)
            drawn_rows[-1] = self._drawn[entry.sequence]
        return BatchArrays(
            values={
                "input_ids": input_ids,
                "drawn_rows": drawn_rows,
                "query_start_loc": chunk.query_start_loc,
                "seq_lens": seq_lens,
                **places,
            },
            query_lens=(num_tokens,),
            sampled_rows=np.array((num_tokens - 1,) if entry.samples else (), dtype=np.int32),
            has_unknown=has_unknown,
        )

    def _make_chunk(self, start: int, num_tokens: int) -> _Chunk:
        end = start + num_tokens
        chunk = _Chunk(
            positions=self._count[start:end],
            query_start_loc=frozen(np.array((0, num_tokens), dtype=np.int32)),
            seq_lens=self._count[end : end + 1],
        )
        if num_tokens > 1:  # there is one such step in a decode run
            if len(self._chunks) >= _MAX_CHUNKS:
                self._chunks.clear()
            self._chunks[start, num_tokens] = chunk
        return chunk

    def _advance(self, entries: tuple[ScheduledSequence, ...], last: _Built) -> BatchArrays:
        """The arrays of a decode step whose sequences are those of the step built before: in place, and only
        what has changed.

        Tables are looked at only where a sequence enters a new block. All tokens of the step before are known
        here or none is, because a step's tokens are accepted together.
        """
        arrays, values, num_reqs = last.arrays, last.arrays.values, len(entries)
        positions: np.ndarray = values["positions"]
        positions += 1
        values["seq_lens"] += 1
        if last.rope_deltas is not None:  # tokens behind the first step of a run lie behind the prompt
            np.add(positions, last.rope_deltas, out=values["rope_positions"])
        for index in np.flatnonzero(positions % self._block_size == 0).tolist():
            self._mirror_row(entries[index], self._rows[entries[index].sequence])
        values["slot_mapping"] = self._slots(last.rows, positions)
        widest = int(positions.max()) // self._block_size + 1
        first = int(last.rows[0])
        if last.are_rows_adjacent:
            values["block_table"] = self._tables[first : first + num_reqs, :widest]
        else:
            values["block_table"] = self._tables[last.rows, :widest]
        has_unknown = entries[0].start >= len(entries[0].sequence.token_ids)
        if has_unknown:
            values["input_ids"], values["drawn_rows"] = last.unknown
        else:
            known = [entry.sequence.token_ids[entry.start] for entry in entries]
            values["input_ids"], values["drawn_rows"] = np.array(known, np.int32), NO_DRAWN_ROWS
        return BatchArrays(
            values=values,
            query_lens=arrays.query_lens,
            sampled_rows=arrays.sampled_rows,
            has_unknown=has_unknown,
        )

    def _deltas(self, batch: ScheduledBatch) -> np.ndarray | None:
        if self._rope_axes == 1:
            return None
        return np.array([entry.sequence.request.rope_delta for entry in batch.entries], dtype=np.int32)

    def _slots(self, table_rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        blocks, inside = np.divmod(positions, self._block_size)
        return self._tables[table_rows, blocks] * self._block_size + inside

    def _mirror(self, entries: tuple[ScheduledSequence, ...]) -> np.ndarray:
        """Bring the tables of ``entries`` up to date; returns their rows."""
        current: set[Sequence] | None = None
        indices = []
        for entry in entries:
            row = self._rows.get(entry.sequence)
            if row is None:
                current = current or {e.sequence for e in entries}
                row = self._rows[entry.sequence] = _Row(self._take_row(current))
            self._mirror_row(entry, row)
            indices.append(row.index)
        return np.array(indices, dtype=np.int64)

    def _mirror_row(self, entry: ScheduledSequence, row: _Row) -> None:
        if row.generation != entry.generation:
            row.generation, row.num_blocks = entry.generation, 0
        known, table = row.num_blocks, entry.block_table
        if len(table) > known:
            self._tables[row.index, known : len(table)] = table[known:]
            row.num_blocks = len(table)

    def _take_row(self, current: set[Sequence]) -> int:
        if not self._free_rows:
            # Rows of sequences outside this step: finished ones, or running ones that are filled again when
            # they return.
            for sequence in [sequence for sequence in self._rows if sequence not in current]:
                del self._rows[sequence]
            # Counted anew: a step that was interrupted may have taken a row for nobody.
            used = {row.index for row in self._rows.values()}
            self._free_rows = [row for row in range(self._max_num_reqs - 1, -1, -1) if row not in used]
        return self._free_rows.pop()


def _places(positions: np.ndarray, slots: np.ndarray, table: np.ndarray) -> dict[str, np.ndarray]:
    return {"positions": positions, "slot_mapping": slots, "block_table": table}


def _known_tokens(entry: ScheduledSequence) -> np.ndarray:
    """int32 ids of its tokens, as far as the host knows them."""
    request = entry.sequence.request
    start, end = entry.start, entry.start + entry.num_new_tokens
    if end <= len(request.prompt_ids):
        return request.prompt_ids[start:end]
    return np.array(entry.sequence.token_ids[start:end], dtype=np.int32)


def _first_token(entry: ScheduledSequence) -> int:
    token_ids = entry.sequence.token_ids
    return token_ids[entry.start] if entry.start < len(token_ids) else 0


_MAX_CHUNKS = 256


class _Chunk(NamedTuple):
    """Frozen arrays of a step of one sequence that depend on where its tokens begin and end alone. Prompts of
    equal length and chunks of long ones share them, and what is known by identity is not staged again."""

    positions: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray


@dataclass(slots=True)
class _Row:
    index: int
    generation: int = -1
    num_blocks: int = 0


@dataclass(slots=True)
class _Built:
    """The decode step that was built last."""

    run: DecodeRun
    step_id: int
    rows: np.ndarray
    arrays: BatchArrays
    rope_deltas: np.ndarray | None
    unknown: tuple[np.ndarray, np.ndarray]
    """``input_ids`` and ``drawn_rows`` of a step whose tokens only the device knows; frozen."""
    are_rows_adjacent: bool = field(init=False)
    """Their tables lie behind each other, so that no copy is needed to gather them."""

    def __post_init__(self) -> None:
        self.are_rows_adjacent = bool((np.diff(self.rows) == 1).all())
