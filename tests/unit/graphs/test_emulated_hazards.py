"""The faults that graphs produce in the field, shown, refused or made harmless on the emulated device.

The numbers are those of the project's hazard list (kinds of public bug reports). Where the emulated device
must *show* a fault (a stale address, a frozen value), the test asserts the wrong number: that is what makes
such bugs visible on a CPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gapless.errors import CaptureError, StaleAddressError
from gapless.graphs.breakable import eager_break
from gapless.graphs.capture import capture_program
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.modes import Strategy
from gapless.graphs.ops import register_custom_op
from gapless.graphs.program import Program


def capture(
    device: EmulatedDevice, fn: Callable[[], object], *, pool=None, strategy: Strategy = Strategy.FULL
) -> tuple[Program, object]:
    return capture_program(fn, device=device, pool=pool or device.new_pool(), strategy=strategy)


@eager_break
def fresh_result(h: Tensor) -> Tensor:
    return h * 3


@pytest.mark.parametrize("churn", [0, 1, 7])
def test_1_24_break_result_reaches_the_next_segment_wherever_it_was_allocated(churn, device):
    """Handoff slots: the eager result may land at a new address each time."""
    x, held = torch.randn(32), []

    @eager_break
    def moving(h: Tensor) -> Tensor:
        held.extend(torch.empty(32) for _ in range(churn))
        held.append(h * 3)
        return held[-1]

    with device.eager_arena():
        program, out = capture(device, lambda: moving(x + 1) * 2, strategy=Strategy.BREAKABLE)
        for _ in range(3):
            x.normal_()
            program.replay()
            assert torch.equal(out, (x + 1) * 3 * 2)


def test_1_reading_an_eager_result_by_address_without_a_slot_is_stale(device):
    """What slots prevent: an eager tensor read by a segment after its owner has gone."""
    x = torch.ones(32)
    with device.eager_arena():
        results = [x * 3]
        program, _ = capture(device, lambda: results[0] * 2)
        results[0] = x * 5
        with pytest.raises(StaleAddressError, match=r"argument self of aten\.mul\.Tensor"):
            program.replay()


def test_1_without_the_liveness_check_it_reads_what_was_put_there_since():
    device = EmulatedDevice(check_liveness=False)
    x = torch.ones(32)
    with device.eager_arena():
        results = [x * 3]
        program, out = capture(device, lambda: results[0] * 2)
        results.clear()
        recycled = torch.full((32,), 50.0)
        program.replay()
        assert out[0] == 100
        assert recycled[0] == 50


def test_2_address_in_the_pool_is_recycled_by_a_later_capture(device):
    """Right until the other bucket replays: keeping only an address of pool memory is not enough."""
    pool = device.new_pool()
    x = torch.full((64,), 2.0)
    kept: list[Tensor] = []

    def first() -> None:
        q = x * 2
        kept.append(device.alias(q))

    program_a, _ = capture(device, first, pool=pool)
    program_b, out_b = capture(device, lambda: x[:32] * 100, pool=pool)
    program_a.replay()
    assert kept[0][0] == 4
    program_b.replay()
    assert kept[0][0] == 200
    assert out_b[0] == 200


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_2_buckets_interleave_in_any_order_with_breaks_and_allocator_churn(order, device):
    """A, B, A, ...: break inputs and slots of one bucket share memory with the other's."""
    pool = device.new_pool()
    sizes, inputs = [48, 16], [torch.randn(48, 8), torch.randn(16, 8)]
    weight = torch.randn(8, 8)

    def forward(x: Tensor) -> Tensor:
        h = x @ weight
        for _ in range(3):
            h = fresh_result(h + 1) - fresh_result(h.relu())
            h = h @ weight * 0.1
        return h

    def store(i: int) -> Callable[[], Tensor]:
        return lambda: results[: sizes[i]].copy_(forward(inputs[i]))

    results = torch.empty(48, 8)
    programs = {i: capture(device, store(i), pool=pool, strategy=Strategy.BREAKABLE)[0] for i in order}
    with device.eager_arena():
        held: list[Tensor] = []
        for step, i in enumerate([0, 1, 0, 0, 1, 0, 1, 1, 0]):
            inputs[i].normal_()
            held.append(torch.empty(8 * (step % 3 + 1)))
            programs[i].replay()
            held[:] = held[-2:]
            assert torch.equal(results[: sizes[i]], forward(inputs[i]))


