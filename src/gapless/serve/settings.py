"""What the HTTP side is told: where to listen, who may call, and every limit, as one frozen object.

Engine options are not here (``config.py`` has them). Every field is checked when the object is made, so a
server that starts has legal limits. No field holds a secret but ``api_keys`` and those never reach
``to_dict``, which is what ``/server_info`` shows. Read ``options.py`` for where the values come from.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gapless.errors import ConfigError

AccessLog = Literal["json", "text", "off"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
ToolCallParser = Literal["auto", "none", "hermes", "llama3", "mistral"]

_MAX_PORT = 65535
_SECRETS = ("api_keys",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Limits and names of one server. Raises ``ConfigError`` for values out of range."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port; the one that was taken is printed."""
    served_model_names: tuple[str, ...] = ()
    """Names a request may use as ``model``; the first is the one in answers. Empty: what ``--model`` said."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens ``/v1``; none: everybody may call."""
    root_path: str = ""
    """Prefix that a reverse proxy has taken off."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call; ``*`` for all."""
    chat_template: str | None = None
    """Text of a Jinja template to use in place of the model's own."""
    tool_call_parser: ToolCallParser = "auto"
    """How the model writes tool calls; auto: as its chat template says."""
    max_queued_requests: int = 1024
    """Requests accepted beyond those that run; more are answered with 429."""
    max_body_bytes: int = 16 * 2**20
    max_n: int = 128
    """Most choices of one request."""
    drain_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    health_stale_s: float = 30.0
    """Without life in the engine's loop for so long, ``/health`` is a 503. Longer than any step takes."""
    enable_cache_reset: bool = False
    """Whether there is ``POST /reset_prefix_cache``."""
    access_log: AccessLog = "json"
    log_level: LogLevel = "info"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def __post_init__(self) -> None:
        _check_text("--host", self.host)
        _check_int("--port", self.port, 0, _MAX_PORT)
        _check_texts("--served-model-name", self.served_model_names)
        _check_texts("--api-key", self.api_keys)
        _check_texts("--cors-origin", self.cors_origins)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path={self.root_path}: must begin with / and not end with it")
        _check_int("--max-queued-requests", self.max_queued_requests, 1, 2**20)
        _check_int("--max-body-bytes", self.max_body_bytes, 1024, 2**31)
        _check_int("--max-n", self.max_n, 1, 128)
        _check_seconds("--drain-seconds", self.drain_s, 0, 86400)
        _check_seconds("--health-stale-seconds", self.health_stale_s, 1, 600)
        if not isinstance(self.enable_cache_reset, bool):
            raise ConfigError(f"--enable-cache-reset={self.enable_cache_reset!r}: must be true or false")
        _check_choice("--tool-call-parser", self.tool_call_parser, get_args(ToolCallParser))
        _check_choice("--access-log", self.access_log, get_args(AccessLog))
        _check_choice("--log-level", self.log_level, get_args(LogLevel))
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together: give both or neither")
        for flag, path in (("--ssl-certfile", self.ssl_certfile), ("--ssl-keyfile", self.ssl_keyfile)):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag}={path}: there is no such file")

    def to_dict(self) -> dict[str, Any]:
        """Every field that is no secret; of secrets, how many there are."""
        values = dataclasses.asdict(self)
        for name in _SECRETS:
            values[f"num_{name}"] = len(values.pop(name))
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _check_text(flag: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{flag}={value!r}: must not be empty")


def _check_texts(flag: str, values: object) -> None:
    if not isinstance(values, tuple):
        raise ConfigError(f"{flag}={values!r}: must be a tuple of names")
    for value in values:
        _check_text(flag, value)


def _check_int(flag: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{flag}={value!r}: must be an integer")
    if not low <= value <= high:
        raise ConfigError(f"{flag}={value}: must be between {low} and {high}")


def _check_seconds(flag: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{flag}={value}: must be between {low} and {high}")


def _check_choice(flag: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{flag}={value!r}: must be one of {', '.join(choices)}")
