"""What decode attention does with a row of the q/k/v product that nobody has normed and rotated yet.

A step with one token a request need not have a kernel between the product and attention: a program has few
query heads and one key head, so it norms and rotates them itself, stores the key and the value, and its
running softmax begins with that key. Numbers are rounded where ``rotate_heads_kernel`` (``kernels/jit.py``)
rounds them. Angles are loaded before the wait; the norms' weights are not, because they would only fill
registers until then.

Shapes: Q rows of the tile in which queries are rotated, M rows of a query tile, D head size padded to a power
of 2, F half a head, P positions, G query and key heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs


@triton.jit
def load_angles(
    rope_P2F, positions_T, token, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, HAS_POSITIONS: tl.constexpr
):
    """``read_angles`` of the token's position. Without positions a kernel of this step makes the table: it is
    read behind the wait, and this is nothing."""
    angles = (1.0, 0.0)
    if HAS_POSITIONS:
        angles = read_angles(rope_P2F, tl.load(positions_T + token).to(tl.int64), HEAD_SIZE, HEAD_PAD)
    return angles


@triton.jit
def read_angles(rope_P2F, row, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Cosines and sines in a row of the table, ``[D]`` each; sines of a head's first half are negative, so
    that both halves rotate alike."""
    dim = tl.arange(0, HEAD_PAD)
    is_first = dim < HEAD_SIZE // 2
    angle = rope_P2F + row * HEAD_SIZE + tl.where(is_first, dim, dim - HEAD_SIZE // 2)
    is_dim = dim < HEAD_SIZE
    cosine_D = tl.load(angle, mask=is_dim, other=0.0).to(tl.float32)
    sine_D = tl.load(angle + HEAD_SIZE // 2, mask=is_dim, other=0.0).to(tl.float32)
    return cosine_D, tl.where(is_first, -sine_D, sine_D)


@triton.jit
def load_with_partner(head, dim, is_element, HEAD_SIZE: tl.constexpr):
    """The elements of heads at ``head``, and each one's partner in the rotation: the one half a head away."""
    partner = tl.where(dim < HEAD_SIZE // 2, dim + HEAD_SIZE // 2, dim - HEAD_SIZE // 2)
    return (
        tl.load(head + dim, mask=is_element, other=0.0),
        tl.load(head + partner, mask=is_element, other=0.0),
    )


@triton.jit
def rotate(
    value,
    partner,
    weight,
    partner_weight,
    cosine_D,
    sine_D,
    eps,
    HEAD_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One or several heads, normed if they are to be: ``[..., D]``, elements in the last dimension."""
    dtype = value.dtype
    element, other = value.to(tl.float32), partner.to(tl.float32)
    if HAS_NORM:
        square_sum = tl.sum(element * element, len(value.shape) - 1, keep_dims=True)
        scale = tl.rsqrt(square_sum / HEAD_SIZE + eps)
        element = ((element * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        other = ((other * scale).to(dtype).to(tl.float32) * partner_weight).to(dtype).to(tl.float32)
    return ((element * cosine_D).to(dtype).to(tl.float32) + other * sine_D).to(dtype)


@triton.jit
def begin_with_new_key(
    qkv_row,
    k_slot,
    v_slot,
    norm_weight_GD,
    rope_P2F,
    angles,
    place,
    eps,
    scale_log2,
    has_new_key,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    """The query tile ``[M, D]``, and the running softmax behind this step's key, which is stored: ``[M], [M],
    [M, D]``. Without ``has_new_key`` nothing is stored, and the softmax has seen nothing yet.

    ``place``: the token, its key/value head, and how many of these there are. Queries are rotated in a tile
    of ``ROWS`` rows, of which ``NUM_ROWS`` is a multiple; rows past the group repeat others or hold zeros,
    and reach no result.
    """
    token, kv_head, num_kv_heads = place
    dim = tl.arange(0, HEAD_PAD)
    is_dim = dim < HEAD_SIZE
    head = tl.arange(0, ROWS)[:, None]
    is_query = (head < GROUP) & is_dim[None, :]
    if not HAS_POSITIONS:
        angles = read_angles(rope_P2F, token.to(tl.int64), HEAD_SIZE, HEAD_PAD)
    cosine_D, sine_D = angles
    q_weight, q_partner_weight, k_weight, k_partner_weight = load_norms(
        norm_weight_GD, kv_head, num_kv_heads, HEAD_SIZE, HEAD_PAD, GROUP, ROWS, HAS_NORM
    )
    query, query_partner = load_with_partner(
        qkv_row + (kv_head * GROUP + head) * HEAD_SIZE, dim[None, :], is_query, HEAD_SIZE
    )
    k_row = qkv_row + (num_kv_heads * GROUP + kv_head) * HEAD_SIZE
    key, key_partner = load_with_partner(k_row, dim, is_dim, HEAD_SIZE)
    value_D = tl.load(k_row + num_kv_heads * HEAD_SIZE + dim, mask=is_dim, other=0.0)
    query_QD = rotate(
        query,
        query_partner,
        q_weight,
        q_partner_weight,
        cosine_D[None, :],
        sine_D[None, :],
        eps,
        HEAD_SIZE,
        HAS_NORM,
    )
    key_D = rotate(key, key_partner, k_weight, k_partner_weight, cosine_D, sine_D, eps, HEAD_SIZE, HAS_NORM)
    is_stored = is_dim & has_new_key
    tl.store(k_slot + dim, key_D.to(k_slot.dtype.element_ty), mask=is_stored)
    tl.store(v_slot + dim, value_D.to(v_slot.dtype.element_ty), mask=is_stored)

    score_Q = tl.sum(query_QD.to(tl.float32) * key_D.to(tl.float32)[None, :], 1) * scale_log2
    COPIES: tl.constexpr = NUM_ROWS // ROWS
    if COPIES > 1:
        score_Q = tl.reshape(tl.broadcast_to(score_Q[None, :], [COPIES, ROWS]), [NUM_ROWS])
        copied = tl.broadcast_to(query_QD[None, :, :], [COPIES, ROWS, HEAD_PAD])
        query_QD = tl.reshape(copied, [NUM_ROWS, HEAD_PAD])
    best_M = tl.where(has_new_key, score_Q, float("-inf"))
    # A score that is no number must be seen in the result, also where no other key follows.
    total_M = tl.where(has_new_key, tl.where(score_Q < float("inf"), 1.0, float("nan")), 0.0)
    sum_MD = total_M[:, None] * value_D.to(tl.float32)[None, :]
    return query_QD, best_M, total_M, sum_MD


@triton.jit
def load_norms(
    norm_weight_GD,
    kv_head,
    num_kv_heads,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Weights of the heads' norms and of their elements' partners: queries ``[Q, D]``, key ``[D]``."""
    dim = tl.arange(0, HEAD_PAD)
    is_dim = dim < HEAD_SIZE
    norms = (1.0, 1.0, 1.0, 1.0)
    if HAS_NORM:
        head = tl.arange(0, ROWS)[:, None]
        q_weight, q_partner_weight = load_with_partner(
            norm_weight_GD + (kv_head * GROUP + head) * HEAD_SIZE, dim[None, :],
            (head < GROUP) & is_dim[None, :], HEAD_SIZE,
        )  # fmt: skip
        k_weight, k_partner_weight = load_with_partner(
            norm_weight_GD + (num_kv_heads * GROUP + kv_head) * HEAD_SIZE, dim, is_dim, HEAD_SIZE
        )
        norms = (
            q_weight.to(tl.float32),
            q_partner_weight.to(tl.float32),
            k_weight.to(tl.float32),
            k_partner_weight.to(tl.float32),
        )
    return norms