def test_2_smaller_buckets_add_nothing_to_the_pool(device):
    pool = device.new_pool()
    results = torch.empty(64, 8)

    def bucket(n: int) -> Program:
        x = torch.randn(n, 8)
        return capture(
            device,
            lambda: results[:n].copy_(fresh_result(x * 2) + 1),
            pool=pool,
            strategy=Strategy.BREAKABLE,
        )[0]

    programs = [bucket(64)]
    grown = pool.num_bytes
    programs += [bucket(n) for n in (48, 32, 16, 1)]
    assert pool.num_bytes == grown
    assert pool.bytes_in_use == 0  # programs own no pool memory at all


@register_custom_op(out_shape="x")
def hazard_limit(x: Tensor, limit: int) -> Tensor:
    return torch.where(torch.arange(x.shape[0]) < limit, x, torch.zeros_like(x))


def test_3_python_number_is_frozen_and_a_device_number_is_live(device):
    x, limit = torch.ones(8), [3]
    live = torch.tensor(3)

    def forward() -> tuple[Tensor, Tensor]:
        return hazard_limit(x, limit[0]), torch.where(torch.arange(8) < live, x, 0.0)

    program, (frozen, device_side) = capture(device, forward)
    limit[0] = 6
    live.fill_(6)
    program.replay()
    assert frozen.sum() == 3
    assert device_side.sum() == 6


def test_6_workspace_grown_under_an_older_graph_is_caught(device):
    """small -> large -> small, the shared workspace having been replaced in between."""
    workspace = {"rotary": torch.arange(16.0)}
    x = torch.ones(16)
    small, _ = capture(device, lambda: x * workspace["rotary"])
    workspace["rotary"] = torch.arange(4096.0)
    with pytest.raises(StaleAddressError, match=r"argument other of aten\.mul\.Tensor"):
        small.replay()


def test_6_workspace_at_its_maximum_from_the_start_serves_all_sizes(device):
    workspace = torch.arange(4096.0)
    pool, programs = device.new_pool(), {}
    for n in (4096, 16):
        x = torch.ones(n)
        programs[n] = (*capture(device, lambda x=x, n=n: x * workspace[:n], pool=pool), x)
    for n in (16, 4096, 16):
        program, out, _ = programs[n]
        program.replay()
        assert torch.equal(out, workspace[:n])


def test_12_branch_not_taken_at_capture_is_missing_from_every_replay(device):
    encoder_len, encoder, x = [0], torch.ones(4), torch.zeros(4)
    program, out = capture(device, lambda: x + (encoder * 3 if encoder_len[0] > 0 else 0))
    encoder_len[0] = 5
    program.replay()
    assert out.sum() == 0
    with_encoder, _ = capture(device, lambda: x + (encoder * 3 if encoder_len[0] > 0 else 0))
    assert with_encoder.num_nodes > program.num_nodes  # counting nodes per bucket tells


def test_14_attribute_rebound_in_the_forward_is_caught(device):
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return x + self.count

    module, x = Counter(), torch.zeros(1)
    program, _ = capture(device, lambda: module(x))
    with pytest.raises(StaleAddressError):
        program.replay()


def test_14_in_place_update_of_a_buffer_advances_with_every_replay(device):
    count, x = torch.zeros(1), torch.zeros(1)
    program, out = capture(device, lambda: x + count.add_(1))
    for expected in (1, 2, 3):
        program.replay()
        assert out.item() == expected


@pytest.mark.parametrize("derived", [False, True])
def test_15_reloading_weights_by_rebinding_is_caught_and_in_place_is_live(derived, device):
    holder = {"w": torch.ones(4, 4)}
    if derived:
        holder["w"] = holder["w"].t().contiguous()
    x = torch.ones(2, 4)
    program, out = capture(device, lambda: x @ holder["w"])
    holder["w"].copy_(torch.full((4, 4), 2.0))
    program.replay()
    assert out[0, 0] == 8
    holder["w"] = torch.full((4, 4), 3.0)
    with pytest.raises(StaleAddressError, match=r"argument mat2 of aten\.mm\.default"):
        program.replay()


def test_16_outputs_are_static_memory_valid_until_the_next_run(device):
    x = torch.ones(4)
    program, out = capture(device, lambda: x * 2)
    program.replay()
    kept, copied = out[:2], out[:2].clone()
    x.fill_(10)
    program.replay()
    assert kept.tolist() == [20, 20]
    assert copied.tolist() == [2, 2]


