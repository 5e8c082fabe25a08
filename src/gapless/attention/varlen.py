"""Attention of encoders: every row sees all rows of its own segment, and nothing else.

Rows of several images (and frames, and windows) lie one behind the other; ``cu_seqlens`` says where segments
begin. Boundaries are read on the device when the kernel runs, so one captured launch serves any of them;
``max_len`` is a host number, an upper bound. Invariants: rows outside all segments become zeros, whatever
they held, and no such row is read by a real one; nothing of the output stays unwritten; a segment that holds
NaN or infinity spoils no other one. ``S`` rows, ``N`` segments, ``H`` heads, ``D`` head size. Backends take
the arguments that encoders elsewhere give to theirs: ``[cu_seqlens, cu_seqlens_kk, max_len]`` or
``[cu_seqlens, max_len]``, where ``kk`` are the lengths.
``encoder_interface.py`` puts them into Transformers' towers.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gapless.errors import ConfigError

_NAN = float("nan")
_BLOCK = 128
"""Rows whose scores the reference holds at once."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segments:
    """Where segments are. Tensors are int32 on the device; entries past the last segment repeat the end."""

    cu_seqlens: Tensor  # [N+1]
    cu_seqlens_kk: Tensor  # [N], lengths
    max_len: int
    """At least the longest segment; frozen by a capture."""
    lengths: tuple[int, ...] | None = None
    """The lengths on the host, for a backend that fixes segments."""


class VarlenBackend(Protocol):
    name: str
    devices: tuple[str, ...]
    fixes_segments: bool
    """Whether a capture freezes the boundaries, so that the graph's key has to hold them."""

    def arguments(self, segments: Segments) -> list[Any]:
        """What the kernel takes beside query, key and value. Raises ``ConfigError`` for what it cannot."""

    def attend(
        self,
        query_SHD: Tensor,
        key_SHD: Tensor,
        value_SHD: Tensor,
        out_SHD: Tensor,
        arguments: Sequence[Any],
        *,
        scale: float,
    ) -> None:
        """Write attention into ``out``, every row of it."""


class TorchReferenceVarlen:
    """Blocks of rows against the keys that could be theirs, masked by segment: any device, capturable.

    A segment is contiguous and at most ``max_len`` long, so a row's keys lie within ``max_len`` of it, and
    windows cost what windows are, not the square of all rows.
    """

    name = "torch_reference"
    devices: tuple[str, ...] = ("cpu", "cuda")
    fixes_segments = False

    def arguments(self, segments: Segments) -> list[Any]:
        return [segments.cu_seqlens, segments.max_len]

    def attend(
        self,
        query_SHD: Tensor,
        key_SHD: Tensor,
        value_SHD: Tensor,
        out_SHD: Tensor,
        arguments: Sequence[Any],
        *,
        scale: float,
    ) -> None:
        cu_seqlens, max_len = arguments
        num_rows = query_SHD.shape[0]
        row_S = torch.arange(num_rows, device=query_SHD.device, dtype=cu_seqlens.dtype)
        segment_S = torch.searchsorted(cu_seqlens, row_S, right=True)
        is_real_S = row_S < cu_seqlens[-1]
        # A probability of zero times NaN is NaN: a value that is no number must not be in a product with rows
        # of others. It becomes zero there, and all rows of its own segment become NaN in the end.
        value_SHD = value_SHD.float()
        is_number_SHD = value_SHD.isfinite()
        value_HSD = value_SHD.masked_fill(~(is_number_SHD & is_real_S[:, None, None]), 0.0).transpose(0, 1)
        is_broken_S = ~is_number_SHD.flatten(1).all(1)
        num_broken_N = torch.zeros(len(cu_seqlens) + 1, dtype=torch.int32, device=query_SHD.device)
        num_broken_N = num_broken_N.index_add(0, segment_S, is_broken_S.int())
        is_broken_S = num_broken_N.index_select(0, segment_S) > 0
        query_HSD, key_HDS = query_SHD.float().transpose(0, 1), key_SHD.float().permute(1, 2, 0)
        for start in range(0, num_rows, _BLOCK):
            end = min(start + _BLOCK, num_rows)
            first, last = max(0, start - max_len + 1), min(num_rows, end + max_len - 1)
            score_HQK = query_HSD[:, start:end] @ key_HDS[:, :, first:last] * scale
            is_seen_QK = segment_S[start:end, None] == segment_S[None, first:last]
            is_seen_QK = is_seen_QK & is_real_S[None, first:last]
            score_HQK = score_HQK.masked_fill(~is_seen_QK, float("-inf"))
            sum_HQD = score_HQK.softmax(-1) @ value_HSD[:, first:last]
            result_QHD = sum_HQD.transpose(0, 1).masked_fill(is_broken_S[start:end, None, None], _NAN)
            result_QHD = result_QHD.masked_fill(~is_real_S[start:end, None, None], 0.0)
            out_SHD[start:end].copy_(result_QHD)


