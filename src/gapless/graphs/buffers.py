"""Static inputs: the memory captured graphs read, declared once as a schema (``input_field.py``).

Padding is data: the whole view of a bucket is rewritten before each replay, so no graph ever reads what an
earlier batch left. All that stays is what the last load put there and this one would put there again:
``frozen`` arrays (an encoder's positions, which follow from an image's size) and padding behind pixels.
*Host* inputs of one bucket lie next to each other in one buffer, so a step stages them with a single copy
from pinned memory (``staging.py``).
*Device* inputs (activations made on the device) have a buffer each and are copied there; so have large ones
that come from the host (``from_host``: pixels), through pinned memory of their own. *Made* ones, which the
forward writes (``is_made``), have a buffer and are never loaded. Views are made once per bucket; addresses
never change. Read ``runner.py`` next.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gapless.errors import GraphError
from gapless.graphs.device.upload import HostRows, RawRows, UploadRing
from gapless.graphs.frozen_arrays import is_frozen
from gapless.graphs.input_field import InputField
from gapless.graphs.staging import HostTarget, Pad, Shape, SlotWriter, make_ring

logger = logging.getLogger(__name__)

_ALIGNMENT = 256
"""Bytes; keeps every view aligned for vectorised loads."""

Value = np.ndarray | Tensor | HostRows | RawRows

_shape_of: Callable[[Value], Shape] = operator.attrgetter("shape")

_NUMPY_DTYPES = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.bool: np.bool_,
}


class InputViews:
    """The views of one bucket: ``tensors`` at fixed device addresses, ``shapes`` as plain tuples."""

    __slots__ = (
        "are_kept", "fitting", "keep_padding", "layout", "num_bytes", "shapes", "sizes", "staged", "tensors",
        "writers",
    )  # fmt: skip

    def __init__(
        self, sizes: dict[str, int], tensors: dict[str, Tensor], layout: dict[str, int], num_bytes: int
    ) -> None:
        self.sizes = sizes
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.layout = layout
        """Byte offset of each host field inside the staged buffer."""
        self.num_bytes = num_bytes
        self.fitting: Sequence[Shape] | None = None
        """Shapes of the last batch on the host, which fit."""
        self.writers: dict[int, SlotWriter] = {}
        """By slot of the staging ring; made at the slot's first use."""
        self.staged: np.ndarray | None = None
        """What the first load of frozen arrays wrote, until it was seen that no forward writes there."""
        self.are_kept = False
        """It was seen."""
        self.keep_padding: dict[str, bool] = {}
        """By input that rows from the host are copied to: whether a forward leaves their padding alone, once
        that was seen."""

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


