"""``generation_config.json``: what is read of it, from where, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gapless.errors import ConfigError
from gapless.sampling.generation_config import read_sampling_defaults


def write(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"min_p": 0.1, "repetition_penalty": 1.05}, {"min_p": 0.1, "repetition_penalty": 1.05}),
        ({"max_new_tokens": 2048}, {"max_tokens": 2048}),
        ({"temperature": None, "top_k": None}, {}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.7}),
        ({"eos_token_id": [1, 2], "transformers_version": "4.51", "max_length": 20}, {}),
    ],
    ids=str,
)
def test_recommendations_have_our_names(
    tmp_path: Path, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert read_sampling_defaults("auto", model=write(tmp_path / "m", json.dumps(values))) == expected


def test_the_option_says_where_they_come_from(tmp_path: Path) -> None:
    model = write(tmp_path / "model", '{"temperature": 0.5}')
    other = write(tmp_path / "other", '{"temperature": 0.2}')
    found = {s: read_sampling_defaults(s, model=model) for s in ("auto", "none", "vllm", other)}
    assert found == {"auto": {"temperature": 0.5}, "none": {}, "vllm": {}, other: {"temperature": 0.2}}


@pytest.mark.parametrize("model", ["smollm2", "/nowhere/model.gguf", "."])
def test_a_model_without_the_file_recommends_nothing(model: str) -> None:
    assert read_sampling_defaults("auto", model=model) == {}


def test_a_named_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--generation-config=.*generation_config.json: No such file"):
        read_sampling_defaults(str(tmp_path), model="smollm2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"temperature": "hot"}', "temperature='hot'.*--generation-config=none"),
        ('{"top_p": 1.5}', "top_p=1.5"),
        ('{"max_new_tokens": 0}', "max_tokens=0"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_sampling_defaults("auto", model=write(tmp_path / "m", text))
    assert str(tmp_path) in str(caught.value)
