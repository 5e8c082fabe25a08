"""What requests experience, measured where they are served: time to the first token, between tokens, in all.

Observing costs a dictionary look-up and a bisection, because it happens for every streamed token; everything
that Prometheus wants beyond that is made when it asks (``exposition.py``). A token counts when it reaches
this process: a slow reader is the reader's affair and does not show here as a slow model, except that deltas
merged for it count as one interval.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from time import perf_counter

from gapless.serve.messages import Delta
from gapless.serve.stats import Histogram

TTFT_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
MAX_RECENT = 2048
LENGTH_BOUNDS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class RequestMetrics:
    """Histograms of one server since its start."""

    def __init__(self) -> None:
        self.ttft_s = Histogram(TTFT_BOUNDS_S)
        self.inter_token_s = Histogram(TOKEN_BOUNDS_S)
        self.time_per_token_s = Histogram(TOKEN_BOUNDS_S)
        """Mean of one choice, without its first token."""
        self.e2e_s = Histogram(REQUEST_BOUNDS_S)
        self.prompt_tokens = Histogram(LENGTH_BOUNDS)
        self.generation_tokens = Histogram(LENGTH_BOUNDS)
        self.responses: Counter[tuple[str, int]] = Counter()
        """By route and status; 499 where the caller had gone."""
        self.recent_ttft_s: deque[float] = deque(maxlen=MAX_RECENT)
        self.recent_inter_token_s: deque[float] = deque(maxlen=MAX_RECENT)
        """The last observations themselves; a reader may take them out (``live.py`` does, every second)."""
        self.media_items: Counter[str] = Counter()
        """Images and videos of prompts that were prepared, by kind."""
        self.media_prepare_s = Histogram(REQUEST_BOUNDS_S)
        """Reading, decoding and preparing all media of one request."""
        self.num_open = 0
        """HTTP requests being answered now."""


class RequestClock:
    """Times the choices of one request from its arrival."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self.num_prompt_tokens: Sequence[int] = ()
        """Of each prompt; observed when its first token comes, so that refused requests do not count."""
        self._start = perf_counter()
        self._has_begun: set[int] = set()
        self._choices: dict[tuple[int, int], _Times] = {}

    def observe(self, position: int, deltas: Iterable[Delta]) -> None:
        """``position``: which prompt of the request the deltas belong to."""
        now = perf_counter()
        metrics = self._metrics
        for delta in deltas:
            key = (position, delta.index)
            times = self._choices.get(key)
            if delta.token_ids:
                if times is None:
                    times = self._choices[key] = _Times(now)
                    metrics.ttft_s.observe(now - self._start)
                    metrics.recent_ttft_s.append(now - self._start)
                    self._begin(position)
                else:
                    metrics.inter_token_s.observe(now - times.last)
                    metrics.recent_inter_token_s.append(now - times.last)
                    times.last = now
                times.num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._finish(times, now)

    def restart(self) -> None:
        """All choices begin again, unseen by the caller; how long the first attempt took stays."""
        for times in self._choices.values():
            times.num_tokens = 0

    def _begin(self, position: int) -> None:
        if position not in self._has_begun and position < len(self.num_prompt_tokens):
            self._has_begun.add(position)
            self._metrics.prompt_tokens.observe(self.num_prompt_tokens[position])

    def _finish(self, times: _Times | None, now: float) -> None:
        metrics = self._metrics
        num_tokens = times.num_tokens if times is not None else 0
        metrics.e2e_s.observe(now - self._start)
        metrics.generation_tokens.observe(num_tokens)
        if times is not None and num_tokens > 1:
            metrics.time_per_token_s.observe((now - times.first) / (num_tokens - 1))


class _Times:
    """Of one choice."""

    __slots__ = ("first", "last", "num_tokens")

    def __init__(self, first: float) -> None:
        self.first = self.last = first
        self.num_tokens = 0
