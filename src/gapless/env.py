"""The only reader of environment variables: what each may say, as one typed object.

Configuration belongs on the command line or in Python; the environment keeps what must hold before either
exists (logging) or what no user should turn by accident (forcing graphs in tests). A value that cannot be
understood is an error, because a typo that silently means "off" is worse than no start. Read ``config.py``
for the options proper.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gapless.errors import ConfigError

LOGGING_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_BOOLS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Env:
    """What the environment says. An unset or empty variable has its default."""

    logging_level: str | None = None
    """``GAPLESS_LOGGING_LEVEL``: one of ``LOGGING_LEVELS``, in any case. None: the command's own default."""
    force_graphs: bool = False
    """``GAPLESS_FORCE_GRAPHS``: ``tc_piecewise`` ignores even the hard rules (tests only)."""
    vit_enable_cuda_graph: bool = False
    """``GAPLESS_VIT_ENABLE_CUDA_GRAPH``: graphs for the vision encoder."""
    soak: bool = False
    """``GAPLESS_SOAK``: run the long random tests too."""
    tune_linear: bool = False
    """``GAPLESS_TUNE_LINEAR``: time tiles for matrix products on this GPU and keep the result."""
    cache_dir: Path | None = None
    """``GAPLESS_CACHE_DIR``: where timings are kept. None: ``~/.cache/gapless``."""
    fast_launch: bool = True
    """``GAPLESS_FAST_LAUNCH``: compiled kernels are called past Triton's own launch (see
    ``kernels/launch.py``)."""
    hopper_attention: bool = True
    """``GAPLESS_HOPPER_ATTENTION``: prefill attention in Gluon on compute capability 9.0."""
    enable_prefix_caching: bool | None = None
    """``GAPLESS_ENABLE_PREFIX_CACHING``: the option of that name, for programs whose calls cannot be edited.
    None: not said."""
    api_keys: tuple[str, ...] = ()
    """``GAPLESS_API_KEY``: keys that open the server, separated by commas; a key on the command line is in
    every user's list of processes."""
    moe_backend: Literal["triton", "grouped_mm"] | None = None
    """``GAPLESS_MOE_BACKEND``: what multiplies experts on CUDA, our kernels or torch's ``grouped_mm``
    (bfloat16 only). None: our kernels where Triton is there."""
    rank_timeout_s: float | None = None
    """``GAPLESS_RANK_TIMEOUT``: seconds that a step of several ranks, a stage of their start without
    progress, or their end may take before they are given up. None: what ``parallel/workers.py`` says."""
    triton_interpret: bool = False
    """``TRITON_INTERPRET``, Triton's own: kernels run in its interpreter, on a CPU."""

    def engine_options(self) -> dict[str, Any]:
        """What ``EngineConfig.from_sources`` takes from the environment."""
        return {
            "enable_prefix_caching": self.enable_prefix_caching,
            "enable_vit_cuda_graph": self.vit_enable_cuda_graph or None,
        }


def read_env(environ: Mapping[str, str] | None = None) -> Env:
    """Read ``environ`` (default: this process's). Raises ``ConfigError`` naming variable and values."""
    values = os.environ if environ is None else environ
    return Env(
        logging_level=_logging_level(values),
        force_graphs=_bool(values, "GAPLESS_FORCE_GRAPHS"),
        vit_enable_cuda_graph=_bool(values, "GAPLESS_VIT_ENABLE_CUDA_GRAPH"),
        soak=_bool(values, "GAPLESS_SOAK"),
        tune_linear=_bool(values, "GAPLESS_TUNE_LINEAR"),
        cache_dir=_path(values, "GAPLESS_CACHE_DIR"),
        fast_launch=_bool(values, "GAPLESS_FAST_LAUNCH", default=True),
        hopper_attention=_bool(values, "GAPLESS_HOPPER_ATTENTION", default=True),
        enable_prefix_caching=_bool_or_none(values, "GAPLESS_ENABLE_PREFIX_CACHING"),
        api_keys=tuple(key.strip() for key in values.get("GAPLESS_API_KEY", "").split(",") if key.strip()),
        moe_backend=_choice(values, "GAPLESS_MOE_BACKEND", ("triton", "grouped_mm")),
        rank_timeout_s=_seconds(values, "GAPLESS_RANK_TIMEOUT"),
        triton_interpret=_bool(values, "TRITON_INTERPRET"),
    )


def prepare_nccl() -> None:
    """Settings that NCCL and torch read when a process group is made.

    NVLink multicast must stay off, in NCCL and in torch's symmetric memory. A failed collective is reported
    by the ranks themselves: torch's watchdog would end the process instead. All collectives of an engine are
    on one stream, in graphs and between them, so NCCL need not order those of several graphs by events (nodes
    of their own in every graph); and registering each captured tensor with the other ranks makes capturing
    slower and brings nothing to tensors this small. torch keeps a record of each collective, with the Python
    stack that has called it, for dumps that nobody asks for here. Whoever has set these three otherwise keeps
    it.
    """
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunRank:
    """What ``torchrun`` tells a process that it has started."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int


def read_torchrun(environ: Mapping[str, str] | None = None) -> TorchrunRank | None:
    """None for a process that ``torchrun`` has not started. Raises ``ConfigError`` naming a variable without
    which, or with which value, ranks cannot meet."""
    values = os.environ if environ is None else environ
    if not values.get("RANK") or not values.get("WORLD_SIZE"):
        return None
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        text = values.get(name, values["RANK"] if name == "LOCAL_RANK" else "")
        if not text.isdecimal():
            raise ConfigError(f"{name}={text}: torchrun's environment must hold a number here")
        numbers[name] = int(text)
    if not values.get("MASTER_ADDR"):
        raise ConfigError("MASTER_ADDR is not set, though RANK and WORLD_SIZE are")
    return TorchrunRank(
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        world_size=numbers["WORLD_SIZE"],
        master_addr=values["MASTER_ADDR"],
        master_port=numbers["MASTER_PORT"],
    )


@contextmanager
def changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Processes started within the block get ``changes`` too. Other threads see them meanwhile."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def inherited(name: str) -> str | None:
    """A variable that other programs read, such as the list of GPUs, to hand parts of it on."""
    return os.environ.get(name)


def _logging_level(values: Mapping[str, str]) -> str | None:
    text = values.get("GAPLESS_LOGGING_LEVEL", "").strip()
    if text and text.upper() not in LOGGING_LEVELS:
        raise ConfigError(f"GAPLESS_LOGGING_LEVEL={text}: must be one of {', '.join(LOGGING_LEVELS)}")
    return text.upper() or None


def _choice(values: Mapping[str, str], name: str, choices: tuple[str, ...]) -> Any:
    text = values.get(name, "").strip()
    if text and text not in choices:
        raise ConfigError(f"{name}={text}: must be one of {', '.join(choices)}")
    return text or None


def _seconds(values: Mapping[str, str], name: str) -> float | None:
    text = values.get(name, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{name}={text}: must be a number of seconds above 0")
    return seconds


def _bool(values: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    text = values.get(name, "").strip()
    if text and text.lower() not in _BOOLS:
        raise ConfigError(f"{name}={text}: must be 1 or 0 (also true/false, yes/no, on/off)")
    return _BOOLS.get(text.lower(), default)


def _bool_or_none(values: Mapping[str, str], name: str) -> bool | None:
    return _bool(values, name) if values.get(name, "").strip() else None


def _path(values: Mapping[str, str], name: str) -> Path | None:
    text = values.get(name, "").strip()
    return Path(text).expanduser() if text else None
