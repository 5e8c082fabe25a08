"""Which attention backends exist, what each can run inside a graph, and how to make the ones this build has.

The table is data: names, support level and preferred mode of every backend the field knows, whether or not
this build implements it, so that the plan for another backend can be computed without it. A name that is not
in the table supports nothing (``NEVER``). Implementations register a factory; the module behind it is
imported only when the backend is made, so reading the table imports no torch. Read ``base.py`` for what a
backend has to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gapless.errors import ConfigError
from gapless.graphs.capabilities import BackendSupport
from gapless.graphs.modes import AttentionSupport, GraphMode

if TYPE_CHECKING:
    from gapless.attention.base import AttentionBackend

_ALWAYS = AttentionSupport.ALWAYS
_UNIFORM = AttentionSupport.UNIFORM_BATCH
_SINGLE = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendInfo:
    """One row. ``factory`` is None where this build has no implementation; ``devices`` are torch device
    types.
    """

    name: str
    support: AttentionSupport
    preferred: GraphMode | None = None
    devices: tuple[str, ...] = ("cuda",)
    factory: Callable[[], AttentionBackend] | None = None
    note: str = ""


def register_backend(
    name: str,
    *,
    support: AttentionSupport,
    factory: Callable[[], AttentionBackend],
    preferred: GraphMode | None = None,
    devices: tuple[str, ...] = ("cuda",),
) -> None:
    """Add an implementation, or give a known name one. Raises ``ConfigError`` if ``name`` has one already."""
    row = _TABLE.get(name)
    if row is not None and row.factory is not None:
        raise ConfigError(f"attention backend {name!r} is registered already; choose another name")
    base = row or BackendInfo(name=name, support=support)
    _TABLE[name] = replace(base, support=support, preferred=preferred, devices=devices, factory=factory)


def get_support(name: str) -> AttentionSupport:
    """What the backend declares; ``NEVER`` for a name nobody declared."""
    row = _TABLE.get(name)
    return row.support if row is not None else AttentionSupport.NEVER


def get_backend_support(name: str) -> BackendSupport:
    """Support and preferred mode in the form ``resolve()`` takes."""
    row = _TABLE.get(name)
    return BackendSupport(name=name, support=get_support(name), preferred=row.preferred if row else None)


def known_backends() -> tuple[BackendInfo, ...]:
    """The whole table, in order of registration."""
    return tuple(_TABLE.values())


def available_backends(device_type: str | None = None) -> tuple[str, ...]:
    """Names that this build can make (for ``device_type``, if given)."""
    return tuple(
        row.name
        for row in _TABLE.values()
        if row.factory is not None and (device_type is None or device_type in row.devices)
    )


def select_backend(name: str, *, device_type: str) -> str:
    """The name behind ``--attention-backend``: ``auto`` is the default of the device.

    Raises ``ConfigError`` for a name that does not exist, is not part of this build, or does not run on the
    device.
    """
    available = ", ".join(available_backends(device_type))
    if name == "auto":
        default = _DEFAULTS.get(device_type)
        if default is None:
            raise ConfigError(
                f"no attention backend for device {device_type!r}; devices: {', '.join(_DEFAULTS)}"
            )
        return default
    row = _TABLE.get(name)
    if row is None:
        close = difflib.get_close_matches(name, _TABLE, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ConfigError(
            f"unknown attention backend {name!r}{hint} Available on {device_type}: auto, {available}"
        )
    if row.factory is None:
        raise ConfigError(
            f"attention backend {name!r} is known but not part of this build; available on {device_type}: "
            f"auto, {available}"
        )
    if device_type not in row.devices:
        raise ConfigError(
            f"attention backend {name!r} runs on {', '.join(row.devices)}, not on {device_type}; available "
            f"there: auto, {available}"
        )
    return name


def create_backend(name: str, *, device_type: str) -> AttentionBackend:
    """Make the backend called ``name`` (or ``auto``). Raises ``ConfigError`` as ``select_backend`` does."""
    factory = _TABLE[select_backend(name, device_type=device_type)].factory
    assert factory is not None  # select_backend refuses rows without one
    return factory()


def _torch_reference() -> AttentionBackend:
    from gapless.attention.torch_reference import TorchReferenceBackend

    return TorchReferenceBackend()


def _triton_paged() -> AttentionBackend:
    from gapless.attention.triton_paged import TritonPagedBackend

    return TritonPagedBackend()


_DEFAULTS = {"cpu": "torch_reference", "cuda": "triton_paged"}

_ROWS = (
    BackendInfo(
        name="torch_reference",
        support=_ALWAYS,
        preferred=GraphMode.FULL,
        devices=("cpu",),
        factory=_torch_reference,
        note="one routine for every batch, which reads its lengths on the host: a CPU kernel; on a GPU "
        "not capturable",
    ),
    BackendInfo(
        name="triton_paged",
        support=_ALWAYS,
        preferred=GraphMode.FULL,
        devices=("cuda",),
        factory=_triton_paged,
        note="one kernel for every batch; full prefill graphs are measured to be faster (docs/log.md)",
    ),
    BackendInfo(
        name="flash_attention_2",
        support=_UNIFORM,
        preferred=GraphMode.FULL_AND_PIECEWISE,
        note="able to run every batch; declared lower because piecewise prefill is faster",
    ),
    BackendInfo(
        name="flash_attention_3",
        support=_ALWAYS,
        preferred=GraphMode.FULL,
        note="one kernel for both kinds of batch",
    ),
    BackendInfo(
        name="triton_attention",
        support=_ALWAYS,
        preferred=GraphMode.FULL_AND_PIECEWISE,
        note="separate kernels for decode and prefill",
    ),
    BackendInfo(name="aiter_flash_attention", support=_UNIFORM),
    BackendInfo(name="flashinfer", support=_SINGLE),
    BackendInfo(
        name="flashinfer_trtllm", support=_UNIFORM, note="FlashInfer with TensorRT-LLM attention on Blackwell"
    ),
    BackendInfo(name="flashmla", support=_UNIFORM),
    BackendInfo(name="flashinfer_mla", support=_UNIFORM),
    BackendInfo(name="flashinfer_mla_sparse", support=_UNIFORM),
    BackendInfo(name="aiter_mla", support=_SINGLE),
    BackendInfo(name="cutlass_mla", support=_SINGLE),
    BackendInfo(name="mamba", support=_SINGLE),
)

_TABLE: dict[str, BackendInfo] = {row.name: row for row in _ROWS}
