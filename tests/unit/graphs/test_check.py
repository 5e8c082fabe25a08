"""Verification finds what is wrong with graphs, says where, and passes what is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gapless.errors import GraphError
from gapless.graphs import check_report
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.breakable import eager_break
from gapless.graphs.buffers import StaticInputs
from gapless.graphs.check import CheckTarget, check
from gapless.graphs.check_report import CheckReport, Status, merge
from gapless.graphs.compare import bound_of, bounded_mismatch, exact_mismatch, tolerance_for
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.graphed import Graphed, Input, graphed
from gapless.graphs.input_field import InputField
from gapless.graphs.modes import Phase, Strategy
from gapless.graphs.ops import register_custom_op
from gapless.graphs.real_sizes import num_real
from gapless.graphs.runner import GraphRunner, OutputField
from gapless.graphs.store import GraphStore

ROWS = Input(dims={0: "rows"})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.requires_grad_(False)
        self.limit = 2

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


@eager_break
def tripled(h: Tensor) -> Tensor:
    return h * 3


def capture(fn: Callable[..., Any], *args: Any, **options: Any) -> Graphed:
    example = args or (torch.randn(3, 6),)
    made = graphed(fn, inputs={"x": ROWS}, **{"sizes": [2, 5], "audit": "never", **options})
    return made.capture(*example)


def failed_checks(report: CheckReport) -> set[str]:
    return {failure.check for failure in report.failures}


GOOD: dict[str, Callable[[Tensor], Any]] = {
    "module": Net(),
    "with_break": lambda x: tripled(x + 1) - 1,
    "attention": lambda x: torch.softmax(x @ x.t() + causal_mask(x), -1).nan_to_num() @ x.nan_to_num(),
    "running_sum": lambda x: x.cumsum(0),
    "two_results": lambda x: {"a": x * 2, "b": (x.argmax(-1), x.amax(-1))},
    "real_mean": lambda x: torch.where(is_real(x)[:, None], x, 0).sum(0) / num_real("rows"),
    "random": lambda x: x + torch.rand_like(x),
}


def causal_mask(x: Tensor) -> Tensor:
    return torch.full((x.shape[0], x.shape[0]), float("-inf")).triu(1)


def is_real(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]) < num_real("rows")


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_passes_every_check(name: str) -> None:
    options: dict[str, Any] = {}
    if name == "attention":  # 0 times NaN is NaN: its padding contract is finite values
        options["inputs"] = {"x": Input(dims={0: "rows"}, poison=(1e4, -1e4))}
    report = (
        graphed(GOOD[name], **{"inputs": {"x": ROWS}, "sizes": [2, 5], **options})
        .capture(torch.randn(3, 6))
        .verify()
    )
    assert report.is_ok, str(report)
    assert "all checks passed" in str(report)
    ran = {result.check for result in report.results}
    assert {
        "lookup",
        "equals padded eager",
        "close to plain eager",
        "ignores padding",
        "interleaved sizes",
    } <= ran
    assert {"frozen values", "side effects", "addresses", "static inputs", "kept results"} <= ran


def test_every_captured_size_is_checked_with_several_real_sizes() -> None:
    report = capture(Net(), sizes=[1, 2, 8]).verify()
    subjects = {r.subject for r in report.results if r.check == "equals padded eager"}
    assert subjects == {"rows=8", "rows=5 in rows=8", "rows=3 in rows=8", "rows=2", "rows=1"}


def test_verification_is_no_traffic_and_leaves_generators_alone() -> None:
    made = capture(Net())
    made(torch.randn(2, 6))
    before = made.report()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    made.verify()
    assert made.report() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_padding_that_reaches_real_rows_is_found() -> None:
    report = capture(lambda x: x - x.mean(0), check_padding=False).verify()
    assert failed_checks(report) == {"close to plain eager", "ignores padding"}
    assert any(f.subject == "rows=3 in rows=5" for f in report.failures)


@pytest.mark.parametrize("poison", [float("nan"), 1e30, (0.5, float("nan"))])
def test_each_poison_value_is_tried(poison: Any) -> None:
    made = graphed(
        lambda x: x * 2 + x.clamp(0, 1).sum() * 1e-9,
        inputs={"x": Input(dims={0: "rows"}, poison=poison)},
        sizes=[5],
        check_padding=False,
    ).capture(torch.zeros(3, 6))
    assert "ignores padding" in failed_checks(made.verify())


def test_weights_rebound_since_the_capture_are_named() -> None:
    net = Net()
    made = capture(net)
    net.first.weight = nn.Parameter(torch.randn(8, 6), requires_grad=False)
    report = made.verify()
    assert {"addresses", "equals padded eager"} <= failed_checks(report)
    assert any("Net.first.weight: moved" in failure.detail for failure in report.failures)
    with pytest.raises(GraphError, match=r"verification of .*\n.*Net\.first\.weight"):
        report.raise_if_failed()


def test_a_value_changed_since_the_capture_is_named() -> None:
    net = Net()
    made = capture(net)
    net.limit = 7
    assert any(f.detail == "Net.limit: 2 → 7" for f in made.verify().failures)


def limited(x: Tensor, limit: int, table: Tensor) -> Tensor:
    return torch.where(torch.arange(x.shape[0])[:, None] < limit, x, 0) + table[:limit].sum()


def test_frozen_arguments_are_listed_and_those_that_vary_are_errors() -> None:
    made = capture(limited, torch.randn(3, 6), 2, torch.randn(9))
    same = made.verify()
    assert same.is_ok
    assert same.frozen_arguments["limit"] == "2"
    assert same.frozen_arguments["table"].startswith("a tensor (9,) torch.float32 at 0x")
    varied = made.verify(variants=[{"limit": 4}])
    assert failed_checks(varied) == {"frozen values"}
    details = [failure.detail for failure in varied.failures]
    assert any("aten.lt.Scalar argument other: 2 once and 4 the other time" in d for d in details)
    assert any("aten.sum" in d and "a tensor (2,)" in d for d in details)
    assert all("limit=4" in failure.subject for failure in varied.failures)
    assert "test_check.py" in details[0]


def test_host_values_inside_ops_are_listed_with_their_line() -> None:
    report = capture(lambda x: x.clamp(-1, 2.5).softmax(-1)).verify()
    values = {(v.op, v.argument): v for v in report.frozen_values["full"]}
    assert values["aten.clamp.default", "max"].value == "2.5"
    assert values["aten._softmax.default", "dim"].value == "-1"
    assert "test_check.py" in values["aten.clamp.default", "max"].line


@register_custom_op
def check_test_hidden_write(x: Tensor) -> None:
    x.add_(1)


@register_custom_op(mutates_args=["out"])
def check_test_open_write(x: Tensor, out: Tensor) -> None:
    out.mul_(2)


def test_custom_ops_that_write_what_they_did_not_declare_are_found() -> None:
    def fn(x: Tensor) -> Tensor:
        h = x * 2
        check_test_hidden_write(h)
        check_test_open_write(h[:, :1], h)
        return h

    report = capture(fn).verify()
    assert failed_checks(report) == {"undeclared writes"}
    assert "gapless.check_test_hidden_write.default writes into x" in report.failures[0].detail
    assert "test_check.py" in report.failures[0].detail


def test_plain_values_that_the_callable_reaches_are_listed() -> None:
    report = capture(Net()).verify()
    assert report.frozen_attributes["Net.limit"] == "2"
    assert report.to_dict()["frozen"]["attributes"]["Net.training"] == "True"


def test_a_failed_capture_is_an_error() -> None:
    def fn(x: Tensor) -> Tensor:
        if x.shape[0] == 5:
            x.sum().item()
        return x * 2

    report = capture(fn).verify()
    assert failed_checks(report) == {"capture"}
    assert "Tensor.item" in report.failures[0].detail
    nothing = capture(lambda x: x * x.sum().item(), check_padding=False).verify()
    assert not nothing.is_ok
    assert nothing.results[-1].status is Status.SKIPPED


def test_sizes_that_break_differently_are_found() -> None:
    report = capture(lambda x: tripled(x) if x.shape[0] > 3 else x * 3, strategy="breakable").verify()
    assert failed_checks(report) == {"breaks per size"}
    assert report.failures[0].detail == "between 0 and 1 breaks"


def test_sizes_with_other_ops_are_noted() -> None:
    report = capture(lambda x: (x + x) * 1.5 if x.shape[0] > 3 else x * 3).verify()
    assert report.is_ok
    (note,) = [r for r in report.results if r.status is Status.NOTE]
    assert note.check == "ops per size"


def test_static_results_are_not_expected_to_be_kept() -> None:
    report = capture(Net(), copy_outputs=False).verify()
    assert report.is_ok
    (kept,) = [r for r in report.results if r.check == "kept results"]
    assert kept.status is Status.SKIPPED


def test_random_results_are_compared_with_the_same_seed_only() -> None:
    report = capture(lambda x: torch.nn.functional.dropout(x)).verify()
    assert report.is_ok
    assert {r.status for r in report.results if r.check == "close to plain eager"} == {Status.SKIPPED}


def test_the_tolerance_can_be_set() -> None:
    made = capture(lambda x: x + 1e-3 * x.shape[0], check_padding=False)
    assert "close to plain eager" in failed_checks(made.verify())
    assert made.verify(tolerance=1e-1).is_ok


def test_json_holds_everything_and_tables_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_report, "_MAX_DETAILS", 2)
    report = capture(lambda x: x - x.mean(0), sizes=[1, 2, 4, 8, 16], check_padding=False).verify()
    loaded = json.loads(json.dumps(report.to_dict()))
    assert loaded["ok"] is False
    assert len(loaded["results"]) == len(report.results)
    assert {"check", "target", "subject", "status", "detail"} == loaded["results"][0].keys()
    assert loaded["frozen"]["values"]["full"][0].keys() == {"op", "argument", "value", "line", "count"}
    text = str(report)
    assert "FAILED" in text
    assert "… and" in text
    assert len(text.splitlines()) < 50


def test_reports_can_be_merged() -> None:
    good, bad = CheckReport(name="a"), CheckReport(name="b")
    good.add("x", "a", "", None)
    bad.add("x", "b", "s", "wrong")
    both = merge("both", [good, bad])
    assert not both.is_ok
    assert [r.target for r in both.results] == ["a", "b"]


# --- runners of any kind -----------------------------------------------------------------------------------

LIMIT = {"n": 2}


def make_target(device: EmulatedDevice, fn: Callable[[Tensor], Tensor], **changes: Any) -> CheckTarget:
    store = GraphStore(device)
    field = InputField(
        name="x", dims=("rows", 4), dtype=torch.float32, pad=0.0, poison=float("nan"), on_device=True
    )
    runner = GraphRunner(
        lambda views: (fn(views["x"]),),
        phase=Phase.PREFILL,
        strategy=Strategy.FULL,
        inputs=StaticInputs((field,), max_sizes={"rows": 6}, torch_device=device.torch_device),
        outputs=(OutputField(name="out", dim="rows", row_shape=(4,)),),
        store=store,
        sizes_of=lambda d: {"rows": d.num_tokens},
        make_dummy=lambda d: {"x": torch.ones(d.num_tokens, 4)},
    )
    descriptors = [BatchDescriptor(6, 1), BatchDescriptor(3, 1)]
    with store.capturing():
        runner.capture(descriptors)
    values: dict[str, Any] = {
        "name": "prefill",
        "runner": runner,
        "descriptors": descriptors,
        "real_descriptors": lambda d: [d, BatchDescriptor(d.num_tokens - 1, 1)],
        "make_values": lambda d, generator: {"x": torch.randn(d.num_tokens, 4, generator=generator)},
        "run_plain": lambda d, values: [fn(values["x"])],
        "find": lambda d: d,
        "roots": {"fn": fn},
    }
    return CheckTarget(**{**values, **changes})


def test_a_runner_is_checked_like_a_callable(device: EmulatedDevice) -> None:
    assert check(make_target(device, lambda x: x * 2)).is_ok


def test_a_branch_that_depends_on_the_batch_is_found(device: EmulatedDevice) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() if LIMIT["n"] > 2 else x * LIMIT["n"]

    def make_values(real: BatchDescriptor, generator: torch.Generator) -> dict[str, Tensor]:
        LIMIT["n"] = 3 if real.num_tokens > 4 else 1
        return {"x": torch.randn(real.num_tokens, 4, generator=generator)}

    LIMIT["n"] = 2
    report = check(make_target(device, fn, make_values=make_values))
    assert {"frozen values", "equals padded eager"} <= failed_checks(report)
    details = [failure.detail for failure in report.failures if failure.check == "frozen values"]
    assert any("a Python branch depends on the batch" in detail for detail in details)


def test_a_key_that_dispatch_does_not_find_is_an_error(device: EmulatedDevice) -> None:
    report = check(make_target(device, lambda x: x * 2, find=lambda d: BatchDescriptor(6, 1)))
    assert failed_checks(report) == {"lookup"}
    assert report.failures[0].subject == "rows=3"


def test_state_is_compared_and_put_back(device: EmulatedDevice) -> None:
    state = torch.zeros(4)

    def fn(x: Tensor) -> Tensor:
        state.add_(x.nan_to_num()[0])
        return x + 0 * state

    target = make_target(device, fn, state=[state])
    state.zero_()
    assert check(target).is_ok
    assert state.tolist() == [0.0] * 4
    hidden = make_target(device, lambda x: x + state.add_(1))
    assert "interleaved sizes" in failed_checks(check(hidden)), "undeclared state shows as a difference"


# --- comparing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "is_equal"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([1.0, float("nan")], [1.0, 2.0], False),
        ([float("inf")], [float("inf")], True),
        ([float("inf")], [float("-inf")], False),
        ([1.0], [1.0 + 1e-7], False),
        ([], [], True),
    ],
)
def test_exact_comparison(a: list[float], b: list[float], is_equal: bool) -> None:
    tensors = [torch.tensor(np.array(v, np.float32)) for v in (a, b)]
    assert (exact_mismatch(tensors[:1], tensors[1:]) is None) is is_equal


@pytest.mark.parametrize(
    ("dtype", "difference", "is_fine"),
    [
        (torch.float32, 0.9e-4, True),
        (torch.float32, 1.2e-4, False),
        (torch.bfloat16, 3e-2, True),
        (torch.bfloat16, 1e-1, False),
        (torch.float16, 5e-3, True),
        (torch.int32, 1, False),
        (torch.int32, 0, True),
    ],
)
def test_bounded_comparison_by_type(dtype: torch.dtype, difference: float, is_fine: bool) -> None:
    a = torch.zeros(3).to(dtype)
    b = a.clone()
    b[1] += difference
    assert (bounded_mismatch([a], [b]) is None) is is_fine


def test_the_coarsest_type_that_takes_part_decides() -> None:
    assert tolerance_for([torch.int32]) == tolerance_for([torch.float32]) == 1e-4
    assert tolerance_for([torch.float32, torch.bfloat16, torch.bool]) == 6e-2

    def in_bfloat16(x: Tensor) -> Tensor:
        return (x.bfloat16() @ torch.ones(6, 3, dtype=torch.bfloat16)).float() * (1 + 1e-3 * x.shape[0])

    weight = torch.ones(6, 3, dtype=torch.bfloat16)
    made = capture(lambda x: (x.bfloat16() @ weight).float() + 1e-3 * x.shape[0])
    assert made.verify().is_ok
    with pytest.raises(GraphError, match="padding changes real rows"):
        capture(in_bfloat16)


def test_bounds_grow_with_the_values_and_ignore_infinities() -> None:
    assert bound_of(torch.tensor([0.1, 0.2])) == pytest.approx(1e-4)
    assert bound_of(torch.tensor([100.0, float("inf"), float("nan")])) == pytest.approx(1e-2)
    assert bound_of(torch.tensor([100.0]), 0.5) == pytest.approx(50)


def test_a_mismatch_says_how_many_where_and_by_how_much() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    b[1, 2] = 0.5
    assert str(exact_mismatch([a], [b])) == (
        "output 0: 1 of 6 elements differ, first at [1, 2]: 0 instead of 0.5, by at most 0.5"
    )
    assert "instead of a tensor (3,)" in str(bounded_mismatch([torch.zeros(2)], [torch.zeros(3)]))
