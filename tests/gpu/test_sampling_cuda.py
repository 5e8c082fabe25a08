"""The compiled sampling and penalty kernels at real sizes, against the torch functions; under capture; and an
engine that samples one step ahead of the host."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gapless.config import EngineConfig
from gapless.engine.build import open_engine
from gapless.graphs.modes import Phase
from gapless.kernels import penalty
from gapless.kernels import sample as module
from gapless.llm import LLM
from gapless.sampling import token_counts
from gapless.sampling.params import SamplingParams
from sampling_cases import Params, make_params, random_logits

pytestmark = pytest.mark.gpu

KINDS = ["normal", "bfloat16", "ties", "impossible", "equal", "one possible", "none possible", "infinite"]
FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "top_k": {"top_k": 50},
    "most": {"top_k": 60000},
    "top_p": {"top_p": 0.9},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 100, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
}


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Memory that was never written holds NaN: what a kernel leaves out is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)


def assert_same_draws(drawn_R: Tensor, expected_R: Tensor, logits_RV: Tensor) -> None:
    """Sums are made in another order, so of many thousand kept tokens a neighbour may be drawn: in at most
    one row of eight, and then a token close by in the order of the vocabulary."""
    differs_R = drawn_R != expected_R
    assert differs_R.float().mean() <= 1 / 8, (drawn_R, expected_R)
    size = logits_RV.shape[1]
    assert (drawn_R[differs_R] - expected_R[differs_R]).abs().le(max(size // 100, 1)).all()


@pytest.mark.parametrize("size", [1, 97, 4096, 4097, 49152, 151936, 262144])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_draws_are_those_of_the_torch_functions(size: int, filters: dict[str, float]) -> None:
    logits = random_logits(9, size, "normal", seed=size, device="cuda")
    params = make_params(9, **filters, device="cuda")  # type: ignore[arg-type]
    assert_same_draws(params.draw(logits), params.expected(logits), logits)
    plain = params.draw(logits, filtered=False)
    assert_same_draws(plain, params.expected(logits, filtered=False), logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [5000, 151936])
def test_every_kind_of_logits(size: int, kind: str) -> None:
    logits = random_logits(8, size, kind, device="cuda")
    params = make_params(
        8,
        temperature=[0.9, 1.5, 0.0, 1.0] * 2,
        top_k=[30, 0, 3, 0] * 2,
        top_p=[0.9, 0.6, 1.0, 1.0] * 2,
        min_p=[0.0, 0.03, 0.0, 0.0] * 2,
        device="cuda",
    )
    logits[5, size // 2] = torch.nan
    assert_same_draws(params.draw(logits), params.expected(logits), logits)


@pytest.mark.parametrize("top_k", [1, 2, 63, 64, 1000])
def test_exactly_the_oracles_tokens_survive_a_cut_in_exact_arithmetic(top_k: int) -> None:
    """Few kept tokens of equal weight: every sum is exact, so every draw must be equal."""
    logits = torch.full((64, 151936), -torch.inf, device="cuda")
    logits[:, ::100] = 0.0
    params = make_params(64, top_k=top_k, device="cuda")
    assert torch.equal(params.draw(logits), params.expected(logits))


def test_a_full_list_changes_nothing_but_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(4, 50000, "bfloat16", device="cuda")
    params = make_params(4, top_k=[9000, 0, 50, 1000], top_p=[1.0, 0.8, 0.5, 0.9], device="cuda")
    drawn = params.draw(logits)
    monkeypatch.setattr(module, "LIST_SIZE", 1)
    assert_same_draws(params.draw(logits), drawn, logits)


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = random_logits(32, 151936, "normal", device="cuda")
    params = make_params(32, top_p=0.9, top_k=[0, 50] * 16, device="cuda")
    together = params.draw(logits)
    for row in range(32):
        alone = Params(**{name: getattr(params, name)[row : row + 1] for name in Params.__slots__})
        assert alone.draw(logits[row : row + 1]) == together[row]


def test_frequencies_follow_the_softmax() -> None:
    count = 20_000
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 2
    params = make_params(count, device="cuda")
    tokens = params.draw(logits.cuda().expand(count, -1).contiguous(), filtered=False)
    expected = torch.softmax(logits.double(), -1).numpy() * count
    observed = np.bincount(tokens.cpu().numpy(), minlength=300)
    often = expected >= 8
    observed = np.append(observed[often], observed[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    degrees = len(expected) - 1
    assert (((observed - expected) ** 2) / expected).sum() < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("filtered", [False, True])
def test_a_captured_draw_follows_its_inputs(filtered: bool) -> None:
    logits = random_logits(5, 30000, "normal", device="cuda")
    params = make_params(5, top_k=[3, 0, 0, 40, 0], top_p=[1.0, 0.5, 1.0, 0.9, 0.7], device="cuda")
    tokens = torch.zeros(5, dtype=torch.int64, device="cuda")
    params.draw_into(tokens, logits, filtered=filtered)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        params.draw_into(tokens, logits, filtered=filtered)
    for seed in range(4):
        logits.copy_(random_logits(5, 30000, KINDS[seed], seed=seed))
        params.seed_R.add_(1)
        params.temperature_R[seed] = 0.0
        tokens.fill_(-7)
        graph.replay()
        assert torch.equal(tokens, params.draw(logits, filtered=filtered)), "bit for bit the eager launch"


def test_penalty_kernels_equal_the_torch_functions_bit_for_bit() -> None:
    size = 151936
    generator = torch.Generator().manual_seed(0)
    logits = random_logits(6, size, "normal", device="cuda")
    counts = torch.randint(0, 9, (5, size), dtype=torch.int32, generator=generator).cuda()
    rows = torch.tensor([4, 0, 2], dtype=torch.int32, device="cuda")
    slots = torch.tensor([1, 4, 0], dtype=torch.int32, device="cuda")
    tokens = torch.randint(0, size, (6,), generator=generator).cuda()
    tokens[2] = -1
    values = {
        "repetition_P": torch.tensor([1.3, 1.0, 0.7], device="cuda"),
        "presence_P": torch.tensor([0.5, -1.0, 0.0], device="cuda"),
        "frequency_P": torch.tensor([0.1, 0.0, 0.3], device="cuda"),
    }
    results = []
    for functions in (penalty, token_counts):
        mine, table = logits.clone(), counts.clone()
        functions.count_drawn(table, tokens, rows, slots)
        functions.penalise_rows(mine, table, rows, slots, **values)
        results.append((mine, table))
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0], results[1][0])


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 9001,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def test_an_engine_draws_the_same_tokens_one_step_ahead(tmp_path: Path) -> None:
    """Filters, penalties and minimum lengths. Every request draws as many tokens, so both runs are made of
    the same batches: bfloat16 products of another number of rows round differently."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = {
        "model": str(tmp_path),
        "load_format": "dummy",
        "device": "cuda",
        "dtype": "bfloat16",
        "max_running_requests": 8,
        "chunked_prefill_size": 64,
        "kv_cache_tokens": 2048,
    }
    opened = open_engine(EngineConfig.from_sources(python=options))
    rng = random.Random(0)
    prompts = [[rng.randrange(9001) for _ in range(rng.randint(1, 60))] for _ in range(8)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5},
        {"temperature": 1.0, "top_k": 50, "min_p": 0.01},
        {"temperature": 0.7, "presence_penalty": 1.0, "min_tokens": 40, "stop_token_ids": list(range(4000))},
    ]
    params = [
        SamplingParams(max_tokens=40, seed=i, ignore_eos=True, detokenize=False, **kinds[i % len(kinds)])
        for i in range(len(prompts))
    ]
    results = []
    for ahead in (0, 1):
        opened.runner.max_steps_ahead = ahead
        llm = LLM._from_parts(opened.runner, None, eos_token_ids=(2,))
        results.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert all(len(tokens) == 40 for tokens in results[0])
    assert results[0] == results[1]
    nodes: dict[Phase, set[int]] = {}
    for row in opened.runner.graphs.store.ledger:
        nodes.setdefault(row.key.phase, set()).add(row.num_nodes)
    # As many kernels and, poisoned as memory is here, a fill of each scratch tensor (-1: nobody could tell).
    assert nodes[Phase.SAMPLE_FILTERED] in ({8 + 9}, {-1})
    assert nodes[Phase.SAMPLE] in ({3 + 3}, {-1})
    opened.runner.shutdown()
