"""From logits to tokens: pure tensor functions of fixed shape, no host reads, no generators, so they capture.

A draw is a function of (seed, token index) and of its own row of logits, nothing else: the random number is a
hash of the two (``uniform``), and the token is read off the cumulative distribution in vocabulary order. So a
request draws the same tokens whatever batch, row, graph or device it runs in (up to rounding of the
probabilities), and with or without filtered neighbours.

Filters need no sort (31 ms for 8 rows of 49,152 on one CPU core): the cut-off logit is found by bisecting
the bits of a float, which takes 31 masked sums. Ties at the cut-off go to the lower token ids, so exactly k
tokens survive a top-k.

Banned tokens and log-probabilities run outside graphs (``mask_tokens``, ``token_logprobs``). So do penalties,
from token counts on the device (``token_counts.py``); ``apply_penalties``, from token lists, is their oracle.
On a GPU ``kernels/sample.py`` draws the same in a few kernels. What the parameters mean: ``params.py``.

Shapes: R rows, V vocabulary, C chunks of the vocabulary, c tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

_CHUNK = 1024
"""Tokens per chunk. Chunks are summed in float32, their sums in float64: no float64 copy of the [R, V] plane,
and the order of additions does not depend on the number of rows."""
_INFINITY_BITS = 0x7F800000
"""float32 infinity as an integer: non-negative floats are ordered as their bits are."""


def greedy(logits_RV: Tensor) -> Tensor:
    """The best token of each row, int64 ``[R]``; the lowest id among equals. NaN beats everything."""
    return logits_RV.argmax(-1)


def sample_unfiltered(logits_RV: Tensor, *, temperature_R: Tensor, seed_R: Tensor, index_R: Tensor) -> Tensor:
    """One token per row, int64 ``[R]``, of ``softmax(logits / temperature)``; greedy where temperature is 0.

    ``seed_R`` is int64, ``index_R`` the number of the token within its request. NaN logits count as
    impossible, +inf as the largest finite value; a row in which nothing is possible gives token 0.
    """
    gap_RV, best_R = _gap_to_best(logits_RV)
    weight_RV = _weights(gap_RV, temperature_R)
    return torch.where(temperature_R > 0, _draw(weight_RV, uniform(seed_R, index_R), best_R), best_R)


def sample(
    logits_RV: Tensor,
    *,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    index_R: Tensor,
) -> Tensor:
    """The same with filters, applied in this order to the distribution after temperature.

    Top-k keeps the k best tokens (0 or less: all). Top-p keeps the best tokens until their share of what is
    left reaches p, the one that crosses included (1 or more: all). Min-p drops tokens less likely than
    ``min_p`` times the best one. A row whose filters are all off draws what ``sample_unfiltered`` draws.
    """
    gap_RV, best_R = _gap_to_best(logits_RV)
    weight_RV = _weights(gap_RV, temperature_R)
    count_R1 = torch.where(top_k_R > 0, top_k_R, gap_RV.shape[1]).double().unsqueeze(1)
    weight_RV = weight_RV * _best_until(gap_RV, None, count_R1)
    share_R1 = torch.where(top_p_R < 1, top_p_R.double(), torch.inf).unsqueeze(1)
    weight_RV = weight_RV * _best_until(gap_RV, weight_RV, share_R1 * _total(weight_RV))
    weight_RV = weight_RV * (weight_RV >= min_p_R.unsqueeze(1))  # the best token's weight is 1
    return torch.where(temperature_R > 0, _draw(weight_RV, uniform(seed_R, index_R), best_R), best_R)


def uniform(seed_R: Tensor, index_R: Tensor) -> Tensor:
    """float64 in [0, 1) from (seed, index): two rounds of the splitmix64 finaliser (Steele, Lea, Flood 2014).

    ``mix(mix(seed + g) + (index + 1) * g)``, g the 64-bit golden ratio; the top 53 bits are the mantissa.
    Integer arithmetic wraps identically on every device.
    """
    key_R = _mix(seed_R.to(torch.int64) + _GOLDEN)
    bits_R = _mix(key_R + (index_R.to(torch.int64) + 1) * _GOLDEN)
    return _shift_right(bits_R, 11).double() * 2.0**-53


def apply_penalties(
    logits_RV: Tensor,
    *,
    prompt_ids: Sequence[Sequence[int]],
    output_ids: Sequence[Sequence[int]],
    repetition_R: Tensor,
    presence_R: Tensor,
    frequency_R: Tensor,
) -> Tensor:
    """New logits with the penalties of each row's own tokens (meaning as in vLLM).

    Repetition divides positive and multiplies negative logits of every token seen in prompt or output;
    frequency subtracts its value once per occurrence in the output, presence once if there is any.
    """
    device = logits_RV.device
    seen_RV = torch.zeros(logits_RV.shape, dtype=torch.bool)
    counts_RV = torch.zeros(logits_RV.shape)
    for row, (prompt, output) in enumerate(zip(prompt_ids, output_ids, strict=True)):
        output_index = torch.tensor(output, dtype=torch.int64)
        seen_RV[row, torch.tensor(prompt, dtype=torch.int64)] = True
        seen_RV[row, output_index] = True
        counts_RV[row].index_add_(0, output_index, torch.ones(len(output)))
    return penalise(
        logits_RV,
        seen_RV.to(device),
        counts_RV.to(device),
        repetition_R=repetition_R,
        presence_R=presence_R,
        frequency_R=frequency_R,
    )


def penalise(
    logits_RV: Tensor,
    seen_RV: Tensor,
    output_counts_RV: Tensor,
    *,
    repetition_R: Tensor,
    presence_R: Tensor,
    frequency_R: Tensor,
) -> Tensor:
    """The arithmetic of ``apply_penalties`` on tensors. ``seen_RV``: bool, in prompt or output."""
    factor_RV = torch.where(seen_RV, repetition_R.unsqueeze(1), 1.0)
    logits_RV = torch.where(logits_RV > 0, logits_RV / factor_RV, logits_RV * factor_RV)
    per_token_RV = frequency_R.unsqueeze(1) * output_counts_RV
    return logits_RV - per_token_RV - presence_R.unsqueeze(1) * (output_counts_RV > 0)


def mask_tokens(logits_RV: Tensor, banned: Iterable[tuple[int, Sequence[int]]]) -> None:
    """Make tokens impossible, in place: ``banned`` holds (row, token ids); for EOS before ``min_tokens``."""
    pairs = [(row, token) for row, tokens in banned for token in tokens]
    if pairs:
        rows, tokens = to_device(np.asarray(pairs), logits_RV.device).unbind(-1)
        logits_RV[rows, tokens] = -torch.inf


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A small array as a tensor, without waiting for the steps that a GPU still has to run."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def token_logprobs(logits_RV: Tensor, tokens_R: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, token ids and ranks, each ``[R, 1 + k]``: the row's own token, then its k best.

    Rank 1 is the most likely. Among equals the lower id is listed first; the own token's rank counts only
    tokens that are strictly more likely.
    """
    logprobs_RV = logits_RV.float().log_softmax(-1)
    own_R1 = tokens_R.to(torch.int64).unsqueeze(1)
    own_value_R1 = logprobs_RV.gather(1, own_R1)
    own_rank_R1 = 1 + (logprobs_RV > own_value_R1).sum(-1, keepdim=True)
    # Log-probabilities are at most 0, so their negated bits ascend; the id in the low half breaks ties.
    ascending_RV = (-logprobs_RV + 0.0).view(torch.int32).to(torch.int64) << 32
    ascending_RV += torch.arange(logits_RV.shape[1], device=logits_RV.device)
    best_RK = ascending_RV.topk(min(k, logits_RV.shape[1]), largest=False).values & 0xFFFFFFFF
    rank_RK = torch.arange(1, best_RK.shape[1] + 1, device=logits_RV.device).expand_as(best_RK)
    return (
        torch.cat([own_value_R1, logprobs_RV.gather(1, best_RK)], 1),
        torch.cat([own_R1, best_RK], 1),
        torch.cat([own_rank_R1, rank_RK], 1),
    )


