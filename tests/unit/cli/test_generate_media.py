"""``gapless generate --image`` and ``--video``: what reaches the engine, and mistakes before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_fakes import FakeLLM
from PIL import Image

from gapless.cli.main import main

IMAGE_ID, VIDEO_ID = 7, 8


class SeeingLLM(FakeLLM):
    """Also keeps the messages that it renders."""

    def __init__(self, progress: Any = None, **options: Any) -> None:
        super().__init__(progress=progress, **options)
        self.processor = SimpleNamespace(
            config=SimpleNamespace(image_token_id=IMAGE_ID, video_token_id=VIDEO_ID),
            placeholder=lambda kind: [5, IMAGE_ID if kind == "image" else VIDEO_ID, 6],
        )
        encode = lambda text: [ord(letter) for letter in text]  # noqa: E731
        self.core = SimpleNamespace(intake=SimpleNamespace(encode=encode))
        self.messages: list[Any] = []

    def render_chat(self, messages: Any) -> Any:
        self.messages += messages
        return [{"prompt": "rendered", "prompt_token_ids": [1]}]


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.llm.LLM", SeeingLLM)
    monkeypatch.setattr(FakeLLM, "made", [])


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    paths = {}
    for name, shade in (("one", 10), ("two", 200)):
        paths[name] = str(tmp_path / f"{name}.png")
        Image.fromarray(np.full((4, 6, 3), shade, np.uint8)).save(paths[name])
    paths["clip"] = str(tmp_path / "clip.mp4")
    Path(paths["clip"]).write_bytes(b"frames")
    paths["text"] = str(tmp_path / "notes.png")
    Path(paths["text"]).write_text("no image")
    return paths


def generate(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["generate", "--model", "m", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_prompt_of_a_chat_shows_all_files_before_its_text(capsys: Any, files: dict[str, str]) -> None:
    args = ["--image", files["one"], "--image", files["two"], "--video", files["clip"]]
    code, _, _ = generate(capsys, *args, "--prompt", "a", "--prompt", "b")
    assert code == 0
    llm = FakeLLM.made[0]
    assert len(llm.messages) == 2
    for message, text in zip(llm.messages, "ab", strict=True):
        kinds = [part["type"] for part in message["content"]]
        assert kinds == ["image", "image", "video", "text"]
        assert [part["image"].getpixel((0, 0))[0] for part in message["content"][:2]] == [10, 200]
        assert message["content"][2]["video"] == Path(files["clip"])
        assert message["content"][3]["text"] == text


def test_without_files_messages_are_plain_text(capsys: Any) -> None:
    assert generate(capsys, "--prompt", "a")[0] == 0
    assert FakeLLM.made[0].messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [("ab", [5, IMAGE_ID, 6, 5, VIDEO_ID, 6, 97, 98]), ("a\x07\x08", [97, IMAGE_ID, VIDEO_ID])],
)
def test_a_raw_prompt_has_them_in_its_placeholders_or_in_front(
    capsys: Any, files: dict[str, str], prompt: str, token_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    stream = SeeingLLM.stream

    def watched(self: Any, prompts: Any, *args: Any, **options: Any) -> Any:
        given.extend(prompts)
        return stream(self, ["x"], *args, **options)

    monkeypatch.setattr(SeeingLLM, "stream", watched)
    args = ["--image", files["one"], "--video", files["clip"], "--raw"]
    assert generate(capsys, *args, "--prompt", prompt)[0] == 0
    (made,) = given
    assert made["prompt_token_ids"] == token_ids
    assert [len(made["multi_modal_data"][kind]) for kind in ("image", "video")] == [1, 1]


def test_json_lines_are_those_of_any_prompt(capsys: Any, files: dict[str, str]) -> None:
    _, out, _ = generate(capsys, "--prompt", "one", "--image", files["one"], "--json")
    record, report = [json.loads(line) for line in out.splitlines()]
    assert (record["prompt"], record["finish_reason"]) == ("one", "length")
    assert report["type"] == "report"


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("--image", "missing", "missing"),
        ("--image", "text", "notes.png"),
        ("--video", "missing", "there is no such file"),
    ],
)
def test_a_wrong_file_is_a_mistake_before_the_model_is_loaded(
    capsys: Any, files: dict[str, str], flag: str, name: str, message: str
) -> None:
    code, out, err = generate(capsys, "--prompt", "a", flag, files.get(name, "missing"))
    assert (code, out) == (2, "")
    assert flag in err
    assert message in err
    assert FakeLLM.made == []


@pytest.mark.parametrize("flag", ["--image", "--video"])
def test_a_model_of_text_refuses_files(
    capsys: Any, files: dict[str, str], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gapless.llm.LLM", FakeLLM)
    code, out, err = generate(capsys, "--prompt", "a", flag, files["one"])
    assert (code, out) == (2, "")
    assert "takes text only" in err
    assert FakeLLM.made[0].is_shut_down


def test_a_folder_of_a_model_of_text_is_refused_before_it_is_loaded(
    capsys: Any, files: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    flags = ("--model", str(tmp_path), "--prompt", "a")
    code, out, err = generate(capsys, *flags, "--image", files["one"])
    assert (code, out) == (2, "")
    assert "takes text only" in err
    assert FakeLLM.made == []
    assert generate(capsys, *flags)[0] == 0


@pytest.mark.parametrize("flag", ["--image", "--video"])
@pytest.mark.parametrize("way", ["file", "name", "config file"])
def test_a_model_without_room_for_an_encoder_is_refused_before_it_is_loaded(
    capsys: Any, files: dict[str, str], tmp_path: Path, flag: str, way: str
) -> None:
    gguf = tmp_path / "model.GGUF"
    gguf.write_bytes(b"GGUF")
    named = {"file": ["--model", str(gguf)], "name": ["--model", "smollm2"]}
    config = tmp_path / "gapless.toml"
    config.write_text(f"model = {json.dumps(str(gguf))}\n")
    flags = named.get(way, ["--config", str(config)])
    code = main(["generate", *flags, "--prompt", "a", flag, files["one"]])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert "takes text only" in captured.err
    assert FakeLLM.made == []
    assert main(["generate", *flags, "--prompt", "a"]) == 0
