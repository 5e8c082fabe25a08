"""Where the fused kernels run, what a GPU has room for, and the one import of Triton.

Triton is imported at the first launch only, so a program on a CPU never pays for it and needs no
installation. A CUDA device without Triton keeps the torch forward and says so once.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

import torch

logger = logging.getLogger(__name__)


def has_fused_kernels(device: torch.device) -> bool:
    """Whether a model on ``device`` should use the fused kernels."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def kernels() -> ModuleType:
    """The module of Triton kernels, ``jit.py``."""
    from gapless.kernels import jit

    return jit


@functools.cache
def launch_options(device: torch.device) -> Mapping[str, bool]:
    """Keyword arguments of every launch: whether a kernel starts before the one ahead of it has ended."""
    if device.type != "cuda":
        return MappingProxyType({"EARLY": False})
    is_early = has_early_launch(device)
    return MappingProxyType({"EARLY": is_early, "launch_pdl": is_early})


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Compute capability 9.0: what was written for Hopper, or measured there, is for no other GPU."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return is_cuda and torch.cuda.get_device_capability(device) == (9, 0)


HOPPER_SHARED_BYTES = 227 << 10


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that one program may have: 99 KiB on GPUs of compute capability 8.6, 8.9 and 12, 163 on
    8.0, 227 on 9.0 and 10. Without a GPU, or where nobody says, as on Hopper."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", HOPPER_SHARED_BYTES)


def stages_that_fit(num_stages: int, *, stage_bytes: int, other_bytes: int, shared_bytes: int) -> int:
    """``num_stages`` of a pipelined loop, or fewer where ``shared_bytes`` is less than on Hopper: such GPUs
    keep what all stages but one have copied. Below 2: not even two fit."""
    if shared_bytes >= HOPPER_SHARED_BYTES:
        return num_stages
    return min(num_stages, 1 + (shared_bytes - other_bytes) // stage_bytes)


@functools.cache
def has_early_launch(device: torch.device) -> bool:
    """Programmatic dependent launch came with Hopper."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_errors() -> tuple[type[Exception], ...]:
    """What a launch raises where a kernel does not fit a GPU: Triton's own errors (``OutOfResources``, those
    of the assembler) are no ``RuntimeError``, the driver's are."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (RuntimeError,)
    return (RuntimeError, TritonError)


def next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()


@functools.cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    logger.warning("Triton is not installed: the model runs on unfused torch operations; install triton")
    return False
