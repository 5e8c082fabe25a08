"""Tokenizers from folders and from GGUF metadata against what Transformers makes of the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_vocabularies import (
    CORPUS,
    TEXTS,
    as_file,
    byte_level_metadata,
    sentencepiece_metadata,
    transformers_dict,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.ggml import convert_gguf_tokenizer

from gapless.errors import ModelError, RequestError
from gapless.models.gguf_tokenizer import gguf_tokenizer
from gapless.models.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if shout is defined %}!{% endif %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "q"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a model's author saves it: BOS added by the post-processor, a template beside it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    path = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_folder_tokenizer_equals_transformers(
    text: str, special: bool, loaded: Tokenizer, folder: Path
) -> None:
    reference = AutoTokenizer.from_pretrained(folder)
    ids = loaded.encode(text, add_special_tokens=special)
    assert ids == reference.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert loaded.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_folder_tokenizer_knows_its_tokens(loaded: Tokenizer) -> None:
    assert loaded.vocab_size == 400
    assert (loaded.token_to_id("<|eos|>"), loaded.id_to_token(1)) == (1, "<|eos|>")
    assert (loaded.token_to_id("nothing"), loaded.id_to_token(400)) == (None, None)
    assert loaded.special_tokens["bos_token"] == "<|bos|>"


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize(
    "extra", [{}, {"shout": True}, {"tools": [{"type": "function", "function": {"name": "f"}}]}]
)
def test_chats_are_rendered_as_transformers_does(
    generation_prompt: bool, extra: dict, loaded: Tokenizer, folder: Path
) -> None:
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=generation_prompt, **extra
    )
    assert loaded.apply_chat_template(CHAT, add_generation_prompt=generation_prompt, **extra) == expected


def test_a_template_of_the_caller_wins(loaded: Tokenizer) -> None:
    assert loaded.apply_chat_template(CHAT, chat_template="{{ messages | length }}") == "3"


def test_rendered_chat_encodes_without_a_second_bos(loaded: Tokenizer) -> None:
    text = loaded.apply_chat_template(CHAT)
    assert loaded.encode(text, add_special_tokens=False).count(0) == 1


@pytest.mark.parametrize(
    ("messages", "template", "says"),
    [
        ([], TEMPLATE, "at least one message"),
        ([{"content": "hi"}], TEMPLATE, "role"),
        (["hi"], TEMPLATE, "role"),
        ([{"role": 3, "content": "hi"}], TEMPLATE, "role"),
        (CHAT, "{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (CHAT, "{% for %}", "template"),
        (CHAT, "{{ messages[0].content + 1 }}", "template"),
        (CHAT, "{{ ''.__class__.__mro__ }}", "template"),
    ],
)
def test_unusable_chats_are_request_errors(
    messages: list, template: str, says: str, loaded: Tokenizer
) -> None:
    with pytest.raises(RequestError, match=says):
        loaded.apply_chat_template(messages, chat_template=template)


def test_without_a_template_a_chat_is_a_request_error(loaded: Tokenizer) -> None:
    bare = Tokenizer(loaded._backend, special_tokens={}, chat_template=None)
    with pytest.raises(RequestError, match="no chat template"):
        bare.apply_chat_template(CHAT)


def test_lengths_saved_with_a_tokenizer_are_ignored(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode(TEXTS[1] * 9)) == TEXTS[1] * 9
    assert len(tokenizer.encode("a")) == 2


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", None, 3, b"bytes"])
def test_what_is_not_text_is_a_request_error(text: object, loaded: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode text"):
        loaded.encode(text)


def test_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"version": "1.0", "model": {"type": "No"}}'])
def test_broken_tokenizer_file_is_a_model_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="tokenizer files cannot be used"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", ["qwen2", "default", None])
def test_byte_level_gguf_equals_transformers(pre: str | None, text: str) -> None:
    metadata = byte_level_metadata(pre)
    kind = "qwen2" if pre == "qwen2" else "llama"
    converted, _ = convert_gguf_tokenizer(kind, transformers_dict(metadata))
    converted.add_special_tokens(["<|bos|>", "<|eos|>"])
    converted.add_tokens(["<tool>"])
    ours = _gguf(metadata)
    ids = ours.encode(text)
    assert ids == converted.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == converted.decode(ids)


@pytest.mark.parametrize("text", [text for text in TEXTS if "<|" not in text and "\x00" not in text])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_gguf_equals_transformers(text: str, prefix: bool) -> None:
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": prefix})
    converted, _ = convert_gguf_tokenizer("llama", transformers_dict(metadata))
    ours = _gguf(metadata)
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == converted.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("default", "a  12", ["a", "Ġ", "Ġ12"]),
        ("gpt-2", "a  12", ["a", "Ġ", "Ġ12"]),
        ("qwen2", "1212", ["1", "2", "1", "2"]),
        ("llama-bpe", "1212", ["12", "1", "2"]),
    ],
)
def test_words_are_split_as_the_vocabulary_was_trained(pre: str, text: str, pieces: list[str]) -> None:
    metadata = byte_level_metadata(pre, **{"tokenizer.ggml.add_bos_token": False})
    ours = _gguf(metadata)
    assert [ours.id_to_token(i) for i in ours.encode(text)] == pieces


@pytest.mark.parametrize(
    ("make", "pre", "add_bos", "has_bos"),
    [
        (byte_level_metadata, "smollm", None, False),
        (byte_level_metadata, "qwen2", None, False),
        (byte_level_metadata, "llama-bpe", None, True),
        (byte_level_metadata, "llama-bpe", False, False),
        (byte_level_metadata, "smollm", True, True),
        (sentencepiece_metadata, None, None, True),
        (sentencepiece_metadata, None, False, False),
    ],
)
def test_bos_is_added_where_the_file_says_or_the_kind_implies(
    make, pre: str | None, add_bos: bool | None, has_bos: bool
) -> None:
    arguments = (pre,) if pre else ()
    metadata = make(*arguments, **{"tokenizer.ggml.add_bos_token": add_bos})
    ours = _gguf(metadata)
    bos = metadata["tokenizer.ggml.bos_token_id"]
    assert (ours.encode("hello")[0] == bos) == has_bos
    assert bos not in ours.encode("hello", add_special_tokens=False)


def test_control_tokens_are_skipped_and_user_defined_ones_kept() -> None:
    ours = _gguf(byte_level_metadata("qwen2"))
    ids = ours.encode("<|bos|>a<tool>b<|eos|>")
    assert ids[0] == 0
    assert ids[-1] == 1
    assert ours.decode(ids) == "a<tool>b"
    assert ours.decode(ids, skip_special_tokens=False) == "<|bos|>a<tool>b<|eos|>"


def test_gguf_special_tokens_and_template_reach_the_chat() -> None:
    ours = _gguf(byte_level_metadata("smollm", **{"tokenizer.chat_template": TEMPLATE}))
    assert ours.apply_chat_template(CHAT[:1]) == "<|bos|>[user]hi<|eos|>[assistant]"


def test_gguf_without_tokens_has_no_tokenizer() -> None:
    assert gguf_tokenizer(as_file({"general.architecture": "llama"})) is None


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (byte_level_metadata("smollm", **{"tokenizer.ggml.model": "bert"}), "tokenizer model 'bert'"),
        (byte_level_metadata("smollm", **{"tokenizer.ggml.model": None}), "tokenizer model None"),
        (byte_level_metadata("tekken"), "pre-tokenizer 'tekken'"),
        (byte_level_metadata("smollm", **{"tokenizer.ggml.merges": None}), "merges' is missing"),
        (byte_level_metadata("smollm", **{"tokenizer.ggml.merges": ["zz yy"]}), "cannot be used"),
        (sentencepiece_metadata(**{"tokenizer.ggml.scores": [0.0]}), "one score for each token"),
        (sentencepiece_metadata(**{"tokenizer.ggml.scores": None}), "one score for each token"),
    ],
)
def test_unusable_gguf_tokenizers_are_named(metadata: dict, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        gguf_tokenizer(as_file(metadata))


def _gguf(metadata: dict) -> Tokenizer:
    tokenizer = gguf_tokenizer(as_file(metadata))
    assert tokenizer is not None
    return tokenizer
