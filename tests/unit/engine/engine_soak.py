"""A long random life of one engine: bursts of requests, aborts between and within steps, failing steps and
entries.

Every token of every request is checked against what the fake model must say, so a wrong block table anywhere
shows; at the end not one block may be missing.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from engine_fakes import PagedFakeRunner, expected_tokens

from gapless.engine.core import EngineCore
from gapless.engine.outputs import CompletionOutput, RequestOutput
from gapless.errors import RequestError
from gapless.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakSummary:
    num_finished: int
    num_aborted: int
    num_errors: int
    num_refused: int
    num_preemptions: int
    num_steps: int


class Soak:
    """One run. ``fault_rate`` is the share of steps in which something goes wrong. With prefix caching,
    prompts begin like others.
    """

    def __init__(
        self, *, num_requests: int, seed: int, fault_rate: float = 0.02, enable_prefix_caching: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.num_requests, self.fault_rate = num_requests, fault_rate
        self.runner = PagedFakeRunner(
            num_blocks=48, block_size=4, max_model_len=120, max_num_reqs=8, max_num_batched_tokens=40
        )
        self.runner.before_execute = self._disturb
        self.runner.errors = self._break_one
        self.core = EngineCore(self.runner, seed=seed, enable_prefix_caching=enable_prefix_caching)
        self.prompts: dict[str, list[int]] = {}
        self.params: dict[str, SamplingParams] = {}
        self.unfinished: set[str] = set()
        self.reasons: Counter[str] = Counter()
        self.num_refused = 0

    def run(self) -> SoakSummary:
        added = 0
        while added < self.num_requests or self.core.has_unfinished():
            if added < self.num_requests and self.random.random() < 0.4:
                burst = min(self.random.randint(1, 6), self.num_requests - added)
                for number in range(added, added + burst):
                    self._add(str(number))
                added += burst
            self._abort_some(0.03)
            for output in self.core.step():
                self._check(output)
        assert not self.unfinished
        self._check_idle()
        return SoakSummary(
            num_finished=len(self.prompts),
            num_aborted=self.reasons["abort"],
            num_errors=self.reasons["error"],
            num_refused=self.num_refused,
            num_preemptions=self.core.scheduler.num_preemptions,
            num_steps=len(self.runner.batches),
        )

    def _add(self, name: str) -> None:
        if self.random.random() < 0.05:
            self._add_bad(name)
        length = self.random.choice([1, 2, 3, 8, 17, 40, 90])
        prompt = [self.random.randrange(1000) for _ in range(length)]
        if self.core.scheduler.prefix_cache is not None and self.prompts and self.random.random() < 0.7:
            other = self.random.choice(list(self.prompts.values()))
            prompt[: self.random.randint(0, len(other))] = other[: self.random.randint(1, len(other))]
            prompt = prompt[:100]
        params = SamplingParams(
            n=self.random.choice([1, 1, 1, 2, 3]),
            max_tokens=self.random.choice([1, 2, 10, 40, None]),
            seed=self.random.choice([None, 3]),
            logprobs=self.random.choice([None, 1]),
            detokenize=False,
        )
        self.core.add_request(name, prompt, params, streams=self.random.random() < 0.5)
        self.prompts[name], self.params[name] = prompt, params
        self.unfinished.add(name)

    def _add_bad(self, name: str) -> None:
        try:
            self.core.add_request(
                name, self.random.choice([[], [5000], [1] * 500, "text"]), SamplingParams(detokenize=False)
            )
        except RequestError:
            self.num_refused += 1
        else:
            raise AssertionError("a bad request was accepted")

    def _abort_some(self, rate: float) -> None:
        if self.unfinished and self.random.random() < rate:
            self.core.abort_request(self.random.choice(sorted(self.unfinished)))

    def _disturb(self, batch: object) -> None:
        """Runs inside a step."""
        self._abort_some(0.05)
        if self.random.random() < self.fault_rate:
            raise RuntimeError("injected")

    def _break_one(self, batch) -> dict[int, str]:
        if self.random.random() < self.fault_rate:
            return {self.random.randrange(batch.num_reqs): "NaN logits"}
        return {}

    def _check(self, output: RequestOutput) -> None:
        name = output.request_id
        assert name in self.unfinished, "an output after the last one"
        for choice in output.outputs:
            self._check_choice(name, choice)
        if output.finished:
            self.unfinished.discard(name)
            self.reasons.update(str(choice.finish_reason) for choice in output.outputs)

    def _check_choice(self, name: str, choice: CompletionOutput) -> None:
        prompt, params = self.prompts[name], self.params[name]
        tokens = list(choice.token_ids)
        assert tokens == expected_tokens(prompt, num_tokens=len(tokens), vocab_size=1000)
        assert (choice.logprobs is None) == (params.logprobs is None)
        assert choice.logprobs is None or len(choice.logprobs) == len(tokens)
        assert (choice.error is not None) == (choice.finish_reason == "error")
        if choice.finish_reason == "length":
            room = 120 - len(prompt)
            assert len(tokens) == (room if params.max_tokens is None else min(params.max_tokens, room))

    def _check_idle(self) -> None:
        allocator = self.core.scheduler.allocator
        assert (allocator.num_used, allocator.num_held) == (0, 0)
        assert allocator.num_free == allocator.num_usable
        assert not self.core.scheduler.has_unfinished


def run_soak(*, num_requests: int, seed: int) -> SoakSummary:
    """Raises ``AssertionError`` at the first thing that is wrong."""
    return Soak(num_requests=num_requests, seed=seed).run()
