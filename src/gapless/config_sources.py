"""From many sources to one set of options: names, precedence, and text that has to become values.

Command line and Python API rank equal, then the config file, then the environment. A key may be a field of
the config classes or the flag's name with underscores; an unknown key is an error that names it and its
nearest neighbour. The merge works on names and values only and remembers where each value came from, so that
a contradiction found later can say so. Read ``config.py`` for the classes that are made of the result.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gapless.config_media import parse_processor_kwargs
from gapless.errors import ConfigError

ALIASES = {
    "model_path": "model",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "mem_fraction_static": "gpu_memory_utilization",
    "cudagraph_mode": "mode",
    "cudagraph_capture_sizes": "capture_sizes",
    "split_ops": "splitting_ops",
    "cuda_graph_backend_prefill": "prefill_backend",
    "cuda_graph_backend_decode": "decode_backend",
    "cuda_graph_max_bs_prefill": "prefill_max",
    "cuda_graph_max_bs_decode": "decode_max",
    "cuda_graph_bs_prefill": "prefill_sizes",
    "cuda_graph_bs_decode": "decode_sizes",
    "cuda_graph_tc_compiler": "tc_compiler",
}
"""Other names of fields, as flags spell them."""

_COMPILATION_KEYS = {
    "cudagraph_mode": "mode",
    "mode": "compile_mode",
    "cudagraph_capture_sizes": "capture_sizes",
    "use_inductor_graph_partition": "use_inductor_graph_partition",
    "splitting_ops": "splitting_ops",
    "split_ops": "splitting_ops",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One place options come from. ``rank`` 0 wins; sources of equal rank may not disagree."""

    name: str
    rank: int
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """The winning value of each field, and the name of the source it came from."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def origins_note(self, names: Collection[str]) -> str:
        """`` (mode from the config file, ...)``; empty unless several sources had a part in ``names``."""
        origins = {name: origin for name, origin in self.origins.items() if name in names}
        if len(set(origins.values())) < 2:
            return ""
        return " (" + ", ".join(f"{name} from the {origin}" for name, origin in origins.items()) + ")"


def merge_sources(sources: Sequence[Source], *, fields: Collection[str]) -> Merged:
    """The values of all ``sources``, best rank first. Raises ``ConfigError`` as described above."""
    merged = Merged()
    ranks: dict[str, int] = {}
    for source in sorted(sources, key=lambda source: source.rank):
        for name, value in _canonical(source, fields).items():
            if name not in merged.values:
                merged.values[name], merged.origins[name], ranks[name] = value, source.name, source.rank
            elif ranks[name] == source.rank and merged.values[name] != value:
                raise ConfigError(
                    f"{name}={merged.values[name]} from the {merged.origins[name]} disagrees with "
                    f"{name}={value} from the {source.name}; give only one of the two"
                )
    return merged


def parse_sizes(name: str, value: Any) -> tuple[int, ...]:
    """``"1,2,4"``, ``"1 2 4"``, ``[1, 2, 4]`` or ``["1,2", "4"]`` to ``(1, 2, 4)``, in the given order.

    Raises ``ConfigError`` naming the option and the item that is not an integer of at least 1.
    """
    if not isinstance(value, (str, list, tuple)):
        raise ConfigError(f"{name}={value!r}: must be a list of sizes, such as 1,2,4")
    items = [value] if isinstance(value, str) else value
    words = [word for item in items for word in (_words(item) if isinstance(item, str) else [item])]
    if not words:
        raise ConfigError(f"{name} is an empty list; list at least one size, such as 1,2,4")
    return tuple(_size(name, word) for word in words)


def read_config_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options of a TOML file. Raises ``ConfigError`` naming the file."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config file {name}: {error.strerror or error}") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"config file {name}: not TOML ({error})") from None


def parse_compilation_config(value: str | Mapping[str, Any]) -> dict[str, Any]:
    """``--compilation-config`` (JSON text or a dict) as fields of ``GraphConfig``.

    Raises ``ConfigError`` for text that is no JSON object, for unknown keys, and for a key given under two
    names.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"--compilation-config is not JSON ({error}): {value}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f'--compilation-config must be an object such as {{"mode": 3}}, not {value!r}')
    fields: dict[str, Any] = {}
    for key, item in value.items():
        name = _COMPILATION_KEYS.get(key)
        if name is None:
            raise ConfigError(
                f"--compilation-config has no key {key!r}; its keys are {', '.join(_COMPILATION_KEYS)}"
            )
        if item is None:
            continue
        plain = _plain(name, item, spelling=key)
        if name in fields and fields[name] != plain:
            raise ConfigError(f"--compilation-config gives {name} twice, with different values")
        fields[name] = plain
    return fields


def _canonical(source: Source, fields: Collection[str]) -> dict[str, Any]:
    """One source's values by field name, ``compilation_config`` unfolded and None left out."""
    known = {*fields, *(alias for alias, name in ALIASES.items() if name in fields), "compilation_config"}
    result: dict[str, Any] = {}
    spelled: dict[str, str] = {}

    def put(name: str, value: Any, spelling: str) -> None:
        if name in result and result[name] != value:
            raise ConfigError(
                f"{spelled[name]}={result[name]} disagrees with {spelling}={value} (both from the "
                f"{source.name}); give only one of the two"
            )
        result[name], spelled[name] = value, spelling

    for given, value in source.values.items():
        key = given.lstrip("-").replace("-", "_")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown option {given!r} from the {source.name}{hint}")
        if value is None:
            continue
        if key == "compilation_config":
            for name, item in parse_compilation_config(value).items():
                put(name, item, f"compilation_config's {name}")
        else:
            name = ALIASES.get(key, key)
            put(name, _plain(name, value, spelling=key), key)
    return result


def _plain(name: str, value: Any, *, spelling: str) -> Any:
    """A form in which equal values compare equal, whichever way they were written."""
    if name.endswith(("_sizes", "_budgets")):
        return parse_sizes(spelling, value)
    if name == "mm_processor_kwargs":
        return parse_processor_kwargs(value)
    return tuple(value) if isinstance(value, list) else value


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text.strip("[]() ")) if word]


def _size(name: str, word: Any) -> int:
    if isinstance(word, str) and re.fullmatch(r"[+-]?\d+", word):
        word = int(word)
    if not isinstance(word, int) or isinstance(word, bool) or word < 1:
        raise ConfigError(f"{name}: {word!r} is not a capture size; sizes are integers of at least 1")
    return word
