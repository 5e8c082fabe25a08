"""From a config and a loaded model to a runner that is ready: plan, memory, cache, graphs.

The order matters. The plan is made from facts alone; on a GPU the cost of graphs and activations is measured
with a cache of one block before the real cache is sized; only then are limits final, sizes above them
dropped, and the graphs captured, prefill before decode and largest first, into one pool. After that the store
is sealed, and every captured key is looked up once through the dispatcher, which must find it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from gapless.attention.registry import create_backend, select_backend
from gapless.cache.pool import MIN_BLOCKS, KVCachePool, bytes_per_block
from gapless.config import DEFAULT_GPU_MEMORY_UTILIZATION, EngineConfig
from gapless.engine.after_capture import check_lookup, measure_gaps, note_addresses
from gapless.engine.compiled_forward import CompiledForwards, make_compiled_forwards
from gapless.engine.experts import ExpertLoad, set_breaks
from gapless.engine.graph_set import GraphSet, StepLimits
from gapless.engine.media import StepMedia
from gapless.engine.media_setup import embedding_cache_bytes, make_encoder, measure_media
from gapless.engine.memory import MemoryEstimate, measure, num_blocks_on_gpu, report_of
from gapless.engine.parallel_runner import ParallelRunner
from gapless.engine.penalties import most_bytes
from gapless.engine.planning import make_plan, max_step_tokens
from gapless.engine.precompile import precompile
from gapless.engine.row_graphs import RowGraphs
from gapless.engine.rules import refuse_missing_encoder
from gapless.engine.runner import ModelRunner
from gapless.errors import ConfigError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.capture import garbage_set_aside
from gapless.graphs.device import get_device
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.dispatcher import Dispatcher
from gapless.graphs.ladder import decode_ladder
from gapless.graphs.modes import Phase, Strategy
from gapless.graphs.plan import GraphPlan
from gapless.graphs.report import StepLog
from gapless.graphs.runner import GraphRunner
from gapless.graphs.store import FailedCapture, GraphStore
from gapless.kernels.launch import prepare_compiling
from gapless.models.registry import LoadedModel, load_model, read_model_info
from gapless.models.vision.base import MediaEncoder
from gapless.parallel.collectives import ALL_REDUCE_OPS
from gapless.parallel.group import RankGroup
from gapless.parallel.shard import WHOLE

Progress = Callable[[str, int, int], None]
"""Called with a stage name, how much is done and how much there is."""

logger = logging.getLogger(__name__)
plan_logger = logging.getLogger("gapless.plan")
"""Of its own, so that whoever shows the plan in another way can silence it."""


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one. Raises ``ConfigError`` for a device this machine does not have."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device=cuda: this machine or this torch has no CUDA device; use cpu or auto")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedEngine:
    """A runner with what belongs to its model."""

    runner: ModelRunner | ParallelRunner
    loaded: LoadedModel
    config: EngineConfig


def open_engine(config: EngineConfig, progress: Progress | None = None) -> OpenedEngine:
    """Load the model that ``config`` names and build its runner, on as many ranks as it asks for; errors are
    those of the two parts, and ``RankError`` when a rank is lost."""
    torch_device = resolve_device(config.device)
    config = config.with_device_defaults(torch_device.type)
    if config.tensor_parallel_size > 1:
        from gapless.engine.ranks import open_ranks

        return open_ranks(config, device_type=torch_device.type, progress=progress, open_one=open_one)
    return open_one(config, torch_device=torch_device, progress=progress)


def open_one(
    config: EngineConfig,
    *,
    torch_device: torch.device,
    group: RankGroup | None = None,
    progress: Progress | None = None,
) -> OpenedEngine:
    """The engine of this process alone: of the whole model, or of one rank of ``group``. ``config`` has its
    device defaults."""
    asks_encoder = config.enable_vit_cuda_graph or config.mm_embedding_cache_tokens is not None
    if asks_encoder or config.mm_processor_kwargs:
        refuse_missing_encoder(config, read_model_info(config.model))  # before weights are read
    prepare_compiling(torch_device)
    start = time.perf_counter()
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        device=torch_device,
        load_format=config.load_format,
        seed=config.seed,
        max_model_len=config.max_model_len,
        shard=WHOLE if group is None else group.shard,
        progress=progress,
    )
    if loaded.processor is not None:
        from gapless.multimodal.overrides import override  # needs Pillow, as has the processor

        loaded = replace(loaded, processor=override(loaded.processor, config.mm_processor_kwargs))
    load_s = time.perf_counter() - start
    runner = build_runner(
        config, loaded, torch_device=torch_device, load_s=load_s, progress=progress, group=group
    )
    return OpenedEngine(runner=runner, loaded=loaded, config=config)


def build_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    torch_device: torch.device,
    load_s: float = 0.0,
    progress: Progress | None = None,
    encoder: MediaEncoder | None = None,
    group: RankGroup | None = None,
) -> ModelRunner:
    """Make the runner. ``config`` has its device defaults; ``loaded`` lies on ``torch_device``. ``encoder``
    takes the place of the one that would be made of the model's vision tower. ``group``: the ranks of which
    ``loaded`` is a part; all of them build at the same time.

    Raises ``ConfigError`` for contradictions and ``MemoryLimitError`` when the cache or the largest step does
    not fit. A size that cannot be captured is no error: it stays eager and is in the report.
    """
    build = _Build(config, loaded, torch_device, load_s, progress, group)
    build.encoder = encoder
    try:
        with garbage_set_aside():
            return build.run()
    except BaseException:
        if build.encoder is not None:
            build.encoder.release()
        raise


class _Build:
    """One start-up; holds what its steps share."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        torch_device: torch.device,
        load_s: float,
        progress: Progress | None,
        group: RankGroup | None = None,
    ) -> None:
        assert config.max_running_requests is not None  # with_device_defaults has filled these in
        assert config.chunked_prefill_size is not None
        self.config, self.model, self.info = config, loaded.model, loaded.info
        self.loaded, self.group = loaded, group
        self.num_kv_heads: int = self.model.attention_layers()[0].num_kv_heads
        """Of this rank."""
        self.encoder: MediaEncoder | None = None
        self.log = StepLog()
        self.progress = progress
        self.device: GraphDevice = get_device(torch_device)
        device_type = self.device.torch_device.type
        self.backend_name = select_backend(config.attention_backend, device_type=device_type)
        self.backend = create_backend(config.attention_backend, device_type=device_type)
        self.max_model_len = loaded.max_model_len
        self.max_num_reqs = config.max_running_requests
        self.seconds: dict[str, float] = {"load": load_s}
        self.compiled: CompiledForwards | None = None

    def run(self) -> ModelRunner:
        plan = self._plan()
        layers = self.model.expert_layers()
        set_breaks(layers, self.config.graphs.splitting_ops)
        expert_load = ExpertLoad(layers) if self.config.count_expert_tokens else None
        if self.info.is_multimodal:
            self._capture_encoder()
        with self._stage("cache"):
            num_blocks, estimate = self._size_cache(plan)
            pool = self._make_cache(num_blocks)
        limits = self._limits(pool.num_usable_tokens)
        plan = plan.with_limits(
            max_tokens=limits.max_num_tokens,
            max_reqs=limits.max_num_reqs,
            reason=f"one step holds at most {limits.max_num_tokens} tokens of {limits.max_num_reqs} requests",
        )
        log = self.log
        store = GraphStore(self.device, peers=self.group)
        graphs = self._graph_set(store, plan, limits)
        rows = RowGraphs(_row_sizes(plan, limits), log)
        dispatcher = Dispatcher.build(plan, max_reqs=limits.max_num_reqs)
        self._compile(graphs)
        if estimate is None:
            self._precompile(_to_capture(graphs, rows, dispatcher))
        else:
            _leave_out(estimate.failures, store, graphs, rows, dispatcher)
        with self._stage("capture"):
            self._capture(store, graphs, rows, dispatcher)
            check_lookup(store, dispatcher, plan)
            measure_gaps(graphs, dispatcher, self.group)
            graphs.captured_model = note_addresses(self.model)
        if expert_load is not None:
            expert_load.reset()  # start-up ran dummy batches
        startup = {
            "architecture": self.info.architecture,
            "dtype": str(self.info.dtype).removeprefix("torch."),
            "device": str(self.device.torch_device),
            "graph_device": self.device.name,
            "attention_backend": self.backend_name,
            "num_blocks": pool.num_blocks,
            "cache_bytes": pool.num_bytes,
            "max_model_len": limits.max_model_len,
            "ranks": None if self.group is None else self.group.report(),
            "seconds": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "memory": report_of(estimate, store),
        }
        for line in plan.describe():
            plan_logger.info(line)
        logger.info("start-up: %s", ", ".join(f"{n} {s:.1f} s" for n, s in self.seconds.items()))
        return ModelRunner(
            graphs,
            plan=plan,
            dispatcher=dispatcher,
            rows=rows,
            log=log,
            num_blocks=pool.num_blocks,
            attention_layers=self.model.attention_layers(),
            startup=startup,
            media=self._step_media(graphs),
            expert_load=expert_load,
        )

    def _capture_encoder(self) -> None:
        """Before the cache is sized, so that what its graphs take is not free any more by then."""
        with self._stage("encoder"):
            if self.encoder is None:
                self.encoder = make_encoder(self.config, self.loaded, device=self.device, log=self.log)
            self.encoder.capture(lambda done, total: self._report("encoder", done, total))

    def _step_media(self, graphs: GraphSet) -> StepMedia | None:
        if self.encoder is None or graphs.media is None:
            return None
        capacity = embedding_cache_bytes(self.config, self.info)
        return StepMedia(self.encoder, graphs.media, device=self.device, capacity_bytes=capacity)

    def _plan(self) -> GraphPlan:
        return make_plan(
            self.config,
            self.info,
            attention=(self.backend_name,),
            supports_graphs=self.device.supports_graphs,
            max_model_len=self.max_model_len,
        )

    def _limits(self, usable_tokens: int) -> StepLimits:
        max_model_len = min(self.max_model_len, usable_tokens)
        return StepLimits(
            max_num_tokens=min(max_step_tokens(self.config, max_model_len), usable_tokens),
            max_num_reqs=min(self.max_num_reqs, usable_tokens),
            max_model_len=max_model_len,
            block_size=self.config.block_size,
        )

    def _size_cache(self, plan: GraphPlan) -> tuple[int, MemoryEstimate | None]:
        """Blocks of the cache, the sink included."""
        block_size = self.config.block_size
        most = MIN_BLOCKS - 1 + self.max_num_reqs * -(-self.max_model_len // block_size)
        if self.config.max_total_tokens is not None:
            most = min(most, 1 + self.config.max_total_tokens // block_size)
        if self.config.kv_cache_tokens is not None:
            if self.config.gpu_memory_utilization != DEFAULT_GPU_MEMORY_UTILIZATION:
                logger.warning(
                    "--gpu-memory-utilization=%s has no effect: the cache has a fixed size, %d tokens",
                    self.config.gpu_memory_utilization,
                    self.config.kv_cache_tokens,
                )
            return 1 + self.config.kv_cache_tokens // block_size, None
        limits = self._limits(self.max_model_len * self.max_num_reqs)
        self._make_cache(MIN_BLOCKS)
        penalty_bytes = most_bytes(max_num_reqs=self.max_num_reqs, vocab_size=self.info.vocab_size)
        media_bytes = 0
        if self.encoder is not None:
            media_bytes = measure_media(self.encoder, self.config, self.loaded, device=self.device)
            self.log.clear()  # that was no traffic
        estimate = measure(
            self.device,
            lambda store: self._runners(store, plan, limits),
            penalty_bytes=penalty_bytes,
            media_bytes=media_bytes,
            peers=self.group,
        )
        num_blocks = num_blocks_on_gpu(
            self.device,
            estimate=estimate,
            utilization=self.config.gpu_memory_utilization,
            bytes_per_block=bytes_per_block(
                block_size=block_size,
                num_layers=self.info.num_layers,
                num_kv_heads=self.num_kv_heads,
                head_size=self.info.head_size,
                dtype=self.info.dtype,
            ),
            most=most,
        )
        if self.group is not None:
            num_blocks = self.group.minimum([num_blocks])[0]
        return num_blocks, estimate

    def _make_cache(self, num_blocks: int) -> KVCachePool:
        pool = KVCachePool(
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            num_layers=self.info.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_size=self.info.head_size,
            dtype=self.info.dtype,
            device=self.device.torch_device,
        )
        pool.bind(self.model.attention_layers(), self.backend)
        return pool

    def _graph_set(self, store: GraphStore, plan: GraphPlan, limits: StepLimits) -> GraphSet:
        if self.compiled is None:
            self.compiled = make_compiled_forwards(
                self.model,
                plan=plan,
                splitting_ops=self.config.graphs.splitting_ops,
                always_split=() if self.group is None else ALL_REDUCE_OPS,
                device=self.device,
                max_num_tokens=limits.max_num_tokens,
                max_num_reqs=limits.max_num_reqs,
            )
        return GraphSet(
            self.model,
            store=store,
            limits=limits,
            prefill=plan.prefill.strategy,
            decode=plan.decode.strategy,
            row_strategy=_row_strategy(plan),
            compiled=self.compiled,
        )

    def _runners(
        self, store: GraphStore, plan: GraphPlan, limits: StepLimits
    ) -> list[tuple[GraphRunner, list[BatchDescriptor]]]:
        """Every runner with what it is to capture, in the order of capture."""
        graphs = self._graph_set(store, plan, limits)
        self._compile(graphs)
        dispatcher = Dispatcher.build(plan, max_reqs=limits.max_num_reqs)
        rows = RowGraphs(_row_sizes(plan, limits), StepLog())
        work = _to_capture(graphs, rows, dispatcher)
        self._precompile(work)
        return work

    def _precompile(self, work: list[tuple[GraphRunner, list[BatchDescriptor]]]) -> None:
        apart = nullcontext() if self.group is None else self.group.apart()
        with self._stage("kernels"), apart:
            precompile(work, on_progress=lambda done, total: self._report("kernels", done, total))

    def _compile(self, graphs: GraphSet) -> None:
        """Trace the forward where the plan asks for it; once, whether memory is measured first or not."""
        if all(forward.is_compiled for forward in graphs.compiled.distinct):
            return
        with self._stage("compile"):
            self._report("compile", 0, 1)
            graphs.compile()
            self._report("compile", 1, 1)

    def _capture(self, store: GraphStore, graphs: GraphSet, rows: RowGraphs, dispatcher: Dispatcher) -> None:
        work = _to_capture(graphs, rows, dispatcher)
        total, done = sum(len(descriptors) for _, descriptors in work), 0

        def on_done(descriptor: BatchDescriptor) -> None:
            nonlocal done
            done += 1
            self._report("capture", done, total)

        self._report("capture", 0, total)
        with store.capturing():
            for runner, descriptors in work:
                _drop(runner, runner.capture(descriptors, on_done=on_done), rows, dispatcher)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Time the block as ``name``, without the stages inside it, so that stages add up to the whole."""
        start, before = time.perf_counter(), sum(self.seconds.values())
        yield
        inside = sum(self.seconds.values()) - before
        self.seconds[name] = time.perf_counter() - start - inside

    def _report(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, total)


def _leave_out(
    failures: Sequence[FailedCapture],
    store: GraphStore,
    graphs: GraphSet,
    rows: RowGraphs,
    dispatcher: Dispatcher,
) -> None:
    """Take what could not be captured while memory was measured from what is to be captured now.

    Limits may have shrunk since: what is no longer a size is no failure either.
    """
    for runner, descriptors in _to_capture(graphs, rows, dispatcher):
        found = [f for f in failures if f.key.phase is runner.phase and f.key.descriptor in descriptors]
        store.failures.extend(found)
        _drop(runner, [failure.key.descriptor for failure in found], rows, dispatcher)


def _drop(
    runner: GraphRunner, failed: list[BatchDescriptor], rows: RowGraphs, dispatcher: Dispatcher
) -> None:
    if runner.phase not in (Phase.PREFILL, Phase.DECODE):
        rows.drop(runner, failed)
        return
    for descriptor in failed:
        dispatcher.drop(descriptor, phase=runner.phase)


def _to_capture(
    graphs: GraphSet, rows: RowGraphs, dispatcher: Dispatcher
) -> list[tuple[GraphRunner, list[BatchDescriptor]]]:
    row_stages = (graphs.head, graphs.sample, graphs.sample_filtered)
    work = [
        (graphs.prefill, list(dispatcher.capture_descriptors(Phase.PREFILL))),
        (graphs.decode, list(dispatcher.capture_descriptors(Phase.DECODE))),
        *((stage, rows.descriptors(stage)) for stage in row_stages),
    ]
    return [(runner, descriptors) for runner, descriptors in work if descriptors]


def _row_strategy(plan: GraphPlan) -> Strategy:
    """Head and sampling are graphs wherever any phase is: they hold no attention, so nothing limits them."""
    off = plan.prefill.strategy is plan.decode.strategy is Strategy.DISABLED
    return Strategy.DISABLED if off else Strategy.FULL


def _row_sizes(plan: GraphPlan, limits: StepLimits) -> tuple[int, ...]:
    """The decode ladder where decode has graphs of its own, else the default ladder; always up to every
    request."""
    if _row_strategy(plan) is Strategy.DISABLED:
        return ()
    if not plan.decode.ladder.is_explicit:
        return decode_ladder(max_reqs=limits.max_num_reqs).sizes
    return tuple(sorted({*plan.decode.ladder.sizes, limits.max_num_reqs}))
