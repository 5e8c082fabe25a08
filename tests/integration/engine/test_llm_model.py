"""``LLM`` around a real (tiny, random) model: options reach their place and tight memory changes no token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapless import LLM, SamplingParams
from gapless.config import CUDAGraphMode
from gapless.errors import RequestError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
IDS_ONLY = SamplingParams(max_tokens=40, temperature=0.0, detokenize=False, ignore_eos=True)
FEW_GRAPHS = {"enforce_eager": False, "cuda_graph_bs_prefill": [8, 32], "cuda_graph_bs_decode": [1, 4]}
PROMPTS = [[number + 2] * (5 * number + 1) for number in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def open_tiny(folder: Path, **options) -> LLM:
    """Eager, small and on the CPU unless ``options`` say otherwise."""
    defaults = {
        "load_format": "dummy",
        "device": "cpu",
        "max_running_requests": 4,
        "chunked_prefill_size": 32,
        "kv_cache_tokens": 1024,
        "enforce_eager": True,
    }
    return LLM(str(folder), **{**defaults, **options})


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = IDS_ONLY) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def reference(folder) -> list[tuple[int, ...]]:
    """Each prompt alone in a roomy cache."""
    with open_tiny(folder) as llm:
        return [tokens_of(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_tokens": 96},
        {"kv_cache_tokens": 96, "chunked_prefill_size": 4},
        {"max_running_requests": 1},
        {**FEW_GRAPHS},
        {**FEW_GRAPHS, "kv_cache_tokens": 96, "cuda_graph_backend_prefill": "breakable"},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "roomy",
)
def test_batching_chunks_preemption_and_graphs_change_no_token(folder, reference, options):
    with open_tiny(folder, **options) as llm:
        assert tokens_of(llm, PROMPTS) == reference
        if options.get("kv_cache_tokens") == 96:
            assert llm.core.scheduler.num_preemptions > 0
        assert llm.core.scheduler.allocator.num_used == 0


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", CUDAGraphMode.FULL_AND_PIECEWISE])
def test_the_mode_may_be_a_string_or_the_enum(folder, reference, mode):
    config = {"mode": 3, "cudagraph_mode": mode}
    with open_tiny(folder, dtype="auto", **FEW_GRAPHS, compilation_config=config) as llm:
        plan = llm.report()["plan"]
        assert (plan["prefill"]["strategy"], plan["decode"]["strategy"]) == ("tc_piecewise", "full")
        assert tokens_of(llm, PROMPTS) == reference
        steps = {(step["phase"], step["strategy"]) for step in llm.report()["steps"]}
    assert {("prefill", "tc_piecewise"), ("decode", "full")} <= steps


def test_seeded_draws_are_the_same_alone_and_in_a_batch_and_differ_between_choices(folder):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=2, detokenize=False, ignore_eos=True)
    with open_tiny(folder) as llm:
        (alone,) = llm.generate([[7, 8, 9]], params)
        batch = llm.generate([[3], [7, 8, 9], [4] * 20], params)
    assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in batch[1].outputs]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids


def test_unseeded_draws_repeat_with_the_engines_seed_only(folder):
    params = SamplingParams(max_tokens=12, temperature=1.0, detokenize=False, ignore_eos=True)

    def run(seed: int) -> list[tuple[int, ...]]:
        with open_tiny(folder, seed=seed) as llm:
            return tokens_of(llm, [[7, 8, 9], [7, 8, 9]], params)

    first = run(0)
    assert first == run(0)
    assert first[0] != first[1]


def test_the_models_length_and_missing_tokenizer_are_known_to_requests(folder):
    with open_tiny(folder, max_model_len=32) as llm:
        (output,) = llm.generate(
            [[2] * 30], SamplingParams(max_tokens=None, detokenize=False, ignore_eos=True)
        )
        assert len(output.outputs[0].token_ids) == 2
        for prompt in ([2] * 32, [128], "text"):
            with pytest.raises(RequestError):
                llm.generate(prompt, IDS_ONLY)


def test_eos_of_the_config_ends_a_choice(folder, reference):
    config = {**CONFIG, "eos_token_id": reference[0][3]}
    (folder / "eos").mkdir(exist_ok=True)
    (folder / "eos" / "config.json").write_text(json.dumps(config))
    with open_tiny(folder / "eos") as llm:
        params = SamplingParams(max_tokens=40, temperature=0.0, detokenize=False)
        (output,) = llm.generate([PROMPTS[0]], params)
    (choice,) = output.outputs
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert choice.token_ids == reference[0][: reference[0].index(reference[0][3]) + 1]
