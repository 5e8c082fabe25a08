"""Staging memory: where a batch is written on the host before one copy takes it to the static inputs.

A ring of pinned slots (``pinned.py``), of which none is overwritten before it was read; on a CPU the one slot
is the static buffer itself. All buckets share a slot, each in a layout of its own, so each has a
``SlotWriter`` per slot. Whoever wrote to a private slot last knows what lies there, and leaves alone what is
right already: padding, and arrays that are never written again. What every step touches has slots in place
of a dictionary, which is a line of cold memory less for each. Invariant: after ``write`` every byte of the
bucket's fields is value or padding of this batch, whatever the slot held before (of a table by column: up to
the number of bytes to copy). Read ``buffers.py`` for the inputs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gapless.graphs.device.pinned import PinnedRing
from gapless.graphs.frozen_arrays import is_frozen

Shape = tuple[int, ...]
Pad = int | float | str
"""A value, or ``"last"``: the last row again."""


class StaticSlot:
    """On a CPU: the static buffer itself is written, and there is nothing to copy. As ``PinnedRing``."""

    is_private = False

    def __init__(self, packed: Tensor) -> None:
        self._host = packed.numpy()

    def acquire(self) -> tuple[int, np.ndarray]:
        return 0, self._host

    def submit(self, num_bytes: int) -> None:
        pass


def make_ring(packed: Tensor) -> StaticSlot | PinnedRing:
    """Host memory that the next batch for ``packed`` is written to."""
    if packed.device.type == "cuda":
        return PinnedRing(packed.data_ptr(), packed.nbytes, packed.device)
    return StaticSlot(packed)


class HostTarget(NamedTuple):
    """Where a field of one bucket lies in one slot. A table by column is the last field and starts at byte
    ``table_start`` of the slot; None for any other field."""

    memory: np.ndarray
    table_start: int | None


class SlotWriter:
    """Writes batches of one bucket into one slot; ``host`` is all memory of the slot."""

    __slots__ = (
        "_gaps", "_is_kept", "_num_bytes", "_num_padded", "_pads", "_parts", "_repeats", "_shapes", "_table",
        "_targets", "_written",
    )  # fmt: skip

    def __init__(self, host: np.ndarray, targets: Sequence[HostTarget], num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._targets = [target.memory for target in targets]
        self._table: _TableClearer | None = None
        if targets and targets[-1].table_start is not None:
            self._table = _TableClearer(host, targets[-1].memory, targets[-1].table_start)
        self._num_padded = len(targets) - (self._table is not None)
        # What the last write left, and views of the places that its shapes fill:
        self._shapes: Sequence[Shape] = ()
        self._pads: Sequence[Pad] = ()
        self._parts: list[np.ndarray] = []
        self._gaps: list[tuple[int, np.ndarray]] | None = None
        """What of which field to pad before its part is written, in a slot of which nothing is known; None
        where that is to be found anew."""
        self._repeats: dict[int, _LastRow] = {}
        """By field that repeats its last row."""
        self._written: list[np.ndarray | Tensor | None] = []
        self._is_kept: list[bool | None] = []
        """By field: whether ``_written`` is frozen, so that it is still there; None where nobody asked."""

    def write(
        self,
        arrays: Sequence[np.ndarray | Tensor],
        shapes: Sequence[Shape],
        pads: Sequence[Pad],
        *,
        is_known: bool,
        staged_before: int,
    ) -> tuple[int, int]:
        """Write a batch whose ``shapes`` fit, one array per field. ``is_known``: this writer was the last to
        write to the slot.

        Returns the bytes to copy, and where the values end: behind that the copied part of a table by column
        is 0, as far as ``staged_before``, which is where values ended for the load before.
        """
        if not is_known or pads is not self._pads:
            self._arrange(shapes, pads, is_known=is_known)
        elif shapes is not self._shapes:
            if shapes != self._shapes:
                self._rearrange(shapes)
            self._shapes = shapes  # the same object the next time, which takes no comparison
        written, is_kept = self._written, self._is_kept
        for place, part in enumerate(self._parts):
            value = arrays[place]
            if value is not written[place]:
                written[place], is_kept[place] = value, None
            elif is_kept[place]:
                continue
            elif is_kept[place] is None:  # frozen from this write on
                is_kept[place] = is_frozen(value)
            part[...] = value
        for place, repeat in self._repeats.items():
            repeat.write(arrays[place])
        table = self._table
        if table is None:
            return self._num_bytes, self._num_bytes
        end = table.end
        if staged_before > end:
            return table.clear(staged_before), end
        return end, end

    def _arrange(self, shapes: Sequence[Shape], pads: Sequence[Pad], *, is_known: bool) -> None:
        """Nothing is known of the slot, or the padding has changed: pad all that the batch does not fill."""
        if self._gaps is None or pads is not self._pads or shapes != self._shapes:
            self._gaps = self._cut(shapes, pads)
        self._shapes, self._pads = shapes, pads
        self._written, self._is_kept = [None] * len(self._targets), [None] * len(self._targets)
        for place, gap in self._gaps:
            gap[...] = pads[place]
        for repeat in self._repeats.values():
            repeat.forget()
        if self._table is not None:
            self._table.change(shapes[-1], is_known=is_known)

    def _cut(self, shapes: Sequence[Shape], pads: Sequence[Pad]) -> list[tuple[int, np.ndarray]]:
        """Make the views that a batch of these shapes is written through; returns those for padding."""
        gaps = []
        self._parts, self._repeats = [], {}
        for place, target in enumerate(self._targets):
            shape, pad = shapes[place], pads[place]
            if shape == target.shape:
                self._parts.append(target)
                continue
            self._parts.append(target[tuple(map(slice, shape))])
            if place == self._num_padded:
                continue
            if isinstance(pad, str):
                self._repeats[place] = _LastRow(target[shape[0] :])
            else:
                gaps.append((place, target[shape[0] :] if len(shape) == 1 else target))
        return gaps

    def _rearrange(self, shapes: Sequence[Shape]) -> None:
        """All but the batch that was written last is padding already."""
        self._gaps = None
        for place, shape in enumerate(shapes):
            old = self._shapes[place]
            if shape == old:
                continue
            target, pad = self._targets[place], self._pads[place]
            if len(shape) > 1:
                self._parts[place] = target[tuple(map(slice, shape))]
                if place == self._num_padded and self._table is not None:
                    self._table.change(shape, is_known=True)
                elif not isinstance(pad, str):
                    target.fill(pad)
                else:
                    self._repeats[place] = _LastRow(target[shape[0] :])
                continue
            (end,) = shape
            self._parts[place] = target[:end]
            if isinstance(pad, str):
                self._repeats[place] = _LastRow(target[end:])
            elif old[0] > end:
                target[end : old[0]] = pad


class _LastRow:
    """Repeats the last row of a field ``where`` the batch ends. Many batches end in the number that the one
    before them ended in, which is there already."""

    __slots__ = ("_is_number", "_last", "_where")

    def __init__(self, where: np.ndarray) -> None:
        self._where = where
        self._is_number = where.ndim == 1 and where.dtype.kind == "i"
        self._last: int | float | None = None

    def forget(self) -> None:
        """Somebody else has written there."""
        self._last = None

    def write(self, value: np.ndarray | Tensor) -> None:
        if not self._is_number or not isinstance(value, np.ndarray):
            self._last = None
            self._where[...] = value[-1] if len(value) else 0
            return
        last = value.item(-1) if len(value) else 0  # half the time of ``value[-1]`` where caches are cold
        if last != self._last:
            self._where[...] = last
            self._last = last


class _TableClearer:
    """Keeps the by-column table of a ``SlotWriter`` 0 but for the rows and columns of the batch."""

    __slots__ = (
        "_clean_end", "_column_bytes", "_host", "_num_columns", "_num_rows", "_start", "_table", "end",
    )  # fmt: skip

    def __init__(self, host: np.ndarray, table: np.ndarray, start: int) -> None:
        self._host, self._table, self._start = host, table, start
        self._column_bytes = table.shape[0] * table.itemsize
        self._num_rows = self._num_columns = 0
        self.end = start
        """Of the columns of the batch."""
        self._clean_end = start
        """Up to here the slot holds the batch's rows and columns and zeros."""

    def change(self, shape: Shape, *, is_known: bool) -> None:
        """The next batch has these rows and columns. ``is_known``: the slot holds what this object left."""
        (num_rows, num_columns), table = shape, self._table
        self.end = self._start + num_columns * self._column_bytes
        if not is_known:
            # What the batch fills need not be cleared, where it fills whole columns.
            self._clean_end = self.end if num_rows == table.shape[0] else self._start
        else:
            if self._num_columns > num_columns:
                table[: self._num_rows, num_columns : self._num_columns] = 0
            if self._num_rows > num_rows:
                table[num_rows : self._num_rows, : self._num_columns] = 0
        self._num_rows, self._num_columns = num_rows, num_columns
        self.clear(self.end)

    def clear(self, end: int) -> int:
        """See to it that all is 0 between the columns of the batch and ``end``. Returns that."""
        if end > self._clean_end:
            self._host[self._clean_end : end] = 0
            self._clean_end = end
        return end
