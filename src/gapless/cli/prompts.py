"""Prompts from the command line and from files.

A prompts file is plain text with one prompt per line, or JSON lines with ``{"prompt": "…"}`` or
``{"token_ids": […]}``; the first line that is not empty decides which. Mistakes name the file and the line,
because a file of ten thousand prompts with one bad line is the usual case. Next: ``generate.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gapless.errors import ConfigError

Prompt = str | list[int]


def collect_prompts(prompts: list[str] | None, prompts_file: str | None) -> list[Prompt]:
    """``--prompt`` values first, then the file's (``-`` reads standard input). Raises ``ConfigError`` if
    none is left.
    """
    found: list[Prompt] = list(prompts or [])
    if prompts_file is not None:
        name = "standard input" if prompts_file == "-" else prompts_file
        found += parse_prompts(_read(prompts_file), name)
    if not found:
        raise ConfigError("no prompt: give --prompt TEXT, or --prompts-file FILE (- for standard input)")
    return found


def parse_prompts(text: str, name: str) -> list[Prompt]:
    """The prompts in ``text``; ``name`` is what error messages call it."""
    # Not splitlines(): it also cuts at U+2028 and the like, which JSON strings and prompts may hold.
    numbered = enumerate(text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"), start=1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    if not lines or not lines[0][1].lstrip().startswith("{"):
        return [line for _, line in lines]
    return [_parse_record(line, f"{name}:{number}") for number, line in lines]


def _parse_record(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{where}: not JSON ({error}); the file's first line is, so every line must be"
        ) from None
    if not isinstance(record, dict) or len(record) != 1 or not record.keys() <= {"prompt", "token_ids"}:
        raise ConfigError(f'{where}: must be an object with one key, "prompt" or "token_ids"')
    if "prompt" in record:
        if not isinstance(record["prompt"], str):
            raise ConfigError(f'{where}: "prompt" must be a string')
        return record["prompt"]
    tokens = record["token_ids"]
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise ConfigError(f'{where}: "token_ids" must be a list of integers')
    return tokens


def _read(prompts_file: str) -> str:
    try:
        if prompts_file == "-":
            if sys.stdin is None or sys.stdin.closed:
                raise ConfigError("--prompts-file -: standard input is closed")
            return sys.stdin.read()
        return Path(prompts_file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--prompts-file {prompts_file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts-file {prompts_file}: not UTF-8 text ({error.reason})") from None
