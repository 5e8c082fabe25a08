"""Host rows on their way to a device: converted once, never joined, never overwritten before being read."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import GraphError
from gapless.graphs.buffers import StaticInputs
from gapless.graphs.device.pinned import PinnedSlot
from gapless.graphs.device.upload import HostRows, RawRows, UploadRing
from gapless.graphs.input_field import InputField

CPU = torch.device("cpu")


class LateSlot:
    """A slot whose copies end when somebody waits for them: as late as a device may be."""

    def __init__(self, num_bytes: int, torch_device: torch.device) -> None:
        self.host = np.zeros(num_bytes, np.uint8)
        self.queued: list[tuple[int, int]] = []

    def wait(self) -> None:
        for address, num_bytes in self.queued:
            ctypes.memmove(address, self.host.ctypes.data, num_bytes)
        self.queued.clear()

    def send(self, address: int, num_bytes: int) -> None:
        assert not self.queued, "written before its last copy has ended"
        self.queued.append((address, num_bytes))


def ring_on(target: torch.Tensor) -> tuple[UploadRing, list[LateSlot]]:
    slots: list[LateSlot] = []

    def make(num_bytes: int, device: torch.device) -> PinnedSlot:
        slots.append(LateSlot(num_bytes, device))
        return cast("PinnedSlot", slots[-1])

    return UploadRing(target, make_slot=make), slots


def arrays(*counts: int, width: int = 5) -> list[np.ndarray]:
    generator = np.random.default_rng(sum(counts))
    return [generator.standard_normal((count, width), np.float32) for count in counts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [(1,), (7,), (3, 4), (1, 2, 4), (0, 3)])
def test_rows_arrive_converted_one_part_behind_the_other(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    target = torch.full((8, 5), torch.nan, dtype=dtype)
    ring, slots = ring_on(target)
    parts = arrays(*counts)
    ring.send(HostRows(parts))
    for slot in slots:
        slot.wait()
    count = sum(counts)
    assert torch.equal(target[:count], torch.from_numpy(np.concatenate(parts)).to(dtype))
    assert target[count:].isnan().all()


def test_a_slot_is_written_only_when_its_last_copy_has_ended() -> None:
    target, seen = torch.zeros(4, 5), []
    ring, slots = ring_on(target)
    batches = [arrays(count)[0] for count in (4, 3, 2, 4, 1)]
    for batch in batches:
        pending = [slot for slot in slots if slot.queued]
        ring.send(HostRows([batch]))
        seen.append(len(pending))
        batch[:] = np.nan  # the caller's memory is free again
    assert seen == [0, 1, 2, 2, 2], "the host runs ahead by as many copies as there are slots"


def test_a_value_may_be_read_only_and_nobody_is_warned() -> None:
    (values,) = arrays(3)
    received = np.frombuffer(values.tobytes(), np.float32).reshape(3, 5)
    assert not received.flags.writeable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = HostRows([received, values[:, ::-1]])
    assert rows.shape == (6, 5)
    made = rows.to(device=CPU, dtype=torch.float32)
    assert torch.equal(made, torch.from_numpy(np.concatenate([values, values[:, ::-1]])))
    assert rows.parts[0].data_ptr() == received.ctypes.data, "not copied"


def inputs_with(field: InputField) -> StaticInputs:
    return StaticInputs((field,), max_sizes={"tokens": 6}, torch_device=CPU)


def test_static_inputs_take_host_rows_and_pad_behind_them() -> None:
    field = InputField(
        name="patches", dims=("tokens", 5), dtype=torch.bfloat16, pad=0, on_device=True, from_host=True
    )
    inputs = inputs_with(field)
    views = inputs.views({"tokens": 6})
    views["patches"].fill_(torch.nan)
    first, second = arrays(2, 1)
    inputs.load_on_device(views, {"patches": HostRows([first, second])})
    expected = torch.from_numpy(np.concatenate([first, second])).bfloat16()
    assert torch.equal(views["patches"][:3], expected)
    assert not views["patches"][3:].any()


@pytest.mark.parametrize(("counts", "width"), [((7,), 5), ((3, 4), 5), ((2,), 6)])
def test_rows_that_do_not_fit_are_refused_before_a_byte_is_written(
    counts: tuple[int, ...], width: int
) -> None:
    field = InputField(
        name="patches", dims=("tokens", 5), dtype=torch.float32, on_device=True, from_host=True
    )
    inputs = inputs_with(field)
    views = inputs.views({"tokens": 6})
    with pytest.raises(GraphError, match="does not fit"):
        inputs.load_on_device(views, {"patches": HostRows(arrays(*counts, width=width))})
    assert not views["patches"].any()


def test_rows_of_part_of_the_width_are_refused() -> None:
    field = InputField(
        name="patches", dims=("tokens", 5), dtype=torch.float32, on_device=True, from_host=True
    )
    inputs = inputs_with(field)
    with pytest.raises(GraphError, match="whole rows"):
        inputs.load_on_device(inputs.views({"tokens": 6}), {"patches": HostRows(arrays(2, width=4))})


class PromptSlot(LateSlot):
    """A slot whose copies end at once: what is queued behind one finds it done, as in a stream."""

    def send(self, address: int, num_bytes: int) -> None:
        super().send(address, num_bytes)
        self.wait()


def halves(raw: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
    return lambda: values.copy_(raw[: values.numel()].view(values.shape) / 2)


def raw_rows(*counts: int, seed: int = 0) -> tuple[RawRows, torch.Tensor]:
    generator = np.random.default_rng(seed)
    parts = [generator.integers(0, 256, (count, 5), np.uint8) for count in counts]
    for part in parts:
        part.setflags(write=False)  # as it comes from a socket
    return RawRows(parts, shape=(sum(counts), 5), finish=halves), torch.from_numpy(np.concatenate(parts)) / 2


def test_bytes_become_values_behind_their_copy_and_touch_nothing_else() -> None:
    target = torch.full((8, 5), torch.nan, dtype=torch.float16)
    ring = UploadRing(target, make_slot=lambda n, device: cast("PinnedSlot", PromptSlot(n, device)))
    assert ring.num_bytes == 8 * 5
    for seed, counts in enumerate([(3, 4), (8,), (1, 0, 1)]):
        rows, expected = raw_rows(*counts, seed=seed)
        target.fill_(torch.nan)
        ring.send(rows)
        assert torch.equal(target[: sum(counts)], expected.half())
        assert target[sum(counts) :].isnan().all()


class Late(NamedTuple):
    """Bytes that are made where they are to be."""

    array: np.ndarray
    targets: list[np.ndarray]

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def write(self, target: np.ndarray) -> None:
        self.targets.append(target)
        target[:] = self.array.reshape(-1)


def test_late_bytes_are_made_in_the_slot_for_every_copy() -> None:
    target = torch.full((8, 5), torch.nan)
    slots: list[PromptSlot] = []

    def make(num_bytes: int, device: torch.device) -> PinnedSlot:
        slots.append(PromptSlot(num_bytes, device))
        return cast("PinnedSlot", slots[-1])

    ring = UploadRing(target, make_slot=make)
    first, late, last = (np.full((count, 5), count, np.uint8) for count in (1, 4, 2))
    part = Late(late, [])
    rows = RawRows([first, part, last], shape=(7, 5), finish=halves)
    for _ in range(3):
        target.fill_(torch.nan)
        ring.send(rows)
        assert torch.equal(target[:7], torch.from_numpy(np.concatenate([first, late, last])) / 2)
        assert target[7:].isnan().all()
    assert [np.shares_memory(made, slots[n % 2].host) for n, made in enumerate(part.targets)] == [True] * 3


def test_static_inputs_take_bytes_and_pad_behind_them() -> None:
    field = InputField(
        name="patches", dims=("tokens", 5), dtype=torch.bfloat16, pad=0, on_device=True, from_host=True
    )
    inputs = inputs_with(field)
    views = inputs.views({"tokens": 6})
    rows, expected = raw_rows(2, 1)
    for poison in (False, True):
        inputs.poison = poison
        views["patches"].fill_(torch.nan)
        inputs.forget_loaded()
        inputs.load_on_device(views, {"patches": rows})
        assert torch.equal(views["patches"][:3], expected.bfloat16())
        assert not views["patches"][3:].any()
    assert torch.equal(rows.to(device=CPU, dtype=torch.float32), expected)
    with pytest.raises(GraphError, match="does not fit"):
        inputs.load_on_device(views, {"patches": raw_rows(7)[0]})


@given(
    loads=st.lists(
        st.tuples(st.sampled_from([4, 6]), st.integers(0, 6), st.sampled_from([0, 1, 2]), st.booleans()),
        min_size=2,
        max_size=12,
    )
)
def test_whatever_rows_came_before_padding_lies_behind_these(
    loads: list[tuple[int, int, int, bool]],
) -> None:
    """In either bucket (they share memory), with any padding, whether rows or a tensor."""
    field = InputField(
        name="patches",
        dims=("tokens", 5),
        dtype=torch.float32,
        pad=3,
        poison=(torch.nan, 7),
        on_device=True,
        from_host=True,
    )
    inputs = inputs_with(field)
    for number, (bucket, count, poison, is_tensor) in enumerate(loads):
        inputs.poison, inputs.poison_round = poison > 0, poison - 1
        views = inputs.views({"tokens": bucket})
        rows, expected = raw_rows(min(count, bucket), seed=number)
        inputs.load_on_device(views, {"patches": expected if is_tensor else rows})
        assert torch.equal(views["patches"][: len(expected)], expected)
        padding = views["patches"][len(expected) :]
        pad = torch.full_like(padding, (3, torch.nan, 7)[poison])
        torch.testing.assert_close(padding, pad, equal_nan=True, rtol=0, atol=0)


def test_padding_that_is_there_is_not_written_again_and_rows_that_failed_leave_none() -> None:
    field = InputField(
        name="patches", dims=("tokens", 5), dtype=torch.float32, pad=0, on_device=True, from_host=True
    )
    inputs = inputs_with(field)
    views = inputs.views({"tokens": 6})
    for _ in range(2):  # the second finds that padding stays
        inputs.load_on_device(views, {"patches": raw_rows(4)[0]})
    views["patches"][5] = 9
    inputs.load_on_device(views, {"patches": raw_rows(2)[0]})
    assert views["patches"][2:, 0].tolist() == [0, 0, 0, 9]

    def fail(raw: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
        values.fill_(9)
        raise RuntimeError("half-way")

    parts = [np.zeros((5, 5), np.uint8)]
    with pytest.raises(RuntimeError, match="half-way"):
        inputs.load_on_device(views, {"patches": RawRows(parts, shape=(5, 5), finish=fail)})
    inputs.load_on_device(views, {"patches": raw_rows(1)[0]})
    assert not views["patches"][1:].any()


@pytest.mark.parametrize("counts", [(3, 3, 3), (6, 3, 2, 3), (3, 6, 2, 1), (1, 5, 2)], ids=str)
def test_a_forward_that_writes_into_rows_from_the_host_gets_their_padding_anew(counts: tuple) -> None:
    field = InputField(
        name="patches", dims=("tokens", 5), dtype=torch.bfloat16, pad=0.3, on_device=True, from_host=True
    )
    inputs = inputs_with(field)
    views, other = inputs.views({"tokens": 6}), inputs.views({"tokens": 4})
    pad = torch.tensor(0.3, dtype=torch.bfloat16)
    for number, count in enumerate(counts):
        rows, expected = raw_rows(count, seed=number)
        inputs.load_on_device(views, {"patches": rows})
        assert torch.equal(views["patches"][:count], expected.bfloat16())
        assert (views["patches"][count:] == pad).all()
        views["patches"].add_(1)
    for _ in range(3):  # in another bucket none does
        inputs.load_on_device(other, {"patches": raw_rows(2)[0]})
        assert (other["patches"][2:] == pad).all()
    assert other.keep_padding == {"patches": True}


def test_what_makes_values_is_made_once_for_equal_rows() -> None:
    """Same shape and same ``finish``; never for others, and for few of them."""
    target, made = torch.zeros(8, 5), []

    class Scaled(NamedTuple):
        factor: int

        def __call__(self, raw: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
            made.append((self.factor, len(values)))
            return lambda: values.copy_(raw[: values.numel()].view(values.shape) * self.factor)

    ring = UploadRing(target, make_slot=lambda n, device: cast("PinnedSlot", PromptSlot(n, device)))
    generator = np.random.default_rng(0)
    for factor, count in [(1, 8), (2, 8), (1, 8), (1, 3), (2, 3), (2, 8), (1, 3)]:
        pixels = generator.integers(0, 100, (count, 5), np.uint8)
        ring.send(RawRows([pixels], shape=(count, 5), finish=Scaled(factor)))
        assert torch.equal(target[:count], torch.from_numpy(pixels).float() * factor)
    assert made == [(1, 8), (2, 8), (1, 3), (2, 3)]
    for factor in range(1000):
        ring.send(RawRows([pixels], shape=(3, 5), finish=Scaled(factor)))
    assert len(ring._finishes) <= 256
