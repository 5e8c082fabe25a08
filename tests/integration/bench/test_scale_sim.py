"""``benchmarks/scale_sim.py`` against what can be computed on paper."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaded_scripts import load_script

ROOT = Path(__file__).parents[3]
sim = load_script(ROOT / "benchmarks" / "scale_sim.py")

TIMES = sim.StepTimes(prefill=((16, 0.010), (1024, 0.100)), decode=((1, 0.004), (8, 0.008)))
STEADY = sim.StepTimes(prefill=((1, 0.010),) * 1 + ((4096, 0.010),), decode=((1, 0.010), (256, 0.010)))
"""Every step takes 10 ms."""
ONE_AT_A_TIME = sim.EngineLimits(max_running=1, step_tokens=4096)


def ask(at_s: float = 0.0, prompt: int = 16, output: int = 1, **fields: Any) -> Any:
    return sim.Request(arrival_s=at_s, prompt_tokens=prompt, output_tokens=output, **fields)


def poisson(rate: float, count: int, *, seed: int = 1, output: int = 1) -> list[Any]:
    rng, now_s, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(rate)
        requests.append(ask(now_s, output=output))
    return requests


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("policy", sim.POLICIES)
def test_alone_on_an_idle_server_a_request_takes_its_steps_and_no_more(num_replicas, policy):
    outcome = sim.simulate([ask(1.0, 520, 5)], TIMES, num_replicas=num_replicas, policy=policy)
    assert outcome.ttft_s == [pytest.approx(0.055)]
    assert outcome.itl_s == [pytest.approx(0.004)] * 4
    assert outcome.e2e_s == [pytest.approx(0.055 + 4 * 0.004)]
    assert outcome.end_s == pytest.approx(1.0 + 0.055 + 4 * 0.004)
    assert outcome.busy_s == pytest.approx(0.055 + 4 * 0.004)


def test_a_long_prompt_goes_in_chunks_and_beside_it_others_go_on():
    limits = sim.EngineLimits(step_tokens=100)
    outcome = sim.simulate([ask(0.0, 16, 4), ask(0.001, 250, 1)], STEADY, num_replicas=1, limits=limits)
    assert sorted(outcome.ttft_s) == [pytest.approx(0.010), pytest.approx(0.039)]
    assert outcome.itl_s == [pytest.approx(0.010)] * 3


def test_a_batch_decodes_together():
    outcome = sim.simulate([ask(output=3) for _ in range(8)], TIMES, num_replicas=1)
    assert outcome.itl_s == [pytest.approx(0.008)] * 16


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_server_of_fixed_times_waits_as_the_formula_says(load):
    """M/D/1: the mean wait is load / (2 (1 - load)) services."""
    service_s = 0.010
    outcome = sim.simulate(poisson(load / service_s, 20_000), STEADY, num_replicas=1, limits=ONE_AT_A_TIME)
    wait_s = sum(outcome.ttft_s) / len(outcome.ttft_s) - service_s
    assert wait_s == pytest.approx(service_s * load / (2 * (1 - load)), rel=0.1)
    assert outcome.busy_s / outcome.end_s == pytest.approx(load, rel=0.05)


def test_random_routing_over_n_servers_is_n_queues_and_load_is_better_than_any_blind_rule():
    """Splitting a Poisson stream at random gives Poisson streams: each server is an M/D/1 of its own."""
    requests = poisson(4 * 0.7 / 0.010, 20_000)

    def mean_wait_s(policy: str) -> float:
        outcome = sim.simulate(requests, STEADY, num_replicas=4, policy=policy, limits=ONE_AT_A_TIME)
        return sum(outcome.ttft_s) / len(outcome.ttft_s) - 0.010

    waits = {policy: mean_wait_s(policy) for policy in ("random", "turns", "load")}
    assert waits["random"] == pytest.approx(0.010 * 0.7 / 0.6, rel=0.1)
    # Services of one length end in the order of their starts: who has the least to do is whose turn it is.
    assert waits["load"] == pytest.approx(waits["turns"])
    assert waits["load"] < waits["random"] / 4


def test_where_lengths_differ_the_least_loaded_is_a_better_choice_than_the_next_in_turn():
    rng = random.Random(5)
    requests = [ask(request.arrival_s, output=rng.choice([1, 1, 1, 40])) for request in poisson(250.0, 4000)]
    limits = sim.EngineLimits(max_running=4)
    waits = {
        policy: sum(sim.simulate(requests, STEADY, num_replicas=8, policy=policy, limits=limits).ttft_s)
        for policy in ("load", "turns", "random")
    }
    assert waits["load"] < waits["turns"] < waits["random"]


def test_a_server_that_is_always_busy_makes_a_batch_per_step():
    outcome = sim.simulate([ask(output=100) for _ in range(50)], STEADY, num_replicas=1)
    assert outcome.output_tokens / outcome.end_s == pytest.approx(50 / 0.010, rel=0.01)


def test_twice_the_replicas_halve_the_time_of_a_queue():
    limits = sim.EngineLimits(max_running=8)
    ends = [
        sim.simulate(
            [ask(output=20) for _ in range(64)], STEADY, num_replicas=n, limits=limits, policy="load"
        ).end_s
        for n in (1, 2, 4)
    ]
    assert ends[0] == pytest.approx(2 * ends[1], rel=0.01)
    assert ends[1] == pytest.approx(2 * ends[2], rel=0.01)


def test_a_known_prefix_is_not_computed_again_and_a_forgotten_one_is():
    def at(at_s: float, prefix: str) -> Any:
        return ask(at_s, 1024 + 16, prefix=prefix, prefix_tokens=1024)

    roomy = sim.EngineLimits(num_blocks=1000)
    outcome = sim.simulate(
        [at(0, "a"), at(1, "a"), at(2, "b"), at(3, "a")], TIMES, num_replicas=1, limits=roomy
    )
    full_s = sim.interpolate(TIMES.prefill, 1040)
    assert outcome.ttft_s == pytest.approx([full_s, 0.010, full_s, 0.010])
    assert outcome.cached_tokens == 2048
    tight = sim.EngineLimits(num_blocks=70)
    outcome = sim.simulate([at(0, "a"), at(1, "b"), at(2, "a")], TIMES, num_replicas=1, limits=tight)
    assert outcome.cached_tokens == 0


def test_blocks_that_running_requests_have_in_common_are_there_once():
    """Four of 66 blocks, 64 of them shared: 72 hold all at once. Apart, they would need 264."""
    family = [ask(0.5 * (i > 0), 1024 + 16, 16, prefix="a", prefix_tokens=1024) for i in range(4)]
    limits = sim.EngineLimits(num_blocks=72)
    together = sim.simulate(family, TIMES, num_replicas=1, limits=limits)
    assert together.cached_tokens == 3 * 1024
    assert max(together.ttft_s[1:]) == pytest.approx(min(together.ttft_s[1:]))
    strangers = [
        ask(each.arrival_s, 1024 + 16, 16, prefix=f"p{i}", prefix_tokens=1024)
        for i, each in enumerate(family)
    ]
    apart = sim.simulate(strangers, TIMES, num_replicas=1, limits=limits)
    assert apart.cached_tokens == 0
    assert len(set(apart.ttft_s)) == 4


def test_prefix_routing_keeps_families_together_where_turns_scatter_them():
    requests = [
        ask(0.5 * i, 1040, prefix=f"p{i % 5}", prefix_tokens=1024) for i in range(60)
    ]  # turns meet every replica with every family
    cached = {
        policy: sim.simulate(requests, TIMES, num_replicas=4, policy=policy).cached_tokens
        for policy in ("prefix", "turns")
    }
    assert cached["prefix"] == 55 * 1024
    assert cached["turns"] == 40 * 1024


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 0.010), (16, 0.010), (520, 0.055), (1024, 0.100), (2032, 0.190)]
)
def test_times_between_and_beyond_the_measured_sizes(size, expected):
    assert sim.interpolate(TIMES.prefill, size) == pytest.approx(expected)
    assert sim.interpolate(TIMES.scaled(0.5).prefill, size) == pytest.approx(expected / 2)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_replicas=st.integers(1, 5),
    policy=st.sampled_from(sim.POLICIES),
    max_running=st.integers(1, 9),
    num_blocks=st.integers(40, 400),
)
def test_every_token_comes_once_and_the_same_seed_gives_the_same_numbers(
    seed, num_replicas, policy, max_running, num_blocks
):
    trace = sim.draw_trace(
        num_requests=30,
        rate=40.0,
        prompt_tokens=60,
        output_tokens=10,
        num_prefixes=3,
        prefix_tokens=64,
        seed=seed,
    )
    limits = sim.EngineLimits(max_running=max_running, num_blocks=num_blocks, step_tokens=64)
    runs = [
        sim.simulate(trace, TIMES, num_replicas=num_replicas, policy=policy, limits=limits, seed=seed)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    (first, _) = runs
    assert first.output_tokens == sum(request.output_tokens for request in trace)
    assert (len(first.ttft_s), len(first.e2e_s)) == (30, 30)
    assert len(first.itl_s) == first.output_tokens - 30
    assert min(first.ttft_s) >= 0.010 - 1e-9
    assert first.busy_s <= num_replicas * first.end_s + 1e-9
    assert first.prompt_tokens == sum(request.prompt_tokens for request in trace)


def test_the_command_reads_measured_times_and_a_trace_and_says_what_is_assumed(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "\n".join(
            json.dumps({"arrival_s": i / 10, "prompt_tokens": 64, "output_tokens": 4}) for i in range(9)
        )
    )
    steps = ROOT / "benchmarks/results/h200_acceptance.json"
    output = tmp_path / "out.json"
    words = ["--steps", str(steps), "--model", "llama-3.1-8b", "--trace", str(trace), "--output", str(output)]
    assert (
        sim.main([*words, "--assume-split", "2=0.6", "--replicas", "1", "2", "--policies", "prefix", "load"])
        == 0
    )
    result = json.loads(output.read_text())
    assert result["is_simulated"]
    assert [(row["tp"], row["replicas"], row["num_gpus"]) for row in result["rows"]] == [
        *((1, 1, 1), (1, 2, 2), (1, 2, 2)),
        *((2, 1, 2), (2, 2, 4), (2, 2, 4)),
    ]
    sources = {row["tp"]: row["times"] for row in result["rows"]}
    assert sources == {1: "measured (h200_acceptance.json)", 2: "assumed (0.6 of one GPU)"}
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


def test_a_model_that_was_not_measured_is_refused_with_those_that_were():
    with pytest.raises(SystemExit, match=r"llama-3\.1-8b, qwen3-0\.6b"):
        sim.main(["--steps", str(ROOT / "benchmarks/results/h200_acceptance.json"), "--model", "gpt-2"])
