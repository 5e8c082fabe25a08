"""ModelRunner: one step of the engine on a device, as graphs wherever the plan allows.

A step reads as a sentence: build the arrays, ask the dispatcher which graph serves, run it, pick the sampled
rows, draw tokens. What serves is decided before a byte is staged, and every step is counted either as a
replay or as an eager run with its reason. ``padded_eager`` runs the same buckets without graphs: the oracle
that graphs must equal bit for bit. Read ``graph_set.py`` for what is captured and ``build.py`` for how a
runner comes to be.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapless.attention.base import Attention
from gapless.engine.draw import TokenDrawer, find_logit_readers
from gapless.engine.experts import ExpertLoad
from gapless.engine.graph_set import GraphSet, StepLimits
from gapless.engine.hidden_taps import HiddenTaps, find_taps
from gapless.engine.inputs import BatchArrays, BatchBuilder
from gapless.engine.media import StepMedia
from gapless.engine.row_graphs import PADDED_EAGER, RowGraphs
from gapless.engine.step import PendingStep, ScheduledBatch, StepResult
from gapless.errors import GaplessError
from gapless.graphs.batch import BatchDescriptor, BatchShape
from gapless.graphs.dispatcher import Dispatch, Dispatcher, EagerReason
from gapless.graphs.modes import Phase, RuntimeMode
from gapless.graphs.plan import GraphPlan
from gapless.graphs.report import StepLog, build_report


class ModelRunner:
    """Executes scheduled batches. Implements ``StepRunner``."""

    def __init__(
        self,
        graphs: GraphSet,
        *,
        plan: GraphPlan,
        dispatcher: Dispatcher,
        rows: RowGraphs,
        log: StepLog,
        num_blocks: int,
        attention_layers: Iterable[Attention],
        startup: dict[str, Any],
        media: StepMedia | None = None,
        expert_load: ExpertLoad | None = None,
    ) -> None:
        """``media``: of a model that takes images; writes what the prefill graphs of ``graphs`` read.
        ``expert_load``: counts that the model makes in every step."""
        limits: StepLimits = graphs.limits
        self.num_blocks = num_blocks
        self.block_size = limits.block_size
        self.max_model_len = limits.max_model_len
        self.max_num_reqs = limits.max_num_reqs
        self.max_num_batched_tokens = limits.max_num_tokens
        self.vocab_size = graphs.vocab_size
        self.plan, self.dispatcher, self.log = plan, dispatcher, log
        self._graphs, self._rows = graphs, rows
        self.media, self._expert_load = media, expert_load
        self._startup = startup
        self._device = graphs.store.device
        self._drawer = TokenDrawer(graphs, rows, log)
        self._taps = HiddenTaps(graphs, log)
        self._builder = BatchBuilder(
            block_size=limits.block_size,
            max_num_reqs=limits.max_num_reqs,
            max_num_tokens=limits.max_num_tokens,
            max_blocks=limits.max_blocks,
            rope_axes=graphs.rope_axes,
            makes_slots=graphs.makes_slots,
        )
        self._layers = list(attention_layers)
        self._padded_eager = False
        self._is_shut_down = False
        self._final_report: dict[str, Any] | None = None
        self.max_steps_ahead = 1 if self._device.torch_device.type == "cuda" else 0
        """On a CPU the device is the host: nothing would overlap."""

    @property
    def graphs(self) -> GraphSet:
        """The runners of all phases."""
        return self._graphs

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step and wait for its tokens."""
        return self.launch(batch).wait()

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start one step; its tokens are on their way to the host when this returns.

        It runs on the device's own stream, after all that the caller's stream was given before (a weight
        written in place, say). The caller's stream does not wait for it: what a step leaves on the device may
        be read or overwritten once its tokens have been waited for. Raises ``GaplessError`` after
        ``shutdown``.
        """
        if self._is_shut_down:
            raise GaplessError("the runner has been shut down: its graphs and cache are gone")
        arrays = self._builder.build(batch)
        decision = self.dispatcher.dispatch(BatchShape(query_lens=arrays.query_lens))
        entries = batch.sampled_entries
        readers = find_logit_readers(entries, batch.sampling_params)
        taps = find_taps(batch)
        if taps and decision.phase is Phase.DECODE:
            decision = Dispatch(mode=RuntimeMode.NONE, phase=Phase.PREFILL, reason=EagerReason.HIDDEN_STATES)
        with torch.no_grad(), self._device.step_scope():
            if self.media is not None:
                decision, arrays = self._stage_media(self.media, batch, arrays, decision)
            needs_logits = readers is not None or self._graphs.keeps_logits
            greedy_R = self._forward(decision, arrays, needs_logits=needs_logits)
            tapped = self._taps.read(taps) if taps else None
            drawn = self._drawer.draw(entries, batch.sampled_positions, greedy_R, readers=readers)
            return drawn if tapped is None else tapped.of(drawn)

    def _stage_media(
        self, media: StepMedia, batch: ScheduledBatch, arrays: BatchArrays, decision: Dispatch
    ) -> tuple[Dispatch, BatchArrays]:
        """Put the step's rows of media in their places. Decode graphs have none for them, so a step of single
        tokens among which there is a placeholder runs as prefill."""
        is_media_T = media.stage(batch, sum(arrays.query_lens))
        if (decision.owner or decision.phase) is Phase.DECODE:
            if not is_media_T.any():
                return decision, arrays
            decision = Dispatch(mode=RuntimeMode.NONE, phase=Phase.PREFILL, reason=EagerReason.MEDIA_ROWS)
        return decision, replace(arrays, values={**arrays.values, "is_media": is_media_T})

    @contextmanager
    def padded_eager(self) -> Iterator[None]:
        """Within the block every step runs eagerly on its padded bucket: same kernels, same shapes, no
        graph."""
        self._padded_eager = self._rows.padded_eager = True
        try:
            yield
        finally:
            self._padded_eager = self._rows.padded_eager = False

    def report(self) -> dict[str, Any]:
        """The report schema of ``graphs/report.py``, with how the runner started; after ``shutdown`` the last
        one, with nothing held."""
        if self._final_report is not None:
            return {**self._final_report, "memory": {**self._final_report["memory"], "pool_bytes": 0}}
        return self._make_report()

    def _make_report(self) -> dict[str, Any]:
        report = build_report(plan=self.plan.to_dict(), store=self._graphs.store, log=self.log)
        media = None
        if self.media is not None:
            report, media = self.media.add_graphs(report), self.media.report()
        compiled = self._graphs.compiled.report()
        experts = None
        if self._expert_load is not None:
            self._device.synchronize()
            experts = self._expert_load.report()
        return {**report, "startup": self._startup, "compile": compiled, "media": media, "experts": experts}

    def reset_report(self) -> None:
        self.log.clear()
        if self.media is not None:
            self.media.cache.reset_counts()
        if self._expert_load is not None:
            self._expert_load.reset()

    def shutdown(self) -> None:
        """Release graphs, static buffers and the KV cache; the weights go with the last reference to the
        model.

        Safe to call twice; the report stays, a step raises.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._device.synchronize()
        self._final_report = self._make_report()  # before what it tells of is gone
        self._graphs.store.release()
        if self.media is not None:
            self.media.shut_down()
        for layer in self._layers:
            layer.unbind()
        del self._graphs, self._drawer, self._taps, self._rows, self._layers
        gc.collect()  # closures and runners refer to each other, and hold device memory
        if self._device.torch_device.type == "cuda":
            torch.cuda.empty_cache()

    def _forward(self, decision: Dispatch, arrays: BatchArrays, *, needs_logits: bool) -> Tensor:
        """The best token of each sampled entry; with ``needs_logits`` the first rows of the logits buffer are
        theirs."""
        owner = decision.owner or decision.phase
        runner = self._graphs.decode if owner is Phase.DECODE else self._graphs.prefill
        num_tokens, num_reqs = len(arrays.values["input_ids"]), len(arrays.query_lens)
        values = self._graphs.inputs_of(runner, arrays.values, needs_logits=needs_logits)
        must_amend = arrays.has_unknown and not self._graphs.embeds_drawn_tokens(runner)
        amend = self._graphs.take_drawn_tokens if must_amend else None
        if decision.descriptor is None:
            assert decision.reason is not None
            self.log.count_eager(decision.phase, str(decision.reason), num_real=num_tokens)
            is_uniform = decision.phase is Phase.DECODE
            real = BatchDescriptor(num_tokens=num_tokens, num_reqs=num_reqs, uniform=is_uniform)
            results = runner.run_eager(real, values, amend=amend)
        else:
            descriptor = decision.descriptor
            mode = RuntimeMode.NONE if self._padded_eager else decision.mode
            num_real_rows = {"tokens": num_tokens, "reqs": num_reqs, "rows": num_reqs}
            results = runner.run(descriptor, mode, values, num_real=num_real_rows, amend=amend)
            if self._padded_eager:
                self.log.count_eager(decision.phase, PADDED_EAGER, num_real=num_tokens)
            elif descriptor.uniform:
                self.log.count_replay(decision.phase, runner.strategy, descriptor.num_reqs, num_reqs)
            else:
                self.log.count_replay(decision.phase, runner.strategy, descriptor.num_tokens, num_tokens)
        if owner is Phase.DECODE and self._graphs.decode_makes_logits:
            return self._keep_sampled(results[1], arrays, num_reqs, needs_logits=needs_logits)
        return self._run_head(arrays, needs_logits=needs_logits)

    def _run_head(self, arrays: BatchArrays, *, needs_logits: bool) -> Tensor:
        rows = arrays.sampled_rows
        if not len(rows):
            return self._graphs.tokens[:0]
        head = self._graphs.head
        values = self._graphs.inputs_of(
            head, {"hidden_rows": rows.astype(np.int32)}, needs_logits=needs_logits
        )
        return self._rows.run(head, values, len(rows))[1]

    def _keep_sampled(
        self, greedy_B: Tensor, arrays: BatchArrays, num_reqs: int, *, needs_logits: bool
    ) -> Tensor:
        """Decode graphs make logits for every request; one-token prompt chunks that end early draw
        nothing."""
        rows = arrays.sampled_rows
        if len(rows) == num_reqs:
            return greedy_B
        index = torch.as_tensor(rows, dtype=torch.int64, device=greedy_B.device)
        if needs_logits:
            self._graphs.logits[: len(rows)].copy_(self._graphs.logits.index_select(0, index))
        kept_R = self._graphs.tokens[: len(rows)]
        return kept_R.copy_(greedy_B.index_select(0, index))
