"""``gapless serve MODEL``: the model's name may stand by itself."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.cli import serve as module
from gapless.cli.main import main


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    options: list[Any] = []
    monkeypatch.setattr(module, "_run", lambda found: options.append(found) or 0)
    return options


@pytest.mark.parametrize(
    "words",
    [
        ["tiny"],
        ["--model", "tiny"],
        ["tiny", "--model-path", "tiny"],
        ["--cuda-graph-bs-decode", "1", "2", "tiny"],
        ["--port", "0", "tiny", "--dtype=float32"],
    ],
    ids=" ".join,
)
def test_a_model_is_named_with_or_without_the_flag(words: list[str], started: list[Any]) -> None:
    assert main(["serve", *words]) == 0
    assert started[0].engine.model == "tiny"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "--model", "other"], "tiny and --model=other are two models"),
        ([], "no model: name smollm2, a model folder, or a .gguf file"),
        (["tiny", "other"], "unexpected extra argument"),
    ],
    ids=str,
)
def test_two_models_or_none_are_refused(
    words: list[str], message: str, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err
    assert not started
