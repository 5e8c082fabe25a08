"""Property: any program, captured whole or with breaks, replays on fresh inputs with the bits of eager."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.graphs.breakable import eager_break
from gapless.graphs.capture import capture_pass, capture_program
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.modes import Strategy

WIDTH = 8
DEVICE = EmulatedDevice(poison_freed=True)


@eager_break
def scaled(h: Tensor) -> Tensor:
    return h * 0.5


@eager_break
def pair(h: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return other + h, h.flip(0)


@eager_break
def fill(h: Tensor, out: Tensor) -> None:
    out.copy_(h.tanh())


def filled(h: Tensor) -> Tensor:
    out = torch.empty_like(h)
    fill(h, out)
    return out


# Each takes the value at hand, an older value, a static input (all [rows, WIDTH]) and a square weight.
STEPS: list[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = [
    lambda h, old, x, w: h + old,
    lambda h, old, x, w: h * x - 0.5,
    lambda h, old, x, w: h @ w * 0.1,
    lambda h, old, x, w: torch.nn.functional.linear(h, w, w[0]) * 0.1,
    lambda h, old, x, w: torch.softmax(h, -1),
    lambda h, old, x, w: torch.nn.functional.layer_norm(h, (WIDTH,)),
    lambda h, old, x, w: torch.where(h > old, h, x),
    lambda h, old, x, w: torch.cat([h[:, 4:], old[:, :4]], 1),
    lambda h, old, x, w: h.view(-1, 2, 4).transpose(1, 2).reshape(-1, WIDTH),
    lambda h, old, x, w: h.t()[torch.arange(WIDTH - 1, -1, -1)].t(),
    lambda h, old, x, w: h.clone().add_(old).mul_(0.5),
    lambda h, old, x, w: (h[:, :4].copy_(x[:, 4:]), h)[1],
    lambda h, old, x, w: h - h.mean(-1, keepdim=True),
    lambda h, old, x, w: h.to(torch.bfloat16).float() + h.cumsum(0) * 0.01,
    lambda h, old, x, w: (x.add_(0.25), h + x)[1],
    lambda h, old, x, w: torch.nn.functional.silu(h[:1]).expand_as(h) + old,
    lambda h, old, x, w: scaled(h) + old,
    lambda h, old, x, w: sum(pair(h, old)),
    lambda h, old, x, w: filled(h) - old,
]


def run(steps: list[tuple[int, int]], x: Tensor, w: Tensor) -> Tensor:
    values = [x + 0]
    for which, older in steps:
        values.append(STEPS[which](values[-1], values[-1 - older % len(values)], x, w))
        values = values[-4:]  # older values die, so their memory is handed out again
    return values[-1]


steps_strategy = st.lists(
    st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 3)), min_size=1, max_size=14
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=steps_strategy,
    rows=st.integers(1, 5),
    strategy=st.sampled_from([Strategy.FULL, Strategy.BREAKABLE]),
)
def test_replay_equals_eager_for_any_program(steps, rows, strategy):
    x, w = torch.randn(rows, WIDTH), torch.randn(WIDTH, WIDTH)
    with torch.no_grad():
        program, out = capture_program(
            lambda: run(steps, x, w), device=DEVICE, pool=DEVICE.new_pool(), strategy=strategy
        )
        for _ in range(2):
            fresh = torch.randn(rows, WIDTH)
            x.copy_(fresh)
            program.replay()
            x_after = x.clone()
            x.copy_(fresh)
            expected = run(steps, x, w)
            assert torch.equal(out, expected)
            assert torch.equal(x_after, x)  # in-place updates of static buffers happen on replay as in eager


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    programs=st.lists(st.tuples(steps_strategy, st.integers(1, 6)), min_size=2, max_size=4),
    order=st.lists(st.integers(0, 3), min_size=3, max_size=10),
)
def test_programs_of_one_pool_replay_in_any_order(programs, order):
    programs = sorted(programs, key=lambda program: -program[1])
    pool, w = DEVICE.new_pool(), torch.randn(WIDTH, WIDTH)
    results = torch.empty(6, WIDTH)
    captured = []
    with torch.no_grad(), capture_pass(DEVICE):
        for steps, rows in programs:
            x = torch.randn(rows, WIDTH)
            program, _ = capture_program(
                lambda steps=steps, rows=rows, x=x: results[:rows].copy_(run(steps, x, w)),
                device=DEVICE,
                pool=pool,
                strategy=Strategy.BREAKABLE,
            )
            captured.append((program, steps, rows, x))
    with torch.no_grad(), DEVICE.eager_arena():
        for i in order:
            program, steps, rows, x = captured[i % len(captured)]
            x.normal_()
            fresh = x.clone()
            program.replay()
            expected = run(steps, fresh, w)
            assert torch.equal(results[:rows], expected)
