"""Safetensors folders: every tensor lands where it belongs, and every damage is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import TINY, empty_model, random_tensors, write_config, write_index, write_shards
from safetensors.torch import save_file

from gapless.errors import ModelError
from gapless.models.registry import load_model
from gapless.models.weights import load_safetensors

CPU = torch.device("cpu")
TIED = {**TINY, "tie_word_embeddings": True}
SHARD_2 = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize("sharded", [True, False])
def test_every_tensor_is_loaded_into_its_place(sharded: bool, tmp_path: Path) -> None:
    tensors = random_tensors()
    if sharded:
        write_shards(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    model = empty_model()
    load_safetensors(model, tmp_path)
    for name, target in model.weight_targets().items():
        assert torch.equal(target.tensor, tensors[name].expand_as(target.tensor)), name


def test_merged_parameters_hold_their_parts_in_order(tmp_path: Path) -> None:
    tensors = random_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    model = empty_model()
    load_safetensors(model, tmp_path)
    block = model.blocks[1]
    prefix = "model.layers.1"
    qkv = [tensors[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(block.attention.qkv.weight, torch.cat(qkv))
    gate_up = [tensors[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(block.mlp.gate_up.weight, torch.cat(gate_up))
    assert block.attention.head_norm is not None
    norms = [
        tensors[f"{prefix}.self_attn.{part}_norm.weight"].expand(n, 8) for part, n in (("q", 4), ("k", 2))
    ]
    assert torch.equal(block.attention.head_norm.weight_HD, torch.cat(norms))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_dtype_is_converted_to_the_wanted_one(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    tensors = random_tensors(dtype=stored)
    save_file(tensors, tmp_path / "model.safetensors")
    model = empty_model(dtype=wanted)
    load_safetensors(model, tmp_path)
    loaded = model.weight_targets()["model.layers.0.mlp.down_proj.weight"].tensor
    assert torch.equal(loaded, tensors["model.layers.0.mlp.down_proj.weight"].to(wanted))


def test_loading_never_replaces_a_parameter(tmp_path: Path) -> None:
    save_file(random_tensors(), tmp_path / "model.safetensors")
    model = empty_model()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    load_safetensors(model, tmp_path)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    write_shards(tmp_path, random_tensors())
    seen: list[tuple[str, int, int]] = []
    load_safetensors(empty_model(), tmp_path, progress=lambda *step: seen.append(step))
    assert len(seen) == len(random_tensors()) + 1
    assert [step[1] for step in seen] == sorted(step[1] for step in seen)
    assert seen[-1][1] == seen[-1][2]
    assert {step[0] for step in seen} == {"weights"}


@pytest.mark.parametrize("head", ["absent", "equal"])
def test_tied_checkpoint_may_repeat_its_head(head: str, tmp_path: Path) -> None:
    tensors = random_tensors(TIED)
    assert "lm_head.weight" not in tensors
    if head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_shards(tmp_path, dict(sorted(tensors.items())))
    model = empty_model(TIED)
    load_safetensors(model, tmp_path)
    assert model.lm_head.weight is model.embedding


@pytest.mark.parametrize("order", ["first", "last"])
def test_tied_checkpoint_with_another_head_is_refused(order: str, tmp_path: Path) -> None:
    tensors = random_tensors(TIED)
    head = {"lm_head.weight": torch.randn(50, 32)}
    write_shards(tmp_path, {**head, **tensors} if order == "first" else {**tensors, **head})
    with pytest.raises(ModelError, match=r"lm_head.weight.*tie_word_embeddings=true"):
        load_safetensors(empty_model(TIED), tmp_path)


def _stored_alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Transformers writes a base model: without the prefix, and without a head."""
    return {name.removeprefix("model."): t for name, t in tensors.items() if name != "lm_head.weight"}


@pytest.mark.parametrize("raw", [{**TINY, "architectures": ["Qwen3Model"]}, TIED], ids=["base", "tied"])
def test_a_base_model_is_read_under_its_own_names(raw: dict, tmp_path: Path) -> None:
    tensors = random_tensors(raw)
    write_shards(tmp_path, _stored_alone(tensors))
    model = empty_model(raw)
    load_safetensors(model, tmp_path)
    for name, target in model.weight_targets().items():
        assert torch.equal(target.tensor, tensors[name].expand_as(target.tensor)), name


def test_a_model_without_its_head_is_told_what_it_may_be(tmp_path: Path) -> None:
    write_shards(tmp_path, _stored_alone(random_tensors()))
    with pytest.raises(ModelError, match=r"lm_head.weight; .* must name the architecture Qwen3Model in"):
        load_safetensors(empty_model(), tmp_path)


