"""A program runs its steps in order, leaves out empty segments, and drops everything on reset."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils import _pytree as pytree

from gapless.errors import GraphError
from gapless.graphs.handoff import Handoff, ResultSpec
from gapless.graphs.program import EagerStep, Program


class FakeSegment:
    def __init__(self, log: list[str], name: str, num_nodes: int = 1) -> None:
        self.log, self.name, self.num_nodes, self.num_resets = log, name, num_nodes, 0

    def replay(self) -> None:
        self.log.append(self.name)

    def reset(self) -> None:
        self.num_resets += 1


def handoff_for(result: object, *, slots: list, is_argument: list[bool] | None = None) -> Handoff:
    return Handoff(
        name="test.body",
        structure=pytree.tree_structure(result),
        slots=slots,
        is_argument=is_argument or [False] * len(slots),
    )


def eager(log: list[str], name: str) -> EagerStep:
    return EagerStep(
        name=name,
        body=lambda *, what: log.append(what),
        args=(),
        kwargs={"what": name},
        handoff=handoff_for(None, slots=[None]),
    )


def test_steps_run_in_order_at_every_replay():
    log: list[str] = []
    program = Program()
    program.add_segment(FakeSegment(log, "a"))
    program.add_eager(eager(log, "break"))
    program.add_segment(FakeSegment(log, "b"))
    program.replay()
    program.replay()
    assert log == ["a", "break", "b"] * 2
    assert (program.num_segments, program.num_breaks, program.break_names) == (2, 1, ("break",))


def test_empty_segments_are_left_out_and_released():
    log: list[str] = []
    program, empty = Program(), FakeSegment([], "empty", num_nodes=0)
    program.add_segment(empty)
    program.add_segment(FakeSegment(log, "a", num_nodes=3))
    program.replay()
    assert (program.num_segments, empty.num_resets, log) == (1, 1, ["a"])


@pytest.mark.parametrize(("counts", "total"), [([3, 4], 7), ([3, -1], -1), ([], 0)])
def test_node_count_is_unknown_if_any_part_is(counts, total):
    program = Program()
    for count in counts:
        program.add_segment(FakeSegment([], "s", num_nodes=count))
    assert program.num_nodes == total


def test_replay_runs_without_autograd():
    program, seen = Program(), []
    step = EagerStep(
        name="b",
        body=lambda: seen.append(torch.is_grad_enabled()),
        args=(),
        kwargs={},
        handoff=handoff_for(None, slots=[None]),
    )
    program.add_eager(step)
    program.replay()
    assert seen == [False]
    assert torch.is_grad_enabled()


class LaunchableSegment(FakeSegment):
    @property
    def launch(self):
        return self.replay


def test_a_program_of_one_segment_is_its_launch_until_it_is_reset():
    log: list[str] = []
    program = Program()
    assert program.launch is None
    program.add_segment(LaunchableSegment(log, "a"))
    program.launch()
    assert log == ["a"]
    program.reset()
    assert program.launch is None


@pytest.mark.parametrize("also", ["break", "segment"])
def test_a_program_of_more_steps_has_no_single_launch(also):
    program = Program()
    program.add_segment(LaunchableSegment([], "a"))
    if also == "break":
        program.add_eager(eager([], "break"))
    else:
        program.add_segment(LaunchableSegment([], "b"))
    assert program.launch is None


def test_a_launch_is_given_out_only_when_all_is_checked():
    log: list[str] = []
    program = Program()
    program.add_segment(LaunchableSegment(log, "a"))
    program.add_check(lambda: log.append("check"))
    assert program.launch is None
    program.replay()
    program.launch()
    assert log == ["check", "a", "a"]


def test_reset_drops_segments_and_captured_arguments():
    class Owner:
        def __call__(self) -> None:
            return None

    owner, segment = Owner(), FakeSegment([], "a")
    program = Program()
    program.add_segment(segment)
    program.add_eager(
        EagerStep(name="b", body=owner, args=(), kwargs={}, handoff=handoff_for(None, slots=[None]))
    )
    reference = weakref.ref(owner)
    del owner
    program.reset()
    program.reset()
    assert (segment.num_resets, reference()) == (1, None)
    with pytest.raises(GraphError, match="was reset"):
        program.replay()


RESULTS = [
    torch.ones(3),
    None,
    (torch.ones(2), None),
    [torch.ones(2), torch.zeros(1)],
    {"a": torch.ones(2), "b": (torch.zeros(1),)},
    (),
]


@pytest.mark.parametrize("result", RESULTS, ids=str)
def test_results_are_copied_into_their_slots(result):
    spec = ResultSpec.of("b", result, torch.device("cpu"))
    slots = [None if leaf is None else torch.full_like(leaf, 9) for leaf in spec.leaves]
    handoff_for(result, slots=slots).fill(result)
    for slot, leaf in zip(slots, spec.leaves, strict=True):
        assert (slot is None) == (leaf is None)
        assert slot is None or torch.equal(slot, leaf)


@pytest.mark.parametrize(
    ("captured", "live", "message"),
    [
        (torch.ones(3), torch.ones(4), r"a tensor \(4,\).*but a tensor \(3,\)"),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), "float64"),
        (torch.ones(3), None, "returned None, but a tensor"),
        (None, torch.ones(3), "but None when it was captured"),
        (torch.ones(3), (torch.ones(3),), "same structure"),
        ((torch.ones(3),), [torch.ones(3)], "same structure"),
        ({"a": torch.ones(3)}, {"b": torch.ones(3)}, "same structure"),
        ((torch.ones(3), torch.ones(3)), (torch.ones(3),), "same structure"),
        (torch.ones(3), 5, "returned a int"),
    ],
    ids=["shape", "dtype", "lost", "extra", "nested", "tuple_list", "keys", "shorter", "number"],
)
def test_another_result_than_at_capture_is_an_error_naming_the_break(captured, live, message):
    spec = ResultSpec.of("b", captured, torch.device("cpu"))
    handoff = handoff_for(captured, slots=list(spec.leaves))
    with pytest.raises(GraphError, match=message) as raised:
        handoff.fill(live)
    assert "test.body" in str(raised.value)


def test_an_argument_handed_back_must_be_handed_back_again():
    argument = torch.zeros(3)
    handoff = handoff_for(argument, slots=[argument], is_argument=[True])
    handoff.fill(argument)
    with pytest.raises(GraphError, match="its own arguments"):
        handoff.fill(torch.ones(3))
    assert not argument.any()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (3, "returned a int"),
        ((torch.ones(1), "x"), "returned a str"),
        (torch.ones(1, device="meta"), "on meta"),
    ],
    ids=["int", "str", "device"],
)
def test_only_tensors_of_the_device_may_cross_a_break(result, message):
    with pytest.raises(GraphError, match=message):
        ResultSpec.of("b", result, torch.device("cpu"))
