"""Where a server's options come from: command line, config file and environment, in that order of rank.

One flat file and one flat command line hold the engine's options and the server's; this splits them, hands
the former to ``EngineConfig`` and makes ``ServerSettings`` of the latter. Invariant: everything that can be
found wrong without loading a model is found here, before a process is started. Read ``settings.py`` for what
each option means and ``server.py`` for what happens then.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapless.config import ENGINE_FIELDS, GRAPH_FIELDS, EngineConfig
from gapless.config_sources import ALIASES
from gapless.env import Env
from gapless.errors import ConfigError
from gapless.sampling.generation_config import read_sampling_defaults
from gapless.serve.media_options import parse_per_prompt
from gapless.serve.settings import ServerSettings

SERVER_ALIASES = {
    "served_model_name": "served_model_names",
    "api_key": "api_keys",
    "cors_origin": "cors_origins",
    "drain_seconds": "drain_s",
    "health_stale_seconds": "health_stale_s",
}
"""Names of flags that differ from the field's."""
_SERVER_FIELDS = tuple(field.name for field in dataclasses.fields(ServerSettings))
_LISTS = ("served_model_names", "api_keys", "cors_origins", "allowed_media_domains")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """All that starts a server."""

    engine: EngineConfig
    server: ServerSettings


def resolve_options(
    *,
    engine_flags: Mapping[str, Any],
    server_flags: Mapping[str, Any],
    config_file: Mapping[str, Any] | None = None,
    env: Env | None = None,
) -> ServeOptions:
    """Merge and check. Raises ``ConfigError`` for what is unknown, contradictory or out of range."""
    env = env or Env()
    engine_file: dict[str, Any] = {}
    server_file: dict[str, Any] = {}
    for name, value in (config_file or {}).items():
        key = name.lstrip("-").replace("-", "_")
        if _server_field(key) is not None:
            server_file[name] = value
        else:
            _check_known(name, key)
            engine_file[name] = value
    server: dict[str, Any] = {}
    if env.api_keys:
        server["api_keys"] = env.api_keys
    if env.logging_level is not None:
        server["log_level"] = env.logging_level.lower()
    server |= _fields(server_file, source="config file")
    server |= _fields(server_flags, source="command line")
    options = ServeOptions(
        engine=EngineConfig.from_sources(
            flags=engine_flags, config_file=engine_file, env=env.engine_options()
        ),
        server=ServerSettings(**server),
    )
    read_sampling_defaults(
        options.server.generation_config, model=options.engine.model
    )  # before minutes pass
    return options


def _server_field(key: str) -> str | None:
    name = SERVER_ALIASES.get(key, key)
    return name if name in _SERVER_FIELDS else None


def _check_known(name: str, key: str) -> None:
    known = {*ENGINE_FIELDS, *GRAPH_FIELDS, *ALIASES, "compilation_config", *_SERVER_FIELDS, *SERVER_ALIASES}
    if key in known:
        return
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"
    raise ConfigError(f"unknown option {name!r} from the config file{hint}")


def _fields(values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if value is None:
            continue
        name = _server_field(key.lstrip("-").replace("-", "_"))
        assert name is not None, f"{key} is no option of the server"
        plain = _plain(name, value)
        given = result.setdefault(name, plain)
        if given is not plain and given != plain:  # a NaN is not equal to itself
            raise ConfigError(f"{name} is given twice in the {source}, with different values; give only one")
    return result


def _plain(name: str, value: Any) -> Any:
    if name in _LISTS:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if name == "chat_template" and isinstance(value, str):
        return _template_text(value)
    if name == "limit_mm_per_prompt":
        return parse_per_prompt(value)
    return value


def _template_text(value: str) -> str:
    """A template itself, which has braces, or the name of a file that holds one."""
    if "{{" in value or "{%" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template={value}: no such template file, nor the text of one ({error})"
        ) from None
