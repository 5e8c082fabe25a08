"""``/metrics``: the engine's statistics and the requests' histograms in Prometheus' text format.

Names that vLLM has are vLLM's, prefix included, so that its dashboards work unchanged. What no other engine
shows stands under ``gapless:``: which graphs replay, which steps run eagerly and why, how much padding and
memory they cost. Everything is made at scrape time from ``EngineClient.stats()`` (``stats.py`` has its
fields) and ``RequestMetrics``; before the engine's first heartbeat its families are absent, never zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gapless.serve.client import EngineClient, ReplicaView
from gapless.serve.media_options import KINDS
from gapless.serve.metrics import RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABELS = ("model_name", "engine")

Engines = Sequence[tuple[tuple[str, str], Mapping[str, Any]]]
"""Values of these labels, and the statistics of that engine."""

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
    ("gapless:embedding_cache_bytes", "embedding_cache_bytes", "Embeddings of images that are kept."),
    ("gapless:engine_uptime_seconds", "uptime_s", "Since the engine was ready."),
)
_COUNTERS = (
    ("vllm:num_preemptions", "num_preemptions", "Sequences that gave their blocks back and started again."),
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of all accepted requests."),
    ("vllm:generation_tokens", "generation_tokens", "Generated tokens."),
    ("vllm:prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("gapless:media_encoded", "media_encoded", "Images and videos that the encoder has run over."),
    ("gapless:embedding_cache_hits", "embedding_cache_hits", "Images whose embeddings were there already."),
    ("gapless:embedding_cache_evictions", "embedding_cache_evictions", "Embeddings given up for others."),
    ("gapless:encoder_captures", "encoder_captures", "Encoder graphs captured while serving."),
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
    ("gapless:media_prepare_seconds", "media_prepare_s", "Reading and preparing the images of a request."),
)
_ENGINE_HISTOGRAMS = (
    ("vllm:request_queue_time_seconds", "queue_time_s", "In the queue, before the first step."),
    ("gapless:step_time_seconds", "step_time_s", "Time of one engine step."),
)


class Exposition:
    """Renders on demand. ``model_name`` and ``engine`` label vLLM's families, as vLLM does. What requests
    experience belongs to all replicas: ``engine`` is ``all`` there if there are several."""

    def __init__(self, client: EngineClient, metrics: RequestMetrics, *, model_name: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(client, metrics, model_name=model_name))

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _Families(Collector):
    def __init__(self, client: EngineClient, metrics: RequestMetrics, *, model_name: str) -> None:
        self._client, self._metrics, self._model_name = client, metrics, model_name

    def describe(self) -> list[Metric]:
        """Nothing: names are known when rendered, and this registry has one collector."""
        return []

    def collect(self) -> Iterator[Metric]:
        replicas = self._client.replicas()
        engines = [((self._model_name, str(replica.index)), replica.stats) for replica in replicas]
        for name, key, text in _GAUGES:
            yield from _labelled(GaugeMetricFamily(name, text, labels=_LABELS), engines, key)
        for name, key, text in _COUNTERS:
            yield from _labelled(CounterMetricFamily(name, text, labels=_LABELS), engines, key)
        for name, key, text in _ENGINE_HISTOGRAMS:
            records = [(labels, stats[key]) for labels, stats in engines if key in stats]
            if records:
                yield _histogram(name, text, records)
        everyone = (self._model_name, "0" if len(replicas) == 1 else "all")
        for name, field, text in _REQUEST_HISTOGRAMS:
            yield _histogram(name, text, [(everyone, getattr(self._metrics, field).record())])
        yield from _finished(engines)
        yield from _graph_steps(self._client.stats())
        if len(replicas) > 1:
            yield from _replicas(replicas, self._model_name)
        yield from self._media()
        yield from self._http()

    def _media(self) -> Iterator[Metric]:
        items = CounterMetricFamily(
            "gapless:media_items", "Images and videos of prompts that were prepared.", labels=("kind",)
        )
        for kind in KINDS:
            items.add_metric((kind,), self._metrics.media_items[kind])
        yield items

    def _http(self) -> Iterator[Metric]:
        responses = CounterMetricFamily("gapless:http_responses", "HTTP answers.", labels=("route", "status"))
        for (route, status), count in sorted(self._metrics.responses.items()):
            responses.add_metric((route, str(status)), count)
        yield responses
        yield GaugeMetricFamily(
            "gapless:http_requests_open", "HTTP requests being answered.", value=self._metrics.num_open
        )


def _labelled(family: Any, engines: Engines, key: str) -> Iterator[Metric]:
    """Nothing when no engine has said anything of it."""
    known = [(labels, stats[key]) for labels, stats in engines if key in stats]
    for labels, value in known:
        family.add_metric(labels, value)
    if known:
        yield family


def _finished(engines: Engines) -> Iterator[Metric]:
    family = CounterMetricFamily(
        "vllm:request_success", "Choices that have ended.", labels=(*_LABELS, "finished_reason")
    )
    key = "requests_finished"
    known = [(labels, stats[key]) for labels, stats in engines if key in stats]
    for labels, by_reason in known:
        for reason in sorted({"stop", "length", "abort", "error", *by_reason}):
            family.add_metric((*labels, reason), by_reason.get(reason, 0))
    if known:
        yield family


def _replicas(replicas: Sequence[ReplicaView], model_name: str) -> Iterator[Metric]:
    up = GaugeMetricFamily("gapless:replica_up", "1 while the replica takes requests.", labels=_LABELS)
    load = GaugeMetricFamily(
        "gapless:replica_load_tokens", "Outstanding tokens, as the router counts them.", labels=_LABELS
    )
    restarts = CounterMetricFamily("gapless:replica_restarts", "Starts after a death.", labels=_LABELS)
    routed = CounterMetricFamily(
        "gapless:replica_requests",
        "Requests sent there, by the router's reason.",
        labels=(*_LABELS, "reason"),
    )
    for replica in replicas:
        labels = (model_name, str(replica.index))
        up.add_metric(labels, float(replica.is_healthy))
        load.add_metric(labels, replica.load_tokens)
        restarts.add_metric(labels, replica.num_restarts)
        for reason in ("prefix", "load", "retry"):
            routed.add_metric((*labels, reason), replica.num_routed.get(reason, 0))
    yield from (up, load, restarts, routed)


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


def _histogram(name: str, text: str, records: Sequence[tuple[tuple[str, str], Any]]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=_LABELS)
    for labels, record in records:
        total = 0
        buckets = []
        for bound, count in zip((*record["bounds"], float("inf")), record["counts"], strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        family.add_metric(labels, buckets=buckets, sum_value=record["sum"])
    return family
