"""What lm-eval (0.4.13) sends, and what it makes of the answers, against Transformers on the same weights.

Its requests and its arithmetic are repeated here, so that it need not be installed. A run of lm-eval itself
is ``benchmarks/lm_eval_cpu.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tiny_served_model import CONFIG, NAME, served, write_model
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

EOS, NUM_TEXT_TOKENS = 256, 257
ENDS = [9, 8, 7]
"""A prompt after which the model ends its text."""
HEADERS = {"Authorization": "Bearer"}
"""What arrives when lm-eval has no key."""
Pair = tuple[list[int], list[int]]
"""A context and what may follow it, as token ids."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("scored")
    write_model(folder)
    torch.manual_seed(0)
    made = LlamaForCausalLM._from_config(LlamaConfig(**CONFIG), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.3) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
        made.lm_head.weight[NUM_TEXT_TOKENS:] = 0  # tokens that are no text are never the likeliest
        hidden_E = made.model(torch.tensor([ENDS])).last_hidden_state[0, -1]
        made.lm_head.weight[EOS] = 20 * hidden_E / hidden_E.square().sum()
    made.save_pretrained(folder)
    return folder, made


@pytest.fixture(scope="module")
def url(model: tuple[Path, LlamaForCausalLM]) -> Iterator[str]:
    options = ("--chunked-prefill-size", "64", "--cuda-graph-bs-prefill", "16,64", "--access-log=off")
    with served(model[0], *options, has_graphs=True, has_weights=True) as url:
        yield url


@pytest.fixture(scope="module")
def pairs(model: tuple[Path, LlamaForCausalLM]) -> list[Pair]:
    """Choices of one question, one token each side, longer than a step takes, and a greedy choice."""
    question = list(range(40, 72))
    long = [(7 * i) % 256 for i in range(150)]
    return [
        (question, [5]),
        (question, [6, 7, 8]),
        (question, greedy(model[1], question, 4)),
        ([1], [2]),
        ([EOS], question),
        (long, long[:40]),
        (question, [*greedy(model[1], question, 2), 3]),
        (ENDS[:1], ENDS[1:]),
    ]


def greedy(model: LlamaForCausalLM, prompt: Sequence[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


def until_eos(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(EOS)] if EOS in token_ids else token_ids


def expected(model: LlamaForCausalLM, pair: Pair) -> tuple[float, bool]:
    """The log-likelihood of what follows, and whether each of its tokens is the likeliest."""
    context, following = pair
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([context + following])).logits[0].log_softmax(-1)
    rows_FV = logprobs_TV[len(context) - 1 : -1]
    target_F = torch.tensor(following)
    total = rows_FV.gather(1, target_F[:, None]).sum().item()
    return total, bool((rows_FV.argmax(-1) == target_F).all())


def score(url: str, pairs: Sequence[Pair], prompt: Any = None) -> list[tuple[float, bool]]:
    """One request of lm-eval's ``loglikelihood``, and what it reads out of the answer."""
    body = {
        "model": NAME,
        "prompt": [context + following for context, following in pairs] if prompt is None else prompt,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=60)
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=itemgetter("index"))
    scores = []
    for choice, (context, following) in zip(choices, pairs, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(context + following) + 1
        of_following = logprobs["token_logprobs"][len(context) : -1]
        best = [max(top.values()) for top in logprobs["top_logprobs"][len(context) : -1]]
        scores.append((sum(of_following), of_following == best))
    return scores


def assert_scores(
    model: LlamaForCausalLM, pairs: Sequence[Pair], found: Sequence[tuple[float, bool]]
) -> None:
    for pair, (total, is_greedy) in zip(pairs, found, strict=True):
        right_total, right_is_greedy = expected(model, pair)
        assert total == pytest.approx(right_total, abs=1e-3)
        assert is_greedy == right_is_greedy


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_log_likelihoods_are_those_of_transformers(url, model, pairs, batch_size):
    found = []
    for start in range(0, len(pairs), batch_size):
        found += score(url, pairs[start : start + batch_size])
    assert_scores(model[1], pairs, found)
    assert {is_greedy for _, is_greedy in found} == {True, False}


def test_requests_at_once_do_not_change_each_other(url, model, pairs):
    with ThreadPoolExecutor(8) as pool:
        found = [scores[0] for scores in pool.map(lambda pair: score(url, [pair]), pairs * 4)]
    assert_scores(model[1], pairs * 4, found)


def test_prompts_as_text_are_scored_alike(url, model):
    """Tokenised on our side: a byte is a token, and none is added in front."""
    tokenizer = Tokenizer.from_file(str(model[0] / "tokenizer.json"))
    texts = [("Question: 2 + 2?\nAnswer:", " four"), ("naïve", " café 日本🙂")]
    pairs = [(tokenizer.encode(a).ids, tokenizer.encode(b).ids) for a, b in texts]
    assert_scores(model[1], pairs, score(url, pairs, ["".join(text) for text in texts]))
    assert_scores(model[1], pairs[:1], score(url, pairs[:1], "".join(texts[0])))


def test_an_end_of_text_behind_the_prompt_is_a_token_too(url, model):
    """lm-eval drops the last entry, so a missing one would cost a token of the answer."""
    pair = (ENDS[:1], ENDS[1:])
    assert greedy(model[1], ENDS, 1) == [EOS]
    answer = httpx.post(
        f"{url}/v1/completions",
        json={
            "model": NAME,
            "prompt": [ENDS],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "echo": True,
        },
    ).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert_scores(model[1], [pair], score(url, [pair]))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_are_written_greedily_up_to_a_stop(url, model, batch_size):
    """lm-eval's ``generate_until``: its stop strings, and the end of text as one more."""
    tokenizer = Tokenizer.from_file(str(model[0] / "tokenizer.json"))
    prompts = [list(range(start, start + 20)) for start in (10, 60, 110)]
    whole = [tokenizer.decode(until_eos(greedy(model[1], prompt, 24))) for prompt in prompts]
    stop = next(letter for letter in whole[0][2:] if letter.isascii())
    texts: list[str] = []
    for start in range(0, len(prompts), batch_size):
        body = {
            "prompt": prompts[start : start + batch_size],
            "model": NAME,
            "max_tokens": 24,
            "temperature": 0,
            "stop": [stop, "</s>"],
            "seed": 1234,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=60).json()
        texts += [choice["text"] for choice in sorted(answer["choices"], key=itemgetter("index"))]
    assert texts == [text.partition(stop)[0] for text in whole]
    assert texts[0] != whole[0]


def test_it_is_left_to_tokenise_by_itself(url):
    """lm-eval takes the tokenizer of a server that has this page, else the folder that it was given."""
    assert httpx.get(f"{url}/tokenizer_info").status_code == 404
