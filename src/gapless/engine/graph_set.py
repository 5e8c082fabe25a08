"""The engine's graphs: prefill, decode, head and sampling over one store, and the callables they capture.

*Full* prefill captures embedding, layers and final norm, keyed by tokens; *breakable* captures the layers
alone and embeds eagerly on the real batch; *piecewise* captures embedding and layers as pieces of a traced
forward. All leave hidden states in a shared buffer from which the head, a graph of its own keyed by sampled
rows, picks the last token of each request. Full prefill on fused kernels stops behind the last layer's
attention, and the head's graph does what follows for those tokens alone. *Full* decode holds everything up to
the greedy token in one graph. Random sampling is a graph over the logits, with every parameter in a
static buffer. All of them run one after another on one stream, so they share one pool. Read ``runner.py`` for
how a step uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gapless.attention.base import AttentionMetadata
from gapless.engine.compiled_forward import NOT_COMPILED, CompiledForwards, trace_tokens
from gapless.engine.inputs import (
    NEEDS_LOGITS,
    NO_DRAWN_ROWS,
    PACKED_TABLES,
    hidden_field,
    logits_flag,
    select_inputs,
    token_fields,
)
from gapless.engine.media_buffers import MediaBuffers, embeds_with_media, layers_with_media, media_to_tail
from gapless.graphs.audit import Snapshot
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.buffers import InputViews, StaticInputs
from gapless.graphs.input_field import InputField
from gapless.graphs.modes import Phase, Strategy
from gapless.graphs.runner import GraphRunner, OutputField
from gapless.graphs.store import GraphStore
from gapless.kernels.head import finish_greedy
from gapless.kernels.head_product import head_greedy
from gapless.kernels.sample import MAX_VOCAB_SIZE, draw_tokens
from gapless.kernels.step_arrays import write_step_arrays
from gapless.models.base import CausalModel, ModelInfo
from gapless.sampling.sampler import sample, sample_unfiltered

SAMPLING_FIELDS = (
    InputField(name="temperature", dims=("rows",), dtype=torch.float32, pad=0.0),
    InputField(name="seed", dims=("rows",), dtype=torch.int64, pad=0),
    InputField(name="index", dims=("rows",), dtype=torch.int32, pad=0),
)
FILTER_FIELDS = (
    InputField(name="top_k", dims=("rows",), dtype=torch.int32, pad=0),
    InputField(name="top_p", dims=("rows",), dtype=torch.float32, pad=1.0),
    InputField(name="min_p", dims=("rows",), dtype=torch.float32, pad=0.0),
)


_SAMPLED_ROWS = 32
"""Rows that one block of the sampling graph works on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """The largest step: what every static buffer is sized for."""

    max_num_tokens: int
    max_num_reqs: int
    max_model_len: int
    block_size: int

    @property
    def max_blocks(self) -> int:
        """Columns of the block table."""
        return -(-self.max_model_len // self.block_size)


class GraphSet:
    """Runners of all phases over ``store``. Nothing is captured until ``capture``."""

    def __init__(
        self,
        model: CausalModel,
        *,
        store: GraphStore,
        limits: StepLimits,
        prefill: Strategy,
        decode: Strategy,
        row_strategy: Strategy,
        compiled: CompiledForwards = NOT_COMPILED,
    ) -> None:
        """``compiled``: traced forwards, of which full and piecewise graphs are made if there are any."""
        self.store, self.limits = store, limits
        self.compiled = compiled
        self._model = model
        self.captured_model: Snapshot | None = None
        """Where the model's tensors lay when the last graph had been captured."""
        self.media: MediaBuffers | None = None
        """Rows of an encoder that prefill steps read; None for a model that takes text only."""
        if model.info.is_multimodal:
            self.media = MediaBuffers(
                model.info, max_num_tokens=limits.max_num_tokens, torch_device=store.device.torch_device
            )
        self.makes_slots = self._makes_slots(prefill)
        """Whether prefill graphs make positions, slots and block tables themselves."""
        self.has_tail = self._has_tail(prefill, decode)
        """Whether prefill stops behind the last layer's attention, and the head does the rest."""
        self._states = _state_outputs(model.info, has_tail=self.has_tail)
        self._logits = OutputField(name="logits", dim="rows", row_shape=(model.info.vocab_size,))
        self._tokens = OutputField(name="tokens", dim="rows", dtype=torch.int64)
        # One row more than any step draws: it stays 0, for inputs that are no drawn token.
        self.tokens = store.output("tokens", (limits.max_num_reqs + 1,), torch.int64)
        self.prefill = self._hidden_runner(Phase.PREFILL, prefill, limits.max_num_tokens)
        self.decode = (
            self._decode_runner(decode)
            if decode in (Strategy.FULL, Strategy.DISABLED)
            else self._hidden_runner(Phase.DECODE, decode, limits.max_num_reqs)
        )
        self.decode_makes_logits = decode in (Strategy.FULL, Strategy.DISABLED)
        self.state_buffers = [self.prefill.output_buffer(output.name) for output in self._states]
        """``[T, ...]`` each: what a prefill step leaves of its tokens."""
        self.head = self._row_runner(
            lambda views: self._head(
                self._hidden(*(b.index_select(0, views["hidden_rows"]) for b in self.state_buffers)), views
            ),
            phase=Phase.HEAD,
            strategy=row_strategy,
            fields=(InputField(name="hidden_rows", dims=("rows",), pad=0), NEEDS_LOGITS),
            outputs=(self._logits, self._tokens),
        )
        self.logits = self.head.output_buffer("logits")
        """``[R, V]`` float32 (static). The first rows are those of the last step if it was told that they are
        needed (``NEEDS_LOGITS``). If it was not, fused kernels have left what was there: do not read them."""
        self.keeps_logits = False
        """Whether every step is told so, for whoever reads ``logits`` beside the engine."""
        self.sample = self._row_runner(
            lambda views: (self._sample(views, sample_unfiltered, SAMPLING_FIELDS),),
            phase=Phase.SAMPLE,
            strategy=row_strategy,
            fields=SAMPLING_FIELDS,
            outputs=(self._tokens,),
        )
        self.sample_filtered = self._row_runner(
            lambda views: (self._sample(views, sample, SAMPLING_FIELDS + FILTER_FIELDS),),
            phase=Phase.SAMPLE_FILTERED,
            strategy=row_strategy,
            fields=SAMPLING_FIELDS + FILTER_FIELDS,
            outputs=(self._tokens,),
        )

    def compile(self) -> None:
        """Trace the forwards that there are and that have not been traced yet; before any capture.

        Raises ``CompileError``.
        """
        for forward in self.compiled.distinct:
            if forward.is_compiled:
                continue
            is_of_prefill = self.prefill.is_compiled and forward is self.compiled.prefill
            runner = self.prefill if is_of_prefill else self.decode
            num_tokens = trace_tokens(forward, max_num_tokens=runner.inputs.max_sizes["tokens"])
            is_decode = runner is self.decode and self.decode_makes_logits  # a token for each request
            num_reqs = num_tokens if is_decode else 1
            runner.compile(BatchDescriptor(num_tokens=num_tokens, num_reqs=num_reqs, uniform=is_decode))

    @property
    def vocab_size(self) -> int:
        return self._model.info.vocab_size

    @property
    def rope_axes(self) -> int:
        return self._model.info.rope_axes

    @property
    def has_fused_sampling(self) -> bool:
        """Whether sampling runs in Triton kernels."""
        return self._model.has_fused_kernels and self.vocab_size <= MAX_VOCAB_SIZE

    def _hidden_runner(self, phase: Phase, strategy: Strategy, max_num_tokens: int) -> GraphRunner:
        """Hidden states of every token. Breakable: the layers alone, embeddings made eagerly before."""
        info, model = self._model.info, self._model
        media = self.media if phase is Phase.PREFILL else None
        makes_slots = self.makes_slots and phase is Phase.PREFILL
        fields = self._token_fields(has_media=media is not None, makes_slots=makes_slots)
        prologue: Callable[[InputViews, Mapping[str, int]], Mapping[str, Tensor]] | None = None
        if strategy is Strategy.BREAKABLE:
            fields = (*fields, hidden_field(hidden_size=info.hidden_size, dtype=info.dtype))

            def prologue(views: InputViews, num_real: Mapping[str, int]) -> Mapping[str, Tensor]:
                num_tokens = num_real["tokens"]
                input_ids_T = views["input_ids"][:num_tokens]
                if media is None:
                    return {"hidden": model.embed(input_ids_T)}
                is_media_T, (embeds_TE, _) = views["is_media"][:num_tokens], media.rows(num_tokens)
                return {"hidden": embeds_with_media(model, input_ids_T, is_media_T, embeds_TE)}

            def fn(views: InputViews) -> tuple[Tensor, ...]:
                hidden_TE, positions = views["hidden"], self._positions(views)
                if media is None:
                    return (model.layers(hidden_TE, positions),)
                _, deepstack_TLE = media.rows(views.sizes["tokens"])
                return (layers_with_media(model, hidden_TE, positions, views["is_media"], deepstack_TLE),)
        elif media is not None:

            def fn(views: InputViews) -> tuple[Tensor, ...]:
                return self._states_with_media(views, media)
        else:

            def fn(views: InputViews) -> tuple[Tensor, ...]:
                if makes_slots:
                    self._write_step_arrays(views)
                if self.has_tail:
                    drawn = {"drawn_rows_T": views["drawn_rows"], "drawn_R": self.tokens}
                    return model.drawn_to_tail(views["input_ids"], self._positions(views), **drawn)
                return (self._hidden_states(views, phase),)

        return self._token_runner(
            fn, phase=phase, strategy=strategy, fields=fields, outputs=self._states,
            max_num_tokens=max_num_tokens, prologue=prologue,
        )  # fmt: skip

    def _decode_runner(self, strategy: Strategy) -> GraphRunner:
        """Everything in one graph: one token per request in, logits and the greedy token out."""

        def fn(views: InputViews) -> tuple[Tensor, ...]:
            return self._head(self._hidden_states(views, Phase.DECODE), views)

        fields = (NEEDS_LOGITS, *self._token_fields())  # the block table, which is by column, must be last
        return self._token_runner(
            fn, phase=Phase.DECODE, strategy=strategy, fields=fields, outputs=(self._logits, self._tokens),
            max_num_tokens=self.limits.max_num_reqs, prologue=None,
        )  # fmt: skip

    def _token_runner(
        self,
        fn: Callable[[InputViews], tuple[Tensor, ...]],
        *,
        phase: Phase,
        strategy: Strategy,
        fields: tuple[InputField, ...],
        outputs: tuple[OutputField, ...],
        max_num_tokens: int,
        prologue: Callable[[InputViews, Mapping[str, int]], Mapping[str, Tensor]] | None,
    ) -> GraphRunner:
        max_num_reqs = min(self.limits.max_num_reqs, max_num_tokens)
        inputs = StaticInputs(
            fields,
            max_sizes={"tokens": max_num_tokens, "reqs": max_num_reqs, "rows": max_num_reqs},
            torch_device=self.store.device.torch_device,
        )
        return GraphRunner(
            fn,
            phase=phase,
            strategy=strategy,
            inputs=inputs,
            outputs=outputs,
            store=self.store,
            sizes_of=lambda d: {"tokens": d.num_tokens, "reqs": d.num_reqs, "rows": d.num_reqs},
            make_dummy=lambda d: select_inputs(self._dummy_tokens(d), inputs),
            make_batch=self._metadata,
            prologue=prologue,
            is_compiled=self.compiled.of(phase) is not None and strategy is not Strategy.BREAKABLE,
        )

    def _row_runner(
        self,
        fn: Callable[[InputViews], tuple[Tensor, ...]],
        *,
        phase: Phase,
        strategy: Strategy,
        fields: tuple[InputField, ...],
        outputs: tuple[OutputField, ...],
    ) -> GraphRunner:
        inputs = StaticInputs(
            fields,
            max_sizes={"rows": self.limits.max_num_reqs},
            torch_device=self.store.device.torch_device,
        )
        return GraphRunner(
            fn,
            phase=phase,
            strategy=strategy,
            inputs=inputs,
            outputs=outputs,
            store=self.store,
            sizes_of=lambda d: {"rows": d.num_reqs},
            make_dummy=lambda d: {
                f.name: np.zeros(f.shape({"rows": d.num_reqs}), dtype=np.int32) for f in fields
            },
        )

    def embeds_drawn_tokens(self, runner: GraphRunner) -> bool:
        """Whether ``runner`` itself looks drawn tokens up, so that ``take_drawn_tokens`` is not needed."""
        if runner.strategy is Strategy.BREAKABLE or self.compiled.of(runner.phase) is not None:
            return False
        merges_media = self.media is not None and runner.phase is Phase.PREFILL
        return self._model.has_fused_kernels and not merges_media

    def take_drawn_tokens(self, views: InputViews) -> None:
        """Put the tokens that the step before drew where this step's inputs want them: the host, which is one
        step behind, wrote 0 there. An invalid token (-1) becomes 0; its request fails when the host sees it.
        """
        input_ids_T = views["input_ids"]
        drawn_T = self.tokens.index_select(0, views["drawn_rows"])
        input_ids_T.copy_(torch.maximum(input_ids_T, drawn_T))

    def hidden_between(self, start: int, end: int) -> Tensor:
        """Final hidden states of the last prefill step's tokens from ``start`` to ``end``, made outside every
        graph."""
        return self._hidden(*(buffer[start:end] for buffer in self.state_buffers))

    def head_eagerly(self, hidden_RE: Tensor) -> Tensor:
        """``[R, E] -> [R, V]`` float32 logits outside every graph, in memory of their own."""
        return self._model.head(hidden_RE)

    def inputs_of(
        self, runner: GraphRunner, values: Mapping[str, np.ndarray], *, needs_logits: bool
    ) -> Mapping[str, np.ndarray]:
        """What ``runner`` is loaded with: a step's arrays as they were built; those of single tokens, which
        are built for decode, as the inputs of a prefill graph where one serves them. ``needs_logits``:
        whether somebody reads the logits, which graphs that make them are told."""
        if runner is self.head or (runner is self.decode and self.decode_makes_logits):
            return {**values, NEEDS_LOGITS.name: logits_flag(is_needed=needs_logits)}
        if self.makes_slots and runner is self.prefill and PACKED_TABLES not in values:
            return select_inputs(values, runner.inputs)
        return values

    def _has_tail(self, prefill: Strategy, decode: Strategy) -> bool:
        """Only where no graph is of layers alone, and not for a model of embeddings, which has no head."""
        in_one = (Strategy.FULL, Strategy.DISABLED)
        is_whole = prefill in in_one and decode in in_one and self.compiled.prefill is None
        return is_whole and self._model.has_tail and not self._model.info.is_pooling

    def _makes_slots(self, prefill: Strategy) -> bool:
        """Only where one graph holds all from the first kernel on. Positions of several axes come from the
        host anyway, and traced code does not see block tables."""
        if prefill is not Strategy.FULL or self.compiled.prefill is not None or self.media is not None:
            return False
        return self._model.has_fused_kernels and self.rope_axes == 1

    def _write_step_arrays(self, views: InputViews) -> None:
        write_step_arrays(
            views["query_start_loc"],
            views["seq_lens"],
            views[PACKED_TABLES].view(-1),
            views["positions"],
            views["slot_mapping"],
            views["block_table"],
            self.limits.block_size,
        )

    def _token_fields(self, *, has_media: bool = False, makes_slots: bool = False) -> tuple[InputField, ...]:
        return token_fields(
            max_blocks=self.limits.max_blocks,
            vocab_size=self.vocab_size,
            max_num_reqs=self.limits.max_num_reqs,
            rope_axes=self.rope_axes,
            has_media=has_media,
            makes_slots=makes_slots,
        )

    def _positions(self, views: InputViews) -> Tensor:
        """What the model rotates by: ``[T]``, or ``[3, T]``."""
        return views["positions" if self.rope_axes == 1 else "rope_positions"]

    def _hidden_states(self, views: InputViews, phase: Phase) -> Tensor:
        input_ids_T, positions = views["input_ids"], self._positions(views)
        compiled = self.compiled.of(phase)
        if compiled is not None:
            return compiled(input_ids_T, positions)
        if self._model.has_fused_kernels:
            return self._model.hidden_states_of_drawn(
                input_ids_T, positions, drawn_rows_T=views["drawn_rows"], drawn_R=self.tokens
            )
        return self._model.layers(self._model.embed(input_ids_T), positions)

    def _states_with_media(self, views: InputViews, media: MediaBuffers) -> tuple[Tensor, ...]:
        input_ids_T, positions, is_media_T = views["input_ids"], self._positions(views), views["is_media"]
        embeds_TE, deepstack_TLE = media.rows(views.sizes["tokens"])
        if self.compiled.prefill is not None:
            return (self.compiled.prefill(input_ids_T, positions, is_media_T, embeds_TE, deepstack_TLE),)
        hidden_TE = embeds_with_media(self._model, input_ids_T, is_media_T, embeds_TE)
        if self.has_tail:
            return media_to_tail(self._model, hidden_TE, positions, is_media_T, deepstack_TLE)
        return (layers_with_media(self._model, hidden_TE, positions, is_media_T, deepstack_TLE),)

    def _hidden(self, *states: Tensor) -> Tensor:
        """``[R, E]`` of the same rows of all ``state_buffers``."""
        return self._model.tail(*states) if self.has_tail else states[0]

    def _head(self, hidden_RE: Tensor, views: InputViews) -> tuple[Tensor, Tensor]:
        if self._model.has_fused_kernels:
            num_rows = hidden_RE.shape[0]
            logits_RV, tokens_R = self.logits[:num_rows], self.tokens[:num_rows]
            needs_logits_1 = views[NEEDS_LOGITS.name]
            outputs = (logits_RV, tokens_R, needs_logits_1, INVALID_TOKEN)
            weight_VE = self._model.head_rows
            if weight_VE is not None:
                head_greedy(hidden_RE, weight_VE, *outputs)
            else:
                finish_greedy(self._model.raw_logits(hidden_RE), *outputs)
            return logits_RV, tokens_R
        logits_RV = self._model.head(hidden_RE)
        return logits_RV, greedy_or_invalid(logits_RV)

    def _sample(
        self, views: InputViews, draw: Callable[..., Tensor], fields: tuple[InputField, ...]
    ) -> Tensor:
        """In a few kernels on a GPU. Else row block by row block, so that the pool holds a few ``[32, V]``
        planes and not ``[R, V]`` ones (1 GiB at 256 rows of a large vocabulary).
        """
        if self.has_fused_sampling:
            num_rows = views.sizes["rows"]
            tokens_R = self.tokens[:num_rows]
            filters = [views.tensors.get(field.name) for field in FILTER_FIELDS]
            params = [views[field.name] for field in SAMPLING_FIELDS]
            draw_tokens(self.logits[:num_rows], tokens_R, INVALID_TOKEN, *params, *filters)
            return tokens_R
        drawn = []
        for start in range(0, views.sizes["rows"], _SAMPLED_ROWS):
            block = slice(start, min(start + _SAMPLED_ROWS, views.sizes["rows"]))
            logits_RV = self.logits[block]
            tokens_R = draw(logits_RV, **{f"{f.name}_R": views[f.name][block] for f in fields})
            drawn.append(torch.where(logits_RV.amax(-1).isnan(), INVALID_TOKEN, tokens_R.to(torch.int64)))
        return torch.cat(drawn)

    def _metadata(self, views: InputViews, descriptor: BatchDescriptor) -> AttentionMetadata:
        uniform_len = descriptor.num_tokens // max(descriptor.num_reqs, 1)
        return AttentionMetadata(
            query_start_loc=views["query_start_loc"],
            seq_lens=views["seq_lens"],
            block_table=views["block_table"],
            slot_mapping=views["slot_mapping"],
            max_query_len=uniform_len if descriptor.uniform else descriptor.num_tokens,
            max_seq_len=self.limits.max_model_len,
        )

    def _dummy_tokens(self, descriptor: BatchDescriptor) -> dict[str, np.ndarray]:
        """A legal batch of the right kind: exactly uniform for uniform decode, else as few requests as fit.

        Every slot and block lies in the sink block, which exists in a cache of any size, and lengths obey
        1 <= length <= max model length.
        """
        num_tokens, num_reqs = descriptor.num_tokens, descriptor.num_reqs
        if descriptor.uniform:
            lens = np.full(num_reqs, num_tokens // num_reqs, dtype=np.int32)
        else:
            full, rest = divmod(num_tokens, self.limits.max_model_len)
            lens = np.asarray([self.limits.max_model_len] * full + [rest] * (rest > 0), dtype=np.int32)
        query_start_loc = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(lens, out=query_start_loc[1:])
        positions = np.arange(num_tokens, dtype=np.int32) - np.repeat(query_start_loc[:-1], lens)
        return {
            NEEDS_LOGITS.name: logits_flag(is_needed=False),
            "input_ids": np.arange(num_tokens, dtype=np.int32) % self._model.info.vocab_size,
            "drawn_rows": NO_DRAWN_ROWS,
            "positions": positions,
            "rope_positions": np.broadcast_to(positions, (3, num_tokens)),
            "is_media": np.zeros(num_tokens, dtype=np.int32),
            "slot_mapping": positions % self.limits.block_size,
            "query_start_loc": query_start_loc,
            "seq_lens": lens,
            "block_table": np.zeros((len(lens), -(-lens.max() // self.limits.block_size)), dtype=np.int32),
        }


def _state_outputs(info: ModelInfo, *, has_tail: bool) -> tuple[OutputField, ...]:
    sizes = {"hidden": info.hidden_size}
    if has_tail:
        sizes = {"attended": info.num_heads * info.head_size, "residual": info.hidden_size}
    return tuple(
        OutputField(name=name, dim="tokens", row_shape=(size,), dtype=info.dtype)
        for name, size in sizes.items()
    )


INVALID_TOKEN = -1
"""Drawn from a row of logits that holds NaN: the request fails, its neighbours go on."""


def greedy_or_invalid(logits_RV: Tensor) -> Tensor:
    """The best token of each row (int64), ``INVALID_TOKEN`` where a logit is NaN. One pass: max propagates
    NaN."""
    best_R, token_R = logits_RV.max(dim=-1)
    return torch.where(best_R.isnan(), INVALID_TOKEN, token_R)
