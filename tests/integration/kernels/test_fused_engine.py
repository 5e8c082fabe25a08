"""The decoder and the engine on fused kernels (interpreted), against the unfused forward and padded eager.

The emulated device records each fused operator as one node and replays it on fixed addresses, as CUDA would.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.config import EngineConfig
from gapless.engine.build import OpenedEngine, open_engine
from gapless.engine.core import EngineCore
from gapless.engine.outputs import RequestOutput
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.modes import Phase
from gapless.models import decoder
from gapless.models.config import parse_config
from gapless.models.decoder import Decoder
from gapless.models.dummy import fill_dummy_weights
from gapless.sampling.params import SamplingParams
from kernel_oracles import assert_close_to
from ragged_batches import make_batch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": LLAMA,
    "llama with biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "head size 80": {"head_dim": 80},
    "one head each": {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3},
}
STRATEGIES: dict[str, tuple[str, str]] = {
    "full": ("full", "full"),
    "breakable": ("breakable", "breakable"),
    "piecewise": ("tc_piecewise", "tc_piecewise"),
}


def run_layers(changes: dict[str, Any], dtype: torch.dtype, *, fused: bool) -> tuple[Tensor, list[Tensor]]:
    """Hidden states of the real tokens of a padded batch, and the caches it left."""
    config = parse_config({**CONFIG, **changes}, source="test")
    model = Decoder(config, max_positions=64, dtype=dtype, device=torch.device("cpu"))
    fill_dummy_weights(model, seed=0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter))
    model.has_fused_kernels = fused
    info = model.info
    batch = make_batch(
        [(0, 5), (7, 1), (0, 0), (3, 2)],
        num_heads=info.num_heads,
        num_kv_heads=info.num_kv_heads,
        head_size=info.head_size,
        pad_tokens=2,
        dtype=dtype,
    )
    for layer in model.attention_layers():
        layer.bind(TorchReferenceBackend(), batch.k_cache.clone(), batch.v_cache.clone())
    positions = torch.tensor([0, 1, 2, 3, 4, 7, 3, 4, 0, 0], dtype=torch.int32)
    ids = torch.arange(10, dtype=torch.int32)
    with use_forward_context(ForwardContext(batch=batch.metadata)):
        hidden = model.embed(ids)
        kept = hidden.clone()
        out = model.layers(hidden, positions)
    assert torch.equal(hidden, kept), "the input may be a static buffer"
    caches = [cache for layer in model.attention_layers() for cache in layer.caches]
    return out[: batch.num_real_tokens], caches


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.bfloat16) for family in FAMILIES), ("qwen3", torch.float32), ("qwen3", torch.float16)],
)
def test_fused_layers_equal_the_unfused_forward(family: str, dtype: torch.dtype) -> None:
    expected, expected_caches = run_layers(FAMILIES[family], dtype, fused=False)
    actual, caches = run_layers(FAMILIES[family], dtype, fused=True)
    assert actual.isfinite().all()
    assert_close_to(actual, expected, ulps=4, fraction=0.2)
    for cache, wanted in zip(caches, expected_caches, strict=True):
        # What no token was written to is still poison; the sink block holds what pad tokens computed.
        assert_close_to(cache[1:], wanted[1:], ulps=4, fraction=0.2)


@pytest.mark.parametrize("fused", [False, True])
def test_ids_drawn_on_the_device_stand_in_for_those_of_the_host(fused: bool) -> None:
    config = parse_config(CONFIG, source="test")
    model = Decoder(config, max_positions=64, dtype=torch.float32, device=torch.device("cpu"))
    fill_dummy_weights(model, seed=0)
    model.has_fused_kernels = fused
    batch = make_batch([(0, 3), (4, 1)], num_heads=4, num_kv_heads=2, head_size=16)
    for layer in model.attention_layers():
        layer.bind(TorchReferenceBackend(), batch.k_cache.clone(), batch.v_cache.clone())
    positions = torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    drawn = torch.tensor([60, 61, 62, 0])
    with use_forward_context(ForwardContext(batch=batch.metadata)):
        expected = model.layers(model.embed(torch.tensor([5, 6, 62, 60])), positions)
        actual = model.hidden_states_of_drawn(
            torch.tensor([5, 6, 0, 0], dtype=torch.int32),
            positions,
            drawn_rows_T=torch.tensor([3, 3, 2, 0], dtype=torch.int32),
            drawn_R=drawn,
        )
    assert torch.equal(actual, expected)


def open_engine_of(folder: Path, prefill: str, decode: str) -> OpenedEngine:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    options = {
        "model": str(folder),
        "load_format": "dummy",
        "device": "cpu",
        "max_running_requests": 2,
        "chunked_prefill_size": 8,
        "kv_cache_tokens": 32 * 16,
        "cuda_graph_backend_prefill": prefill,
        "cuda_graph_backend_decode": decode,
        "cuda_graph_bs_prefill": [8],
        "cuda_graph_bs_decode": [1, 2],
    }
    return open_engine(EngineConfig.from_sources(python=options))


def generate(opened: OpenedEngine) -> list[list[int]]:
    rng = random.Random(0)
    core = EngineCore(opened.runner)
    for index, length in enumerate((3, 9)):
        prompt = [rng.randrange(97) for _ in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=2 + index, ignore_eos=True, detokenize=False)
        core.add_request(str(index), prompt, params)
    last: dict[str, RequestOutput] = {}
    while core.has_unfinished():
        last.update((output.request_id, output) for output in core.step())
    return [list(last[str(index)].outputs[0].token_ids) for index in range(2)]


@pytest.fixture(scope="module")
def unfused_tokens(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return generate(open_engine_of(tmp_path_factory.mktemp("unfused"), "full", "full"))


@pytest.mark.parametrize(("prefill", "decode"), STRATEGIES.values(), ids=STRATEGIES.keys())
def test_graphs_of_fused_kernels_equal_padded_eager_and_draw_what_unfused_ones_draw(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    unfused_tokens: list[list[int]],
    prefill: str,
    decode: str,
) -> None:
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: True)
    opened = open_engine_of(tmp_path / "fused", prefill, decode)
    assert generate(opened) == unfused_tokens
    assert not opened.runner.report()["eager"], "every step ran as a graph"
    logits = opened.runner._graphs.logits.clone()
    opened.runner.max_steps_ahead = 1
    assert generate(opened) == unfused_tokens, "drawn tokens that only the device knows"
    opened.runner.max_steps_ahead = 0
    with opened.runner.padded_eager():
        assert generate(opened) == unfused_tokens
    assert torch.equal(opened.runner._graphs.logits, logits), "the last step's logits are bit-equal"


def test_a_layer_is_nine_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four products, attention and four fused kernels; embedding and first norm, and the head."""
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: True)
    opened = open_engine_of(tmp_path / "fused", "full", "full")
    store = opened.runner._graphs.store
    decode = [row.key for row in store.ledger if row.key.phase is Phase.DECODE]
    assert decode
    for key in decode:
        entry = store.get(key)
        assert entry is not None
        assert entry.program.num_nodes == 9 * CONFIG["num_hidden_layers"] + 3
