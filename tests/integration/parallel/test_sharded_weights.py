"""What each rank loads: slices that make up the whole model, and no more than those."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors
import torch
from checkpoints import TINY, empty_model, random_tensors, write_config, write_shards
from torch import Tensor

from gapless.errors import ModelError
from gapless.models.decoder import Decoder
from gapless.models.layers import Slice, WeightTarget
from gapless.models.registry import load_model
from gapless.models.sources import find_smollm2
from gapless.parallel.shard import WHOLE, Shard

CPU = torch.device("cpu")
BIASES = {
    **TINY,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": True,
    "mlp_bias": True,
    "vocab_size": 51,
    "intermediate_size": 45,
}
EXPERTS = {
    **TINY,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "head_dim": None,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 30,
}
"""Slices of 5 are padded to rows of a length that ``grouped_mm`` takes, those of 10 too."""


@pytest.fixture(autouse=True)
def _keep_plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights cannot be looked at."""
    monkeypatch.setattr(Decoder, "pack", lambda self: None)


def load(source: str, shard: Shard = WHOLE, **options: Any) -> Decoder:
    return load_model(source, device=CPU, dtype="float32", shard=shard, **options).model


def assert_parts_of(whole: Decoder, part: Decoder) -> None:
    """Every tensor of ``part`` is the slice of ``whole`` that its target says, and nothing is left over."""
    found = part.weight_targets()
    for name, target in whole.weight_targets().items():
        wanted = found.pop(name)
        assert wanted.shape == target.shape
        values = (
            target.tensor if target.tensor.shape == target.shape else target.tensor[0]
        )  # one of all heads
        assert torch.equal(wanted.tensor, wanted.part_of(values).expand_as(wanted.tensor)), name
    assert not found


@pytest.mark.parametrize(
    "raw", [TINY, {**TINY, "tie_word_embeddings": True}, BIASES], ids=["plain", "tied", "biases"]
)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_load_their_slices_of_a_folder(raw, size, tmp_path):
    write_config(tmp_path, raw)
    write_shards(tmp_path, random_tensors(raw))
    whole = load(str(tmp_path))
    for rank in range(size):
        assert_parts_of(whole, load(str(tmp_path), Shard(rank=rank, size=size)))


@pytest.mark.parametrize("form", ["each", "stacked"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_load_their_slices_of_every_expert(form, size, tmp_path):
    write_config(tmp_path, EXPERTS)
    write_shards(tmp_path, expert_tensors(form))
    whole = load(str(tmp_path))
    for rank in range(size):
        assert_parts_of(whole, load(str(tmp_path), Shard(rank=rank, size=size)))


def expert_tensors(form: str) -> dict[str, Tensor]:
    """A checkpoint with a matrix per expert, or with all of a layer in one tensor."""
    if form == "stacked":
        return random_tensors(EXPERTS)
    named = {f"model.layers.{i}.mlp.experts.0.gate_proj.weight" for i in range(2)}
    return {name: torch.randn(t.shape) for name, t in empty_model(EXPERTS).weight_targets(named).items()}


WHOLE_ON_ALL = ("norm", "mlp.gate.", "shared_expert_gate")
"""Norms; and the router and the gate of the shared expert, which every rank asks."""


@pytest.mark.parametrize(
    ("raw", "form"), [(TINY, None), (EXPERTS, "each"), (EXPERTS, "stacked")], ids=["dense", "each", "stacked"]
)
def test_no_rank_reads_a_matrix_that_is_divided(raw, form, tmp_path, monkeypatch):
    write_config(tmp_path, raw)
    write_shards(tmp_path, random_tensors() if form is None else expert_tensors(form))
    whole_reads: list[str] = []
    real = safetensors.safe_open

    class Spy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = real(*args, **kwargs)

        def __enter__(self) -> Spy:
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_tensor(self, name: str) -> Tensor:
            whole_reads.append(name)
            return self._file.get_tensor(name)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    monkeypatch.setattr("gapless.models.weights.safe_open", Spy)
    load(str(tmp_path), Shard(rank=1, size=2))
    assert whole_reads
    assert all(any(part in name for part in WHOLE_ON_ALL) for name in whole_reads), whole_reads


def test_a_rank_expands_its_slices_of_a_gguf_file():
    """Heads of 64, stored with rotary pairs interleaved; 3 of 9 heads, 1 of 3 key/value heads."""
    source = str(find_smollm2())
    assert_parts_of(load(source), load(source, Shard(rank=1, size=3)))


@pytest.mark.parametrize("size", [2, 4])
def test_dummy_weights_of_all_ranks_are_those_of_one(size, tmp_path):
    source = str(write_config(tmp_path, BIASES))
    whole = load(source, load_format="dummy", seed=3)
    for rank in range(size):
        assert_parts_of(whole, load(source, Shard(rank=rank, size=size), load_format="dummy", seed=3))


def test_padding_is_zero_and_stays_out_of_every_target(tmp_path):
    source = str(write_config(tmp_path, BIASES))
    last = load(source, Shard(rank=3, size=4), load_format="dummy")
    num_tokens, num_features = last.tokens_held.length, 45 - 3 * 12
    assert last.embedding.shape[0] == 13
    assert num_tokens == 51 - 39
    assert not last.embedding[num_tokens:].any()
    assert not last.lm_head.weight[num_tokens:].any()
    mlp = last.blocks[0].mlp
    gate, up = mlp.gate_up.weight.chunk(2)
    assert not gate[num_features:].any()
    assert not up[num_features:].any()
    assert not mlp.gate_up.bias[num_features:12].any()
    assert not mlp.down.weight[:, num_features:].any()
    assert gate[:num_features].all()


def test_only_the_first_rank_adds_the_bias_of_a_sum(tmp_path):
    source = str(write_config(tmp_path, BIASES))
    first, second = (load(source, Shard(rank=r, size=2), load_format="dummy") for r in range(2))
    for block in (*first.blocks, *second.blocks):
        is_first = block in list(first.blocks)
        assert (block.attention.out.bias is not None) == is_first
        assert (block.mlp.down.bias is not None) == is_first


def test_a_tensor_of_another_shape_is_refused_though_the_slice_would_fit(tmp_path):
    write_config(tmp_path)
    tensors = random_tensors()
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.randn(64, 32)
    write_shards(tmp_path, tensors)
    with pytest.raises(ModelError, match=r"q_proj.weight' has shape \(64, 32\).*\(32, 32\)"):
        load(str(tmp_path), Shard(rank=0, size=2))


def test_a_target_takes_its_slice_of_a_whole_tensor():
    held = torch.zeros(3, 2)
    target = WeightTarget(tensor=held, shape=(3, 6), part=Slice(dim=1, start=2, length=2))
    target.load("x", torch.arange(18.0).view(3, 6), source="test")
    assert held.tolist() == [[2, 3], [8, 9], [14, 15]]