def test_18_single_slot_cache_replaced_while_a_graph_uses_it_is_caught(device):
    cache: dict[int, Tensor] = {}

    def table(n: int) -> Tensor:
        if n not in cache:
            cache.clear()
            cache[n] = torch.arange(float(n))
        return cache[n]

    pool, x = device.new_pool(), torch.ones(64)
    table(64)
    first, _ = capture(device, lambda: x * table(64), pool=pool)
    table(32)
    capture(device, lambda: x[:32] * table(32), pool=pool)
    with pytest.raises(StaleAddressError):
        first.replay()


def test_18_cache_filled_during_a_capture_lives_in_the_pool_and_is_recycled(device):
    """The memo holds pool memory that only this program fills: another program reading it gets leftovers."""
    cache: dict[str, Tensor] = {}
    pool, x = device.new_pool(), torch.ones(64)

    def table() -> Tensor:
        if "t" not in cache:
            cache["t"] = torch.arange(64.0) + 1
        return cache["t"]

    capture(device, lambda: x * table(), pool=pool)  # captured, never replayed
    second, out = capture(device, lambda: x + table(), pool=pool)
    second.replay()
    assert out.isnan().all()


@register_custom_op(mutates_args=["cache"])
def hazard_write_rows(cache: Tensor, key: Tensor, slots: Tensor) -> None:
    for i in range(key.shape[0]):  # trusts the padded count, as a kernel's grid does
        cache[slots[i]] = key[i]


def test_21_kernel_that_trusts_the_padded_count_fails_at_replay_with_its_node(device):
    cache, key, slots = torch.zeros(8, 2), torch.ones(4, 2), torch.arange(3)
    program, _ = capture(device, lambda: hazard_write_rows(cache, key, slots))
    with pytest.raises(IndexError) as raised:
        program.replay()
    assert "gapless.hazard_write_rows.default" in raised.value.__notes__[0]


def test_47_failed_capture_then_a_good_one_in_the_same_pool(device):
    pool, x = device.new_pool(), torch.ones(128)
    for _ in range(3):
        with pytest.raises(CaptureError, match=r"Tensor\.item"):
            capture(device, lambda: x * (x + 1).sum().item(), pool=pool)
    assert pool.bytes_in_use == 0
    program, out = capture(device, lambda: x * (x + 1).sum(), pool=pool)
    program.replay()
    assert out[0] == 256


def test_49_no_finalizer_runs_in_the_middle_of_a_capture(device):
    """A cycle that owns a graph must not be collected while another capture is open."""
    finalized: list[str] = []

    class Owner:
        pass

    def make_garbage() -> None:
        owner = Owner()
        owner.me = owner
        weakref.finalize(owner, finalized.append, "gone")

    def forward() -> Tensor:
        make_garbage()
        for _ in range(2000):
            [{} for _ in range(5)]  # enough container allocations to trigger an automatic collection
        assert not finalized
        return torch.ones(1) + 1

    capture(device, forward)
    gc.collect()
    assert finalized == ["gone"]


@pytest.mark.parametrize("sizes", [(128, 64, 32, 16, 8, 4)])
def test_54_descending_sizes_share_memory_and_ascending_sizes_add_up(sizes, device):
    def total(order: tuple[int, ...]) -> int:
        pool, results, x_max = device.new_pool(), torch.empty(128, 32), torch.randn(128, 32)
        programs = []
        for n in order:
            x = x_max[:n]
            programs.append(capture(device, lambda x=x, n=n: results[:n].copy_(x * 2 + 1), pool=pool)[0])
        for program in programs:  # the order of captures is a matter of memory, never of results
            program.replay()
        return pool.num_bytes

    descending, ascending = total(sizes), total(sizes[::-1])
    assert descending == 2 * 128 * 32 * 4
    assert descending < ascending


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(16),
        lambda: torch.randn(16),
        lambda: torch.empty(16).uniform_(),
        lambda: torch.bernoulli(torch.full((16,), 0.5)),
        lambda: torch.nn.functional.dropout(torch.ones(64), 0.5),
        lambda: torch.rand_like(torch.ones(16)),
        lambda: torch.randint(0, 1000, (16,)),
        lambda: torch.multinomial(torch.ones(64), 16),
    ],
    ids=["rand", "randn", "uniform_", "bernoulli", "dropout", "rand_like", "randint", "multinomial"],
)
def test_60_default_generator_advances_with_replays_and_reseeding_repeats(draw, device):
    program, out = capture(device, draw)
    torch.manual_seed(11)
    program.replay()
    first = out.clone()
    program.replay()
    second = out.clone()
    torch.manual_seed(11)
    assert torch.equal(first, draw())
    assert torch.equal(second, draw())
    assert not torch.equal(first, second)


