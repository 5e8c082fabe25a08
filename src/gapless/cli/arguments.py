"""The words of a command line, before typer reads them.

Spellings that users of other engines know are brought to one, and an option that is given two values under
two names is refused: typer would take the last one, and a server would start with half of what was asked for.
Read ``options.py`` for the options.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from gapless.errors import ConfigError

_LIST_FLAGS = ("--cuda-graph-bs-prefill", "--cuda-graph-bs-decode", "--vit-cuda-graph-budgets")


def normalise_args(args: list[str], known: Collection[str]) -> list[str]:
    """``--max_tokens`` becomes ``--max-tokens``; ``--cuda-graph-bs-decode 1 2 4`` becomes one value."""
    result: list[str] = []
    list_words = 0  # of the size list that is being read; 0 outside one
    for position, arg in enumerate(args):
        if arg == "--":
            return result + args[position:]
        name, equals, value = arg.partition("=")
        dashed = name.replace("_", "-")
        if dashed in known:
            result.append(dashed + equals + value)
            list_words = int(dashed in _LIST_FLAGS) + int(dashed in _LIST_FLAGS and bool(equals))
        elif list_words > 1 and re.fullmatch(r"[\d,]+", arg):
            result[-1] += f",{arg}"
        else:
            result.append(arg)
            list_words += int(list_words > 0)
    return result


def refuse_contradictions(args: Sequence[str], params: Sequence[Any]) -> None:
    """``args`` as ``normalise_args`` returns them; ``params``: the command's. Raises ``ConfigError`` for an
    option that has two values under two names, or is switched on and off. Under one name the last value
    counts, as everywhere, so that a script's own can be overridden; options that may be repeated are left
    alone."""
    options = {name: param for param in params for name in (*param.opts, *param.secondary_opts)}
    given: dict[str, tuple[str, str, str]] = {}
    words = iter(args)
    for word in words:
        if word == "--":
            return
        name, equals, value = word.partition("=")
        param = options.get(name) if name.startswith("-") else None
        if param is None:
            continue
        if getattr(param, "is_flag", False):
            shown, value = name, str(name in param.secondary_opts)
        else:
            value = value if equals else next(words, "")
            shown = f"{name}={value}"
        first_name, first_value, first = given.get(param.name, (name, value, shown))
        if name != first_name and value != first_value and not getattr(param, "multiple", False):
            raise ConfigError(f"{first} contradicts {shown}; give only one of the two")
        given[param.name] = name, value, shown
