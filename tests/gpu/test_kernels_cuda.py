"""The compiled fused kernels at real shapes, against float64 or the decoder's torch steps; under capture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.config import EngineConfig
from gapless.engine.build import open_engine
from gapless.engine.core import EngineCore
from gapless.engine.graph_set import INVALID_TOKEN, greedy_or_invalid
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.modes import Phase
from gapless.kernels.activation import fused_silu_mul
from gapless.kernels.head import finish_greedy
from gapless.kernels.norm import fused_add_rms_norm, fused_embed_rms_norm, fused_rms_norm
from gapless.kernels.rope_cache import rotate_heads, rotate_into_cache
from gapless.models.config import parse_config
from gapless.models.decoder import Decoder
from gapless.models.dummy import fill_dummy_weights
from gapless.sampling.params import SamplingParams
from kernel_oracles import (
    DTYPES,
    assert_close_to,
    make_rope,
    poisoned_caches,
    rotate_oracle,
    silu_mul_oracle,
    written_caches,
)
from ragged_batches import make_batch

pytestmark = pytest.mark.gpu

SHAPES = [
    (1, 576),
    (3, 1024),
    (7, 2048),
    (2, 2560),
    (130, 3072),
    (5, 4096),
    (2, 5120),
    (8192, 1024),
    (33, 8192),
]
HEADS = [(9, 3, 64), (16, 8, 128), (32, 8, 128), (14, 2, 64), (8, 8, 80), (32, 32, 96), (8, 1, 256)]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that was never written holds NaN: an element that a kernel leaves out is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


poisoned = pytest.mark.usefixtures("poisoned_memory")


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def exact_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = hidden.double()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.double()).to(hidden.dtype)


@poisoned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), SHAPES)
def test_norm_equals_float64(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    hidden, weight = random(num_tokens, size, dtype=dtype, scale=3), random(size, dtype=dtype)
    assert_close_to(fused_rms_norm(hidden, weight, 1e-5), exact_norm(hidden, weight, 1e-5))


@poisoned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), SHAPES)
def test_addition_and_norm_equal_two_steps(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    update, residual = (random(num_tokens, size, dtype=dtype) for _ in range(2))
    weight = random(size, dtype=dtype)
    total, normed = fused_add_rms_norm(update, residual, weight, 1e-6)
    assert torch.equal(total, residual + update)
    assert_close_to(normed, exact_norm(total, weight, 1e-6))


@poisoned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), SHAPES)
def test_embedding_of_known_and_of_drawn_tokens(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    embedding, weight = random(500, size, dtype=dtype), random(size, dtype=dtype)
    drawn = torch.randint(500, (17,), device="cuda")
    drawn[16] = 0
    is_known = torch.arange(num_tokens, device="cuda") % 3 != 0
    ids = torch.randint(500, (num_tokens,), device="cuda").where(is_known, 0).int()
    drawn_rows = torch.randint(16, (num_tokens,), device="cuda").where(~is_known, 16).int()
    hidden, normed = fused_embed_rms_norm(ids, drawn_rows, drawn, embedding, weight, 1e-5)
    expected = embedding[torch.where(is_known, ids.long(), drawn[drawn_rows.long()])]
    assert torch.equal(hidden, expected)
    assert_close_to(normed, exact_norm(expected, weight, 1e-5))


@poisoned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1536), (1, 3072), (77, 14336), (4096, 3072), (3, 2731)])
def test_activation_equals_two_steps(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = random(num_tokens, 2 * size, dtype=dtype, scale=4)
    assert_close_to(fused_silu_mul(gate_up), silu_mul_oracle(gate_up))


@poisoned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 33, 2049])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), HEADS)
def test_rotation_and_cache_write_equal_the_steps(
    num_heads: int, num_kv_heads: int, head_size: int, num_tokens: int, has_norm: bool, dtype: torch.dtype
) -> None:
    block_size = 16
    num_blocks = num_tokens // block_size + 3
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_size, dtype=dtype)
    qkv[-1] = math.nan
    weight = random(num_heads + num_kv_heads, head_size, dtype=dtype) if has_norm else None
    rope = make_rope(head_size, num_positions=5000, dtype=dtype, device="cuda")
    positions = torch.randint(5000, (num_tokens,), device="cuda", dtype=torch.int32)
    slots = torch.randperm((num_blocks - 1) * block_size, device="cuda")[:num_tokens].int() + block_size
    slots[-1] = 1  # a pad token
    k_cache, v_cache = poisoned_caches(
        num_blocks, block_size, num_kv_heads, head_size, dtype=dtype, device="cuda"
    )
    query, key, value = rotate_oracle(qkv, weight, 1e-6, rope, positions, num_kv_heads)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    expected_k.view(-1, num_kv_heads, head_size)[slots.long()] = key
    expected_v.view(-1, num_kv_heads, head_size)[slots.long()] = value
    out = rotate_into_cache(qkv, weight, 1e-6, rope, positions, slots, k_cache, v_cache)
    assert_close_to(out, query)
    assert_close_to(k_cache, expected_k)
    torch.testing.assert_close(v_cache, expected_v, atol=0, rtol=0, equal_nan=True)
    rotated = rotate_heads(qkv, weight, 1e-6, rope, positions, num_kv_heads)
    assert_close_to(rotated, torch.cat((query, key), 1))


@poisoned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [49152, 128256, 151936, 262145])
@pytest.mark.parametrize("num_rows", [1, 2, 9, 200])
def test_greedy_head_equals_float_and_max(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    raw = random(num_rows, vocab_size, dtype=dtype, scale=5)  # in half precision full of ties
    if num_rows > 2:
        raw[1, vocab_size - 1] = math.nan
        raw[2] = -math.inf
    logits = torch.full((num_rows + 1, vocab_size), 7.0, device="cuda")
    tokens = torch.full((num_rows + 1,), 99, device="cuda")
    expected = greedy_or_invalid(raw.float().cpu())  # the CPU takes the lowest index of equal logits
    needs_logits = torch.zeros(1, dtype=torch.int32, device="cuda")
    finish_greedy(raw, logits[:-1], tokens[:-1], needs_logits, INVALID_TOKEN)
    assert (logits == 7.0).all()
    assert torch.equal(tokens[:-1].cpu(), expected)
    finish_greedy(raw, logits[:-1], tokens[:-1].fill_(99), needs_logits.fill_(1), INVALID_TOKEN)
    torch.testing.assert_close(logits[:-1], raw.float(), atol=0, rtol=0, equal_nan=True)
    assert torch.equal(tokens[:-1].cpu(), expected)
    assert tokens[-1] == 99
    assert (logits[-1] == 7.0).all()


def test_a_captured_launch_reads_slots_and_positions_at_every_replay() -> None:
    num_tokens, head_size, dtype = 5, 128, torch.bfloat16
    rope = make_rope(head_size, num_positions=100, dtype=dtype, device="cuda")
    qkv = random(num_tokens, 32 * head_size, dtype=dtype)
    weight = random(24, head_size, dtype=dtype)
    positions, slots = (torch.zeros(num_tokens, device="cuda", dtype=torch.int32) for _ in range(2))
    k_cache, v_cache = poisoned_caches(4, 16, 8, head_size, dtype=dtype, device="cuda")

    def launch() -> Tensor:
        return rotate_into_cache(qkv, weight, 1e-6, rope, positions, slots, k_cache, v_cache)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    for _ in range(5):
        qkv.copy_(torch.randn_like(qkv))
        positions.copy_(torch.randint(100, (num_tokens,)))
        slots.copy_(torch.randperm(48)[:num_tokens] + 16)
        for tensor in (k_cache, v_cache, out):
            tensor.fill_(math.nan)
        query, key, value = rotate_oracle(qkv, weight, 1e-6, rope, positions, 8)
        expected = written_caches(key, value, slots, k_cache, v_cache)
        graph.replay()
        assert_close_to(out, query)
        assert_close_to(k_cache, expected[0])
        assert_close_to(v_cache, expected[1])


CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
STRATEGIES = [("full", "full"), ("breakable", "full"), ("breakable", "breakable")]


def open_model(folder: Path, changes: dict[str, Any], prefill: str, decode: str) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    options = {
        "model": str(folder),
        "load_format": "dummy",
        "device": "cuda",
        "dtype": "bfloat16",
        "max_running_requests": 16,
        "chunked_prefill_size": 256,
        "kv_cache_tokens": 8192,
        "cuda_graph_backend_prefill": prefill,
        "cuda_graph_backend_decode": decode,
    }
    return open_engine(EngineConfig.from_sources(python=options))


def generate(opened: Any, **changes: Any) -> list[list[int]]:
    """Greedy tokens of prompts of many lengths; ``changes``: of their parameters."""
    core = EngineCore(opened.runner)
    for index, length in enumerate((1, 2, 17, 100, 255, 300)):
        prompt = [(index * 977 + i * 31) % 8000 for i in range(length)]
        values = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "detokenize": False, **changes}
        params = SamplingParams(**values)
        core.add_request(str(index), prompt, params)
    last = {}
    while core.has_unfinished():
        last.update((output.request_id, output) for output in core.step())
    return [list(last[str(index)].outputs[0].token_ids) for index in range(len(last))]


@pytest.mark.parametrize(("prefill", "decode"), STRATEGIES)
def test_logits_are_written_only_for_steps_that_read_them(tmp_path: Path, prefill: str, decode: str) -> None:
    opened = open_model(tmp_path / "model", {}, prefill, decode)
    opened.runner.max_steps_ahead = 0
    logits = opened.runner.graphs.logits.fill_(math.nan)
    torch.cuda.synchronize()
    tokens = generate(opened)
    assert logits.isnan().all()
    assert generate(opened, logprobs=0) == tokens
    torch.cuda.synchronize()
    assert logits[:1].isfinite().all()
    logits.fill_(math.nan)
    torch.cuda.synchronize()
    sampled = generate(opened, temperature=0.8, seed=1)
    opened.runner.graphs.keeps_logits = True
    assert generate(opened) == tokens
    assert generate(opened, temperature=0.8, seed=1) == sampled
    opened.runner.shutdown()


@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["qwen3", "llama"])
@pytest.mark.parametrize(("prefill", "decode"), STRATEGIES)
def test_graphs_of_fused_kernels_equal_padded_eager(
    tmp_path: Path, changes: dict[str, Any], prefill: str, decode: str
) -> None:
    opened = open_model(tmp_path / "model", changes, prefill, decode)
    assert opened.loaded.model.has_fused_kernels
    with_graphs = generate(opened)
    report = opened.runner.report()
    assert not report["eager"]
    assert not report["failures"]
    opened.runner.max_steps_ahead = 0
    assert generate(opened) == with_graphs
    with opened.runner.padded_eager():
        assert generate(opened) == with_graphs
    if decode == "full":
        nodes = {row.num_nodes for row in opened.runner._graphs.store.ledger if row.key.phase is Phase.DECODE}
        print("nodes of decode graphs:", sorted(nodes))
    opened.runner.shutdown()


@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["qwen3", "llama"])
def test_hidden_states_are_within_noise_of_the_torch_forward(changes: dict[str, Any]) -> None:
    """Both in bfloat16, against the torch forward in float32 with the same weights: equally far from it."""
    config = parse_config({**CONFIG, **changes}, source="test")
    model = Decoder(config, max_positions=256, dtype=torch.bfloat16, device=torch.device("cuda"))
    fill_dummy_weights(model, seed=0)
    batch = make_batch(
        [(0, 60), (30, 1), (100, 20), (0, 0)],
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        pad_tokens=15,
        dtype=torch.bfloat16,
        device="cuda",
    )
    positions = torch.tensor([*range(60), 30, *range(100, 120), *[0] * 15], device="cuda", dtype=torch.int32)
    ids = torch.arange(96, device="cuda", dtype=torch.int32) * 83
    caches = [(batch.k_cache.clone(), batch.v_cache.clone()) for _ in range(config.num_layers)]

    def hidden_states(dtype: torch.dtype) -> Tensor:
        for layer, (k_cache, v_cache) in zip(model.attention_layers(), caches, strict=True):
            layer.bind(TorchReferenceBackend(), k_cache.to(dtype, copy=True), v_cache.to(dtype, copy=True))
        with use_forward_context(ForwardContext(batch=batch.metadata)):
            return model.layers(model.embed(ids), positions)[: batch.num_real_tokens].double()

    assert model.has_fused_kernels
    fused = hidden_states(torch.bfloat16)
    model.has_fused_kernels = False
    plain = hidden_states(torch.bfloat16)
    model.float()
    exact = hidden_states(torch.float32)
    fused_error, plain_error = (((x - exact).norm() / exact.norm()).item() for x in (fused, plain))
    print(f"relative error: fused {fused_error:.2e}, torch {plain_error:.2e}")
    assert fused_error < 1.2 * plain_error + 1e-3
