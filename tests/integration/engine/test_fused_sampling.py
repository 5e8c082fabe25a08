"""An engine whose sampling graphs are the Triton kernels (under the interpreter): the tokens of the torch
functions, with penalties and limits, and with steps launched ahead of the host."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_model import VOCAB_SIZE, open_tiny

from gapless.engine.build import OpenedEngine
from gapless.engine.graph_set import GraphSet
from gapless.graphs.modes import Phase
from gapless.llm import LLM
from gapless.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 0.6, "frequency_penalty": 0.4, "n": 2},
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedEngine:
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphSet, "has_fused_sampling", True)
        return open_tiny(tmp_path_factory.mktemp("fused"))


@pytest.fixture(scope="module")
def unfused(tmp_path_factory: pytest.TempPathFactory) -> OpenedEngine:
    return open_tiny(tmp_path_factory.mktemp("unfused"))


def generate(opened: OpenedEngine, ahead: int) -> list[Any]:
    """A batch in which every request has other parameters."""
    rng = random.Random(1)
    opened.runner.max_steps_ahead = ahead
    llm = LLM._from_parts(opened.runner, None, eos_token_ids=(2,))
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))] for _ in PARAMS]
    params = [
        SamplingParams(max_tokens=2, min_tokens=1, seed=i, detokenize=False, **p)
        for i, p in enumerate(PARAMS)
    ]
    return [[c.token_ids for c in output.outputs] for output in llm.generate(prompts, params)]


def test_tokens_are_those_of_the_torch_functions(
    opened: OpenedEngine, unfused: OpenedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(unfused, 0)
    monkeypatch.setattr(GraphSet, "has_fused_sampling", True)
    assert generate(opened, 1) == expected


def test_a_sampling_graph_is_one_operator(opened: OpenedEngine) -> None:
    store = opened.runner.graphs.store
    keys = [row.key for row in store.ledger if row.key.phase in (Phase.SAMPLE, Phase.SAMPLE_FILTERED)]
    assert keys
    for key in keys:
        entry = store.get(key)
        assert entry is not None
        assert entry.program.num_nodes == 1
