"""A long random life of one engine with real graphs: mixed lengths and sampling, aborts, too small a cache.

Afterwards every request runs once more, alone. Its tokens must be the same: nothing that shared a step, a
bucket, a block or a slot with it may have touched it. An aborted request has a beginning of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiny_model import VOCAB_SIZE

from gapless.engine.core import EngineCore
from gapless.engine.runner import ModelRunner
from gapless.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSoakSummary:
    num_requests: int
    num_aborted: int
    num_preemptions: int
    differing: tuple[str, ...]
    """Requests whose tokens depend on their company."""


class GraphSoak:
    """``runner`` must have a cache that is too small for what it may run at once."""

    def __init__(self, runner: ModelRunner, *, num_requests: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.core = EngineCore(runner, seed=seed)
        self.num_requests = num_requests
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.results: dict[str, list[tuple[list[int], str]]] = {}

    def run(self) -> GraphSoakSummary:
        added = 0
        while added < self.num_requests or self.core.has_unfinished():
            if added < self.num_requests and self.random.random() < 0.3:
                for _ in range(min(self.random.randint(1, 5), self.num_requests - added)):
                    self._add(str(added))
                    added += 1
            if self.requests and self.random.random() < 0.04:
                self.core.abort_request(self.random.choice(list(self.requests)))
            self._collect(self.core.step())
        num_preemptions = self.core.scheduler.num_preemptions
        self._check_idle()
        together, self.results = self.results, {}
        differing = [name for name in together if not self._is_same_alone(name, together[name])]
        self._check_idle()
        reasons = [reason for choices in together.values() for _, reason in choices]
        assert len(together) == self.num_requests
        assert set(reasons) <= {"stop", "length", "abort"}
        return GraphSoakSummary(
            num_requests=len(together),
            num_aborted=reasons.count("abort"),
            num_preemptions=num_preemptions,
            differing=tuple(differing),
        )

    def _add(self, name: str) -> None:
        draw = self.random
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([1, 5, 16, 17, 31, 45, 70]))]
        sampling: dict[str, Any] = draw.choice(
            [
                {"temperature": 0.0},
                {"temperature": 0.0, "logprobs": 2},
                {"temperature": 1.0},
                {"temperature": 0.7, "top_k": 5},
                {"temperature": 1.3, "top_p": 0.8},
                {"temperature": 1.0, "min_p": 0.1, "top_k": 20, "top_p": 0.9},
                {"temperature": 0.0, "repetition_penalty": 1.2},
                {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
            ]
        )
        max_tokens = draw.choice([1, 3, 8, 20])
        params = SamplingParams(
            n=draw.choice([1, 1, 1, 2]),
            seed=draw.randrange(1000),
            max_tokens=max_tokens,
            stop_token_ids=draw.choice([(), (7, 8)]),
            min_tokens=min(draw.choice([0, 0, 2]), max_tokens),
            ignore_eos=True,
            detokenize=False,
            **sampling,
        )
        self.requests[name] = prompt, params
        self.core.add_request(name, prompt, params)

    def _collect(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            if output.finished:
                self.results[output.request_id] = [
                    (list(choice.token_ids), str(choice.finish_reason)) for choice in output.outputs
                ]

    def _is_same_alone(self, name: str, together: list[tuple[list[int], str]]) -> bool:
        self.core.add_request(name, *self.requests[name])
        while self.core.has_unfinished():
            self._collect(self.core.step())
        for (tokens, reason), (alone, _) in zip(together, self.results[name], strict=True):
            if tokens != (alone[: len(tokens)] if reason == "abort" else alone):
                return False
        return True

    def _check_idle(self) -> None:
        allocator = self.core.scheduler.allocator
        assert (allocator.num_used, allocator.num_held) == (0, 0)
        assert allocator.num_free == allocator.num_usable
        assert not self.core.scheduler.has_unfinished
