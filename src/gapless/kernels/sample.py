"""Random sampling in three kernels, in eight with filters: the launches around ``sample_jit.py``.

Draws what ``sampling/sampler.py`` draws from the same seeds, up to the rounding of sums: the torch functions
are the oracle, and the path of every device without Triton. Scratch memory is 64 KiB a row for the list of
candidates and a few KiB of sums, where a plane of a row in float32 is 600 KB for a vocabulary of 150,000.
``R`` rows, ``V`` vocabulary, ``C`` chunks, ``N`` splitters, ``L`` listed tokens, ``S`` fields of the search.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.graphs.ops import register_custom_op
from gapless.kernels.launch import launch
from gapless.kernels.select import launch_options, next_power_of_2

MAX_VOCAB_SIZE = 1 << 20
"""One program holds the sums of all chunks."""
NUM_SPLITTERS = 32
LIST_SIZE = 16384
"""Tokens between two splitters that are listed: three times as many as there are in a vocabulary of 150,000
on average."""
_CHUNK = 4096
_SAMPLES = 512
_SEARCH_TILE = 8192
_STATE_SIZE = 4


@register_custom_op(mutates_args=["tokens_R"])
def draw_tokens(
    logits_RV: Tensor,
    tokens_R: Tensor,
    invalid: int,
    temperature_R: Tensor,
    seed_R: Tensor,
    index_R: Tensor,
    top_k_R: Tensor | None,
    top_p_R: Tensor | None,
    min_p_R: Tensor | None,
) -> None:
    """``tokens_R`` (int64) = one token per row of float32 ``logits_RV``, or ``invalid`` where it holds a NaN.

    Parameters as in ``sampler.sample``; without the last three, as in ``sampler.sample_unfiltered``.
    """
    num_rows, size = logits_RV.shape
    if size > MAX_VOCAB_SIZE:
        raise ConfigError(f"fused sampling handles vocabularies of up to {MAX_VOCAB_SIZE}, not {size}")
    if num_rows == 0:
        return
    assert logits_RV.dtype == torch.float32
    assert logits_RV.stride(1) == tokens_R.stride(0) == 1
    filtered = top_k_R is not None
    # Without filters these pointers are never read.
    top_k_R = temperature_R if top_k_R is None else top_k_R
    top_p_R = temperature_R if top_p_R is None else top_p_R
    min_p_R = temperature_R if min_p_R is None else min_p_R
    num_chunks = -(-size // _CHUNK)
    device, stride = logits_RV.device, logits_RV.stride(0)
    best_RC = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    index_RC = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    mass_RC = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    ties_RC, state_RS, splitter_RN = index_RC, mass_RC, mass_RC
    jit, options = kernels(), launch_options(device)
    chunks = {
        "SIZE": size,
        "NUM_CHUNKS": num_chunks,
        "CHUNKS_PAD": next_power_of_2(num_chunks),
    }
    params = (temperature_R, top_k_R, top_p_R)
    if filtered:
        ties_RC = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
        state_RS = torch.empty((num_rows, _STATE_SIZE), dtype=torch.float64, device=device)
        splitter_RN = torch.empty((num_rows, NUM_SPLITTERS), dtype=torch.float32, device=device)
    launch(
        jit.best_and_splitters_kernel,
        (num_rows, num_chunks + filtered),
        (logits_RV, best_RC, index_RC, splitter_RN, *params, stride),
        {
            "SIZE": size,
            "CHUNK": _CHUNK,
            "NUM_CHUNKS": num_chunks,
            "NUM_SPLITTERS": NUM_SPLITTERS,
            "SAMPLES": _SAMPLES,
            "FILTERED": filtered,
            "num_warps": 8,
            **options,
        },
    )
    if filtered:
        _find_cuts(logits_RV, best_RC, splitter_RN, state_RS, params, chunks)
    launch(
        jit.weigh_kept_kernel,
        (num_rows, num_chunks),
        (logits_RV, best_RC, state_RS, mass_RC, ties_RC, *params, min_p_R, stride),
        {"CHUNK": _CHUNK, "FILTERED": filtered, "num_warps": 8, **chunks, **options},
    )
    launch(
        jit.draw_kernel,
        (num_rows,),
        (
            logits_RV,
            best_RC,
            index_RC,
            state_RS,
            mass_RC,
            ties_RC,
            tokens_R,
            temperature_R,
            seed_R,
            index_R,
            top_k_R,
            top_p_R,
            min_p_R,
            stride,
        ),
        {"INVALID": invalid, "CHUNK": _CHUNK, "FILTERED": filtered, "num_warps": 8, **chunks, **options},
    )


@functools.cache
def kernels() -> ModuleType:
    """The module of Triton kernels, imported at the first launch."""
    from gapless.kernels import sample_jit

    return sample_jit


def _find_cuts(
    logits_RV: Tensor,
    best_RC: Tensor,
    splitter_RN: Tensor,
    state_RS: Tensor,
    params: tuple[Tensor, Tensor, Tensor],
    chunks: dict[str, int],
) -> None:
    """The cut-off of top-k, then that of top-p, into ``state_RS``."""
    num_rows, num_chunks = best_RC.shape
    device, stride = logits_RV.device, logits_RV.stride(0)
    jit, options = kernels(), launch_options(device)
    sums = (num_rows, num_chunks, NUM_SPLITTERS)
    count_RCN = torch.empty(sums, dtype=torch.int32, device=device)
    mass_RCN = torch.empty(sums, dtype=torch.float32, device=device)
    gap_RL = torch.empty((num_rows, LIST_SIZE), dtype=torch.float32, device=device)
    launch(
        jit.weigh_splitters_kernel,
        (num_rows, num_chunks),
        (logits_RV, best_RC, splitter_RN, count_RCN, mass_RCN, *params, stride),
        {
            "CHUNK": _CHUNK,
            "TILE": min(_CHUNK, 256),
            "NUM_SPLITTERS": NUM_SPLITTERS,
            "num_warps": 8,
            **chunks,
            **options,
        },
    )
    for by_mass in (False, True):
        launch(
            jit.list_between_kernel,
            (num_rows, num_chunks),
            (logits_RV, best_RC, splitter_RN, count_RCN, gap_RL, state_RS, *params, stride),
            {
                "CHUNK": _CHUNK,
                "NUM_SPLITTERS": NUM_SPLITTERS,
                "LIST": LIST_SIZE,
                "BY_MASS": by_mass,
                "num_warps": 8,
                **chunks,
                **options,
            },
        )
        launch(
            jit.find_cut_kernel,
            (num_rows,),
            (logits_RV, best_RC, splitter_RN, count_RCN, mass_RCN, gap_RL, state_RS, *params, stride),
            {
                "TILE": _SEARCH_TILE,
                "NUM_SPLITTERS": NUM_SPLITTERS,
                "LIST": LIST_SIZE,
                "BY_MASS": by_mass,
                "num_warps": 16,
                **chunks,
                **options,
            },
        )
