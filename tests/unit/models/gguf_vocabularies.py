"""Helper: GGUF metadata of small tokenizers of both kinds, without a file behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from gapless.models.gguf_file import GGUFFile

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12 o'clock, isn't it?",
    "hello world hello there hello again, again and again  and   again",
    "def f(x):\n    return x ** 2  # 2024-01-31\n\n\tdone",
    "Grüße aus Köln, naïve café über straße 日本語 한국어 🙂🙃",
]
PIECES = "▁the ▁quick ▁hello ▁again ▁and ▁world hello world and is ll er in th he re on an"
CONTROL, USER_DEFINED, NORMAL, UNKNOWN, BYTE = 3, 4, 1, 2, 6

TEXTS = [
    "",
    "hello",
    "Hello world",
    " leading and trailing ",
    "two  spaces   three",
    "12345 and 6.75",
    "isn't IT'S we'll",
    "tabs\tand\nnew\n\nlines\r\n",
    "Grüße naïve café",
    "日本語と한국어",
    "🙂 👩‍👩‍👧",
    "<|bos|>hello<|eos|>",
    "a<|eos|> b",
    "<tool>x</tool>",
    "combining e\u0301 and \u212b",
    "\x00\x7f\u200b",
]


def byte_level_metadata(pre: str | None, **changes: Any) -> dict[str, Any]:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    state = trained.to_str()
    merges = [" ".join(pair) for pair in json.loads(state)["model"]["merges"]]
    vocab = trained.get_vocab()
    tokens = ["<|bos|>", "<|eos|>", "<tool>", *sorted(vocab, key=vocab.__getitem__)]
    kinds = [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * len(vocab)]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": False,
        **changes,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    words = PIECES.split()
    letters = sorted({letter for word in words for letter in word} | set("abcdefghijklmnopqrstuvwxyz.,'ü"))
    pieces = [*words, *sorted({word[:n] for word in words for n in range(2, len(word))} - set(words))]
    tokens = ["<unk>", "<|bos|>", "<|eos|>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(letters))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(letters))]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def as_file(metadata: dict[str, Any]) -> GGUFFile:
    return GGUFFile(path=Path("test.gguf"), metadata=metadata, tensors={}, _bytes=np.empty(0, dtype=np.uint8))


def transformers_dict(metadata: dict[str, Any]) -> dict[str, Any]:
    """The same facts under the names Transformers' GGUF converters take."""
    prefix = "tokenizer.ggml."
    found = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    names = {"model": "tokenizer_type", "add_space_prefix": "add_prefix_space"}
    found = {names.get(key, key): value for key, value in found.items()}
    return found
