"""Fused kernels (interpreted) write float32 logits only in steps in which somebody reads them.

The buffer is full of NaN before every step: logits that were not asked for stay NaN, and a row that is read
without having been written would fail its request.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engines import CONFIG, open_engine_of
from tiny_model import BatchMaker

from gapless.engine.build import OpenedEngine
from gapless.engine.core import EngineCore
from gapless.engine.outputs import RequestOutput
from gapless.models import decoder
from gapless.sampling.params import SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)

VOCAB_SIZE = CONFIG["vocab_size"]
STRATEGIES = [("full", "full"), ("breakable", "breakable")]
SIZES = {"max_running_requests": 4, "cuda_graph_bs_decode": [1, 3, 4]}
"""Three rows of logits are drawn from by a graph of four, whose last row nobody has written."""


@pytest.fixture(scope="module", params=STRATEGIES, ids="+".join)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenedEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "has_fused_kernels", lambda device: True)
        opened = open_engine_of(tmp_path_factory.mktemp("fused"), *request.param, options=SIZES)
    assert opened.runner.graphs.has_fused_sampling
    opened.runner.max_steps_ahead = 0
    yield opened
    opened.runner.shutdown()


def serve(
    opened: OpenedEngine, params: Sequence[dict[str, Any]], *, waits: bool = False
) -> tuple[list[Any], list[bool]]:
    """What a request with each of ``params`` gets, and whether each step wrote its logits. ``waits``: each
    request comes a step after the one before."""
    rng = random.Random(0)
    core, graphs = EngineCore(opened.runner), opened.runner.graphs
    waiting = []
    for index, changes in enumerate(params):
        values = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "detokenize": False, **changes}
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(2)]
        waiting.append((str(index), prompt, SamplingParams(**values)))
    last: dict[str, RequestOutput] = {}
    is_written = []
    while waiting or core.has_unfinished():
        for _ in range(1 if waits else len(waiting)):
            if waiting:
                core.add_request(*waiting.pop(0))
        graphs.logits.fill_(math.nan)
        last.update((output.request_id, output) for output in core.step())
        is_written.append(not bool(graphs.logits.isnan().all()))
    choices = [last[str(index)].outputs[0] for index in range(len(params))]
    assert {choice.finish_reason for choice in choices} == {"length"}
    return [(choice.token_ids, choice.logprobs, choice.error) for choice in choices], is_written


def serve_with_all(
    opened: OpenedEngine, params: Sequence[dict[str, Any]], *, waits: bool = False
) -> list[Any]:
    """The same with logits in every step."""
    opened.runner.graphs.keeps_logits = True
    try:
        found, is_written = serve(opened, params, waits=waits)
    finally:
        opened.runner.graphs.keeps_logits = False
    assert all(is_written)
    return found


@pytest.mark.parametrize(
    ("params", "is_written"),
    [
        ({}, [False, False, False]),
        ({"min_tokens": 2, "stop_token_ids": [5]}, [True, True, False]),
        ({"prompt_logprobs": 1}, [False, False, False]),  # these are made apart, of hidden states
        ({"logprobs": 2}, [True, True, True]),
        ({"repetition_penalty": 1.3}, [True, True, True]),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.5}, [True, True, True]),
        ({"temperature": 0.8, "seed": 1, "top_k": 7, "top_p": 0.9, "max_tokens": 1}, [True]),
    ],
    ids=str,
)
def test_logits_are_written_where_they_are_read(
    opened: OpenedEngine, params: dict[str, Any], is_written: list[bool]
) -> None:
    found = serve(opened, [params])
    assert found[1] == is_written
    assert found[0] == serve_with_all(opened, [params])
    with opened.runner.padded_eager():
        assert serve(opened, [params]) == found


def test_one_request_that_reads_logits_is_enough_and_no_longer_than_it_runs(opened: OpenedEngine) -> None:
    params = [
        {"max_tokens": 5},
        {"temperature": 0.9, "seed": 3, "max_tokens": 2},
        {"logprobs": 1, "max_tokens": 3},
    ]
    found, is_written = serve(opened, params)
    assert is_written == [True, True, True, False, False]
    assert found == serve_with_all(opened, params)


GREEDY = [{"max_tokens": 6}, {"max_tokens": 5}]


@pytest.fixture(scope="module")
def alone(opened: OpenedEngine) -> list[Any]:
    """What the greedy requests get without another."""
    return serve(opened, GREEDY, waits=True)[0]


@pytest.mark.parametrize(
    "last", [{"temperature": 0.9, "seed": 3}, {"logprobs": 2}, {"presence_penalty": 1.0}]
)
def test_a_step_reads_nothing_that_greedy_steps_before_it_left_out(
    opened: OpenedEngine, alone: list[Any], last: dict[str, Any]
) -> None:
    params = [*GREEDY, last]
    found, is_written = serve(opened, params, waits=True)
    assert is_written == [False, False, True, True, True, False]
    assert found == serve_with_all(opened, params, waits=True)
    assert found[:2] == alone


def test_greedy_tokens_are_the_same_with_steps_ahead(opened: OpenedEngine) -> None:
    params = [{"max_tokens": 4}, {"max_tokens": 3, "logprobs": 0}]
    expected, _ = serve(opened, params)
    opened.runner.max_steps_ahead = 1
    try:
        core = EngineCore(opened.runner)
        rng = random.Random(0)
        last: dict[str, RequestOutput] = {}
        for index, changes in enumerate(params):
            values = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **changes}
            core.add_request(
                str(index), [rng.randrange(VOCAB_SIZE) for _ in range(2)], SamplingParams(**values)
            )
        while core.has_unfinished():
            last.update((output.request_id, output) for output in core.step())
    finally:
        opened.runner.max_steps_ahead = 0
    assert [last[str(index)].outputs[0].token_ids for index in range(2)] == [
        tokens for tokens, *_ in expected
    ]


class OneToken:
    """Of grammars the simplest: one token, always. As ``GrammarMatcher``."""

    def __init__(self, token: int) -> None:
        self.token = token

    def fill(self, words_W: np.ndarray, *, banned: Any) -> None:
        words_W[:] = 0
        words_W[self.token // 32] = np.array([1 << self.token % 32], np.uint32).view(np.int32)[0]


def test_a_grammar_reads_logits_until_its_matcher_is_gone(opened: OpenedEngine) -> None:
    maker = BatchMaker(structured_outputs=StructuredOutputsParams(choice=["a"]))
    sequence, logits = maker.sequence([1, 2, 3]), opened.runner.graphs.logits
    sequence.matcher = OneToken(40)  # type: ignore[assignment]
    for count in (3, 1):
        logits.fill_(math.nan)
        result = opened.runner.execute(maker.batch([(sequence, count)]))
        assert result.token_ids == [40]
        assert result.errors == {}
        assert not logits.isnan().all()
        sequence.token_ids += result.token_ids
    sequence.matcher = None
    logits.fill_(math.nan)
    assert opened.runner.execute(maker.batch([(sequence, 1)])).token_ids != [-1]
    assert logits.isnan().all()


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9}, {"logprobs": 0}], ids=str)
def test_of_a_step_of_single_tokens_only_those_at_the_end_are_drawn(
    opened: OpenedEngine, params: dict[str, Any]
) -> None:
    """The row that is drawn from is not the first of the decode graph."""
    found = []
    for neighbours in (1, 0):
        maker = BatchMaker(**params)
        opened.runner.graphs.logits.fill_(math.nan)
        drawn = maker.sequence([7, 8])
        others = [maker.sequence([1, 2, 3]) for _ in range(neighbours)]
        opened.runner.execute(maker.batch([(drawn, 1)]))
        result = opened.runner.execute(maker.batch([*((other, 1) for other in others), (drawn, 1)]))
        found.append((result.token_ids, result.errors))
    assert found[0] == found[1]
    assert found[0][0] != [-1]
