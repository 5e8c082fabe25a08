"""``/metrics``: the engine's statistics and the requests' histograms in Prometheus' text format.

Names that vLLM has are vLLM's, prefix included, so that its dashboards work unchanged. What no other engine
shows stands under ``gapless:``: which graphs replay, which steps run eagerly and why, how much padding and
memory they cost. Everything is made at scrape time from ``EngineClient.stats()`` (``stats.py`` has its
fields) and ``RequestMetrics``; before the engine's first heartbeat its families are absent, never zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gapless.serve.client import EngineClient
from gapless.serve.metrics import RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABELS = ("model_name", "engine")

_GAUGES = (
    ("vllm:num_requests_running", "num_running", "Sequences that take part in steps."),
    ("vllm:num_requests_waiting", "num_waiting", "Sequences in the engine's queue."),
    ("vllm:kv_cache_usage_perc", "kv_usage", "Part of the KV cache's blocks in use, 0 to 1."),
    ("gapless:kv_blocks", "num_blocks", "Blocks of the KV cache that can be in use at once."),
    ("gapless:kv_blocks_free", "num_free_blocks", "Blocks of the KV cache that nobody uses."),
    ("gapless:graphs", "num_graphs", "Captured graphs."),
    ("gapless:graph_capture_seconds", "capture_s", "Time spent on capturing them."),
    ("gapless:graph_pool_bytes", "pool_bytes", "Memory of the graphs' pools."),
    ("gapless:graph_driver_bytes", "driver_bytes", "Memory the driver keeps for the graphs."),
    ("gapless:engine_uptime_seconds", "uptime_s", "Since the engine was ready."),
)
_COUNTERS = (
    ("vllm:num_preemptions", "num_preemptions", "Sequences that gave their blocks back and started again."),
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of all accepted requests."),
    ("vllm:generation_tokens", "generation_tokens", "Generated tokens."),
    ("vllm:prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("gapless:engine_steps", "num_steps", "Steps of the engine."),
    ("gapless:requests_refused", "requests_refused", "Requests that the engine refused."),
)
_REQUEST_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "ttft_s", "From a request's arrival to its first token."),
    ("vllm:inter_token_latency_seconds", "inter_token_s", "Between tokens of one choice."),
    ("vllm:time_per_output_token_seconds", "inter_token_s", "The same under its older name."),
    (
        "vllm:request_time_per_output_token_seconds",
        "time_per_token_s",
        "Mean time per token of one choice, without its first.",
    ),
    ("vllm:e2e_request_latency_seconds", "e2e_s", "From a request's arrival to the end of a choice."),
    ("vllm:request_prompt_tokens", "prompt_tokens", "Prompt tokens per request."),
    ("vllm:request_generation_tokens", "generation_tokens", "Generated tokens per choice."),
)
_ENGINE_HISTOGRAMS = (
    ("vllm:request_queue_time_seconds", "queue_time_s", "In the queue, before the first step."),
    ("gapless:step_time_seconds", "step_time_s", "Time of one engine step."),
)


class Exposition:
    """Renders on demand. ``model_name`` and ``engine`` label vLLM's families, as vLLM does."""

    def __init__(self, client: EngineClient, metrics: RequestMetrics, *, model_name: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(client, metrics, labels=(model_name, "0")))

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _Families(Collector):
    def __init__(self, client: EngineClient, metrics: RequestMetrics, *, labels: tuple[str, str]) -> None:
        self._client, self._metrics, self._labels = client, metrics, labels

    def describe(self) -> list[Metric]:
        """Nothing: names are known when rendered, and this registry has one collector."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats()
        for name, key, text in _GAUGES:
            if key in stats:
                yield _one(GaugeMetricFamily(name, text, labels=_LABELS), self._labels, stats[key])
        for name, key, text in _COUNTERS:
            if key in stats:
                yield _one(CounterMetricFamily(name, text, labels=_LABELS), self._labels, stats[key])
        for name, key, text in _ENGINE_HISTOGRAMS:
            if key in stats:
                yield _histogram(name, text, self._labels, stats[key])
        for name, field, text in _REQUEST_HISTOGRAMS:
            yield _histogram(name, text, self._labels, getattr(self._metrics, field).record())
        if "requests_finished" in stats:
            yield self._finished(stats["requests_finished"])
        yield from _graph_steps(stats)
        yield from self._http()

    def _finished(self, by_reason: dict[str, int]) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Choices that have ended.", labels=(*_LABELS, "finished_reason")
        )
        for reason in sorted({"stop", "length", "abort", "error", *by_reason}):
            family.add_metric((*self._labels, reason), by_reason.get(reason, 0))
        return family

    def _http(self) -> Iterator[Metric]:
        responses = CounterMetricFamily("gapless:http_responses", "HTTP answers.", labels=("route", "status"))
        for (route, status), count in sorted(self._metrics.responses.items()):
            responses.add_metric((route, str(status)), count)
        yield responses
        yield GaugeMetricFamily(
            "gapless:http_requests_open", "HTTP requests being answered.", value=self._metrics.num_open
        )


def _graph_steps(stats: dict[str, Any]) -> Iterator[Metric]:
    if "replays" in stats:
        labels = ("phase", "strategy", "size")
        replays = CounterMetricFamily("gapless:graph_replays", "Steps that replayed a graph.", labels=labels)
        tokens = CounterMetricFamily("gapless:graph_tokens", "Rows of replays that held data.", labels=labels)
        padding = CounterMetricFamily(
            "gapless:graph_padding_tokens", "Rows of replays that were padding.", labels=labels
        )
        for row in stats["replays"]:
            values = (row["phase"], row["strategy"], str(row["bucket"]))
            replays.add_metric(values, row["count"])
            tokens.add_metric(values, row["tokens"])
            padding.add_metric(values, row["padding"])
        yield from (replays, tokens, padding)
    if "eager" in stats:
        eager = CounterMetricFamily(
            "gapless:graph_eager_steps", "Steps without a graph.", labels=("phase", "reason")
        )
        for row in stats["eager"]:
            eager.add_metric((row["phase"], row["reason"]), row["count"])
        yield eager


def _one(family: Any, labels: tuple[str, ...], value: float) -> Metric:
    family.add_metric(labels, value)
    return family


def _histogram(name: str, text: str, labels: tuple[str, ...], record: Any) -> Metric:
    family = HistogramMetricFamily(name, text, labels=_LABELS)
    total = 0
    buckets = []
    for bound, count in zip((*record["bounds"], float("inf")), record["counts"], strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
    family.add_metric(labels, buckets=buckets, sum_value=record["sum"])
    return family
