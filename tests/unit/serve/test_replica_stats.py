"""Sums over replicas and over restarts: totals that never fall, rates that add up."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from gapless.serve.replica_stats import SharedClock, StatsHistory, add_stats
from gapless.serve.stats import EngineStats


def stats(k: int = 1, **changes: Any) -> dict[str, Any]:
    """Every field, with values that differ from field to field."""
    made = {
        "uptime_s": 10.0 * k,
        "num_running": 2 * k,
        "num_waiting": 3 * k,
        "kv_usage": 0.25,
        "num_blocks": 100 * k,
        "num_free_blocks": 75 * k,
        "num_preemptions": 4 * k,
        "prompt_tokens": 50 * k,
        "generation_tokens": 60 * k,
        "num_steps": 70 * k,
        "requests_finished": {"stop": k, "length": 2 * k},
        "requests_refused": 5 * k,
        "replays": [
            {
                "phase": "decode",
                "strategy": "full",
                "bucket": 4,
                "count": k,
                "tokens": 3 * k,
                "padding": k,
            }
        ],
        "eager": [{"phase": "prefill", "reason": "no_graph", "count": 6 * k}],
        "num_graphs": 7 * k,
        "capture_s": 0.5 * k,
        "pool_bytes": 8 * k,
        "driver_bytes": 9 * k,
        "media_encoded": 13 * k,
        "embedding_cache_hits": 14 * k,
        "embedding_cache_evictions": 15 * k,
        "embedding_cache_bytes": 16 * k,
        "encoder_captures": 17 * k,
        "prefix_cache_queries": 11 * k,
        "prefix_cache_hits": 12 * k,
        "queue_time_s": {"bounds": [1.0], "counts": [k, 0], "sum": 0.1 * k},
        "step_time_s": {"bounds": [1.0], "counts": [0, k], "sum": 2.0 * k},
        "recent_steps": [["decode", "full", 4, 3, "", float(k)]],
    }
    return {**made, **changes}


def test_every_field_of_the_statistics_has_a_sum():
    assert set(add_stats([stats(), stats()])) == set(get_type_hints(EngineStats)) == set(stats())


def test_two_engines_add_up():
    total = add_stats([stats(1), stats(2)])
    assert (total["num_running"], total["generation_tokens"], total["num_blocks"]) == (6, 180, 300)
    assert total["kv_usage"] == pytest.approx(0.25)
    assert total["requests_finished"] == {"stop": 3, "length": 6}
    assert total["queue_time_s"] == {"bounds": [1.0], "counts": [3, 0], "sum": pytest.approx(0.3)}
    assert total["replays"] == [
        {"phase": "decode", "strategy": "full", "bucket": 4, "count": 3, "tokens": 9, "padding": 3}
    ]
    assert total["eager"][0]["count"] == 18
    assert len(total["recent_steps"]) == 2


def test_engines_that_have_said_nothing_add_nothing():
    assert add_stats([]) == add_stats([{}, {}]) == {}
    assert add_stats([{}, stats()]) == stats()


def test_one_full_and_one_empty_cache_are_half_used():
    full = stats(num_blocks=10, num_free_blocks=0)
    empty = stats(num_blocks=30, num_free_blocks=30)
    assert add_stats([full, empty])["kv_usage"] == pytest.approx(0.25)


def test_the_arguments_are_left_alone():
    first = stats()
    add_stats([first, stats()])
    assert first == stats()


def test_totals_survive_a_death_and_what_the_process_held_does_not():
    history = StatsHistory()
    history.retire(stats(3))
    between = history.now({})
    assert (between["generation_tokens"], between["num_running"], between["num_blocks"]) == (180, 0, 0)
    after = history.now(stats(1))
    assert (after["generation_tokens"], after["num_running"], after["num_graphs"]) == (240, 2, 7)
    assert after["requests_finished"] == {"stop": 4, "length": 8}
    assert after["uptime_s"] == 10.0
    history.retire(stats(1))
    assert history.now({})["generation_tokens"] == 240


def test_a_process_that_never_spoke_changes_nothing():
    history = StatsHistory()
    history.retire({})
    assert history.now({}) == {}
    assert history.now(stats()) == stats()


def test_the_common_clock_makes_rates_add_up_however_heartbeats_are_spread():
    clock = SharedClock()
    clock.advance({0: 0.0, 1: 0.0})
    half = clock.advance({0: 1.0, 1: 0.0})  # only one has spoken: half of the tokens, half of a second
    assert half == pytest.approx(0.5)
    assert clock.advance({0: 1.0, 1: 1.0}) == pytest.approx(1.0)


def test_the_common_clock_goes_on_when_replicas_die_and_come_back():
    clock = SharedClock()
    seen = [
        clock.advance(uptimes)
        for uptimes in ({0: 5.0, 1: 5.0}, {0: 6.0}, {}, {0: 7.0}, {0: 8.0, 1: 0.5}, {0: 9.0, 1: 1.5})
    ]
    assert seen == sorted(seen)
    assert seen[1] - seen[0] == pytest.approx(1.0)
    assert seen[5] - seen[4] == pytest.approx(1.0)
