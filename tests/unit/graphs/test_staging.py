"""A private ring of staging slots: what writers leave alone is right already, whatever was loaded before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.graphs.buffers import StaticInputs
from gapless.graphs.frozen_arrays import frozen, is_frozen
from gapless.graphs.input_field import InputField

FIELDS = (
    InputField(name="ids", dims=("tokens",), pad=0, poison=7),
    InputField(name="known", dims=("tokens",), pad=5),
    InputField(name="axes", dims=(3, "tokens"), pad=0, poison=(1, 2)),
    InputField(name="starts", dims=("reqs+1",), pad="last"),
    InputField(name="seed", dims=("reqs",), dtype=torch.int64, pad=-1),
    InputField(name="table", dims=("reqs", 6), by_column=True),
)
MAX_SIZES = {"tokens": 12, "reqs": 4}
CONSTANT = frozen(np.arange(100, 112, dtype=np.int32))


class CopyingRing:
    """As pinned slots and their copies, in ordinary memory that holds garbage at first."""

    is_private = True

    def __init__(self, packed: torch.Tensor, num_slots: int) -> None:
        self._packed = packed.numpy()
        self._hosts = [np.full(packed.nbytes, 77, dtype=np.uint8) for _ in range(num_slots)]
        self._next = 0
        self.num_bytes: list[int] = []

    def acquire(self) -> tuple[int, np.ndarray]:
        return self._next, self._hosts[self._next]

    def submit(self, num_bytes: int) -> None:
        self._packed[:num_bytes] = self._hosts[self._next][:num_bytes]
        self._next = (self._next + 1) % len(self._hosts)
        self.num_bytes.append(num_bytes)


def private_inputs(num_slots: int) -> StaticInputs:
    inputs = StaticInputs(FIELDS, max_sizes=MAX_SIZES, torch_device=torch.device("cpu"))
    inputs._ring = CopyingRing(inputs._packed, num_slots)  # type: ignore[assignment]
    return inputs


def make_values(tokens: int, reqs: int, columns: int, first: int) -> dict[str, np.ndarray]:
    """Values from ``first`` on, so that no two loads of a test write the same."""

    def count(*shape: int) -> np.ndarray:
        return np.arange(first, first + np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)

    return {
        "ids": count(tokens),
        "known": CONSTANT[:tokens],
        "axes": count(3, tokens),
        "starts": count(reqs + 1),
        "seed": count(reqs).astype(np.int64),
        "table": count(reqs, columns),
    }


def assert_loaded(inputs: StaticInputs, sizes: dict[str, int], values: dict[str, np.ndarray]) -> None:
    """Every value, and padding everywhere else."""
    views = inputs.views(sizes)
    for field in FIELDS:
        value, view = values[field.name], views[field.name].numpy()
        pad = field.pad
        if inputs.poison and field.poison is not None:
            rounds = field.poison if isinstance(field.poison, tuple) else (field.poison,)
            pad = rounds[inputs.poison_round % len(rounds)]
        if pad == "last":
            pad = value[-1] if len(value) else 0
        expected = np.full_like(view, pad)
        expected[tuple(map(slice, value.shape))] = value
        assert np.array_equal(view, expected), field.name


LOADS = st.lists(
    st.tuples(
        st.sampled_from([(12, 4), (12, 2), (8, 4), (5, 3), (1, 1)]),  # the bucket
        st.tuples(st.integers(0, 12), st.integers(0, 4), st.integers(0, 6)),  # real tokens, requests, columns
        st.sampled_from(["fresh", "again", "in place", "frozen"]),
        st.integers(0, 2),  # poison rounds; 0: none
        st.booleans(),  # whether something on the device writes into the inputs
    ),
    min_size=1,
    max_size=16,
)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), LOADS)
def test_after_any_loads_every_view_holds_its_batch_then_padding(num_slots: int, loads) -> None:
    inputs = private_inputs(num_slots)
    earlier: dict[tuple, dict[str, np.ndarray]] = {}
    for number, ((tokens, reqs), real, kind, poison, is_written) in enumerate(loads):
        sizes = {"tokens": tokens, "reqs": reqs}
        shape = (min(real[0], tokens), min(real[1], reqs), real[2])
        if kind == "fresh" or (kind, shape) not in earlier:
            values = make_values(*shape, first=1000 * (number + 1))
            if kind == "frozen":
                values = {name: frozen(value) for name, value in values.items()}
            earlier[kind, shape] = values
        values = earlier[kind, shape]
        if kind == "in place":
            values["ids"] += 1
            values["axes"] += 1
            values["table"] += 1
        inputs.poison, inputs.poison_round = poison > 0, max(poison - 1, 0)
        inputs.load(inputs.views(sizes), values)
        assert_loaded(inputs, sizes, values)
        if is_written:
            inputs.views(sizes)["ids"].add_(1)
            inputs.views(sizes)["starts"].fill_(3)
            inputs.forget_loaded()


def test_arrays_that_change_in_place_are_written_every_time_also_behind_frozen_ones() -> None:
    inputs, sizes = private_inputs(1), {"tokens": 8, "reqs": 4}
    constant = {name: frozen(value) for name, value in make_values(8, 4, 2, first=1).items()}
    changing = make_values(8, 4, 2, first=50)
    for values in (constant,) * 3 + (changing,) * 3 + (constant,) * 3:
        if values is changing:
            for name in ("ids", "axes", "starts", "seed", "table"):
                values[name] += 1
        inputs.load(inputs.views(sizes), values)
        inputs.forget_loaded()
        assert_loaded(inputs, sizes, values)


def test_an_array_that_is_frozen_between_loads_is_written_once_more() -> None:
    inputs, sizes = private_inputs(1), {"tokens": 8, "reqs": 4}
    values = make_values(8, 4, 2, first=1)
    inputs.load(inputs.views(sizes), values)
    values["ids"] += 1
    values["ids"] = frozen(values["ids"])
    for _ in range(3):
        inputs.load(inputs.views(sizes), values)
        assert_loaded(inputs, sizes, values)


def test_a_write_that_fails_half_way_leaves_nothing_that_is_trusted() -> None:
    inputs, sizes = private_inputs(1), {"tokens": 8, "reqs": 4}
    values = make_values(8, 4, 2, first=1)
    inputs.load(inputs.views(sizes), values)
    broken = {**make_values(5, 2, 1, first=50), "seed": np.array(["a", "b"])}
    with pytest.raises(ValueError, match="invalid literal"):
        inputs.load(inputs.views(sizes), broken)
    inputs.load(inputs.views(sizes), values)
    assert_loaded(inputs, sizes, values)


def test_a_copy_that_fails_leaves_nothing_of_the_load_before(monkeypatch) -> None:
    inputs, sizes = private_inputs(2), {"tokens": 8, "reqs": 4}
    inputs.load(inputs.views(sizes), make_values(8, 4, 6, first=1))

    def fail(num_bytes: int) -> None:
        raise RuntimeError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(inputs._ring, "submit", fail)
        with pytest.raises(RuntimeError, match="no copy"):
            inputs.load(inputs.views(sizes), make_values(8, 4, 1, first=100))
    values = make_values(8, 4, 1, first=200)
    inputs.load(inputs.views(sizes), values)
    assert_loaded(inputs, sizes, values)


def test_a_slot_is_not_cleared_where_it_is_clear_but_copied_as_far_as_the_device_is_not() -> None:
    """The second slot has never held the five columns that the device holds since the first."""
    inputs, sizes = private_inputs(2), {"tokens": 8, "reqs": 4}
    views = inputs.views(sizes)
    for width in (5, 2, 2, 6, 0):
        values = make_values(8, 3, width, first=10 * width)
        inputs.load(views, values)
        assert_loaded(inputs, sizes, values)
    ring, start = inputs._ring, views.layout["table"]
    assert ring.num_bytes == [start + 16 * columns for columns in (5, 5, 2, 6, 6)]  # type: ignore[attr-defined]


def test_a_last_row_is_repeated_again_where_another_bucket_has_written() -> None:
    inputs, mine = private_inputs(1), {"tokens": 8, "reqs": 4}
    values = make_values(8, 2, 1, first=1)
    for others in ({"tokens": 12, "reqs": 4}, mine):
        inputs.load(inputs.views(mine), values)
        inputs.load(inputs.views(others), make_values(8, 4, 1, first=100))
        inputs.load(inputs.views(mine), values)
        assert_loaded(inputs, mine, values)


def test_a_last_row_that_has_changed_is_repeated_and_one_that_has_not_is_left_alone() -> None:
    inputs, sizes = private_inputs(1), {"tokens": 8, "reqs": 4}
    views, host = inputs.views(sizes), inputs._ring._hosts[0]  # type: ignore[union-attr]
    starts = host[views.layout["starts"] :][:20].view(np.int32)
    for first, last, left in ((1, 3, 3), (1, 3, 50), (2, 4, 4)):
        inputs.load(views, make_values(8, 2, 1, first=first))
        assert starts.tolist() == [first, first + 1, last, left, left]
        starts[3:] = 50


def test_padding_follows_a_batch_that_became_smaller_when_another_bucket_wrote_meanwhile() -> None:
    inputs, mine, others = private_inputs(1), {"tokens": 8, "reqs": 4}, {"tokens": 12, "reqs": 4}
    for num_before, num_tokens in ((6, 3), (3, 5), (5, 1)):
        inputs.load(inputs.views(mine), make_values(num_before, 2, 1, first=200))
        values = make_values(num_tokens, 2, 1, first=10 * num_tokens)
        inputs.load(inputs.views(mine), values)
        inputs.load(inputs.views(others), make_values(12, 4, 6, first=100))
        inputs.load(inputs.views(mine), values)
        assert_loaded(inputs, mine, values)


def test_a_field_repeats_its_last_row_or_is_poisoned() -> None:
    fields = (InputField(name="ends", dims=("reqs",), pad="last", poison=9),)
    inputs = StaticInputs(fields, max_sizes={"reqs": 4}, torch_device=torch.device("cpu"))
    inputs._ring = CopyingRing(inputs._packed, 1)  # type: ignore[assignment]
    views = inputs.views({"reqs": 4})
    for poison, expected in ((False, [3, 5, 5, 5]), (True, [3, 5, 9, 9]), (False, [3, 5, 5, 5])):
        inputs.poison = poison
        for _ in range(2):
            inputs.load(views, {"ends": np.array([3, 5], dtype=np.int32)})
            assert views["ends"].tolist() == expected


def test_views_are_let_go_of() -> None:
    inputs, sizes = private_inputs(2), {"tokens": 8, "reqs": 4}
    values = make_values(8, 4, 2, first=1)
    inputs.load(inputs.views(sizes), values)
    inputs.forget_views()
    assert not inputs._knowing
    inputs.load(inputs.views(sizes), values)
    assert_loaded(inputs, sizes, values)


def test_frozen_are_arrays_whose_owner_is_frozen_too() -> None:
    owner = np.arange(4)
    view = owner[1:]
    view.setflags(write=False)
    assert not is_frozen(owner)
    assert not is_frozen(view)
    assert is_frozen(CONSTANT)
    assert is_frozen(CONSTANT[2:5])
    assert not is_frozen(np.frombuffer(bytes(8), dtype=np.int32))
    assert not is_frozen(torch.ones(2))
