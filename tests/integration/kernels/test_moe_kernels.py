"""The kernels of a mixture of experts (interpreted) against float64, with padding of NaN before or behind the
real rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from gapless.errors import ConfigError
from gapless.kernels import moe, moe_sum
from gapless.kernels.norm import fused_add_rms_norm
from moe_oracles import Case, make_inputs, mixture, mixture_oracle, route, route_oracle

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu covers the compiled kernels")

CASES = {
    "one token": Case(num_tokens=1, num_experts=8, top_k=2, hidden=32, size=24, real=(0, 1)),
    "odd sizes": Case(num_tokens=5, num_experts=7, top_k=3, hidden=19, size=11, real=(0, 5)),
    "padding last": Case(num_tokens=6, num_experts=6, top_k=2, hidden=16, size=12, real=(0, 4)),
    "padding first": Case(num_tokens=6, num_experts=6, top_k=2, hidden=16, size=12, real=(3, 6)),
    "padding on both sides": Case(num_tokens=9, num_experts=5, top_k=2, hidden=18, size=9, real=(2, 7)),
    "padding only": Case(num_tokens=4, num_experts=4, top_k=2, hidden=16, size=8, real=(0, 0)),
    "weights as they are": Case(
        num_tokens=4, num_experts=6, top_k=3, hidden=16, size=8, real=(0, 3), renormalizes=False
    ),
    "every expert": Case(num_tokens=3, num_experts=3, top_k=3, hidden=16, size=8, real=(0, 3)),
    "one expert": Case(num_tokens=3, num_experts=1, top_k=1, hidden=16, size=8, real=(0, 2)),
    "all tokens to one expert": Case(
        num_tokens=20, num_experts=32, top_k=1, hidden=16, size=8, real=(0, 19), only_expert=30
    ),
    "experts with no token": Case(num_tokens=2, num_experts=20, top_k=2, hidden=16, size=8, real=(0, 2)),
    "blocks of 32": Case(num_tokens=30, num_experts=3, top_k=2, hidden=16, size=8, real=(1, 30)),
    "blocks of 64": Case(num_tokens=31, num_experts=2, top_k=2, hidden=20, size=10, real=(0, 30)),
    "blocks of 128": Case(num_tokens=70, num_experts=1, top_k=1, hidden=20, size=10, real=(2, 69)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_those_of_the_float64_mixture_and_zeros_in_padding(
    case: Case, poisoned_memory: None
) -> None:
    inputs = make_inputs(case)
    out, expected = mixture(case, inputs), mixture_oracle(case, inputs)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    is_padding = torch.ones(case.num_tokens, dtype=torch.bool)
    is_padding[case.rows] = False
    assert (out[is_padding] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["padding last", "blocks of 64"])
def test_half_precision_is_within_its_noise(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    half = Case(**{**{f: getattr(case, f) for f in Case.__slots__}, "dtype": dtype})
    inputs = make_inputs(half)
    out, expected = mixture(half, inputs), mixture_oracle(half, inputs)
    error = (out.double() - expected).norm() / expected.norm()
    assert out.dtype == dtype
    assert error < 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("max_chunk", [16, 4])
def test_every_real_slot_lies_in_one_block_of_its_expert(
    case: Case, max_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "_MAX_ALONE", max_chunk)
    check_routing(case, route(case, inputs := make_inputs(case)), inputs.logits_TN)


@given(
    num_tokens=st.integers(1, 24),
    num_experts=st.integers(1, 12),
    data=st.data(),
    max_chunk=st.sampled_from([1, 2, 8, 16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def test_any_routing_is_grouped_without_a_gap(
    num_tokens: int, num_experts: int, data: st.DataObject, max_chunk: int, seed: int
) -> None:
    first = data.draw(st.integers(0, num_tokens))
    case = Case(
        num_tokens=num_tokens, num_experts=num_experts, top_k=data.draw(st.integers(1, num_experts)),
        hidden=4, size=4, real=(first, data.draw(st.integers(first, num_tokens))),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_MAX_ALONE", "_MIN_CHUNK", "_MAX_CHUNK"):  # of one: counts are read 8 at a time
            patch.setattr(moe, name, max_chunk)
        inputs = make_inputs(case, seed=seed)
        check_routing(case, route(case, inputs), inputs.logits_TN)


def check_routing(case: Case, routed: tuple[Tensor, ...], logits_TN: Tensor) -> None:
    weights, experts, slots, blocks, counts = routed
    expected_weights, expected_experts = route_oracle(case, logits_TN)
    assert torch.equal(experts[case.rows].long(), expected_experts)
    torch.testing.assert_close(weights[case.rows].double(), expected_weights, atol=1e-6, rtol=1e-5)
    is_padding = torch.ones(case.num_tokens, dtype=torch.bool)
    is_padding[case.rows] = False
    assert (experts[is_padding] == case.num_experts).all()
    assert (weights[is_padding] == 0).all()
    assert counts.tolist() == torch.bincount(expected_experts.flatten(), minlength=case.num_experts).tolist()
    block_p = moe.block_slots(case.num_tokens, num_experts=case.num_experts, top_k=case.top_k)
    found: list[int] = []
    is_behind = False
    for expert, start, length in blocks.tolist():
        assert 0 <= length <= block_p
        assert not (is_behind and length), "blocks without slots are the last ones"
        is_behind = is_behind or length == 0
        covered = slots[start : start + length].tolist()
        assert covered == sorted(covered)
        assert all(experts.flatten()[slot] == expert for slot in covered)
        found += covered
    real = range(case.real[0] * case.top_k, case.real[1] * case.top_k)
    assert sorted(found) == list(real)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (3, 1), (3, 2), (3, 3), (5, 1), (5, 2), (5, 3)])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 13])
def test_no_routing_needs_more_blocks_than_there_are(num_tokens: int, top_k: int, num_experts: int) -> None:
    """Every way to hand the slots out, of which an expert takes at most one per token."""
    block_p, num_slots = 4, num_tokens * top_k
    most = {0: 0}  # blocks by slots, over the experts so far
    for _ in range(num_experts):
        best: dict[int, int] = {}
        for slots, blocks in most.items():
            for count in range(num_tokens + 1):
                best[slots + count] = max(best.get(slots + count, 0), blocks + -(-count // block_p))
        most = best
    bound = moe.max_blocks(num_tokens, num_experts=num_experts, top_k=top_k, block_p=block_p)
    assert most[num_slots] <= bound <= num_slots
    if num_experts == 1:
        assert bound == -(-num_tokens // block_p)


def test_of_equal_probabilities_the_lower_experts_win() -> None:
    case = Case(num_tokens=3, num_experts=6, top_k=3, hidden=4, size=4, real=(0, 3))
    inputs = make_inputs(case)
    inputs.logits_TN.zero_()
    inputs.logits_TN[1, 4] = inputs.logits_TN[1, 2] = 1.0
    inputs.logits_TN[2, 0] = -1.0
    experts = route(case, inputs)[1]
    assert experts.tolist() == [[0, 1, 2], [2, 4, 0], [1, 2, 3]]


@pytest.mark.parametrize("num_experts", [6, 128, 160])
def test_of_equal_probabilities_of_a_single_token_the_lower_experts_win_too(num_experts: int) -> None:
    """A single token is routed in another way, unless there are too many experts for it."""
    case = Case(num_tokens=1, num_experts=num_experts, top_k=4, hidden=4, size=4, real=(0, 1))
    inputs = make_inputs(case)
    inputs.logits_TN.zero_()
    inputs.logits_TN[0, 5] = inputs.logits_TN[0, 2] = 1.0
    weights, experts = route(case, inputs)[:2]
    assert experts.tolist() == [[2, 5, 0, 1]]
    check_routing(case, route(case, inputs), inputs.logits_TN)
    inputs.logits_TN[0, num_experts - 1] = torch.nan
    weights, experts, slots, _, counts = route(case, inputs)
    assert weights.isnan().all()
    assert experts.tolist() == [[0, 1, 2, 3]]
    assert slots.tolist() == [0, 1, 2, 3]
    assert counts.sum() == 4


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_breaks_no_other_and_stays_broken(value: float) -> None:
    case = Case(num_tokens=3, num_experts=4, top_k=2, hidden=16, size=8, real=(0, 3))
    inputs = make_inputs(case)
    expected = mixture(case, inputs)
    inputs.logits_TN[1, 3] = value
    out = mixture(case, inputs)
    assert out[1].isnan().all()
    assert torch.equal(out[0::2], expected[0::2])


def test_shared_results_are_added_under_their_gate_but_not_to_padding() -> None:
    by_slot, shared, gate = torch.randn(8, 20), torch.randn(4, 20), torch.randn(4, 1)
    by_slot[6:] = shared[3] = gate[3] = torch.nan
    out = torch.full((4, 20), torch.nan)
    with torch.no_grad():
        moe_sum.combine_experts(by_slot, torch.tensor([0, 3], dtype=torch.int32), shared, gate, out)
    expected = by_slot.view(4, 2, 20).sum(1) + gate.sigmoid() * shared
    torch.testing.assert_close(out[:3], expected[:3])
    assert (out[3] == 0).all()


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, 16), (128, 16), (256, 32), (512, 64), (2048, 128)])
def test_blocks_of_qwen3_30b_grow_with_the_tokens(num_tokens: int, rows: int) -> None:
    assert moe.block_slots(num_tokens, num_experts=128, top_k=8) == rows
    for is_gate_up, num_out in ((True, 768), (False, 2048)):
        tiles = moe.choose_tiles(num_tokens, num_experts=128, top_k=8, num_out=num_out, is_gate_up=is_gate_up)
        busy = min(num_tokens * 8, 128)
        assert busy * -(-num_out // tiles.block_o) >= 88, "for two multiprocessors in three"
        assert tiles.block_p == rows


@pytest.mark.parametrize(
    ("num_tokens", "gate_up", "down"),
    [(1, (64, 5), (64, 5)), (8, (64, 3), (128, 3)), (32, (64, 3), (128, 3)), (128, (64, 3), (128, 3))],
)
def test_few_tokens_of_qwen3_30b_get_what_was_fastest(
    num_tokens: int, gate_up: tuple[int, int], down: tuple[int, int]
) -> None:
    for is_gate_up, num_out, wanted in ((True, 768, gate_up), (False, 2048, down)):
        tiles = moe.choose_tiles(num_tokens, num_experts=128, top_k=8, num_out=num_out, is_gate_up=is_gate_up)
        assert (tiles.block_o, tiles.num_stages, tiles.block_i, tiles.block_p) == (*wanted, 128, 16)


@pytest.mark.parametrize(
    ("num_tokens", "gate_up", "down"), [(512, (128, 4), (128, 3)), (2048, (128, 4), (256, 4))]
)
def test_many_tokens_of_qwen3_30b_get_what_was_fastest(
    num_tokens: int, gate_up: tuple[int, int], down: tuple[int, int]
) -> None:
    for is_gate_up, num_out, wanted in ((True, 768, gate_up), (False, 2048, down)):
        tiles = moe.choose_tiles(num_tokens, num_experts=128, top_k=8, num_out=num_out, is_gate_up=is_gate_up)
        assert (tiles.block_o, tiles.num_stages, tiles.num_warps) == (*wanted, 8)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("is_gate_up", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 32, 128, 512, 2048])
@pytest.mark.parametrize("kib", [99, 163])
def test_tiles_fit_a_gpu_with_less_shared_memory_than_hopper(
    kib: int, num_tokens: int, is_gate_up: bool, itemsize: int
) -> None:
    sizes = {"num_experts": 128, "top_k": 8, "num_out": 768 if is_gate_up else 2048, "itemsize": itemsize}
    tiles = moe.choose_tiles(num_tokens, **sizes, is_gate_up=is_gate_up, shared_bytes=kib << 10)
    rows = tiles.block_p + tiles.block_o * (2 if is_gate_up else 1)
    # What Triton 3.6 was seen to take when compiling for compute capability 12.0.
    assert rows * tiles.block_i * itemsize * (tiles.num_stages - 1) <= kib << 10
    assert tiles.num_stages >= 2


def test_more_experts_of_a_token_than_ranks_have_bits_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 127 experts here, not 128"):
        moe.route_tokens(torch.zeros(2, 128), torch.tensor([0, 2], dtype=torch.int32), 128, True, 16)


def test_a_slice_of_a_rank_is_cut_finer() -> None:
    """A token of Qwen3-30B-A3B shared by 8 ranks: 96 rows of each of 8 experts."""
    sizes = {"num_experts": 128, "top_k": 8, "is_gate_up": True}
    assert [moe.choose_tiles(tokens, num_out=96, **sizes).block_o for tokens in (1, 4, 8)] == [16, 64, 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_shared", [False, True])
def test_sum_and_norm_in_one_kernel_are_the_bits_of_two(dtype: torch.dtype, has_shared: bool) -> None:
    """Rows 0 and 4 are padding; the residual lies in wider rows."""
    by_slot, weight = torch.randn(15, 20, dtype=dtype), torch.randn(20, dtype=dtype)
    residual = torch.randn(5, 2, 20, dtype=dtype)[:, 1]
    shared, gate = torch.randn(5, 20, dtype=dtype), torch.randn(5, 1, dtype=dtype)
    for row in (0, 4):
        by_slot[3 * row : 3 * row + 3] = shared[row] = gate[row] = torch.nan
    terms = (
        by_slot,
        torch.tensor([1, 3, 4, 4], dtype=torch.int32),
        *((shared, gate) if has_shared else (None, None)),
    )
    update = torch.full((5, 20), torch.nan, dtype=dtype)
    with torch.no_grad():
        moe_sum.combine_experts(*terms, update)
        expected = fused_add_rms_norm(update, residual, weight, 1e-6)
        found = moe_sum.combine_add_rms_norm(*terms, residual, weight, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(found[0][0::4], residual[0::4])


@pytest.mark.parametrize("is_gate_up", [True, False])
@pytest.mark.parametrize("group", [2, 3, 8])
def test_the_order_of_programs_changes_no_bit(group: int, is_gate_up: bool, poisoned_memory: None) -> None:
    """Seven blocks, some empty, and three tiles of features."""
    case = Case(num_tokens=40, num_experts=3, top_k=2, hidden=40, size=40, real=(1, 39))
    inputs = make_inputs(case)
    limits, block_p = inputs.query_start_loc, 16
    weights, _, slots, blocks, _ = moe.route_tokens(inputs.logits_TN, limits, 2, True, block_p)
    assert blocks.shape[0] == 7
    act = torch.randn(80, 40)
    found = []
    for each in (1, group):
        tiles = moe.ExpertTiles(
            block_p=block_p, block_o=16, block_i=32, weights_left=False, num_warps=4, num_stages=2, group=each
        )
        out = torch.full((80, 40), -7.0)
        source, matrix = (inputs.x_TE, inputs.gate_up_NOE) if is_gate_up else (act, inputs.down_NEF)
        scales = None if is_gate_up else weights
        moe.launch_expert_product(source, matrix, slots, blocks, scales, out, tiles, top_k=2)
        found.append(out)
    assert torch.equal(*found)
    assert found[0].isfinite().all()
    assert (found[0] != -7.0).any(1).sum() == 76, "the slots of real rows"


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 4), (60, 4), (64, 8), (128, 8), (512, 10)])
@pytest.mark.parametrize("num_tokens", [1, 3, 33, 70])
def test_routing_of_published_shapes(num_tokens: int, num_experts: int, top_k: int) -> None:
    real = (min(1, num_tokens - 1), num_tokens)
    case = Case(num_tokens=num_tokens, num_experts=num_experts, top_k=top_k, hidden=1, size=1, real=real)
    check_routing(case, route(case, inputs := make_inputs(case)), inputs.logits_TN)


def test_weights_are_taken_once_per_group_where_experts_fill_many_blocks() -> None:
    """Mixtral 8x22B: an expert is larger than the second-level cache."""
    sizes = {"num_experts": 8, "top_k": 2, "num_out": 16384, "is_gate_up": True}
    assert moe.choose_tiles(2048, **sizes).group > 1
    assert moe.choose_tiles(256, **sizes).group == 1
