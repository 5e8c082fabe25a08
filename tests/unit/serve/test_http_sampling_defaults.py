"""What the model's authors recommend is what requests get that do not say otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from http_fakes import FakeClient, answer, chat_body, make_app, post, text_body

from gapless.errors import ConfigError
from gapless.llm import LLM
from gapless.sampling.params import SamplingParams
from gapless.serve.options import resolve_options

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 2048}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {TEXT: text_body(), CHAT: chat_body()}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return str(tmp_path)


def params_of(
    path: str, *, model: str = "m", generation_config: str = "auto", **fields: Any
) -> SamplingParams:
    client = FakeClient(answer("x"), model=model)
    unsaid = {k: v for k, v in BODIES[path].items() if k in ("model", "prompt", "messages")}
    app = make_app(client, generation_config=generation_config, served_model_names=("a",))
    response = post(app, path, {**unsaid, "model": "a", **fields})
    assert response.status_code == 200, response.text
    return SamplingParams(**client.requests[0].params)


@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_names_nothing_gets_them(folder: str, path: str) -> None:
    params = params_of(path, model=folder)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.95, 20, 2048)
    assert params_of(path, generation_config=folder) == params


@pytest.mark.parametrize("path", BODIES)
def test_what_a_request_names_wins_also_where_it_is_our_own_default(folder: str, path: str) -> None:
    params = params_of(path, model=folder, temperature=1.0, top_p=1.0, top_k=0, max_tokens=16)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)


@pytest.mark.parametrize("option", ["none", "vllm"])
@pytest.mark.parametrize(("path", "max_tokens"), [(TEXT, 16), (CHAT, None)])
def test_they_can_be_switched_off(folder: str, path: str, max_tokens: int | None, option: str) -> None:
    params = params_of(path, model=folder, generation_config=option)
    assert params == SamplingParams(max_tokens=max_tokens)


def test_a_prompt_beside_which_they_do_not_fit_is_taken(folder: str) -> None:
    assert params_of(TEXT, model=folder, prompt=[5] * 3000).max_tokens == 2048
    client = FakeClient(answer("x"), model=folder)
    app = make_app(client, served_model_names=("a",))
    asked = {"model": "a", "prompt": [5] * 3000, "max_tokens": 2000}
    assert post(app, TEXT, asked).status_code == 400


def test_a_folder_without_them_is_found_out_before_the_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        resolve_options(engine_flags={"model": "m"}, server_flags={"generation_config": str(tmp_path)})


def test_offline_they_are_offered_and_not_taken(folder: str) -> None:
    llm = LLM.__new__(LLM)
    llm._model = folder
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, max_tokens=2048
    )
    llm._model = None
    assert llm.get_default_sampling_params() == SamplingParams()
