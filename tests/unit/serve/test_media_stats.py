"""What an encoder did, from its report to the statistics and the metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from http_fakes import FakeClient, call, make_app

from gapless.serve.stats import EngineCounters, collect_stats

REPORT = {
    "embedding_cache": {"encoded": 5, "hits": 7, "evicted": 2, "bytes": 640},
    "encoder": {"mode": "exact", "captures": 3},
}


def stats_of(media: Any) -> dict[str, Any]:
    allocator = SimpleNamespace(num_used=1, num_usable=4, num_free=3)
    scheduler = SimpleNamespace(
        allocator=allocator, prefix_cache=None, running=[], waiting=[], num_preemptions=0
    )
    core = SimpleNamespace(scheduler=scheduler, runner=SimpleNamespace(media=media))
    return dict(collect_stats(core, EngineCounters(), log=None, capture={}, uptime_s=1.0))  # type: ignore[arg-type]


def test_a_model_of_text_has_no_numbers_of_media():
    assert not {"media_encoded", "encoder_captures"} & set(stats_of(None))


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("gapless:media_encoded_total", 5),
        ("gapless:embedding_cache_hits_total", 7),
        ("gapless:embedding_cache_evictions_total", 2),
        ("gapless:embedding_cache_bytes", 640),
        ("gapless:encoder_captures_total", 3),
    ],
)
def test_each_number_of_the_report_is_a_metric(metric, value):
    client = FakeClient()
    client.statistics = stats_of(SimpleNamespace(report=lambda: REPORT))
    text = call(make_app(client), "GET", "/metrics").text
    assert f'{metric}{{engine="0",model_name="fake-model"}} {value}.0' in text


def test_an_encoder_in_budget_mode_captures_nothing_while_serving():
    media = SimpleNamespace(report=lambda: {**REPORT, "encoder": {"mode": "budget"}})
    assert stats_of(media)["encoder_captures"] == 0
