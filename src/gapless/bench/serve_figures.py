"""From what became of each request to the figures of a run, under the names that ``vllm bench serve`` has.

They mean the same: TTFT from sending to the first event with a token, TPOT the mean of a request without its
first token, ITL the gap between two events, E2EL a whole request; peaks are of whole seconds. Requests that
failed are counted and are in no time. Read ``serve_load.py`` for how requests are sent.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from gapless.bench.stats import percentile
from gapless.errors import ConfigError

GOODPUT_NAMES = ("ttft", "tpot", "e2el")


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One request. Times in seconds from when it was sent; ``error`` is None when all went well."""

    prompt_index: int
    prompt_len: int
    start_s: float = 0.0
    """When it was sent, on any clock that all share."""
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    output_len: int = 0
    text: str = ""
    error: str | None = None

    @property
    def tpot_s(self) -> float:
        """0 for a single token, which says nothing of the time for the next."""
        return (self.latency_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else 0.0


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """``["ttft:500", "tpot:50"]`` as numbers. Raises ``ConfigError``."""
    found: dict[str, float] = {}
    for limit in limits:
        name, _, text = limit.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if name not in GOODPUT_NAMES or not value >= 0:
            raise ConfigError(f"--goodput={limit}: must be {', '.join(GOODPUT_NAMES)}, a colon, milliseconds")
        found[name] = value
    return found


def summary(
    outcomes: Sequence[Outcome], duration_s: float, goodput: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The figures. Times of requests that failed are in none of them. ``goodput``: see ``LoadOptions``."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    tokens_in, tokens_out = sum(o.prompt_len for o in good), sum(o.output_len for o in good)
    peak_tokens, peak_requests = _peaks(good)
    num_good = sum(_keeps(outcome, goodput) for outcome in good) if goodput else 0
    return {
        "duration": round(duration_s, 4),
        "completed": len(good),
        "failed": len(failed),
        "errors": sorted({str(error) for error in failed})[:10],
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": round(len(good) / duration_s, 3),
        "request_goodput": round(num_good / duration_s, 3) if goodput else None,
        "output_throughput": round(tokens_out / duration_s, 2),
        "total_token_throughput": round((tokens_in + tokens_out) / duration_s, 2),
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        **_figures("ttft", [o.ttft_s for o in good]),
        **_figures("tpot", [o.tpot_s for o in good if o.output_len > 1]),
        **_figures("itl", [gap for o in good for gap in o.itl_s]),
        **_figures("e2el", [o.latency_s for o in good]),
    }


def _figures(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    names = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p90", "p99")]
    if not values_s:
        return dict.fromkeys(names)
    ms = [1e3 * value for value in values_s]
    found = (
        *(statistics.fmean(ms), statistics.median(ms), statistics.pstdev(ms)),
        *(percentile(ms, 90), percentile(ms, 99)),
    )
    return {name: round(value, 4) for name, value in zip(names, found, strict=True)}


def _peaks(good: Sequence[Outcome]) -> tuple[float, int]:
    """Most events with tokens that came, and most requests that ran, within one second of the run; seconds
    are counted from the first request, as vLLM does."""
    first_s = min((outcome.start_s for outcome in good), default=0.0)
    tokens: Counter[int] = Counter()
    requests: Counter[int] = Counter()
    for outcome in good:
        sent_s = outcome.start_s - first_s
        times = accumulate(outcome.itl_s, initial=sent_s + outcome.ttft_s)
        tokens.update(int(time_s) for time_s in times)
        requests.update(range(int(sent_s), int(sent_s + outcome.latency_s) + 1))
    return float(max(tokens.values(), default=0)), max(requests.values(), default=0)


def _keeps(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    times_s = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2el": outcome.latency_s}
    return all(1e3 * times_s[name] <= limit for name, limit in limits.items())


def check_answers(outcomes: Sequence[Outcome], output_len: int | None) -> dict[str, Any]:
    """Whether the same prompt always had the same answer, and every answer all its tokens. A token that was
    lost, sent twice or given to another stream shows as a second answer to some prompt."""
    answers: dict[int, dict[str, int]] = {}
    for outcome in outcomes:
        if outcome.error is None:
            texts = answers.setdefault(outcome.prompt_index, {})
            texts[outcome.text] = texts.get(outcome.text, 0) + 1
    num_failed = sum(outcome.error is not None for outcome in outcomes)
    short = [o for o in outcomes if o.error is None and output_len is not None and o.output_len != output_len]
    deviating = sum(sum(texts.values()) - max(texts.values()) for texts in answers.values())
    return {
        "ok": not deviating and not short and not num_failed,
        "prompts": len(answers),
        "answers": sum(sum(texts.values()) for texts in answers.values()),
        "deviating": deviating,
        "of_wrong_length": len(short),
        "failed": num_failed,
    }