class StaticInputs:
    """All static inputs of one runner, with room for ``max_sizes`` (the largest value of every symbol)."""

    def __init__(
        self, fields: tuple[InputField, ...], *, max_sizes: Mapping[str, int], torch_device: torch.device
    ) -> None:
        names = [field.name for field in fields]
        if len(set(names)) != len(names):
            raise GraphError(f"input names must be unique: {names}")
        self.fields = fields
        self.max_sizes = dict(max_sizes)
        self.torch_device = torch_device
        self.poison = False
        self.poison_round = 0
        """Which of a field's several poison values is used."""
        self._host_fields = tuple(f for f in fields if f.is_staged)
        self._device_fields = tuple(f for f in fields if f.on_device)
        self._loaded_fields = tuple(f for f in fields if not f.is_made)
        self.device_names = frozenset(f.name for f in fields if f.on_device)
        self.host_names = tuple(f.name for f in self._host_fields)
        self._pick = _picker(self.host_names)
        self._pads: Sequence[Pad] = tuple(f.pad for f in self._host_fields)
        self._poisons: dict[int, Sequence[Pad]] = {}
        self._held: _Held | None = None
        self._may_hold = True
        self._changing = 0
        self._changed: np.ndarray | Tensor | None = None
        """The host input that was found not to be frozen last, and its place: it is looked at first, and not
        looked at again where it is the same."""
        self._views: dict[tuple[tuple[str, int], ...], InputViews] = {}
        _, capacity = self._pack(self.max_sizes)
        # static: written in place for the life of this object, never rebound
        self._packed = torch.zeros(max(capacity, _ALIGNMENT), dtype=torch.uint8, device=torch_device)
        self._device_buffers = {
            f.name: torch.zeros(f.shape(self.max_sizes), dtype=f.dtype, device=torch_device)
            for f in fields
            if not f.is_staged
        }
        self._ring = make_ring(self._packed)
        self._knowing: dict[int, SlotWriter] = {}
        """By slot: who wrote to it last, where nobody else can have written since."""
        self._padded: dict[str, _Padded] = {}
        """By input that rows from the host are copied to."""
        self._uploads = {
            f.name: UploadRing(self._device_buffers[f.name])
            for f in self._device_fields
            if f.from_host and torch_device.type == "cuda"
        }
        _check_table(self._host_fields)
        self._staged_bytes = 0
        """With a table by columns: end of what the last load staged; everything behind it is 0."""

    @property
    def num_bytes(self) -> int:
        buffers = sum(t.nbytes for t in self._device_buffers.values())
        return self._packed.nbytes + buffers + sum(upload.num_bytes for upload in self._uploads.values())

    def views(self, sizes: Mapping[str, int]) -> InputViews:
        """The views for one bucket, made at the first call. Raises ``GraphError`` above the capacity."""
        key = tuple(sorted(sizes.items()))
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = self._make_views(dict(sizes))
        return found

    def transient_views(self, sizes: Mapping[str, int]) -> InputViews:
        """Views of any size, not kept: for eager steps, whose sizes have no bound on their number."""
        return self._make_views(dict(sizes))

    def forget_views(self) -> None:
        """Let go of the views made so far (their memory stays): when the graphs that read them are gone."""
        self._views.clear()
        self._padded.clear()
        self._held = None
        self._knowing.clear()

    def load_all(self, views: InputViews, values: Mapping[str, Value]) -> None:
        """Write a batch of host and on-device inputs into ``views``; ``values`` must name them all. Checks
        run before the first byte is written. Large inputs go first: the device works while the host goes on.
        """
        host = None if self._is_held(views, values) else self._checked(views, values, self._loaded_fields)
        self._check_device(views, values, self._loaded_fields)
        self._load_on_device(views, values)
        if host is not None and self._host_fields:
            self._load(views, *host)

    def load(self, views: InputViews, values: Mapping[str, Value]) -> None:
        """Write a batch into ``views``: real values first, declared padding after them, one copy to the
        device.

        ``values`` must name exactly the declared host inputs. A value may be smaller than its view in any
        dimension, never larger (``GraphError``). Checks run before the first byte is written. Frozen arrays
        (``frozen``) that the views hold already are not written again.
        """
        arrays, shapes = self._checked(views, values, self._host_fields)
        if self._host_fields and (self._held is None or not self._is_held(views, values)):
            self._load(views, arrays, shapes)

    def load_on_device(self, views: InputViews, values: Mapping[str, Value]) -> None:
        """Copy tensors into the on-device inputs of ``views`` and pad behind them. Names and sizes as in
        ``load``."""
        self._check_device(views, values, self._device_fields)
        self._load_on_device(views, values)

    def forget_loaded(self) -> None:
        """Somebody else has written to inputs: whatever comes next is loaded, with all of its padding."""
        self._held = None
        self._padded.clear()

    def _load(
        self, views: InputViews, arrays: Sequence[np.ndarray | Tensor], shapes: Sequence[Shape]
    ) -> None:
        self._held = None  # until all of it is on its way
        slot, host = self._ring.acquire()
        writer = views.writers.get(slot)
        if writer is None:
            writer = views.writers[slot] = SlotWriter(host, self._targets(views, host), views.num_bytes)
        pads = self._pads if not self.poison else self._poisoned_pads()
        is_known = self._knowing.pop(slot, None) is writer
        num_bytes, staged_bytes = writer.write(
            arrays, shapes, pads, is_known=is_known, staged_before=self._staged_bytes
        )
        if self._ring.is_private:
            self._knowing[slot] = writer
        self._staged_bytes = num_bytes  # if it is not sent, what was there before may be there still
        self._ring.submit(num_bytes)
        self._staged_bytes = staged_bytes
        if arrays[self._changing] is not self._changed and self._may_hold:
            self._hold(views, arrays, host[:num_bytes])

    def _hold(self, views: InputViews, arrays: Sequence[np.ndarray | Tensor], staged: np.ndarray) -> None:
        """Remember what was loaded, if none of it can change."""
        for place in (self._changing, *range(len(arrays))):
            if not is_frozen(arrays[place]):
                self._changing, self._changed = place, arrays[place]
                return
        loaded = dict(zip(self.host_names, arrays, strict=True))
        self._held = _Held(views, loaded, self.poison, self.poison_round)
        if not views.are_kept:
            views.staged = staged.copy()

    def _is_held(self, views: InputViews, values: Mapping[str, Value]) -> bool:
        """Whether the last load was of these very arrays into these views, and so is still there."""
        held = self._held
        if held is None or held.views is not views:
            return False
        if held.poison != self.poison or held.poison_round != self.poison_round:
            return False
        for name, value in held.values.items():  # a generator takes twice as long
            if values.get(name) is not value:
                return False
        return views.are_kept or self._are_kept(views)

    def _are_kept(self, views: InputViews) -> bool:
        """Whether host inputs are as they were staged, looked at once for each bucket: a forward may write
        into its inputs, which does no harm where all of them are written before each run."""
        staged = views.staged
        assert staged is not None
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)
        views.staged = None
        views.are_kept = np.array_equal(self._packed[: staged.nbytes].cpu().numpy(), staged)
        if not views.are_kept:
            logger.info("a forward writes into its inputs, so all of them are staged for every run")
            self._held, self._may_hold = None, False
        return views.are_kept

    def _load_on_device(self, views: InputViews, values: Mapping[str, Value]) -> None:
        for field in self._device_fields:
            value = values[field.name]
            if isinstance(value, (HostRows, RawRows)) and field.from_host:
                self._fill_from_host(field, views, value)
                continue
            self._padded.pop(field.name, None)
            assert isinstance(value, Tensor), f"on-device input {field.name!r} takes a tensor"
            self._fill_device(field, views.tensors[field.name], value)

    def _pack(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
        layout: dict[str, int] = {}
        offset = 0
        for field in self._host_fields:
            layout[field.name] = offset
            num_bytes = math.prod(field.shape(sizes)) * field.dtype.itemsize
            offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return layout, offset

    def _make_views(self, sizes: dict[str, int]) -> InputViews:
        for symbol, size in sizes.items():
            limit = self.max_sizes.get(symbol)
            if limit is None:
                raise GraphError(f"unknown dimension {symbol!r}; declared: {sorted(self.max_sizes)}")
            if not 0 <= size <= limit:
                raise GraphError(f"{symbol}={size} exceeds the static buffers, made for at most {limit}")
        layout, num_bytes = self._pack(sizes)
        tensors: dict[str, Tensor] = {}
        for field in self.fields:
            shape = field.shape(sizes)
            count = math.prod(shape)
            if field.is_staged:
                start = layout[field.name]
                flat = self._packed[start : start + count * field.dtype.itemsize].view(field.dtype)
            else:
                # Carved from the front: contiguous for every bucket, whichever dims are dynamic.
                flat = self._device_buffers[field.name].view(-1)[:count]
            tensors[field.name] = flat.view(shape[::-1]).t() if field.by_column else flat.view(shape)
        return InputViews(sizes, tensors, layout, num_bytes)

    def _targets(self, views: InputViews, host: np.ndarray) -> list[HostTarget]:
        targets: list[HostTarget] = []
        for field in self._host_fields:
            shape = views.shapes[field.name]
            start = views.layout[field.name]
            count = math.prod(shape) * field.dtype.itemsize
            flat: np.ndarray = host[start : start + count].view(_NUMPY_DTYPES[field.dtype])
            if field.by_column:
                targets.append(HostTarget(flat.reshape(shape[::-1]).T, start))
            else:
                targets.append(HostTarget(flat.reshape(shape), None))
        return targets

    def _checked(
        self, views: InputViews, values: Mapping[str, Value], fields: tuple[InputField, ...]
    ) -> tuple[Sequence[np.ndarray | Tensor], Sequence[Shape]]:
        """The values of host inputs in the order of the schema, and their shapes, which fit. ``values`` is to
        name ``fields``."""
        if len(values) != len(fields):
            raise _wrong_names(values, fields)
        try:
            arrays = self._pick(values)
        except KeyError:
            raise _wrong_names(values, fields) from None
        shapes: Sequence[Shape] = list(map(_shape_of, arrays))
        if shapes == views.fitting:
            return arrays, views.fitting
        for place, shape in enumerate(shapes):
            if views.fitting is None or shape != views.fitting[place]:
                name = self.host_names[place]
                assert isinstance(arrays[place], (np.ndarray, Tensor)), f"input {name!r} takes an array"
                _check_fits(name, shape, views.shapes[name])
        views.fitting = shapes
        return arrays, shapes

    def _check_device(
        self, views: InputViews, values: Mapping[str, Value], fields: tuple[InputField, ...]
    ) -> None:
        if len(values) != len(fields) or not self.device_names <= values.keys():
            raise _wrong_names(values, fields)
        for field in self._device_fields:
            _check_fits(field.name, values[field.name].shape, views.shapes[field.name])

    def _poisoned_pads(self) -> Sequence[Pad]:
        """One object per round: writers know it by identity."""
        pads = self._poisons.get(self.poison_round)
        if pads is None:
            pads = tuple(self._pad_value(field) for field in self._host_fields)
            self._poisons[self.poison_round] = pads
        return pads

    def _pad_value(self, field: InputField) -> Pad:
        if not self.poison or field.poison is None:
            return field.pad
        if isinstance(field.poison, tuple):
            return field.poison[self.poison_round % len(field.poison)]
        return field.poison

    def _fill_from_host(self, field: InputField, views: InputViews, rows: HostRows | RawRows) -> None:
        """Rows of the full width; padding behind them."""
        target, room = views.tensors[field.name], views.shapes[field.name]
        pad, num_rows = self._pad_value(field), rows.shape[0]
        if rows.shape[1:] != room[1:] or isinstance(pad, str):
            raise GraphError(
                f"input {field.name!r} comes from the host in whole rows with a value for padding"
            )
        known = self._padded.pop(field.name, None)  # if the rows do not get there, nothing is known
        end = room[0]
        if known is not None and known.views is views and known.pad == pad and _keeps_padding(field, known):
            end = known.start  # what the rows before left is overwritten; behind that lies their padding
        upload = self._uploads.get(field.name)
        if upload is None:
            rows.copy_to(target[:num_rows])
        else:
            upload.send(rows)
        if num_rows < end:
            target[num_rows:end].fill_(pad)
        self._padded[field.name] = _Padded(views, num_rows, pad)

    def _fill_device(self, field: InputField, target: Tensor, value: Tensor) -> None:
        if value.shape == target.shape:
            target.copy_(value, non_blocking=True)
            return
        pad = self._pad_value(field)
        if value.shape[1:] != target.shape[1:]:
            assert not isinstance(pad, str), f"{field.name}: pad 'last' repeats rows, so only dim 0 may grow"
            target.fill_(pad)
            target[tuple(slice(0, n) for n in value.shape)].copy_(value, non_blocking=True)
            return
        n = value.shape[0]
        target[:n].copy_(value, non_blocking=True)
        if not isinstance(pad, str):
            target[n:].fill_(pad)
        elif n:
            target[n:].copy_(target[n - 1 : n].expand_as(target[n:]))
        else:
            target.zero_()


class _Held(NamedTuple):
    """What the host inputs hold: ``values`` in ``views``, with the padding of this poison."""

    views: InputViews
    values: Mapping[str, Value]
    poison: bool
    poison_round: int


class _Padded(NamedTuple):
    """Rows of an input from ``start`` on hold ``pad``, in ``views``, which were loaded last."""

    views: InputViews
    start: int
    pad: int | float


def _keeps_padding(field: InputField, known: _Padded) -> bool:
    """Whether padding is still there, looked at once for each bucket and input: see ``_are_kept``."""
    views = known.views
    is_kept = views.keep_padding.get(field.name)
    if is_kept is None:
        padding = views.tensors[field.name][known.start :]
        if not len(padding):
            return True  # nothing to see, nothing to lose
        is_kept = torch.equal(padding, torch.full_like(padding, known.pad))
        views.keep_padding[field.name] = is_kept
    return is_kept


def _picker(names: tuple[str, ...]) -> Callable[[Mapping[str, Value]], tuple[Any, ...]]:
    """What takes the values of ``names`` from a mapping. Its result raises ``KeyError``."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda values: tuple(values[name] for name in names)


def _check_fits(name: str, have: Shape, room: Shape) -> None:
    if have == room:
        return
    if len(have) != len(room) or any(n > limit for n, limit in zip(have, room, strict=True)):
        raise GraphError(f"input {name!r} of shape {tuple(have)} does not fit its static view {tuple(room)}")


def _wrong_names(values: Mapping[str, Value], fields: tuple[InputField, ...]) -> GraphError:
    differing = values.keys() ^ {field.name for field in fields}
    return GraphError(f"inputs do not match the schema: {sorted(differing)} missing or unknown")


def _check_table(host_fields: tuple[InputField, ...]) -> None:
    for field in host_fields:
        if not field.by_column:
            continue
        if field is not host_fields[-1] or len(field.dims) != 2 or field.pad != 0 or field.poison is not None:
            raise GraphError(
                f"input {field.name!r} is stored by column, so it must be the last one on the host, have two "
                "dimensions, pad 0 and no poison"
            )
