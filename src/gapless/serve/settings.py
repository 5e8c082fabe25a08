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
from gapless.multimodal.access import MediaAccess
from gapless.multimodal.limits import DEFAULT_LIMITS, MediaLimits
from gapless.serve.media_options import DEFAULT_PER_PROMPT, PerPrompt, parse_per_prompt
from gapless.serve.routing import Routing

AccessLog = Literal["json", "text", "off"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
ToolCallParser = Literal["auto", "none", "hermes", "llama3", "mistral"]

_MAX_PORT = 65535
_SECRETS = ("api_keys",)
_MEDIA = (
    *("limit_mm_per_prompt", "allowed_local_media_path", "allowed_media_domains", "max_image_bytes"),
    *("max_image_pixels", "max_video_bytes", "max_video_seconds", "max_video_frames"),
    *("max_decoded_pixels", "max_media_bytes"),
)


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
    generation_config: str = "auto"
    """Where sampling values of requests that name none come from: ``auto`` (the model's folder), ``vllm`` or
    ``none`` (nowhere: ``SamplingParams``' defaults), or a folder with a ``generation_config.json``."""
    max_queued_requests: int = 1024
    """Requests accepted beyond those that run; more are answered with 429."""
    max_body_bytes: int = 16 * 2**20
    max_n: int = 128
    """Most choices of one request."""
    drain_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    health_stale_s: float = 30.0
    """Without life in the engine's loop for so long, ``/health`` is a 503. Longer than any step takes."""
    replicas: int = 1
    """Engine processes behind the one HTTP process."""
    routing: Routing = "prefix"
    """Which of them gets a request: the one that holds its prefix, or the one with the least to do."""
    max_replica_restarts: int = 5
    """Deaths in a row after which a replica is started again; then the server goes on without it."""
    enable_cache_reset: bool = False
    """Whether there is ``POST /reset_prefix_cache``."""
    limit_mm_per_prompt: PerPrompt = DEFAULT_PER_PROMPT
    """Most images and videos of one request."""
    allowed_local_media_path: str | None = None
    """The folder whose files a request may name; none: no file is read."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts that media may be fetched from; none: nothing is fetched."""
    max_image_bytes: int = DEFAULT_LIMITS.max_image_bytes
    max_image_pixels: int = DEFAULT_LIMITS.max_image_pixels
    max_video_bytes: int = DEFAULT_LIMITS.max_video_bytes
    max_video_seconds: int = DEFAULT_LIMITS.max_video_seconds
    max_video_frames: int = DEFAULT_LIMITS.max_video_frames
    max_decoded_pixels: int = DEFAULT_LIMITS.max_decoded_pixels
    max_media_bytes: int = 4 * 2**30
    """Of prepared images and videos of all requests that wait or run."""
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
        if parse_per_prompt(self.limit_mm_per_prompt) != self.limit_mm_per_prompt:
            raise ConfigError("limit_mm_per_prompt: make it with parse_per_prompt")
        _check_texts("--allowed-media-domains", self.allowed_media_domains)
        _check_int("--max-media-bytes", self.max_media_bytes, 2**20, 2**40)
        _ = self.media_limits, self.media_access  # they check their parts
        _check_int("--replicas", self.replicas, 1, 64)
        _check_choice("--routing", self.routing, get_args(Routing))
        _check_int("--max-replica-restarts", self.max_replica_restarts, 0, 1000)
        if not isinstance(self.enable_cache_reset, bool):
            raise ConfigError(f"--enable-cache-reset={self.enable_cache_reset!r}: must be true or false")
        _check_choice("--tool-call-parser", self.tool_call_parser, get_args(ToolCallParser))
        _check_text("--generation-config", self.generation_config)
        _check_choice("--access-log", self.access_log, get_args(AccessLog))
        _check_choice("--log-level", self.log_level, get_args(LogLevel))
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together: give both or neither")
        for flag, path in (("--ssl-certfile", self.ssl_certfile), ("--ssl-keyfile", self.ssl_keyfile)):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag}={path}: there is no such file")

    @property
    def media_limits(self) -> MediaLimits:
        return MediaLimits(
            max_image_bytes=self.max_image_bytes,
            max_image_pixels=self.max_image_pixels,
            max_video_bytes=self.max_video_bytes,
            max_video_seconds=self.max_video_seconds,
            max_video_frames=self.max_video_frames,
            max_decoded_pixels=self.max_decoded_pixels,
        )

    @property
    def media_access(self) -> MediaAccess:
        return MediaAccess(local_path=self.allowed_local_media_path, domains=self.allowed_media_domains)

    def to_dict(self) -> dict[str, Any]:
        """Every field that is no secret; of secrets, how many there are."""
        values = dataclasses.asdict(self)
        for name in _SECRETS:
            values[f"num_{name}"] = len(values.pop(name))
        return {name: _shown(value) for name, value in values.items()}


def refuse_media_options(settings: ServerSettings) -> None:
    """For a model without vision. Raises ``ConfigError`` for an option that would do nothing there."""
    for field in dataclasses.fields(settings):
        if field.name in _MEDIA and getattr(settings, field.name) != field.default:
            raise ConfigError(
                f"--{field.name.replace('_', '-')} is about images and videos, and this model takes text "
                "only; leave it out"
            )


def _shown(value: Any) -> Any:
    """As JSON has it: pairs are an object, other tuples a list."""
    if not isinstance(value, tuple):
        return value
    if value and all(isinstance(item, tuple) for item in value):
        return {name: _shown(item) for name, item in value}
    return list(value)


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
