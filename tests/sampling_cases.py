"""Rows of logits and parameters for the sampling kernels, and both ways to draw from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.engine.graph_set import INVALID_TOKEN
from gapless.kernels.sample import draw_tokens
from gapless.sampling.sampler import sample, sample_unfiltered

UNWRITTEN = -99


@dataclass(frozen=True, kw_only=True, slots=True)
class Params:
    """Of every row of a batch, on one device."""

    temperature_R: Tensor
    seed_R: Tensor
    index_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor

    def expected(self, logits_RV: Tensor, *, filtered: bool = True) -> Tensor:
        """What the torch functions draw."""
        shared = {
            "temperature_R": self.temperature_R,
            "seed_R": self.seed_R,
            "index_R": self.index_R,
        }
        if filtered:
            tokens_R = sample(
                logits_RV, **shared, top_k_R=self.top_k_R, top_p_R=self.top_p_R, min_p_R=self.min_p_R
            )
        else:
            tokens_R = sample_unfiltered(logits_RV, **shared)
        return torch.where(logits_RV.isnan().any(-1), INVALID_TOKEN, tokens_R)

    def draw(self, logits_RV: Tensor, *, filtered: bool = True) -> Tensor:
        """What the kernels draw; the logits must stay as they are."""
        tokens_R = torch.full((logits_RV.shape[0],), UNWRITTEN, dtype=torch.int64, device=logits_RV.device)
        before_RV = logits_RV.clone()
        self.draw_into(tokens_R, logits_RV, filtered=filtered)
        assert torch.equal(before_RV.nan_to_num(nan=7.0), logits_RV.nan_to_num(nan=7.0))
        return tokens_R

    def draw_into(self, tokens_R: Tensor, logits_RV: Tensor, *, filtered: bool = True) -> None:
        filters = (self.top_k_R, self.top_p_R, self.min_p_R) if filtered else (None, None, None)
        draw_tokens(
            logits_RV, tokens_R, INVALID_TOKEN, self.temperature_R, self.seed_R, self.index_R, *filters
        )


def make_params(
    num_rows: int,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    first_seed: int = 0,
    device: str = "cpu",
) -> Params:
    """Seeds and indices differ from row to row; a number stands for every row."""

    def column(value: float | list[float], dtype: torch.dtype) -> Tensor:
        values = value if isinstance(value, list) else [value] * num_rows
        return torch.tensor(values, dtype=dtype, device=device)

    row_R = torch.arange(num_rows, device=device)
    return Params(
        temperature_R=column(temperature, torch.float32),
        seed_R=(row_R + first_seed) * 0x1234567_89ABCDEF,
        index_R=(row_R * 3 + first_seed % 5).to(torch.int32),
        top_k_R=column(top_k, torch.int32),
        top_p_R=column(top_p, torch.float32),
        min_p_R=column(min_p, torch.float32),
    )


def random_logits(num_rows: int, size: int, kind: str, *, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = torch.randn(num_rows, size, generator=generator) * 3
    if kind == "bfloat16":
        logits_RV = logits_RV.bfloat16().float()
    elif kind == "ties":
        logits_RV = logits_RV.round()
    elif kind == "impossible":
        logits_RV[:, ::2] = -torch.inf
    elif kind == "equal":
        logits_RV.zero_()
    elif kind == "one possible":
        logits_RV.fill_(-torch.inf)[:, size // 2] = 1.0
    elif kind == "none possible":
        logits_RV.fill_(-torch.inf)
    elif kind == "infinite":
        logits_RV[:, size // 3] = torch.inf
    else:
        assert kind == "normal", kind
    return logits_RV.to(device)
