"""A server of a model that only makes embeddings: a base model as Transformers stores it, against its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from tiny_served_model import NAME, served
from transformers import AutoModel, Qwen3Config

CONFIG = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
PROMPTS = [[5, 6, 7], [1], list(range(90)), [3] * 200, [7, 6, 5], [1, 2, 3, 4] * 64]
"""The fourth is longer than a step takes, the last as long as the model's context."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    torch.manual_seed(0)
    made = AutoModel.from_config(Qwen3Config(**CONFIG), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.3) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp("pooling")
    made.save_pretrained(folder)
    return folder, made


@pytest.fixture(scope="module")
def url(model) -> Iterator[str]:
    options = ("--chunked-prefill-size", "64", "--cuda-graph-bs-prefill", "16,64", "--access-log=off")
    with served(model[0], *options, has_graphs=True, has_weights=True) as url:
        yield url


@pytest.fixture(scope="module")
def api(url) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[3:4], PROMPTS * 6], ids=["some", "one", "many"])
def test_vectors_are_the_last_hidden_states_at_length_one(api, model, prompts):
    reply = api.embeddings.create(model=NAME, input=prompts)
    assert reply.usage.prompt_tokens == sum(map(len, prompts))
    for item, prompt in zip(reply.data, prompts, strict=True):
        with torch.no_grad():
            hidden_E = model[1](torch.tensor([prompt])).last_hidden_state[0, -1]
        assert item.embedding == pytest.approx((hidden_E / hidden_E.norm()).tolist(), abs=2e-5)


def test_its_plan_is_that_of_a_pooling_model_and_graphs_serve_it(url):
    info = httpx.get(f"{url}/server_info").json()
    reasons = [decision["reason"] for decision in info["plan"]["decisions"]]
    assert any("pooling models have no decode steps" in reason for reason in reasons), reasons
    replayed = {row["phase"] for row in info["report"]["steps"]}
    assert "prefill" in replayed
    assert "decode" not in replayed


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_text_is_refused_in_words(url, path, is_streamed):
    body = {"prompt": [5]} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{url}/v1/{path}", json={**body, "stream": is_streamed})
    assert answer.status_code == 400
    if path == "completions":  # without a tokenizer there are no chats at all
        assert "embeddings only" in answer.json()["error"]["message"]