def test_60_seed_passed_as_a_number_is_frozen_and_as_a_tensor_is_live(device):
    seeds, seed = [7], torch.tensor(7)
    x = torch.arange(8)
    program, (frozen, live) = capture(device, lambda: ((x * seeds[0]) % 5, (x * seed) % 5))
    seeds[0] = 3
    seed.fill_(3)
    program.replay()
    assert torch.equal(frozen, (x * 7) % 5)
    assert torch.equal(live, (x * 3) % 5)


def test_60_capture_itself_draws_nothing(device):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    capture(device, lambda: torch.rand(4) + torch.randn(4))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("use", "op"),
    [
        (lambda x, t: x + t, "argument other of aten.add.Tensor"),
        (lambda x, t: x @ t.view(4, 1), "argument mat2 of aten.mm.default"),
        (lambda x, t: torch.cat([x[0], t]), "argument tensors of aten.cat.default"),
        (lambda x, t: t.add_(x[0]), "argument self of aten.add_.Tensor"),
        (lambda x, t: x.index_select(1, t.long()), "argument self of aten._to_copy.default"),
    ],
    ids=["operand", "through_view", "in_list", "written", "cast"],
)
def test_61_replay_after_an_external_tensor_died_names_op_and_argument(use, op, device):
    x, temporary = torch.ones(2, 4), [torch.ones(4)]
    program = capture(device, lambda: use(x, temporary[0]))[0]
    program.replay()
    temporary.clear()
    with pytest.raises(StaleAddressError) as raised:
        program.replay()
    assert op in str(raised.value)
    assert "test_emulated_hazards.py:" in str(raised.value)


def test_61_a_view_keeps_its_storage_alive_and_counts_as_the_owner(device):
    x, owner = torch.ones(4), [torch.arange(8.0)]
    view = owner[0][2:6]
    program, out = capture(device, lambda: x + owner[0][2:6])
    owner.clear()
    program.replay()
    assert torch.equal(out, x + view)


def test_61_input_in_another_pool_is_watched_too(device):
    producer, made = capture(device, lambda: torch.ones(4) * 2)
    results = [made]
    consumer, out = capture(device, lambda: results[0] + 1)
    producer.replay()
    consumer.replay()
    assert out[0] == 3
    del made
    results.clear()
    with pytest.raises(StaleAddressError):
        consumer.replay()


def test_61_host_constants_of_the_forward_are_owned_by_the_graph(device):
    x = torch.ones(3)
    program, out = capture(device, lambda: x * torch.tensor([1.0, 2.0, 3.0]))
    gc.collect()
    churn = [torch.full((3,), 9.0) for _ in range(100)]
    program.replay()
    assert out.tolist() == [1, 2, 3]
    assert len(churn) == 100


def test_70_failure_message_has_segment_op_line_and_hints(device):
    x = torch.ones(3)

    def forward() -> Tensor:
        h = fresh_result(x + 1)
        return (h * 2).relu() + h.max().item()

    with pytest.raises(CaptureError) as raised:
        capture(device, forward, strategy=Strategy.BREAKABLE)
    message = str(raised.value)
    for part in ("segment 1", "Tensor.item", "last recorded op", "test_emulated_hazards.py:", "usual causes"):
        assert part in message


def test_freed_blocks_can_be_poisoned_to_find_use_after_free():
    device = EmulatedDevice(poison_freed=True)
    pool, x, kept = device.new_pool(), torch.ones(16), []

    def forward() -> Tensor:
        h = x * 2
        kept.append(device.alias(h))
        return h

    program, out = capture(device, forward, pool=pool)
    program.replay()
    assert kept[0][0] == 2
    del out
    assert pool.bytes_in_use == 0
    assert kept[0].isnan().all()


def test_values_left_by_the_capture_are_nan_so_a_skipped_write_shows(device):
    """An op that fills only part of its output leaves NaN, not a plausible old number."""

    @register_custom_op(mutates_args=["out"], name="hazard_fill_half")
    def fill_half(out: Tensor, x: Tensor) -> None:
        out[: out.shape[0] // 2] = x[: out.shape[0] // 2]

    x = torch.ones(8)

    def forward() -> Tensor:
        out = torch.empty(8)
        fill_half(out, x)
        return out

    program, out = capture(device, forward)
    program.replay()
    assert out[:4].tolist() == [1] * 4
    assert out[4:].isnan().all()
