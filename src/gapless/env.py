"""The only reader of environment variables: what each may say, as one typed object.

Configuration belongs on the command line or in Python; the environment keeps what must hold before either
exists (logging) or what no user should turn by accident (forcing graphs in tests). A value that cannot be
understood is an error, because a typo that silently means "off" is worse than no start. Read ``config.py``
for the options proper.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """``GAPLESS_TUNE_LINEAR``: time matrix products of a few tokens on this GPU and keep the result."""
    cache_dir: Path | None = None
    """``GAPLESS_CACHE_DIR``: where timings are kept. None: ``~/.cache/gapless``."""
    fast_launch: bool = True
    """``GAPLESS_FAST_LAUNCH``: compiled kernels are called past Triton's own launch (see
    ``kernels/launch.py``)."""
    enable_prefix_caching: bool | None = None
    """``GAPLESS_ENABLE_PREFIX_CACHING``: the option of that name, for programs whose calls cannot be edited.
    None: not said."""
    api_keys: tuple[str, ...] = ()
    """``GAPLESS_API_KEY``: keys that open the server, separated by commas; a key on the command line is in
    every user's list of processes."""
    triton_interpret: bool = False
    """``TRITON_INTERPRET``, Triton's own: kernels run in its interpreter, on a CPU."""

    def engine_options(self) -> dict[str, Any]:
        """What ``EngineConfig.from_sources`` takes from the environment."""
        return {"enable_prefix_caching": self.enable_prefix_caching}


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
        enable_prefix_caching=_bool_or_none(values, "GAPLESS_ENABLE_PREFIX_CACHING"),
        api_keys=tuple(key.strip() for key in values.get("GAPLESS_API_KEY", "").split(",") if key.strip()),
        triton_interpret=_bool(values, "TRITON_INTERPRET"),
    )


def _logging_level(values: Mapping[str, str]) -> str | None:
    text = values.get("GAPLESS_LOGGING_LEVEL", "").strip()
    if text and text.upper() not in LOGGING_LEVELS:
        raise ConfigError(f"GAPLESS_LOGGING_LEVEL={text}: must be one of {', '.join(LOGGING_LEVELS)}")
    return text.upper() or None


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
