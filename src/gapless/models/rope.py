"""Rotary position embedding: from config to inverse frequencies, a table of cosines and sines, and the
rotation.

The table covers every position the engine may use and is made once, so the forward only gathers rows by
position and never computes an angle. Frequencies follow the papers named at each function; the convention is
"rotate half" (the first half of a head pairs with the second), as in every Hugging Face checkpoint. ``T``
tokens, ``D`` head size, ``F`` = D/2 frequencies, ``P`` positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gapless.errors import ModelError

RopeType = Literal["default", "linear", "llama3", "yarn"]

ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
"""The keys each rope type reads; any other key with a value is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Parameters of one rotary embedding; unused fields keep their neutral value."""

    rope_type: RopeType
    theta: float
    head_size: int
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cosines and sines (yarn)."""
    truncate: bool = True
    divisors: tuple[float, ...] | None = None
    """One divisor per frequency where a GGUF file stores them instead of the formula (Llama 3.1)."""
    axis_sections: tuple[int, int, int] | None = None
    """m-rope: how many frequencies turn with the temporal, vertical and horizontal position."""
    axis_layout: Literal["chunked", "interleaved"] = "chunked"
    """How the sections lie among the frequencies; ``mrope.py`` has the rule."""

    @property
    def trained_positions(self) -> int:
        """Positions yarn stretches to; 0 for types whose ``max_position_embeddings`` already says it."""
        return int(self.original_max_positions * self.factor) if self.rope_type == "yarn" else 0


def parse_rope(
    raw: Mapping[str, Any], *, head_size: int, max_position_embeddings: int, source: str
) -> RopeConfig:
    """Read ``rope_theta``, ``rope_scaling`` (old) or ``rope_parameters`` (Transformers 5) of a raw config."""
    if raw.get("rope_parameters") is not None and raw.get("rope_scaling") is not None:
        raise ModelError(f"{source}: config has both rope_parameters and rope_scaling; keep one")
    params = raw.get("rope_parameters")
    if params is None:
        params = raw.get("rope_scaling")
    params = {} if params is None else params
    if not isinstance(params, Mapping):
        raise ModelError(f"{source}: rope parameters {params!r} must be an object")
    reader = _RopeReader(params, source)
    rope_type = params.get("rope_type", params.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
        raise ModelError(
            f"{source}: rope type {rope_type!r} is not implemented; implemented are {', '.join(ROPE_KEYS)}"
        )
    reader.refuse_unknown(rope_type)
    theta = params.get("rope_theta")
    if theta is None:
        theta = raw.get("rope_theta")
    common: dict[str, Any] = {
        "rope_type": rope_type,
        "theta": reader.check("rope_theta", 10000.0 if theta is None else theta),
        "head_size": head_size,
    }
    if rope_type == "default":
        return RopeConfig(**common)
    if rope_type == "linear":
        return RopeConfig(**common, factor=reader.number("factor"))
    original = int(reader.number("original_max_position_embeddings", default=max_position_embeddings))
    if rope_type == "llama3":
        low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
        if high <= low:
            raise ModelError(f"{source}: high_freq_factor={high} must exceed low_freq_factor={low}")
        return RopeConfig(
            **common,
            factor=reader.number("factor"),
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = reader.number("factor", default=max_position_embeddings / original)
    return RopeConfig(
        **common,
        factor=factor,
        original_max_positions=original,
        beta_fast=reader.number("beta_fast", default=32.0),
        beta_slow=reader.number("beta_slow", default=1.0),
        attention_factor=_yarn_attention_factor(reader, factor),
        truncate=reader.flag("truncate", default=True),
    )


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Float32 ``[F]`` on the CPU: angle per position of each frequency."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequencies_F = 1.0 / config.theta**exponents
    if config.divisors is not None:
        return frequencies_F / torch.tensor(config.divisors, dtype=torch.float32)
    if config.rope_type == "linear":
        return frequencies_F / config.factor
    if config.rope_type == "llama3":
        return _llama3_frequencies(config, frequencies_F)
    if config.rope_type == "yarn":
        return _yarn_frequencies(config, frequencies_F)
    return frequencies_F


def rope_table(config: RopeConfig, *, max_positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[P, 2, F]``: cosines (0) and sines (1) of each position, computed in float32, stored as ``dtype``."""
    positions_P = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles_PF = torch.outer(positions_P, inverse_frequencies(config).to(device))
    table_P2F = torch.stack((angles_PF.cos(), angles_PF.sin()), dim=1) * config.attention_factor
    return table_P2F.to(dtype)


def rotate(heads_THD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    """Rotate each head of each token by its position's angles: ``[T, H, D] -> [T, H, D]``, a new tensor."""
    first_THF, second_THF = heads_THD.chunk(2, dim=-1)
    return torch.cat(
        (
            torch.addcmul(first_THF * cos_T1F, second_THF, sin_T1F, value=-1),
            torch.addcmul(second_THF * cos_T1F, first_THF, sin_T1F),
        ),
        dim=-1,
    )


class _RopeReader:
    def __init__(self, params: Mapping[str, Any], source: str) -> None:
        self._params, self._source = params, source

    def refuse_unknown(self, rope_type: str) -> None:
        known = ROPE_KEYS[rope_type] | {"rope_type", "type", "rope_theta"}
        for key, value in self._params.items():
            if key in known or value is None or (key == "partial_rotary_factor" and value == 1):
                continue
            raise ModelError(
                f"{self._source}: rope parameter '{key}'={value!r} is refused because it may change the "
                f"result: not implemented for rope type '{rope_type}'"
            )

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self._params.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._source}: rope parameter '{key}' is missing")
        return self.check(key, value)

    def optional(self, key: str) -> float | None:
        return None if self._params.get(key) is None else self.number(key)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._params.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self._source}: rope parameter '{key}'={value!r} must be true or false")
        return value

    def check(self, key: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ModelError(f"{self._source}: rope parameter '{key}'={value!r} must be a positive number")
        return float(value)


def _llama3_frequencies(config: RopeConfig, frequencies_F: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are divided by ``factor``, short ones kept, those between blended."""
    wavelengths_F = 2 * math.pi / frequencies_F
    turns_F = config.original_max_positions / wavelengths_F
    keep_F = (turns_F - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep_F = keep_F.clamp(0.0, 1.0)
    return (1 - keep_F) * frequencies_F / config.factor + keep_F * frequencies_F


def _yarn_frequencies(config: RopeConfig, frequencies_F: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): blend of interpolation and extrapolation along a linear ramp."""
    size = config.head_size
    low = _yarn_dimension(config, config.beta_fast)
    high = _yarn_dimension(config, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a ramp of zero width would divide by zero
    ramp_F = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies_F / config.factor * ramp_F + frequencies_F * (1 - ramp_F)


def _yarn_dimension(config: RopeConfig, rotations: float) -> float:
    """The dimension whose frequency makes ``rotations`` full turns within the trained context."""
    turns = config.original_max_positions / (rotations * 2 * math.pi)
    return config.head_size * math.log(turns) / (2 * math.log(config.theta))


def _yarn_attention_factor(reader: _RopeReader, factor: float) -> float:
    given = reader.optional("attention_factor")
    if given is not None:
        return given
    scale, scale_all = reader.optional("mscale"), reader.optional("mscale_all_dim")
    if scale and scale_all:
        return _yarn_scale(factor, scale) / _yarn_scale(factor, scale_all)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
