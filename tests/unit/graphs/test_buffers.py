"""Static inputs: fixed addresses, declared padding, one layout per bucket, clear refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import GraphError
from gapless.graphs.buffers import StaticInputs
from gapless.graphs.frozen_arrays import frozen
from gapless.graphs.input_field import InputField

FIELDS = (
    InputField(name="ids", dims=("tokens",), pad=0, poison=7),
    InputField(name="starts", dims=("reqs+1",), pad="last"),
    InputField(name="table", dims=("reqs", 5), pad=3),
    InputField(name="scale", dims=("reqs",), dtype=torch.float32, pad=1.5),
    InputField(name="seed", dims=("reqs",), dtype=torch.int64, pad=-1),
)
HIDDEN = InputField(
    name="hidden", dims=("tokens", 4), dtype=torch.float32, pad=0.0, poison=float("nan"), on_device=True
)


def make_inputs(fields: tuple[InputField, ...] = FIELDS) -> StaticInputs:
    return StaticInputs(fields, max_sizes={"tokens": 64, "reqs": 16}, torch_device=torch.device("cpu"))


def make_values(tokens: int, reqs: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(tokens * 100 + reqs)
    return {
        "ids": rng.integers(1, 100, tokens).astype(np.int32),
        "starts": np.cumsum(rng.integers(0, 5, reqs + 1)).astype(np.int32),
        "table": rng.integers(10, 99, (reqs, 2)).astype(np.int32),
        "scale": rng.random(reqs).astype(np.float32),
        "seed": rng.integers(-(2**62), 2**62, reqs),
    }


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 64), st.integers(1, 16), st.data())
def test_views_hold_the_batch_then_its_declared_padding(tokens: int, reqs: int, data: st.DataObject) -> None:
    inputs = make_inputs()
    views = inputs.views({"tokens": tokens, "reqs": reqs})
    for _ in range(2):  # the second load must not leave anything of the first behind
        n, r = data.draw(st.integers(1, tokens)), data.draw(st.integers(1, reqs))
        values = make_values(n, r)
        inputs.load(views, values)
        assert views["ids"].tolist() == values["ids"].tolist() + [0] * (tokens - n)
        assert views["starts"].tolist() == values["starts"].tolist() + [values["starts"][-1]] * (reqs - r)
        assert views["table"][:r, :2].tolist() == values["table"].tolist()
        assert (views["table"][:r, 2:] == 3).all()
        assert (views["table"][r:] == 3).all()
        assert torch.equal(views["scale"][:r], torch.from_numpy(values["scale"]))
        assert (views["scale"][r:] == 1.5).all()
        assert views["seed"].tolist() == values["seed"].tolist() + [-1] * (reqs - r)


def test_views_of_a_bucket_never_move() -> None:
    inputs = make_inputs()
    sizes = {"tokens": 32, "reqs": 4}
    before = {name: t.data_ptr() for name, t in inputs.views(sizes).tensors.items()}
    for tokens in (64, 1, 17):
        inputs.load(inputs.views({"tokens": tokens, "reqs": 3}), make_values(tokens, 3))
    after = {name: t.data_ptr() for name, t in inputs.views(sizes).tensors.items()}
    assert before == after
    assert inputs.views(sizes) is inputs.views(dict(reversed(sizes.items())))


def test_views_of_one_bucket_do_not_overlap() -> None:
    views = make_inputs().views({"tokens": 13, "reqs": 3})
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in views.tensors.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_transient_views_are_not_kept() -> None:
    inputs = make_inputs()
    sizes = {"tokens": 9, "reqs": 2}
    assert inputs.transient_views(sizes) is not inputs.transient_views(sizes)


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"tokens": 65, "reqs": 1}, "tokens=65 exceeds"),
        ({"tokens": 1, "reqs": 17}, "reqs=17 exceeds"),
        ({"tokens": -1, "reqs": 1}, "tokens=-1 exceeds"),
        ({"tokens": 1, "reqs": 1, "frames": 1}, "unknown dimension 'frames'"),
    ],
)
def test_views_above_the_capacity_are_refused(sizes: dict[str, int], match: str) -> None:
    with pytest.raises(GraphError, match=match):
        make_inputs().views(sizes)


@pytest.mark.parametrize("field", ["ids", "starts", "table", "scale", "seed"])
def test_a_batch_that_is_too_large_is_refused_before_anything_is_written(field: str) -> None:
    inputs = make_inputs()
    views = inputs.views({"tokens": 8, "reqs": 4})
    inputs.load(views, make_values(8, 4))
    before = {name: t.clone() for name, t in views.tensors.items()}
    values = make_values(5, 2)
    values[field] = np.concatenate([values[field]] * 9)
    with pytest.raises(GraphError, match=f"input '{field}' of shape"):
        inputs.load(views, values)
    assert all(torch.equal(before[name], t) for name, t in views.tensors.items())


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_names_must_match_the_schema(change: str) -> None:
    inputs = make_inputs()
    values = make_values(4, 2)
    if change == "missing":
        del values["ids"]
    else:
        values["idz"] = values["ids"]
    with pytest.raises(GraphError, match="missing or unknown"):
        inputs.load(inputs.views({"tokens": 4, "reqs": 2}), values)


def test_poison_replaces_padding_and_nothing_else() -> None:
    inputs = make_inputs((*FIELDS, HIDDEN))
    inputs.poison = True
    views = inputs.views({"tokens": 8, "reqs": 4})
    values = make_values(5, 2)
    inputs.load(views, values)
    inputs.load_on_device(views, {"hidden": torch.ones(5, 4)})
    assert views["ids"].tolist() == values["ids"].tolist() + [7] * 3
    assert (views["table"][2:] == 3).all(), "a field without poison keeps its pad value"
    assert (views["hidden"][:5] == 1).all()
    assert views["hidden"][5:].isnan().all()


@pytest.mark.parametrize("shape", [(5, 4), (8, 4), (5, 2), (0, 4)])
def test_device_inputs_are_padded_on_every_side(shape: tuple[int, int]) -> None:
    inputs = make_inputs((*FIELDS, HIDDEN))
    views = inputs.views({"tokens": 8, "reqs": 4})
    inputs.load_on_device(views, {"hidden": torch.full((8, 4), 9.0)})
    inputs.load_on_device(views, {"hidden": torch.ones(shape)})
    expected = torch.zeros(8, 4)
    expected[: shape[0], : shape[1]] = 1
    assert torch.equal(views["hidden"], expected)


def test_device_views_are_prefixes_of_one_buffer() -> None:
    inputs = make_inputs((*FIELDS, HIDDEN))
    large = inputs.views({"tokens": 64, "reqs": 1})["hidden"]
    small = inputs.views({"tokens": 4, "reqs": 1})["hidden"]
    assert large.data_ptr() == small.data_ptr()


def test_what_the_forward_makes_has_views_and_no_value() -> None:
    made = InputField(name="made", dims=("reqs", 5), by_column=True, is_made=True)
    inputs = make_inputs((*FIELDS, made, HIDDEN))
    small, large = inputs.views({"tokens": 8, "reqs": 2}), inputs.views({"tokens": 64, "reqs": 16})
    assert small["made"].stride() == (1, 2)
    assert small["made"].data_ptr() == large["made"].data_ptr()
    small["made"].fill_(9)
    inputs.load(small, make_values(3, 1))
    inputs.load_all(small, {**make_values(8, 2), "hidden": torch.ones(8, 4)})
    assert (small["made"] == 9).all()
    with pytest.raises(GraphError, match="made"):
        inputs.load(small, {**make_values(8, 2), "made": np.zeros((2, 5), dtype=np.int32)})


def test_field_names_must_be_unique() -> None:
    with pytest.raises(GraphError, match="unique"):
        make_inputs((FIELDS[0], FIELDS[0]))


# Tables stored by column

TABLE_FIELDS = (
    InputField(name="lens", dims=("reqs",), pad=3),
    InputField(name="table", dims=("reqs", 6), by_column=True),
)


def table_inputs() -> StaticInputs:
    return StaticInputs(TABLE_FIELDS, max_sizes={"reqs": 4}, torch_device=torch.device("cpu"))


def test_a_table_by_column_reads_like_any_other() -> None:
    inputs = table_inputs()
    views = inputs.views({"reqs": 4})
    assert views["table"].shape == (4, 6)
    assert views["table"].stride() == (1, 4)
    inputs.load(views, {"lens": np.array([1, 2]), "table": np.array([[1, 2, 3], [4, 5, 6]])})
    assert views["lens"].tolist() == [1, 2, 3, 3]
    assert views["table"].tolist() == [[1, 2, 3, 0, 0, 0], [4, 5, 6, 0, 0, 0], [0] * 6, [0] * 6]


def test_only_columns_with_values_and_those_to_be_cleared_are_staged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = table_inputs()
    views = inputs.views({"reqs": 4})
    staged: list[int] = []
    monkeypatch.setattr(inputs._ring, "submit", staged.append)
    for width in (1, 5, 2, 2, 0):
        inputs.load(views, {"lens": np.array([1]), "table": np.ones((1, width), dtype=np.int32)})
    start, column = views.layout["table"], 4 * 4
    assert staged == [start + column * n for n in (1, 5, 5, 2, 2)]


@settings(max_examples=40, deadline=None)
@given(
    loads=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 6)).filter(lambda t: t[1] <= t[0]),
        min_size=1,
        max_size=8,
    )
)
def test_loads_of_other_buckets_leave_nothing_behind(loads: list[tuple[int, int, int]]) -> None:
    """``loads`` are (rows of the bucket, real rows, columns); buckets share memory with other strides."""
    inputs = table_inputs()
    for number, (bucket, num_rows, num_columns) in enumerate(loads, start=1):
        views = inputs.views({"reqs": bucket})
        table = np.full((num_rows, num_columns), number, dtype=np.int32)
        inputs.load(views, {"lens": np.full(num_rows, number), "table": table})
        expected = np.zeros((bucket, 6), dtype=np.int32)
        expected[:num_rows, :num_columns] = number
        assert views["table"].tolist() == expected.tolist()


@pytest.mark.parametrize(
    "fields",
    [
        (TABLE_FIELDS[1], TABLE_FIELDS[0]),
        (InputField(name="table", dims=("reqs",), by_column=True),),
        (InputField(name="table", dims=("reqs", 6), pad=1, by_column=True),),
        (InputField(name="table", dims=("reqs", 6), poison=1, by_column=True),),
    ],
    ids=["not last", "one dimension", "pad", "poison"],
)
def test_what_cannot_be_stored_by_column_is_refused(fields: tuple[InputField, ...]) -> None:
    with pytest.raises(GraphError, match="'table' is stored by column, so it must be the last"):
        StaticInputs(fields, max_sizes={"reqs": 4}, torch_device=torch.device("cpu"))


def assert_loaded(inputs: StaticInputs, sizes: dict[str, int], values: dict[str, np.ndarray]) -> None:
    """What lies in the views is what a load into other inputs leaves there."""
    anew = make_inputs()
    anew.poison, anew.poison_round = inputs.poison, inputs.poison_round
    views = anew.views(sizes)
    anew.load(views, {name: value.copy() for name, value in values.items()})
    for name, expected in views.tensors.items():
        assert torch.equal(inputs.views(sizes)[name], expected), name


def frozen_values(tokens: int, reqs: int) -> dict[str, np.ndarray]:
    return {name: frozen(value) for name, value in make_values(tokens, reqs).items()}


def test_frozen_inputs_that_are_there_already_are_not_written_again(monkeypatch) -> None:
    inputs, sizes, values = make_inputs(), {"tokens": 8, "reqs": 4}, frozen_values(7, 3)
    writes: list[int] = []
    submit = inputs._ring.submit
    monkeypatch.setattr(inputs._ring, "submit", lambda n: (writes.append(n), submit(n)))
    for _ in range(3):
        inputs.load(inputs.views(sizes), dict(values))
    assert len(writes) == 1
    assert_loaded(inputs, sizes, values)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([(8, 4), (8, 3), (16, 4)]),
            st.sampled_from(["a", "b", "mixed", "changing", "view", "other"]),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_was_loaded_before_a_load_leaves_its_own_batch(loads) -> None:
    """Frozen arrays, others that change between loads, and views of such that may not be written."""
    inputs = make_inputs((*FIELDS, HIDDEN))
    kinds = {"a": frozen_values(7, 3), "b": frozen_values(6, 3), "changing": make_values(5, 2)}
    kinds["mixed"] = {**kinds["a"], "scale": make_values(7, 3)["scale"]}
    kinds["other"] = {**kinds["a"], "ids": kinds["b"]["ids"]}
    owner = make_values(7, 3)
    kinds["view"] = {name: array[:] for name, array in owner.items()}
    for view in kinds["view"].values():
        view.setflags(write=False)
    hidden = torch.ones(5, 4)
    for (tokens, reqs), kind, poison in loads:
        inputs.poison, inputs.poison_round = bool(poison), poison
        for changing in (kinds["changing"], owner):
            changing["ids"] += 1
        kinds["mixed"]["scale"] += 1
        sizes = {"tokens": tokens, "reqs": reqs}
        inputs.load_all(inputs.views(sizes), {**kinds[kind], "hidden": hidden})
        assert_loaded(inputs, sizes, kinds[kind])


def test_what_others_have_written_to_is_loaded_again() -> None:
    inputs, sizes, values = make_inputs(), {"tokens": 8, "reqs": 4}, frozen_values(7, 3)
    inputs.load(inputs.views(sizes), values)
    inputs.views(sizes)["ids"].fill_(5)
    inputs.forget_loaded()
    inputs.load(inputs.views(sizes), values)
    assert_loaded(inputs, sizes, values)


@pytest.mark.parametrize("num_loads", [1, 3])
def test_a_forward_that_writes_into_its_inputs_gets_them_anew(num_loads: int) -> None:
    inputs, sizes, values = make_inputs(), {"tokens": 8, "reqs": 4}, frozen_values(7, 3)
    for _ in range(num_loads):
        inputs.load(inputs.views(sizes), values)
        assert_loaded(inputs, sizes, values)
        inputs.views(sizes)["ids"].add_(1)
    for _ in range(2):
        inputs.load(inputs.views(sizes), values)
        assert_loaded(inputs, sizes, values)
        inputs.views(sizes)["ids"].add_(1)


def test_a_load_that_is_refused_leaves_everything_as_it_was() -> None:
    inputs, sizes = make_inputs((*FIELDS, HIDDEN)), {"tokens": 8, "reqs": 4}
    views, values = inputs.views(sizes), frozen_values(7, 3)
    inputs.load_all(views, {**values, "hidden": torch.ones(7, 4)})
    hidden, too_many = torch.zeros(7, 4), make_values(9, 1)["ids"]
    for broken in (
        {**values, "hidden": torch.zeros(9, 4)},
        values,
        {**values, "hidden": hidden, "ids": too_many},
    ):
        with pytest.raises(GraphError):
            inputs.load_all(views, broken)
    assert_loaded(inputs, sizes, values)
    assert views["hidden"][:7].eq(1).all()


def test_frozen_arrays_own_their_memory_and_may_not_be_written() -> None:
    owner = np.arange(6, dtype=np.int32)
    array = frozen(owner[1:4])
    owner[:] = 0
    assert array.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 5
    assert frozen(array) is array