class TorchSegmentsVarlen:
    """PyTorch's own attention, one call per segment, with the lengths from the host: what Transformers does
    without flash attention. A capture fixes the segments."""

    name = "torch_segments"
    devices: tuple[str, ...] = ("cpu", "cuda")
    fixes_segments = True

    def arguments(self, segments: Segments) -> list[Any]:
        if segments.lengths is None:
            raise ConfigError(
                "encoder attention torch_segments needs the lengths of segments on the host, and a token "
                "budget serves any; use exact mode, or another backend"
            )
        return [segments.lengths]

    def attend(
        self,
        query_SHD: Tensor,
        key_SHD: Tensor,
        value_SHD: Tensor,
        out_SHD: Tensor,
        arguments: Sequence[Any],
        *,
        scale: float,
    ) -> None:
        start = 0
        for length in arguments[0]:
            rows = slice(start, start + length)
            query, key, value = (t[rows].transpose(0, 1)[None] for t in (query_SHD, key_SHD, value_SHD))
            result = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
            out_SHD[rows].copy_(result[0].transpose(0, 1))
            start += length
        out_SHD[start:].zero_()


class TritonVarlen:
    """Our kernel (``triton_varlen.py``): its grid depends on rows and ``max_len`` alone."""

    name = "triton_varlen"
    devices: tuple[str, ...] = ("cuda",)
    fixes_segments = False

    def __init__(self) -> None:
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("encoder attention triton_varlen needs Triton; install triton")
        from gapless.attention.triton_varlen import varlen_attention

        self._attend = varlen_attention

    def arguments(self, segments: Segments) -> list[Any]:
        return [segments.cu_seqlens, segments.cu_seqlens_kk, segments.max_len]

    def attend(
        self,
        query_SHD: Tensor,
        key_SHD: Tensor,
        value_SHD: Tensor,
        out_SHD: Tensor,
        arguments: Sequence[Any],
        *,
        scale: float,
    ) -> None:
        self._attend(query_SHD, key_SHD, value_SHD, out_SHD, *arguments, scale)


class TorchFlashVarlen:
    """FlashAttention as PyTorch has it (``torch.nn.attention.varlen``): half precision on CUDA.

    Its grid is ``max_len`` times the number of segments, so a token budget, made for the most segments,
    starts many blocks that have nothing to do; it suits exact mode. It leaves rows past the last segment
    unwritten; they are cleared here.
    """

    name = "torch_varlen"
    devices: tuple[str, ...] = ("cuda",)
    fixes_segments = False

    def __init__(self) -> None:
        self._varlen_attn = _torch_varlen_attn()

    def arguments(self, segments: Segments) -> list[Any]:
        return [segments.cu_seqlens, segments.max_len]

    def attend(
        self,
        query_SHD: Tensor,
        key_SHD: Tensor,
        value_SHD: Tensor,
        out_SHD: Tensor,
        arguments: Sequence[Any],
        *,
        scale: float,
    ) -> None:
        if query_SHD.dtype not in (torch.float16, torch.bfloat16) or query_SHD.device.type != "cuda":
            raise ConfigError(
                f"encoder attention torch_varlen takes float16 and bfloat16 on CUDA, not {query_SHD.dtype} "
                f"on {query_SHD.device.type}; use triton_varlen or torch_reference"
            )
        cu_seqlens, max_len = arguments
        result_SHD = self._varlen_attn(
            query_SHD, key_SHD, value_SHD, cu_seqlens, cu_seqlens, max_len, max_len, scale=scale
        )
        row_S = torch.arange(query_SHD.shape[0], device=query_SHD.device, dtype=cu_seqlens.dtype)
        out_SHD.copy_(result_SHD.masked_fill((row_S >= cu_seqlens[-1])[:, None, None], 0.0))


def varlen_backends(device_type: str | None = None) -> tuple[str, ...]:
    """Names that exist (for ``device_type``, if given)."""
    return tuple(
        name for name, made in _BACKENDS.items() if device_type is None or device_type in made.devices
    )


def create_varlen_backend(name: str, *, device_type: str) -> VarlenBackend:
    """The backend called ``name``; ``auto`` is the reference on a CPU, Triton's on CUDA where there is one.

    Raises ``ConfigError`` for a name that does not exist, does not run on the device, or lacks what it needs.
    """
    if name == "auto":
        has_triton = importlib.util.find_spec("triton") is not None
        name = "triton_varlen" if device_type == "cuda" and has_triton else "torch_reference"
    made = _BACKENDS.get(name)
    if made is None or device_type not in made.devices:
        known = ", ".join(("auto", *varlen_backends(device_type)))
        why = "does not exist" if made is None else f"does not run on {device_type}"
        raise ConfigError(f"encoder attention {name!r} {why}; choose from {known}")
    return made()


@functools.cache
def _torch_varlen_attn() -> Callable[..., Tensor]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise ConfigError(
            "encoder attention torch_varlen needs torch.nn.attention.varlen, which PyTorch "
            f"{torch.__version__} does not have; use triton_varlen"
        ) from error
    if "scale" not in inspect.signature(varlen_attn).parameters:
        raise ConfigError(
            f"torch.nn.attention.varlen of PyTorch {torch.__version__} takes no scale; use triton_varlen"
        )
    return cast("Callable[..., Tensor]", varlen_attn)


_BACKENDS: dict[str, type[Any]] = {
    made.name: made for made in (TorchReferenceVarlen, TorchSegmentsVarlen, TritonVarlen, TorchFlashVarlen)
}