def test_frequency_tables_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    load_safetensors(empty_model(), tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors[name]
    write_shards(tmp_path, tensors)
    with pytest.raises(ModelError, match=rf"1 tensors are missing.*{name}"):
        load_safetensors(empty_model(), tmp_path)


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight", "x"],
)
def test_surplus_tensor_is_named_with_its_file(name: str, tmp_path: Path) -> None:
    save_file({**random_tensors(), name: torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor '{name}' has no place"):
        load_safetensors(empty_model(), tmp_path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (31, 32)),
        ("model.layers.0.self_attn.k_proj.weight", (1, 32)),
        ("model.layers.0.self_attn.q_norm.weight", (1,)),
        ("model.layers.0.self_attn.k_norm.weight", (2, 8)),
        ("model.layers.1.mlp.down_proj.weight", (48, 32)),
        ("model.norm.weight", (1,)),
        ("model.embed_tokens.weight", (51, 32)),
    ],
)
def test_wrong_shape_is_named_with_both_shapes(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = random_tensors()
    right = tuple(tensors[name].shape)
    tensors[name] = torch.ones(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as error:
        load_safetensors(empty_model(), tmp_path)
    assert all(text in str(error.value) for text in ("model.safetensors", name, str(shape), str(right)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn, torch.bool])
def test_wrong_dtype_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(48, 32).to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"up_proj.weight' has dtype {dtype}"):
        load_safetensors(empty_model(), tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_truncated_shard_is_named(keep: float, tmp_path: Path) -> None:
    write_shards(tmp_path, random_tensors())
    data = (tmp_path / SHARD_2).read_bytes()
    (tmp_path / SHARD_2).write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=rf"{SHARD_2}: truncated or not a safetensors file"):
        load_safetensors(empty_model(), tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, random_tensors())
    (tmp_path / SHARD_2).unlink()
    with pytest.raises(ModelError, match=rf"shard {SHARD_2} is missing"):
        load_safetensors(empty_model(), tmp_path)


def test_surplus_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, random_tensors())
    save_file({"x": torch.ones(1)}, tmp_path / "model-00004-of-00004.safetensors")
    with pytest.raises(ModelError, match=r"model-00004-of-00004.safetensors: this shard is surplus"):
        load_safetensors(empty_model(), tmp_path)


def test_other_safetensors_files_beside_an_index_are_left_alone(tmp_path: Path) -> None:
    write_shards(tmp_path, random_tensors())
    save_file({"x": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    load_safetensors(empty_model(), tmp_path)


@pytest.mark.parametrize("lost", ["index", "shard"])
def test_index_and_shard_that_disagree_name_the_tensor(lost: str, tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, random_tensors())
    name = next(name for name, file in weight_map.items() if file == SHARD_2)
    if lost == "index":
        write_index(tmp_path, {n: f for n, f in weight_map.items() if n != name})
    else:
        write_index(tmp_path, {**weight_map, "model.extra": SHARD_2})
        name = "model.extra"
    with pytest.raises(ModelError, match=rf"{SHARD_2}: tensor '{name}' is"):
        load_safetensors(empty_model(), tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
    ],
)
def test_unusable_index_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json: "):
        load_safetensors(empty_model(), tmp_path)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (None, "no weights"),
        ("pytorch_model.bin", "convert them to safetensors"),
        ("consolidated.00.pth", "convert them to safetensors"),
        ("weights.safetensors", "add the index file"),
    ],
)
def test_folder_without_usable_weights_says_what_to_do(file: str | None, says: str, tmp_path: Path) -> None:
    write_config(tmp_path)
    if file is not None:
        (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ModelError, match=says):
        load_model(str(tmp_path), device=CPU)


def test_error_in_one_folder_does_not_disturb_the_next_load(tmp_path: Path) -> None:
    bad, good = write_config(tmp_path / "bad"), write_config(tmp_path / "good")
    (bad / "model.safetensors").write_bytes(b"\x08" + b"\x00" * 20)
    save_file(random_tensors(), good / "model.safetensors")
    with pytest.raises(ModelError):
        load_model(str(bad), device=CPU)
    assert load_model(str(good), device=CPU).info.num_layers == 2


def test_index_may_hold_unknown_metadata(tmp_path: Path) -> None:
    write_shards(tmp_path, random_tensors())
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metadata": {"total_size": 1}, "more": []}))
    load_safetensors(empty_model(), tmp_path)
