"""Prefill that stops behind the last layer's attention, and the head that does the rest for sampled rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import CONFIG

from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.config import EngineConfig
from gapless.engine.build import OpenedEngine, open_engine
from gapless.engine.core import EngineCore
from gapless.engine.graph_set import GraphSet
from gapless.engine.outputs import RequestOutput
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.modes import Phase
from gapless.models import decoder
from gapless.models.config import parse_config
from gapless.models.decoder import Decoder
from gapless.models.dummy import fill_dummy_weights
from gapless.parallel.shard import Shard
from gapless.sampling.params import SamplingParams
from kernel_oracles import assert_close_to
from ragged_batches import make_batch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
PROMPTS = [[5, 6, 7], [8] * 9, [9, 3, 1, 4, 1]]


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: True)


def open_engine_of(
    folder: Path, *, prefill: str = "full", decode: str = "full", **changes: Any
) -> OpenedEngine:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    options = {
        "model": str(folder),
        "load_format": "dummy",
        "device": "cpu",
        "max_running_requests": 4,
        "chunked_prefill_size": 8,
        "kv_cache_tokens": 32 * 16,
        "cuda_graph_backend_prefill": prefill,
        "cuda_graph_backend_decode": decode,
        "cuda_graph_bs_prefill": [4, 8],
        "cuda_graph_bs_decode": [1, 2, 4],
    }
    return open_engine(EngineConfig.from_sources(python=options))


@pytest.fixture
def without_tail(monkeypatch: pytest.MonkeyPatch) -> Any:
    def open_without(folder: Path) -> OpenedEngine:
        with monkeypatch.context() as patch:
            patch.setattr(GraphSet, "_has_tail", lambda self, prefill, decode: False)
            return open_engine_of(folder)

    return open_without


def outputs_of(opened: OpenedEngine, **params: Any) -> list[RequestOutput]:
    core = EngineCore(opened.runner)
    options = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **params)
    for index, prompt in enumerate(PROMPTS):
        core.add_request(str(index), prompt, options)
    last: dict[str, RequestOutput] = {}
    while core.has_unfinished():
        last.update((output.request_id, output) for output in core.step())
    return [last[str(index)] for index in range(len(PROMPTS))]


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_that_stops_and_its_tail_are_the_stack(num_layers: int, dtype: torch.dtype) -> None:
    config = parse_config({**CONFIG, "num_hidden_layers": num_layers}, source="test")
    model = Decoder(config, max_positions=64, dtype=dtype, device=torch.device("cpu"))
    fill_dummy_weights(model, seed=0)
    batch = make_batch([(0, 5), (7, 1)], num_heads=4, num_kv_heads=2, head_size=16, dtype=dtype)
    for layer in model.attention_layers():
        layer.bind(TorchReferenceBackend(), batch.k_cache.clone(), batch.v_cache.clone())
    positions = torch.tensor([0, 1, 2, 3, 4, 7], dtype=torch.int32)
    ids, none = torch.arange(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    drawn = {"drawn_rows_T": none, "drawn_R": torch.zeros(1, dtype=torch.int64)}
    rows = torch.tensor([4, 5, 0])
    with use_forward_context(ForwardContext(batch=batch.metadata)):
        expected = model.layers(model.embed(ids), positions).index_select(0, rows)
        states = [
            model.layers_to_tail(model.embed(ids), positions),
            model.drawn_to_tail(ids, positions, **drawn),
        ]
    for attended_TC, residual_TE in states:
        found = model.tail(attended_TC.index_select(0, rows), residual_TE.index_select(0, rows))
        assert_close_to(found, expected, ulps=4, fraction=0.2)


def test_features_of_media_are_added_in_front_of_the_tail() -> None:
    config = parse_config({**CONFIG, "num_hidden_layers": 3}, source="test")
    model = Decoder(config, max_positions=64, dtype=torch.float32, device=torch.device("cpu"))
    fill_dummy_weights(model, seed=0)
    batch = make_batch([(0, 5)], num_heads=4, num_kv_heads=2, head_size=16)
    for layer in model.attention_layers():
        layer.bind(TorchReferenceBackend(), batch.k_cache.clone(), batch.v_cache.clone())
    positions, is_media_T = torch.arange(5, dtype=torch.int32), torch.tensor([0, 1, 1, 0, 1])
    hidden_TE = model.embed(positions)
    media = torch.randn(2, 5, CONFIG["hidden_size"]), is_media_T.to(torch.int32)
    with use_forward_context(ForwardContext(batch=batch.metadata)):
        expected = model.layers(hidden_TE, positions, *media)
        assert not torch.allclose(expected, model.layers(hidden_TE, positions), atol=1e-3)
        states = model.layers_to_tail(hidden_TE, positions, *media)
    assert_close_to(model.tail(*states), expected, ulps=4, fraction=0.2)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_an_engine_draws_what_it_would_without(num_ahead: int, tmp_path: Path, without_tail: Any) -> None:
    opened, other = open_engine_of(tmp_path / "tail"), without_tail(tmp_path / "whole")
    assert opened.runner.graphs.has_tail
    assert not other.runner.graphs.has_tail
    for engine in (opened, other):
        engine.runner.max_steps_ahead = num_ahead
    found, expected = (outputs_of(engine, max_tokens=5) for engine in (opened, other))
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert not opened.runner.report()["eager"], "every step ran as a graph"


def test_scores_of_prompts_and_embeddings_come_from_the_tail_too(tmp_path: Path, without_tail: Any) -> None:
    opened, other = open_engine_of(tmp_path / "tail"), without_tail(tmp_path / "whole")
    for found, expected in zip(
        *(outputs_of(e, max_tokens=1, prompt_logprobs=2) for e in (opened, other)), strict=True
    ):
        assert found.prompt_logprobs is not None
        assert expected.prompt_logprobs is not None
        for here, there in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert here.keys() == there.keys()
            for token, entry in here.items():
                assert entry.logprob == pytest.approx(there[token].logprob, abs=1e-4)
    embeddings = []
    for engine in (opened, other):
        core = EngineCore(engine.runner)
        params = SamplingParams(temperature=0.0, max_tokens=1, pooling="last", detokenize=False)
        core.add_request("one", [5, 6, 7], params)
        (delta,) = core.step_deltas()
        embeddings.append(torch.tensor(delta.embedding))
    torch.testing.assert_close(*embeddings, atol=1e-5, rtol=1e-4)
    wanted = {"phase": "head", "reason": "hidden_states", "count": 1}
    assert wanted in opened.runner.report()["eager"], "the tail of one row ran outside of a graph"
    assert "hidden_states" not in str(other.runner.report()["eager"])


def test_the_end_of_the_last_layer_moves_to_the_heads_graph(tmp_path: Path, without_tail: Any) -> None:
    """What prefill graphs lose of the last layer the head's get."""
    counts = []
    for opened in (open_engine_of(tmp_path / "tail"), without_tail(tmp_path / "whole")):
        store = opened.runner.graphs.store
        nodes: dict[Phase, int] = {}
        for row in store.ledger:
            entry = store.get(row.key)
            assert entry is not None
            nodes[row.key.phase] = entry.program.num_nodes
        counts.append(nodes)
    tail, whole = counts
    assert tail[Phase.DECODE] == whole[Phase.DECODE]
    assert tail[Phase.PREFILL] < whole[Phase.PREFILL]
    assert tail[Phase.HEAD] - whole[Phase.HEAD] >= whole[Phase.PREFILL] - tail[Phase.PREFILL]


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill": "breakable"},
        {"prefill": "tc_piecewise"},
        {"decode": "breakable"},
        EXPERTS,
        {"architectures": ["Qwen3Model"]},
    ],
    ids=["breakable", "piecewise", "breakable decode", "experts", "embeddings"],
)
def test_everything_else_runs_whole_layers(changes: dict[str, Any], tmp_path: Path) -> None:
    opened = open_engine_of(tmp_path / "model", **changes)
    assert not opened.runner.graphs.has_tail
    assert [buffer.shape[1] for buffer in opened.runner.graphs.state_buffers] == [CONFIG["hidden_size"]]


def test_a_rank_of_several_runs_whole_layers() -> None:
    config = parse_config(CONFIG, source="test")
    for size in (1, 2):
        model = Decoder(
            config,
            max_positions=64,
            dtype=torch.float32,
            device=torch.device("cpu"),
            shard=Shard(rank=0, size=size),
        )
        assert model.has_tail == (size == 1)