def _gap_to_best(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """How far each logit lies below its row's best (float32, 0 to inf, never NaN), and the best token.

    The vocabulary is padded to whole chunks with impossible tokens.
    """
    finite_RV = logits_RV.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    best_R = finite_RV.argmax(-1)
    best_logit_R1 = finite_RV.gather(1, best_R.unsqueeze(1)).clamp(min=torch.finfo(torch.float32).min)
    return pad(best_logit_R1 - finite_RV, (0, -logits_RV.shape[1] % _CHUNK), value=torch.inf), best_R


def _weights(gap_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """Unnormalised probabilities; the best token's is exactly 1, however low the temperature."""
    divisor_R1 = torch.where(temperature_R > 0, temperature_R, 1.0).unsqueeze(1)
    return (gap_RV / divisor_R1).neg_().exp_()


def _best_until(gap_RV: Tensor, weight_RV: Tensor | None, budget_R1: Tensor) -> Tensor:
    """1.0 for the tokens one takes, best first, while the weight taken before is below the budget, else 0.0.

    ``weight_RV`` None: every token weighs 1. The cut-off is the largest gap such that the tokens strictly
    better weigh less than the budget, and is built bit by bit.
    """
    taken_RV = torch.empty_like(gap_RV)

    def weight_below(bits_R1: Tensor) -> Tensor:
        torch.lt(gap_RV, bits_R1.view(torch.float32), out=taken_RV)
        return _total(taken_RV if weight_RV is None else taken_RV.mul_(weight_RV))

    cut_bits_R1 = torch.zeros_like(budget_R1, dtype=torch.int32)
    for bit in range(30, -1, -1):
        trial_R1 = cut_bits_R1 | (1 << bit)
        fits_R1 = (weight_below(trial_R1) < budget_R1) & (trial_R1 <= _INFINITY_BITS)
        cut_bits_R1 = torch.where(fits_R1, trial_R1, cut_bits_R1)
    left_R1 = budget_R1 - weight_below(cut_bits_R1)
    cut_R1 = cut_bits_R1.view(torch.float32)
    is_tie_RV = gap_RV == cut_R1
    if weight_RV is not None:
        left_R1 = left_R1 / torch.where(is_tie_RV, weight_RV, 0.0).amax(-1, keepdim=True).double()
    num_ties_R1 = left_R1.ceil().clamp(max=gap_RV.shape[1]).to(torch.int32)
    return (
        (gap_RV < cut_R1) | (is_tie_RV & (is_tie_RV.cumsum(-1, dtype=torch.int32) <= num_ties_R1))
    ).float()


def _draw(weight_RV: Tensor, uniform_R: Tensor, best_R: Tensor) -> Tensor:
    """Inverse of the cumulative distribution at ``uniform``: first the chunk, then the token in it."""
    weight_RCc = weight_RV.unflatten(1, (-1, _CHUNK))
    mass_RC = weight_RCc.sum(-1).double()
    upto_RC = mass_RC.cumsum(-1)
    target_R1 = uniform_R.unsqueeze(1) * upto_RC[:, -1:]
    chunk_R1 = _first_beyond(upto_RC, mass_RC, target_R1)
    before_R1 = (upto_RC - mass_RC).gather(1, chunk_R1)
    inside_Rc = weight_RCc.gather(1, chunk_R1.unsqueeze(2).expand(-1, -1, _CHUNK)).squeeze(1).double()
    place_R1 = _first_beyond(inside_Rc.cumsum(-1), inside_Rc, target_R1 - before_R1)
    token_R = (chunk_R1 * _CHUNK + place_R1).squeeze(1)
    return torch.where(upto_RC[:, -1] > 0, token_R, best_R)


def _total(weight_RV: Tensor) -> Tensor:
    return weight_RV.unflatten(1, (-1, _CHUNK)).sum(-1).sum(-1, keepdim=True, dtype=torch.float64)


def _first_beyond(upto_RN: Tensor, weight_RN: Tensor, target_R1: Tensor) -> Tensor:
    """First place with weight whose cumulative sum exceeds the target; if rounding leaves none, the last with
    weight."""
    num_places = upto_RN.shape[1]
    place_N = torch.arange(num_places, device=upto_RN.device)
    possible_RN = weight_RN > 0
    first_R1 = torch.where(possible_RN & (upto_RN > target_R1), place_N, num_places).amin(-1, keepdim=True)
    last_R1 = torch.where(possible_RN, place_N, 0).amax(-1, keepdim=True)
    return torch.minimum(first_R1, last_R1)


def _mix(value_R: Tensor) -> Tensor:
    value_R = (value_R ^ _shift_right(value_R, 30)) * _MIX_1
    value_R = (value_R ^ _shift_right(value_R, 27)) * _MIX_2
    return value_R ^ _shift_right(value_R, 31)


def _shift_right(value_R: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (value_R >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
