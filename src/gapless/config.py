"""User-facing options as frozen dataclasses: ``GraphConfig`` (the graphs) and ``EngineConfig`` (everything
else).

Every field is checked when the object is made, so what the engine receives is legal and complete in itself;
defaults that depend on the device are filled in by ``with_device_defaults``, which returns a new object.
Nothing here imports torch or knows a model. ``config_sources.py`` merges command line, Python, file and
environment into these classes; ``graphs/plan.py`` decides what becomes of a ``GraphConfig``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, cast, get_args

from gapless.config_media import Pairs, parse_processor_kwargs
from gapless.config_sources import ALIASES, Merged, Source, merge_sources, parse_sizes
from gapless.errors import ConfigError
from gapless.graphs.capabilities import GraphRequest, TcCompiler
from gapless.graphs.modes import GraphMode, Strategy
from gapless.graphs.plan import check_request

CUDAGraphMode = GraphMode
"""The single knob over both phases, under the name users of vLLM know."""

Auto = Literal["auto"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy", "safetensors", "gguf"]
VitGraphMode = Literal["budget", "exact"]

INT32_MAX = 2**31 - 1
"""Slots and positions are int32 on the device, so no count of tokens may exceed this."""
MAX_STEP_TOKENS = 2**20
MAX_STEP_REQUESTS = 2**13
MAX_RANKS = 64

E = TypeVar("E", bound=enum.StrEnum)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphConfig:
    """How steps become graphs; ``auto`` and None mean "not said". Values may be given as plain strings and
    lists.

    Prefill sizes count tokens, decode sizes requests, ``capture_sizes`` tokens for both phases (per-phase
    lists win). Raises ``ConfigError`` for values that do not exist and for options that contradict each
    other.
    """

    mode: GraphMode | Auto = "auto"
    prefill_backend: Strategy | Auto = "auto"
    decode_backend: Strategy | Auto = "auto"
    prefill_max: int | None = None
    decode_max: int | None = None
    prefill_sizes: tuple[int, ...] | None = None
    decode_sizes: tuple[int, ...] | None = None
    capture_sizes: tuple[int, ...] | None = None
    compile_mode: Literal[0, 3] | None = None
    """0: no compilation; 3: piecewise compilation."""
    tc_compiler: TcCompiler | None = None
    """Compiler of ``tc_piecewise`` pieces; None means ``eager``."""
    use_inductor_graph_partition: bool = False
    splitting_ops: tuple[str, ...] | None = None
    """Ops at which ``tc_piecewise`` cuts, besides attention; None: those that belong to the model (mixtures
    of experts); empty: do not cut, so piecewise becomes full. Breakable graphs break at
    ``gapless::moe_layer`` if it is named here.
    """

    def __post_init__(self) -> None:
        _set(self, "mode", _enum_or_auto("cudagraph_mode", self.mode, GraphMode))
        for phase in ("prefill", "decode"):
            name = f"{phase}_backend"
            _set(self, name, _enum_or_auto(_flag(name), getattr(self, name), Strategy))
            _check_int(_flag(f"{phase}_max"), getattr(self, f"{phase}_max"), 1, MAX_STEP_TOKENS)
        for name in ("prefill_sizes", "decode_sizes", "capture_sizes"):
            if getattr(self, name) is not None:
                _set(self, name, parse_sizes(_flag(name), getattr(self, name)))
        if self.compile_mode not in (None, 0, 3):
            raise ConfigError(
                f"compilation mode {self.compile_mode!r} is not supported: 0 is no compilation, 3 is "
                "piecewise compilation"
            )
        if self.tc_compiler is not None:
            _check_choice(_flag("tc_compiler"), self.tc_compiler, get_args(TcCompiler))
        _check_bool("use_inductor_graph_partition", self.use_inductor_graph_partition)
        _set(self, "splitting_ops", _op_names(self.splitting_ops))
        check_request(self.to_request())

    @classmethod
    def from_sources(
        cls,
        flags: Mapping[str, Any] | None = None,
        python: Mapping[str, Any] | None = None,
        config_file: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
    ) -> GraphConfig:
        """One config from all sources: command line = Python API > config file > environment > default.

        Keys are field names or flag names (``cuda_graph_backend_prefill``); ``compilation_config`` (JSON or
        dict) may stand beside them. None means "not given". Raises ``ConfigError`` for unknown keys, for two
        sources of one rank that disagree, and for a mode that contradicts a per-phase option, naming where
        each came from.
        """
        merged = _merge(flags, python, config_file, env, fields=GRAPH_FIELDS)
        return _graphs_of(merged)

    def to_request(self, *, force: bool = False) -> GraphRequest:
        """What ``resolve()`` takes. ``force`` comes from ``GAPLESS_FORCE_GRAPHS``."""
        return GraphRequest(
            mode=None if self.mode == "auto" else GraphMode(self.mode),
            prefill=None if self.prefill_backend == "auto" else Strategy(self.prefill_backend),
            decode=None if self.decode_backend == "auto" else Strategy(self.decode_backend),
            prefill_max=self.prefill_max,
            decode_max=self.decode_max,
            prefill_sizes=self.prefill_sizes,
            decode_sizes=self.decode_sizes,
            capture_sizes=self.capture_sizes,
            compile_mode=self.compile_mode,
            use_inductor_graph_partition=self.use_inductor_graph_partition,
            tc_compiler=self.tc_compiler,
            splitting_ops=self.splitting_ops,
            force=force,
        )


DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything that starts an engine. None means: the device's default, or measured (``kv_cache_tokens`` on
    CUDA).
    """

    model: str
    """``smollm2``, a model folder or a GGUF file."""
    dtype: DType = "auto"
    device: Device = "auto"
    load_format: LoadFormat = "auto"
    seed: int = 0
    """Of dummy weights; a request's own seed decides its tokens."""
    max_model_len: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    """Token budget of one step."""
    block_size: int = 16
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION
    max_total_tokens: int | None = None
    """Upper bound on tokens in the KV cache, and so on any step."""
    enable_prefix_caching: bool = True
    """A prompt starts behind what is in the cache of it already, from an earlier or a running request."""
    count_expert_tokens: bool = False
    """Count, on the device, the tokens that each expert is given; the report has the numbers."""
    attention_backend: str = "auto"
    tensor_parallel_size: int = 1
    """Processes, one per GPU, that hold the model together."""
    break_at_all_reduce: bool = False
    """Breakable graphs end before each sum over ranks and begin anew behind it."""
    enforce_eager: bool = False
    enable_vit_cuda_graph: bool = False
    """Graphs for the vision encoder of a model that has one."""
    vit_cuda_graph_mode: VitGraphMode | None = None
    """``budget`` (None means it): images are packed into sizes captured at start-up. ``exact``: a graph for
    each set of image sizes, captured when it is first seen."""
    vit_cuda_graph_budgets: tuple[int, ...] | None = None
    """Sizes of budget mode, in patches."""
    vit_cuda_graph_max_tokens: int | None = None
    """The largest size that becomes a graph, in patches."""
    mm_embedding_cache_tokens: int | None = None
    """Placeholders whose embeddings are kept for images that come again; 0 keeps none."""
    mm_processor_kwargs: Pairs = ()
    """Settings of the model's processor that differ from those of its folder; a mapping is taken, too."""
    graphs: GraphConfig = field(default_factory=GraphConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"--model={self.model!r}: name a model folder, a GGUF file or smollm2")
        _check_choice("--dtype", self.dtype, get_args(DType))
        _check_choice("--device", self.device, get_args(Device))
        _check_choice("--load-format", self.load_format, get_args(LoadFormat))
        _check_int("--seed", self.seed, 0, 2**63 - 1)
        _check_int("--max-model-len", self.max_model_len, 1, INT32_MAX)
        _check_int("--max-running-requests", self.max_running_requests, 1, MAX_STEP_REQUESTS)
        _check_int("--chunked-prefill-size", self.chunked_prefill_size, 1, MAX_STEP_TOKENS)
        _check_int("--block-size", self.block_size, 16, 128)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size={self.block_size}: must be a power of two (16, 32, 64 or 128)")
        _check_int("--kv-cache-tokens", self.kv_cache_tokens, self.block_size, INT32_MAX)
        _check_int("--max-total-tokens", self.max_total_tokens, self.block_size, INT32_MAX)
        _check_fraction("--gpu-memory-utilization", self.gpu_memory_utilization)
        if not isinstance(self.attention_backend, str) or not self.attention_backend:
            raise ConfigError(f"--attention-backend={self.attention_backend!r}: must be a name, or auto")
        _check_int("--tensor-parallel-size", self.tensor_parallel_size, 1, MAX_RANKS)
        _check_bool("--break-at-all-reduce", self.break_at_all_reduce)
        _check_bool("--enforce-eager", self.enforce_eager)
        _check_bool("--enable-prefix-caching", self.enable_prefix_caching)
        _check_bool("--count-expert-tokens", self.count_expert_tokens)
        _check_bool("--enable-vit-cuda-graph", self.enable_vit_cuda_graph)
        if self.vit_cuda_graph_mode is not None:
            _check_choice("--vit-cuda-graph-mode", self.vit_cuda_graph_mode, get_args(VitGraphMode))
        if self.vit_cuda_graph_budgets is not None:
            sizes = parse_sizes("--vit-cuda-graph-budgets", self.vit_cuda_graph_budgets)
            _set(self, "vit_cuda_graph_budgets", sizes)
        _check_int("--vit-cuda-graph-max-tokens", self.vit_cuda_graph_max_tokens, 1, MAX_STEP_TOKENS)
        _check_int("--mm-embedding-cache-tokens", self.mm_embedding_cache_tokens, 0, INT32_MAX)
        _set(self, "mm_processor_kwargs", parse_processor_kwargs(self.mm_processor_kwargs))
        if not isinstance(self.graphs, GraphConfig):
            raise ConfigError(f"graphs={self.graphs!r}: must be a GraphConfig")
        self._check_contradictions()
        self._check_vit_options()

    @classmethod
    def from_sources(
        cls,
        flags: Mapping[str, Any] | None = None,
        python: Mapping[str, Any] | None = None,
        config_file: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
    ) -> EngineConfig:
        """As ``GraphConfig.from_sources``, for all options at once: graph options stand among the others.

        Python may also pass ``graphs``, a ``GraphConfig``: its fields that are not defaults count as given.
        Raises ``ConfigError`` for what is unknown, impossible, or said twice in different ways.
        """
        python = dict(python or {})
        for name, value in _given(python.pop("graphs", None)).items():
            if python.setdefault(name, value) != value:
                raise ConfigError(f"{name}={python[name]} disagrees with graphs.{name}={value}")
        merged = _merge(flags, python, config_file, env, fields=ENGINE_FIELDS + GRAPH_FIELDS)
        if "model" not in merged.values:
            raise ConfigError("no model was named: give --model a model folder, a GGUF file or smollm2")
        own = {name: value for name, value in merged.values.items() if name in ENGINE_FIELDS}
        return cls(**own, graphs=_graphs_of(merged))

    def with_device_defaults(self, device_type: str) -> EngineConfig:
        """A new config for ``cuda`` or ``cpu`` in which limits that depend on the device have values.

        Raises ``ConfigError`` for another device than these, and than the one that was asked for.
        """
        defaults = _DEVICE_DEFAULTS.get(device_type)
        if defaults is None:
            raise ConfigError(
                f"no defaults for device {device_type!r}; devices: {', '.join(_DEVICE_DEFAULTS)}"
            )
        if self.device not in ("auto", device_type):
            raise ConfigError(f"--device={self.device} contradicts the device {device_type} that was chosen")
        kv_cache_tokens = self.kv_cache_tokens or defaults.kv_cache_tokens
        if kv_cache_tokens is not None and self.max_total_tokens is not None:
            kv_cache_tokens = min(kv_cache_tokens, self.max_total_tokens)
        return replace(
            self,
            device=cast(Device, device_type),
            max_running_requests=self.max_running_requests or defaults.max_running_requests,
            chunked_prefill_size=self.chunked_prefill_size or defaults.chunked_prefill_size,
            kv_cache_tokens=kv_cache_tokens,
        )

    def graph_request(self, *, force: bool = False) -> GraphRequest:
        """What ``resolve()`` takes; ``enforce_eager`` is mode NONE."""
        request = self.graphs.to_request(force=force)
        return replace(request, mode=GraphMode.NONE) if self.enforce_eager else request

    def _check_contradictions(self) -> None:
        if (
            self.kv_cache_tokens is not None
            and self.max_total_tokens is not None
            and self.kv_cache_tokens > self.max_total_tokens
        ):
            raise ConfigError(
                f"--kv-cache-tokens={self.kv_cache_tokens} contradicts --max-total-tokens="
                f"{self.max_total_tokens}, which bounds it; give only one of the two"
            )
        if self.break_at_all_reduce and self.tensor_parallel_size == 1:
            raise ConfigError("--break-at-all-reduce: one rank has no sums over ranks; give --tp 2 or more")
        if not self.enforce_eager:
            return
        wishes = {
            "cudagraph_mode": self.graphs.mode,
            _flag("prefill_backend"): self.graphs.prefill_backend,
            _flag("decode_backend"): self.graphs.decode_backend,
        }
        for name, wish in wishes.items():
            if wish not in ("auto", GraphMode.NONE, Strategy.DISABLED):
                raise ConfigError(f"--enforce-eager contradicts {name}={wish}; give only one of the two")

    def _check_vit_options(self) -> None:
        details = ("vit_cuda_graph_mode", "vit_cuda_graph_budgets", "vit_cuda_graph_max_tokens")
        given = [name for name in details if getattr(self, name) is not None]
        if given and not self.enable_vit_cuda_graph:
            name = given[0]
            raise ConfigError(
                f"--{name.replace('_', '-')}={getattr(self, name)} is about graphs of the vision encoder, "
                "which are off; add --enable-vit-cuda-graph"
            )
        if self.enable_vit_cuda_graph and self.enforce_eager:
            raise ConfigError("--enforce-eager contradicts --enable-vit-cuda-graph; give only one of the two")
        if self.vit_cuda_graph_budgets is None:
            return
        if self.vit_cuda_graph_mode == "exact":
            raise ConfigError(
                "--vit-cuda-graph-budgets has no meaning with --vit-cuda-graph-mode=exact, whose graphs have "
                "the sizes of the images"
            )
        largest = max(self.vit_cuda_graph_budgets)
        if self.vit_cuda_graph_max_tokens not in (None, largest):
            raise ConfigError(
                f"--vit-cuda-graph-max-tokens={self.vit_cuda_graph_max_tokens} contradicts the largest of "
                f"--vit-cuda-graph-budgets, {largest}; give only one of the two"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _DeviceDefaults:
    max_running_requests: int
    chunked_prefill_size: int
    kv_cache_tokens: int | None


_DEVICE_DEFAULTS = {
    "cuda": _DeviceDefaults(max_running_requests=256, chunked_prefill_size=4096, kv_cache_tokens=None),
    "cpu": _DeviceDefaults(max_running_requests=16, chunked_prefill_size=256, kv_cache_tokens=16384),
}

GRAPH_FIELDS = tuple(f.name for f in fields(GraphConfig))
ENGINE_FIELDS = tuple(f.name for f in fields(EngineConfig) if f.name != "graphs")

_FLAG_NAMES = {
    "mode": "cudagraph_mode",
    "capture_sizes": "cudagraph_capture_sizes",
    **{name: f"--{alias.replace('_', '-')}" for alias, name in ALIASES.items() if alias.startswith("cuda_")},
}


def _merge(
    flags: Mapping[str, Any] | None,
    python: Mapping[str, Any] | None,
    config_file: Mapping[str, Any] | None,
    env: Mapping[str, Any] | None,
    *,
    fields: tuple[str, ...],
) -> Merged:
    sources = (
        Source(name="command line", rank=0, values=flags or {}),
        Source(name="Python API", rank=0, values=python or {}),
        Source(name="config file", rank=1, values=config_file or {}),
        Source(name="environment", rank=2, values=env or {}),
    )
    return merge_sources(sources, fields=fields)


def _given(graphs: object) -> dict[str, Any]:
    """Fields of a ``GraphConfig`` that say something."""
    if graphs is None:
        return {}
    if not isinstance(graphs, GraphConfig):
        raise ConfigError(f"graphs={graphs!r}: must be a GraphConfig")
    return {f.name: getattr(graphs, f.name) for f in fields(graphs) if getattr(graphs, f.name) != f.default}


def _graphs_of(merged: Merged) -> GraphConfig:
    try:
        return GraphConfig(**{name: value for name, value in merged.values.items() if name in GRAPH_FIELDS})
    except ConfigError as error:
        raise ConfigError(f"{error}{merged.origins_note(GRAPH_FIELDS)}") from None


def _flag(name: str) -> str:
    return _FLAG_NAMES[name]


def _set(config: object, name: str, value: object) -> None:
    """Store a field's checked form while the object is being made (frozen dataclasses allow no other way)."""
    object.__setattr__(config, name, value)


def _enum_or_auto(name: str, value: object, enum_class: type[E]) -> E | Auto:
    choices = ("auto", *enum_class)
    _check_choice(name, value, choices)
    return "auto" if value == "auto" else enum_class(cast(str, value))


def _op_names(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(op, str) and op for op in value):
        raise ConfigError(f"splitting_ops={value!r}: must be a list of operator names, or [] for no split")
    return tuple(value)


def _check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    allowed = list(choices)
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: must be an integer")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value}: must be between {low} and {high}")


def _check_fraction(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r}: must be a number above 0 and at most 1")
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"{name}={value}: must be above 0 and at most 1")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: must be true or false")
