"""Small real tokenizers of the two kinds that make detokenisation hard, built in memory.

``byte_level`` is GPT-2-like: a token is any run of bytes, so a character may be split over tokens.
``byte_fallback`` is Llama-2-like: "▁" marks spaces, the first space of a decoded text is stripped, unknown
characters become byte tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. Naïve café, über straße!",
    "Hello world, hello there; hello again and again and again.",
    "数字图像处理 한국어 문장입니다 🙂🙃🚀 emoji 🙂🙂",
]


class TestTokenizer:
    """The engine's tokenizer interface over ``tokenizers``."""

    __test__ = False

    def __init__(self, tokenizer: Tokenizer, *, bos_token_id: int | None = None) -> None:
        self.tokenizer, self.bos_token_id = tokenizer, bos_token_id

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [self.bos_token_id, *ids] if add_special_tokens and self.bos_token_id is not None else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[dict], *, add_generation_prompt: bool = True, **kwargs: object
    ) -> str:
        lines = [f"<s>{m['role']}: {m['content']}</s>" for m in messages]
        lines += [f"{key}={value}" for key, value in kwargs.items()]
        return "".join(lines) + ("<s>assistant:" if add_generation_prompt else "")


def byte_level() -> TestTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return TestTokenizer(tokenizer, bos_token_id=tokenizer.token_to_id("<s>"))


def byte_fallback() -> TestTokenizer:
    words = ["▁", "▁the", "▁a", "he", "▁he", "llo", "▁world", "e", "l", "o", "h", "a", "t", "!", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [("▁", "a"), ("h", "e"), ("▁", "he"), ("l", "lo")]
    merges = [pair for pair in merges if pair[0] in vocab and pair[1] in vocab and "".join(pair) in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return TestTokenizer(tokenizer, bos_token_id=1)
