"""A decoder of two small layers, and engines of it, for tests of fused kernels in whole steps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from gapless.config import EngineConfig
from gapless.engine.build import OpenedEngine, open_engine
from gapless.engine.core import EngineCore
from gapless.engine.outputs import RequestOutput
from gapless.sampling.params import SamplingParams

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


def open_engine_of(
    folder: Path, prefill: str, decode: str, *, options: dict[str, Any] | None = None, **changes: Any
) -> OpenedEngine:
    """Of a model of dummy weights; ``options`` beside those below; ``changes``: of its config."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    values = {
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
        **(options or {}),
    }
    return open_engine(EngineConfig.from_sources(python=values))


def generate(opened: OpenedEngine, *, lengths: tuple[int, int] = (3, 9)) -> list[list[int]]:
    """Greedy tokens of two prompts, of which one takes two steps."""
    rng = random.Random(0)
    core = EngineCore(opened.runner)
    for index, length in enumerate(lengths):
        prompt = [rng.randrange(97) for _ in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=2 + index, ignore_eos=True, detokenize=False)
        core.add_request(str(index), prompt, params)
    last: dict[str, RequestOutput] = {}
    while core.has_unfinished():
        last.update((output.request_id, output) for output in core.step())
    return [list(last[str(index)].outputs[0].token_ids) for index in range(2)]
