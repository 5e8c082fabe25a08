"""Vision-language folders: both models are loaded from one checkpoint, whoever named its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gapless.errors import ModelError, RequestError
from gapless.models.registry import LoadedModel, load_model, read_model_info
from gapless.models.tokenizer import load_tokenizer
from gapless.models.vl_template import PLAIN_TEMPLATE
from vl_checkpoints import FAMILIES, vl_model, write_vl_folder

CPU = torch.device("cpu")
USER = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}, {"type": "video"}]}]


def load(folder: Path, **options: object) -> LoadedModel:
    return load_model(str(folder), device=CPU, **options)


def rename(folder: Path, *renames: tuple[str, str]) -> None:
    """Prefixes of the checkpoint's tensors; the first that fits is replaced."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in renames:
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


NEW = (("model.language_model.", "model.language_model."), ("visual.", "model.visual."))
MADE_NEW = (*NEW, ("model.visual.", "model.visual."), ("model.", "model.language_model."))
MADE_OLD = (("model.language_model.", "model."), ("model.visual.", "visual."))


@pytest.mark.parametrize("renames", [(), MADE_NEW, MADE_OLD], ids=["saved", "new names", "old names"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_lands_in_its_place_under_all_names(family: str, renames: tuple, tmp_path: Path) -> None:
    folder = write_vl_folder(tmp_path, family)
    rename(folder, *renames)
    loaded = load(folder)
    theirs = vl_model(family)
    assert loaded.vision is not None
    for name, parameter in theirs.model.visual.named_parameters():
        assert torch.equal(loaded.vision.weight_targets()[f"visual.{name}"].tensor, parameter), name
    norms = theirs.model.language_model.norm.weight
    assert torch.equal(loaded.model.final_norm.weight, norms)
    assert loaded.processor is not None
    assert (loaded.info.is_multimodal, loaded.info.rope_axes) == (True, 3)
    assert loaded.info.num_deepstack == (2 if family == "qwen3_vl" else 0)


@pytest.mark.parametrize("prefix", ["visual.merger", "model.layers.1"])
def test_tensors_that_are_missing_are_named(prefix: str, tmp_path: Path) -> None:
    folder = write_vl_folder(tmp_path, "qwen2_5_vl")
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith(prefix)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"missing from the shards: {prefix}"):
        load(folder)


@pytest.mark.parametrize("name", ["visual.extra.weight", "model.visual.extra.weight", "model.extra.weight"])
def test_tensors_without_a_place_are_named_as_in_the_file(name: str, tmp_path: Path) -> None:
    folder = write_vl_folder(tmp_path, "qwen3_vl")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"'{name}' has no place"):
        load(folder)


def test_a_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    folder = write_vl_folder(tmp_path, "qwen3_vl")
    tensors = load_file(folder / "model.safetensors")
    twice = tensors["model.visual.merger.norm.weight"].clone()
    save_file({**tensors, "visual.merger.norm.weight": twice}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"merger\.norm\.weight' has no place"):
        load(folder)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl_moe"])
def test_dummy_weights_fill_both_models_and_depend_on_the_seed_alone(family: str, tmp_path: Path) -> None:
    folder = write_vl_folder(tmp_path, family, has_weights=False)
    made = [load(folder, load_format="dummy", seed=seed) for seed in (1, 1, 2)]
    towers = [m.vision.weight_targets() for m in made if m.vision is not None]
    for name, target in towers[0].items():
        assert target.tensor.isfinite().all(), name
        assert torch.equal(target.tensor, towers[1][name].tensor), name
        if ("norm" in name and name.endswith("weight")) or "ln_q" in name:
            assert target.tensor.eq(1).all(), name
        else:
            assert not torch.equal(target.tensor, towers[2][name].tensor), name
    assert torch.equal(made[0].model.embedding, made[1].model.embedding)


def test_a_tower_has_the_dtype_of_the_model(tmp_path: Path) -> None:
    loaded = load(write_vl_folder(tmp_path, "qwen3_vl"), dtype="bfloat16")
    assert loaded.vision is not None
    assert {p.dtype for p in loaded.vision.module.parameters()} == {torch.bfloat16}


def test_numbers_need_no_weights(tmp_path: Path) -> None:
    info = read_model_info(str(write_vl_folder(tmp_path, "qwen3_vl", has_weights=False)))
    assert (info.rope_axes, info.num_deepstack, info.is_multimodal) == (3, 2, True)
    assert (info.image_token_id, info.video_token_id) == (262, 263)


def test_a_folder_without_a_template_has_a_plain_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vl_folder(tmp_path, "qwen3_vl", has_weights=False))
    assert tokenizer is not None
    assert tokenizer.apply_chat_template(USER) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>hi"
        "<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    text = [{"role": "system", "content": "s"}, {"role": "assistant", "content": None}]
    rendered = tokenizer.apply_chat_template(text, add_generation_prompt=False)
    assert rendered == "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    with pytest.raises(RequestError, match="type audio"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "audio"}]}])


def test_a_folders_own_template_comes_first(tmp_path: Path) -> None:
    folder = write_vl_folder(tmp_path, "qwen2_5_vl", has_weights=False)
    (folder / "chat_template.jinja").write_text("of the tokenizer")
    assert load_tokenizer(folder).chat_template == "of the tokenizer"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert load_tokenizer(folder).chat_template == "of the processor"
    (folder / "chat_template.json").write_text("{}")
    with pytest.raises(ModelError, match="chat_template"):
        load_tokenizer(folder)


def test_a_model_of_text_gets_no_template(tmp_path: Path) -> None:
    folder = write_vl_folder(tmp_path, "qwen2_5_vl", has_weights=False)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert load_tokenizer(folder).chat_template is None
    assert "image_pad" in PLAIN_TEMPLATE
