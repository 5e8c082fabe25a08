"""Configs of mixtures of experts, where their weights go, and their parts on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CPU, empty_model, write_config, write_shards
from safetensors.torch import save_file
from torch import Tensor

from gapless.attention.base import AttentionMetadata
from gapless.errors import ModelError
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.models.config import parse_config
from gapless.models.dummy import fill_dummy_weights
from gapless.models.experts import ExpertWeights
from gapless.models.layers import Placement
from gapless.models.moe import MixtureOfExperts, moe_layer
from gapless.models.moe_config import ExpertConfig, ExpertNames, expert_ops
from gapless.models.registry import load_model
from gapless.parallel.shard import Shard

NUM_EXPERTS, HIDDEN, SIZE = 4, 32, 24
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
QWEN3 = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": NUM_EXPERTS,
    "moe_intermediate_size": SIZE,
}
QWEN2 = {
    **QWEN3,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 40,
}
MIXTRAL = {
    **COMMON,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": NUM_EXPERTS,
}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (QWEN3, {"top_k": 2, "renormalizes": False, "intermediate_size": SIZE}),
        ({**QWEN3, "norm_topk_prob": True}, {"renormalizes": True, "shared_intermediate_size": None}),
        ({**QWEN3, "decoder_sparse_step": 2}, {"sparse_layers": (False, True, False, True)}),
        ({**QWEN3, "mlp_only_layers": [0, 2]}, {"sparse_layers": (False, True, False, True)}),
        (
            {**QWEN3, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
            {"sparse_layers": (False, True, False, False)},
        ),
        ({**QWEN3, "num_experts": None, "num_local_experts": 6}, {"num_experts": 6}),
        ({**QWEN3, "router_aux_loss_coef": 0.1, "output_router_logits": True}, {"num_experts": NUM_EXPERTS}),
        (QWEN2, {"shared_intermediate_size": 40, "renormalizes": False}),
        (MIXTRAL, {"intermediate_size": 48, "renormalizes": True, "sparse_layers": (True,) * 4}),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, {"num_experts": NUM_EXPERTS}),
    ],
)  # fmt: skip
def test_configs_say_what_experts_do(raw: dict, expected: dict) -> None:
    experts = parse_config(raw, source="test").experts
    assert experts is not None
    assert {name: getattr(experts, name) for name in expected} == expected


@pytest.mark.parametrize("changes", [{"num_experts": 0}, {"mlp_only_layers": [0, 1, 2, 3]}])
def test_without_a_sparse_layer_a_model_is_dense(changes: dict) -> None:
    assert parse_config({**QWEN3, **changes}, source="test").experts is None
    assert empty_model({**QWEN3, **changes}).info.num_experts == 0


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        ({**QWEN3, "sliding_window": 8}, (None,) * 4),
        ({**QWEN3, "sliding_window": 8, "use_sliding_window": True}, (8,) * 4),
        ({**QWEN2, "sliding_window": 0}, (None,) * 4),
        (
            {**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (8, None, 8, None),
        ),
        ({**MIXTRAL, "sliding_window": 8}, (8,) * 4),
        ({**MIXTRAL, "sliding_window": None}, (None,) * 4),
    ],
)
def test_windows_follow_the_family(raw: dict, windows: tuple) -> None:
    assert parse_config(raw, source="test").windows == windows


def test_mixtral_turns_slower_where_the_config_names_no_frequency() -> None:
    assert parse_config(MIXTRAL, source="test").rope.theta == 1e6
    assert parse_config({**MIXTRAL, "rope_theta": 5000.0}, source="test").rope.theta == 5000.0
    assert parse_config(MIXTRAL, source="test").rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ({"n_group": 2}, "n_group"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes: dict, key: str) -> None:
    with pytest.raises(ModelError, match=rf"test: config key '{key}'="):
        parse_config({**QWEN3, **changes}, source="test")


def test_a_model_with_experts_is_cut_at_them() -> None:
    assert expert_ops(NUM_EXPERTS) == (moe_layer.name(),)
    assert expert_ops(0) == ()


# --- weights ---------------------------------------------------------------------------------------


def tensors_of(raw: dict, *, each: bool) -> dict[str, Tensor]:
    """A checkpoint with experts in either form."""
    generator = torch.Generator().manual_seed(3)
    model = empty_model(raw)
    names = (
        {f"model.layers.{i}.{b}.experts.0.{g}.weight" for i in range(4) for b, g in NAMES} if each else set()
    )
    targets = model.weight_targets(names)
    return {name: torch.randn(t.shape, generator=generator) * 0.1 for name, t in targets.items()}


NAMES = (("mlp", "gate_proj"), ("block_sparse_moe", "w1"))


@pytest.mark.parametrize("raw", [QWEN3, QWEN2, MIXTRAL], ids=["qwen3", "qwen2", "mixtral"])
def test_both_forms_of_a_checkpoint_give_the_same_model(raw: dict, tmp_path: Path) -> None:
    each = tensors_of(raw, each=True)
    config = parse_config(raw, source="test")
    assert config.experts is not None
    names = config.experts.names
    stacked = {}
    for layer in range(4):
        prefix = f"model.layers.{layer}.{names.block}.experts"
        matrices = {
            kind: torch.stack([each[f"{prefix}.{n}.{kind}.weight"] for n in range(NUM_EXPERTS)])
            for kind in (names.gate, names.up, names.down)
        }
        where = f"model.layers.{layer}.mlp.experts"
        stacked[f"{where}.gate_up_proj"] = torch.cat((matrices[names.gate], matrices[names.up]), dim=1)
        stacked[f"{where}.down_proj"] = matrices[names.down]
    others = {
        name.replace("block_sparse_moe", "mlp"): t for name, t in each.items() if ".experts." not in name
    }
    folders = [write_config(tmp_path / form, raw) for form in ("each", "stacked")]
    write_shards(folders[0], each)
    save_file({**stacked, **others}, folders[1] / "model.safetensors")
    first, second = (dict(load_model(str(f), device=CPU).model.named_parameters()) for f in folders)
    assert first.keys() == second.keys()
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name


def test_a_file_without_the_first_expert_misses_just_that(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3, each=True)
    write_config(tmp_path, QWEN3)
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.2.mlp.experts.0." not in name}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"3 tensors are missing .*layers\.2\.mlp\.experts\.0\.gate_proj"):
        load_model(str(tmp_path), device=CPU)


def test_a_missing_or_surplus_expert_is_named(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3, each=True)
    write_config(tmp_path, QWEN3)
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != lost}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"1 tensors are missing from the shards: {lost}"):
        load_model(str(tmp_path), device=CPU)
    surplus = lost.replace("experts.2", "experts.4")
    save_file({**tensors, surplus: tensors[lost].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"tensor '{surplus}' has no place"):
        load_model(str(tmp_path), device=CPU)


def test_dummy_weights_are_stacked_and_every_expert_has_its_own() -> None:
    model = empty_model(QWEN3)
    assert len(model.weight_targets()) < 80, "one entry per stack, not per expert"
    fill_dummy_weights(model, seed=1)
    weights = model.expert_layers()[2].experts
    assert weights.gate_up_NOE.std() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(weights.down_NEF[0], weights.down_NEF[1])
    again = empty_model(QWEN3)
    fill_dummy_weights(again, seed=1)
    assert torch.equal(weights.gate_up_NOE, again.expert_layers()[2].experts.gate_up_NOE)


# --- ranks -----------------------------------------------------------------------------------------


def expert_config(*, is_transposed: bool = False, size: int = SIZE) -> ExpertConfig:
    names = ExpertNames(
        block="mlp", gate="gate_proj", up="up_proj", down="down_proj", is_transposed=is_transposed
    )
    return ExpertConfig(
        num_experts=NUM_EXPERTS, top_k=2, intermediate_size=size, renormalizes=True,
        shared_intermediate_size=None, sparse_layers=(True,), names=names,
    )  # fmt: skip


def loaded_weights(config: ExpertConfig, shard: Shard, stored: dict[str, Tensor]) -> ExpertWeights:
    placement = Placement(dtype=torch.float32, device=CPU, shard=shard)
    weights = ExpertWeights(config, hidden_size=HIDDEN, placement=placement)
    targets = dict(weights.targets("mlp", stored))
    assert targets.keys() == stored.keys()
    for name, target in targets.items():
        target.load(name, stored[name], source="test")
    return weights


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("form", ["each", "stacked", "transposed"])
@pytest.mark.parametrize("size", [SIZE, 20])
def test_ranks_hold_disjoint_slices_and_zeros_behind_an_uneven_split(
    num_ranks: int, form: str, size: int
) -> None:
    gate, up = torch.randn(2, NUM_EXPERTS, size, HIDDEN)
    down = torch.randn(NUM_EXPERTS, HIDDEN, size)
    if form == "each":
        kinds = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        stored = {
            f"mlp.experts.{n}.{kind}.weight": t[n] for n in range(NUM_EXPERTS) for kind, t in kinds.items()
        }
    else:
        stored = {"mlp.experts.gate_up_proj": torch.cat((gate, up), 1), "mlp.experts.down_proj": down}
        if form == "transposed":
            stored = {name: tensor.transpose(1, 2).contiguous() for name, tensor in stored.items()}
    config = expert_config(is_transposed=form == "transposed", size=size)
    shards = [Shard(rank=r, size=num_ranks) for r in range(num_ranks)]
    ranks = [loaded_weights(config, shard, stored) for shard in shards]
    lengths = [shard.split_padded(size).length for shard in shards]
    assert len({rank.size for rank in ranks}) == 1
    gates, ups = zip(*(rank.gate_up_NOE.chunk(2, 1) for rank in ranks), strict=True)
    for parts, whole, dim in ((gates, gate, 1), (ups, up, 1), ([r.down_NEF for r in ranks], down, 2)):
        real = [part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)]
        assert torch.equal(torch.cat(real, dim), whole)
        for part, n in zip(parts, lengths, strict=True):
            assert not part.narrow(dim, n, part.shape[dim] - n).any()


@pytest.mark.parametrize("size", [SIZE, 20])
def test_the_parts_of_ranks_add_up_to_the_whole(size: int) -> None:
    """What a mixture of a rank puts out is its part of a sum; the router is the same on all. 10 of 20 are
    rows of 40 bytes, which ``grouped_mm`` takes with zeros behind them only; 24 divide by 5 with a rest."""
    config = expert_config(size=size)
    x, router = torch.randn(6, HIDDEN), torch.randn(NUM_EXPERTS, HIDDEN)
    stored = {
        "mlp.experts.gate_up_proj": torch.randn(NUM_EXPERTS, 2 * size, HIDDEN) * 0.2,
        "mlp.experts.down_proj": torch.randn(NUM_EXPERTS, HIDDEN, size) * 0.2,
        "mlp.gate.weight": router,
    }
    found = {}
    for num_ranks in (1, 2, 5):
        total = torch.zeros_like(x)
        for rank in range(num_ranks):
            placement = Placement(dtype=torch.float32, device=CPU, shard=Shard(rank=rank, size=num_ranks))
            mixture = MixtureOfExperts(config, hidden_size=HIDDEN, shared=None, placement=placement)
            for name, target in mixture.targets("", stored={f".{n}" for n in stored}).items():
                target.load(name, stored[name.removeprefix(".")], source="test")
            total += run(mixture, x, [0, 2, 5])
        found[num_ranks] = total
    for num_ranks in (2, 5):
        torch.testing.assert_close(found[num_ranks], found[1], atol=1e-5, rtol=1e-5)
        assert not found[num_ranks][5].any()


# --- padding ---------------------------------------------------------------------------------------


def run(mixture: MixtureOfExperts, x_TE: Tensor, query_start_loc: list[int]) -> Tensor:
    empty = torch.zeros(0, dtype=torch.int32)
    batch = AttentionMetadata(
        query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32), seq_lens=empty, block_table=empty,
        slot_mapping=empty, max_query_len=x_TE.shape[0], max_seq_len=64,
    )  # fmt: skip
    with torch.no_grad(), use_forward_context(ForwardContext(batch=batch)):
        return mixture(x_TE)


def made_mixture() -> MixtureOfExperts:
    placement = Placement(dtype=torch.float32, device=CPU)
    mixture = MixtureOfExperts(expert_config(), hidden_size=HIDDEN, shared=None, placement=placement)
    generator = torch.Generator().manual_seed(0)
    for parameter in mixture.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
    return mixture


@pytest.mark.parametrize("num_real", [0, 1, 5])
@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("num_behind", [0, 2])
@pytest.mark.parametrize("poison", [0.0, torch.nan])
def test_20_padding_first_or_last_reaches_no_expert_and_no_statistic(
    num_real: int, num_before: int, num_behind: int, poison: float
) -> None:
    mixture = made_mixture()
    mixture.start_counting()
    x = torch.randn(num_real, HIDDEN)
    alone = run(mixture, x, [0, num_real])
    assert mixture.counts_N is not None
    expected = mixture.counts_N.tolist()
    assert sum(expected) == num_real * 2
    mixture.start_counting()
    padded = torch.full((num_before + num_real + num_behind, HIDDEN), poison)
    padded[num_before : num_before + num_real] = x
    out = run(mixture, padded, [num_before, num_before + num_real])
    # Not the same bits: the router multiplies another number of rows.
    torch.testing.assert_close(out[num_before : num_before + num_real], alone, atol=1e-6, rtol=1e-5)
    assert not out[:num_before].any()
    assert not out[num_before + num_real :].any()
    assert mixture.counts_N.tolist() == expected


@pytest.mark.parametrize("favourites", [(0, 1), (3, 2)])
def test_all_tokens_may_go_to_the_same_experts_and_none_to_the_others(favourites: tuple[int, int]) -> None:
    mixture = made_mixture()
    mixture.start_counting()
    assert mixture.router.weight is not None
    mixture.router.weight.zero_()
    for rank, expert in enumerate(favourites):
        mixture.router.weight[expert, 0] = 9.0 - rank
    x = torch.rand(7, HIDDEN) + 0.5
    out = run(mixture, x, [0, 7])
    assert mixture.counts_N is not None
    assert [mixture.counts_N[n].item() for n in range(NUM_EXPERTS)] == [
        7 if n in favourites else 0 for n in range(NUM_EXPERTS)
    ]
    weights = (x @ mixture.router.weight.T).softmax(-1)[:, list(favourites)]
    weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for weight, expert in zip(weights.T, favourites, strict=True):
        gate, up = (x @ mixture.experts.gate_up_NOE[expert].T).chunk(2, -1)
        act = torch.nn.functional.silu(gate) * up
        expected += weight[:, None] * (act @ mixture.experts.down_NEF[expert].T)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_of_equal_probabilities_those_of_topk_win() -> None:
    mixture = made_mixture()
    mixture.start_counting()
    assert mixture.router.weight is not None
    mixture.router.weight.zero_()
    run(mixture, torch.randn(3, HIDDEN), [0, 3])
    chosen = torch.full((3, NUM_EXPERTS), 0.25).topk(2).indices
    assert mixture.counts_N is not None
    assert mixture.counts_N.tolist() == chosen.flatten().bincount(minlength=NUM_EXPERTS).tolist()
