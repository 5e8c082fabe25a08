"""Verification of a graphed callable: its generation as a target of ``check``, and its public call besides.

The runner-level checks see static memory; what a user sees goes through the call, so that is exercised too:
results kept from earlier calls must not change, and calls above the ladder must equal eager.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.call_template import Call
from gapless.graphs.check import CheckTarget, check, no_traffic
from gapless.graphs.check_report import CheckReport, sizes_text
from gapless.graphs.compare import exact_mismatch
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.generation import Generation
from gapless.graphs.graphed_callable import Graphed
from gapless.graphs.op_log import OpLog
from gapless.graphs.probe import saved_contents
from gapless.graphs.real_sizes import RealSizes
from gapless.graphs.runner import Values
from gapless.graphs.samples import smaller_than


def verify_graphed(
    graphed: Graphed,
    *,
    seed: int,
    variants: Sequence[Mapping[str, Any]],
    scratch: Sequence[Tensor],
    tolerance: float | None,
) -> CheckReport:
    """What ``Graphed.verify`` documents."""
    generation = graphed.generation
    assert generation.findings is not None
    if tolerance is None:
        tolerance = generation.findings.tolerance
    with generation.pool.use():
        report = check(_target(generation, variants, scratch), seed=seed, tolerance=tolerance)
    _check_kept_results(graphed, report, seed=seed)
    template = generation.template
    for leaf in template.frozen_tensors:
        report.frozen_arguments[leaf.name] = (
            f"a tensor {leaf.layout[0]} {leaf.layout[2]} at {leaf.address:#x}"
        )
    for value in template.frozen_values:
        report.frozen_arguments[value.name] = f"{value.value!r:.80}"
    for name, constant in generation.findings.outputs.frozen_leaves.items():
        report.frozen_arguments[f"result {name}"] = f"{constant!r:.80}"
    return report


def _target(
    generation: Generation, variants: Sequence[Mapping[str, Any]], scratch: Sequence[Tensor]
) -> CheckTarget:
    findings, buckets, template = generation.findings, generation.buckets, generation.template
    assert findings is not None
    state = generation.state_tensors()

    def make_values(real: BatchDescriptor, generator: torch.Generator) -> Values:
        sizes = buckets.sizes_of(real)
        return generation.values_of(Call(generation.samples.fresh(sizes, generator), sizes))

    def context_of(real: BatchDescriptor) -> ForwardContext:
        sizes = buckets.sizes_of(real)
        return ForwardContext(batch=RealSizes(buckets.symbols, sizes=sizes, device=template.device))

    def run_plain(real: BatchDescriptor, values: Values) -> Sequence[Tensor]:
        args, kwargs = template.fill(values)  # type: ignore[arg-type]  # declared inputs are tensors
        with use_forward_context(context_of(real)):
            return findings.outputs.flatten(generation.fn(*args, **kwargs))

    def run_variants(descriptor: BatchDescriptor, values: Values) -> Iterable[tuple[str, OpLog]]:
        for changes in variants:
            log = OpLog()
            args, kwargs = template.replaced(changes).fill(values)  # type: ignore[arg-type]
            context = use_forward_context(context_of(descriptor))
            with torch.no_grad(), saved_contents(state), context, log:
                findings.outputs.flatten(generation.fn(*args, **kwargs))
            yield ", ".join(f"{name}={value!r:.40}" for name, value in changes.items()), log

    return CheckTarget(
        name=str(generation.strategy),
        runner=generation.runner,
        descriptors=buckets.live_descriptors(),
        real_descriptors=lambda bucket: _real_descriptors(generation, bucket),
        make_values=make_values,
        run_plain=run_plain,
        find=lambda real: generation.find(buckets.sizes_of(real)),
        roots=generation.roots,
        state=state,
        scratch=scratch,
        audit=generation.changes,
        live_names=findings.live_names - {effect.partition(":")[0] for effect in findings.side_effects},
        draws_random_numbers=findings.draws_random_numbers,
        variants=run_variants,
    )


def _real_descriptors(generation: Generation, bucket: BatchDescriptor) -> list[BatchDescriptor]:
    """The bucket itself, the smallest batch that it serves, and one in between."""
    buckets = generation.buckets
    sizes = buckets.sizes_of(bucket)
    smallest = {
        symbol: 1 + max((s for s in buckets.ladders[symbol].sizes if s < size), default=0)
        for symbol, size in sizes.items()
    }
    between = smaller_than(sizes) if min(sizes.values()) > 1 else sizes
    found = {symbol: max(between[symbol], smallest[symbol]) for symbol in sizes}
    return list(dict.fromkeys(buckets.descriptor(s) for s in (sizes, found, smallest)))


def _check_kept_results(graphed: Graphed, report: CheckReport, *, seed: int) -> None:
    """Results of one call must outlive the next ones, unless the user asked for static memory."""
    generation = graphed.generation
    target = str(generation.strategy)
    if not graphed.options.copy_outputs:
        reason = "copy_outputs=False: results are valid until the next call"
        report.add("kept results", target, "", reason, skipped=True)
        return
    generator = torch.Generator().manual_seed(seed + 1)
    log, graphed.log = graphed.log, type(graphed.log)()
    state = saved_contents(generation.state_tensors())
    device = generation.device.torch_device
    gpus = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=gpus), no_traffic(generation.runner), state:
            for bucket in generation.buckets.live_descriptors()[-2:]:
                sizes = generation.buckets.sizes_of(bucket)
                first, second = (
                    generation.template.fill(generation.samples.fresh(sizes, generator)) for _ in range(2)
                )
                kept = _tensors(graphed, first)
                copies = [tensor.clone() for tensor in kept]
                _tensors(graphed, second)
                mismatch = exact_mismatch(kept, copies)
                report.add(
                    "kept results", target, sizes_text(sizes), None if mismatch is None else str(mismatch)
                )
    finally:
        graphed.log = log


def _tensors(graphed: Graphed, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    result = graphed(*call[0], **call[1])
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
