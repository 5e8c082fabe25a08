"""Verification: proof, on fresh data, that captured graphs compute what eager execution computes.

For each captured size and several real sizes inside it: a replay equals the same bucket run without its graph
bit for bit, and the callable at its real size within a bound; padding of NaN and of extreme values leaves
every real row bit-equal; results survive other sizes and a churning allocator in between. For the capture as
a whole: no host value and no branch depends on the batch, no tensor that graphs read has moved, a run rebinds
nothing and changes nothing in Python. It works on runners, so the engine's graphs and a library callable's
are checked by the same code. Read ``check_report.py`` for results; ``check_targets.py`` makes targets of
graphed callables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapless.errors import GraphError
from gapless.graphs.audit import Change, Snapshot
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.check_report import CheckReport, sizes_text
from gapless.graphs.compare import Mismatch, bounded_mismatch, exact_mismatch
from gapless.graphs.modes import RuntimeMode
from gapless.graphs.op_log import OpLog
from gapless.graphs.probe import saved_contents
from gapless.graphs.runner import GraphRunner, Values
from gapless.graphs.store import GraphKey


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckTarget:
    """One runner, its captured sizes, and how to make batches for it.

    A *real* descriptor holds real counts. ``find`` is the public dispatch path, ``state`` the memory that a
    run writes in place, ``roots`` where everything it reads is reachable from, ``audit`` what moved since
    the capture.
    """

    name: str
    runner: GraphRunner
    descriptors: Sequence[BatchDescriptor]
    real_descriptors: Callable[[BatchDescriptor], Sequence[BatchDescriptor]]
    make_values: Callable[[BatchDescriptor, torch.Generator], Values]
    run_plain: Callable[[BatchDescriptor, Values], Sequence[Tensor]]
    find: Callable[[BatchDescriptor], BatchDescriptor | None]
    roots: Mapping[str, object]
    state: Sequence[Tensor] = ()
    scratch: Sequence[Tensor] = ()
    """Views of ``state`` that padding may write (a sink slot): left out of comparisons."""
    audit: Callable[[], Sequence[Change]] = tuple
    live_names: Collection[str] = ()
    """What eager breaks change, and may."""
    draws_random_numbers: bool = False
    choices: Collection[int] = ()
    """Outputs that are choices (an argmax): the last bits flip them, so only the same bucket is compared."""
    variants: Callable[[BatchDescriptor, Values], Iterable[tuple[str, OpLog]]] = lambda descriptor, values: ()


def check(target: CheckTarget, *, seed: int = 0, tolerance: float | None = None) -> CheckReport:
    """Run every check on ``target``. Later runs are as before: state, generators and ledger are put back."""
    report = CheckReport(name=target.name)
    checker = _Checker(target, report, seed=seed, tolerance=tolerance)
    checker.check_failures()
    if not target.descriptors:
        report.add("capture", target.name, "", "nothing is captured", skipped=True)
        return report
    device = target.runner.store.device
    gpus = [device.torch_device] if device.torch_device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=gpus),
        torch.no_grad(),
        device.stream_scope(),
        no_traffic(target.runner),
    ):
        checker.run()
        device.synchronize()
    return report


class _Checker:
    def __init__(
        self, target: CheckTarget, report: CheckReport, *, seed: int, tolerance: float | None
    ) -> None:
        self._target, self._report, self._tolerance = target, report, tolerance
        self._runner = target.runner
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    def run(self) -> None:
        addresses = self._static_addresses()
        reachable = Snapshot(self._target.roots).values
        self._report.frozen_attributes = {name: f"{value!r:.80}" for name, value in reachable.items()}
        self._check_addresses("addresses")
        for descriptor in self._target.descriptors:
            self._check_lookup(descriptor)
            for real in self._target.real_descriptors(descriptor):
                self._guard("equals padded eager", self._check_results, descriptor, real)
                self._guard("ignores padding", self._check_padding, descriptor, real)
        self._guard("interleaved sizes", self._check_interleaving)
        for descriptor in dict.fromkeys((self._target.descriptors[-1], self._target.descriptors[0])):
            self._check_frozen(descriptor)
            self._check_side_effects(descriptor)
        self._check_work_per_size()
        self._check_addresses("addresses afterwards")
        moved = [name for name, address in self._static_addresses().items() if addresses[name] != address]
        detail = f"{', '.join(moved)} moved" if moved else None
        self._report.add("static inputs", self._target.name, "", detail)

    def _guard(self, name: str, run: Callable[..., None], *descriptors: BatchDescriptor) -> None:
        """A graph that refuses to replay (memory that it reads has gone) has failed the check."""
        try:
            run(*descriptors)
        except GraphError as error:
            subject = self._pair_text(*descriptors) if descriptors else ""
            self._report.add(name, self._target.name, subject, str(error))

    def check_failures(self) -> None:
        for failure in self._runner.store.failures:
            if failure.key.phase is self._runner.phase:
                self._report.add("capture", self._target.name, str(failure.key.descriptor), failure.message)

    def _check_lookup(self, descriptor: BatchDescriptor) -> None:
        found = self._target.find(descriptor)
        detail = None if found == descriptor else f"a batch of exactly this size is served by {found}"
        self._report.add("lookup", self._target.name, self._text(descriptor), detail)

    def _check_results(self, descriptor: BatchDescriptor, real: BatchDescriptor) -> None:
        """Two batches, because a graph that ignores its input passes with one."""
        exact: Mismatch | None = None
        bounded: Mismatch | None = None
        for _ in range(2):
            values = self._fresh(real)
            replayed = self._run(descriptor, real, values, self._mode)
            padded = self._run(descriptor, real, values, RuntimeMode.NONE)
            exact = exact or exact_mismatch(replayed, padded)
            if self._incomparable(len(padded)) is None:
                plain = self._with_state(functools.partial(self._target.run_plain, real, values))
                bounded = bounded or bounded_mismatch(
                    self._measured(padded), self._measured(plain), tolerance=self._tolerance
                )
        subject = self._pair_text(descriptor, real)
        self._report.add("equals padded eager", self._target.name, subject, _text_of(exact))
        reason = self._incomparable(len(padded))
        if reason is not None:
            self._report.add("close to plain eager", self._target.name, subject, reason, skipped=True)
        else:
            self._report.add("close to plain eager", self._target.name, subject, _text_of(bounded))

    def _check_padding(self, descriptor: BatchDescriptor, real: BatchDescriptor) -> None:
        inputs = self._runner.inputs
        rounds = max(_num_poisons(field.poison) for field in inputs.fields)
        subject = self._pair_text(descriptor, real)
        if not rounds or descriptor == real:
            return
        values = self._fresh(real)
        clean = self._run(descriptor, real, values, self._mode)
        mismatch: Mismatch | None = None
        try:
            inputs.poison = True
            for index in range(rounds):
                inputs.poison_round = index
                poisoned = self._run(descriptor, real, values, self._mode)
                mismatch = mismatch or exact_mismatch(poisoned, clean)
        finally:
            inputs.poison, inputs.poison_round = False, 0
        self._report.add("ignores padding", self._target.name, subject, _text_of(mismatch))

    def _check_interleaving(self) -> None:
        """A, B, A for every pair of neighbours in size, with memory allocated and freed in between."""
        descriptors = list(self._target.descriptors)
        for one, other in zip(descriptors, descriptors[1:] + descriptors[:1], strict=True):
            real, other_real = self._largest(one), self._largest(other)
            values, others = self._fresh(real), self._fresh(other_real)
            first = self._run(one, real, values, self._mode)
            kept = [tensor.clone() for tensor in first]
            _churn(self._runner.store.device.torch_device)
            self._run(other, other_real, others, self._mode)
            _churn(self._runner.store.device.torch_device)
            mismatch = exact_mismatch(self._run(one, real, values, self._mode), kept)
            subject = f"{self._text(one)} around {self._text(other)}"
            self._report.add("interleaved sizes", self._target.name, subject, _text_of(mismatch))

    def _check_frozen(self, descriptor: BatchDescriptor) -> None:
        """The batch of the capture and two fresh ones must run the same ops with the same host values."""
        subject = self._text(descriptor)
        real = self._target.real_descriptors(descriptor)[-1]
        at_capture = self._log(descriptor, descriptor, self._runner.dummy(descriptor))
        self._report.frozen_values.setdefault(self._target.name, at_capture.frozen_values())
        largest = self._largest(descriptor)
        fresh = self._fresh(largest)
        logs = [("another batch", self._log(descriptor, largest, fresh))]
        if real != largest:
            logs.append(("a smaller batch", self._log(descriptor, real, self._fresh(real))))
        logs += self._target.variants(descriptor, fresh)
        for (op, argument), line in at_capture.undeclared_writes.items():
            detail = f"{op} writes into {argument} and does not say so in mutates_args ({line})"
            self._report.add("undeclared writes", self._target.name, subject, detail)
        for name, log in logs:
            differences = at_capture.differences_to(log)
            for found in differences:
                where = f" ({found.line})" if found.line else ""
                self._report.add(
                    "frozen values", self._target.name, f"{subject}, {name}", f"{found.detail}{where}"
                )
            if not differences:
                self._report.add("frozen values", self._target.name, f"{subject}, {name}", None)

    def _check_side_effects(self, descriptor: BatchDescriptor) -> None:
        before = Snapshot(self._target.roots)
        real = self._largest(descriptor)
        self._run(descriptor, real, self._fresh(real), RuntimeMode.NONE)
        live = self._target.live_names
        changes = [c for c in before.changes_to(Snapshot(self._target.roots)) if c.name not in live]
        subject = self._text(descriptor)
        for change in changes:
            what = "a run changes a value, a replay does not"
            if change.kind != "value":
                what = f"after a run a tensor is {change.kind}"
            self._report.add("side effects", self._target.name, subject, f"{what}: {change}")
        if not changes:
            self._report.add("side effects", self._target.name, subject, None)

    def _check_work_per_size(self) -> None:
        """Sizes of one runner do the same work; a size with fewer breaks or ops has taken another branch."""
        rows = [
            entry.row
            for d in self._target.descriptors
            if (entry := self._runner.store.get(self._key(d))) is not None
        ]
        breaks = {row.num_breaks for row in rows}
        detail = f"between {min(breaks)} and {max(breaks)} breaks" if len(breaks) > 1 else None
        self._report.add("breaks per size", self._target.name, "", detail)
        nodes = {row.num_nodes for row in rows}
        if len(nodes) > 1:
            text = f"between {min(nodes)} and {max(nodes)}: another kernel or branch was chosen at some sizes"
            self._report.note("ops per size", self._target.name, "", text)

    def _check_addresses(self, name: str) -> None:
        changes = self._target.audit()
        for change in changes:
            self._report.add(name, self._target.name, "", str(change))
        if not changes:
            self._report.add(name, self._target.name, "", None)

    def _incomparable(self, num_results: int) -> str | None:
        """Why results cannot be compared with those of another size."""
        if self._target.draws_random_numbers:
            return "it draws random numbers, which depend on the size"
        if len(self._target.choices) == num_results:
            return "all results are choices, which the last bits flip"
        return None

    def _measured(self, results: Sequence[Tensor]) -> list[Tensor]:
        return [tensor for index, tensor in enumerate(results) if index not in self._target.choices]

    @property
    def _mode(self) -> RuntimeMode:
        return self._runner.strategy.runtime_mode

    def _largest(self, descriptor: BatchDescriptor) -> BatchDescriptor:
        """The largest real batch of a bucket: the bucket itself, unless memory sets a limit."""
        return self._target.real_descriptors(descriptor)[0]

    def _fresh(self, real: BatchDescriptor) -> Values:
        return self._target.make_values(real, self._generator)

    def _run(
        self, descriptor: BatchDescriptor, real: BatchDescriptor, values: Values, mode: RuntimeMode
    ) -> list[Tensor]:
        """Results and the state afterwards, copied; state and generators are put back."""
        sizes = self._runner.sizes_of(real)
        return self._with_state(lambda: self._runner.run(descriptor, mode, values, num_real=sizes))

    def _with_state(self, run: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        torch.manual_seed(self._seed)
        with saved_contents(self._target.state):
            results = [tensor.clone() for tensor in run()]
            for view in self._target.scratch:
                view.zero_()
            return results + [tensor.clone() for tensor in self._target.state]

    def _log(self, descriptor: BatchDescriptor, real: BatchDescriptor, values: Values) -> OpLog:
        log = OpLog()
        sizes = self._runner.sizes_of(real)
        self._with_state(lambda: self._runner.observe(descriptor, values, num_real=sizes, scope=log))
        return log

    def _static_addresses(self) -> dict[str, int]:
        views = self._runner.inputs.views(self._runner.sizes_of(self._target.descriptors[0]))
        return {name: tensor.data_ptr() for name, tensor in views.tensors.items()}

    def _key(self, descriptor: BatchDescriptor) -> GraphKey:
        return GraphKey(self._runner.phase, self._mode, descriptor)

    def _text(self, descriptor: BatchDescriptor) -> str:
        return sizes_text(self._runner.sizes_of(descriptor))

    def _pair_text(self, descriptor: BatchDescriptor, real: BatchDescriptor) -> str:
        if descriptor == real:
            return self._text(descriptor)
        return f"{self._text(real)} in {self._text(descriptor)}"


@contextmanager
def no_traffic(runner: GraphRunner) -> Iterator[None]:
    """Verification is no traffic: the ledger's counters are put back after the block."""
    rows = runner.store.ledger
    before = [(row.replays, row.tokens, row.padding) for row in rows]
    try:
        yield
    finally:
        for row, counts in zip(rows, before, strict=True):
            row.replays, row.tokens, row.padding = counts


def _churn(device: torch.device) -> None:
    """Make freed memory hold something else."""
    held: list[Any] = [torch.full((1 << exponent,), float("nan"), device=device) for exponent in range(4, 18)]
    held.clear()


def _num_poisons(poison: Any) -> int:
    return 0 if poison is None else len(poison) if isinstance(poison, tuple) else 1


def _text_of(mismatch: Mismatch | None) -> str | None:
    return None if mismatch is None else str(mismatch)
