"""``gapless serve``: an OpenAI-compatible server, started from the same options as everything else.

It checks every option before anything is loaded, prints what was resolved and the plan with its reasons, and
then belongs to ``serve/server.py``. All of it goes to standard error; the access log is the server's own.
Read ``serve/options.py`` for where options come from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapless.cli.defaults import server_defaults
from gapless.cli.options import EngineOptions
from gapless.cli.progress import show_progress
from gapless.config_sources import read_config_file
from gapless.env import read_env
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.serve.messages import EngineInfo
    from gapless.serve.options import ServeOptions

_NEEDED = ("fastapi", "uvicorn", "pydantic", "zmq", "msgspec", "prometheus_client")


def _option(*names: str, help: str, metavar: str | None = None, panel: str = "Server") -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """What the HTTP side is told; names as in ``ServerSettings``, or as there aliased."""

    host: Annotated[str | None, _option("--host", help="Address to listen on.")] = None
    port: Annotated[int | None, _option("--port", help="Port to listen on; 0: any free one.")] = None
    served_model_name: Annotated[
        list[str] | None,
        _option("--served-model-name", help="The model's name for clients; repeatable.", metavar="NAME"),
    ] = None
    api_key: Annotated[
        list[str] | None,
        _option(
            "--api-key", help="Ask callers for this key; repeatable. Also GAPLESS_API_KEY.", metavar="KEY"
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        _option("--chat-template", help="A Jinja template, or a file with one.", metavar="FILE"),
    ] = None
    max_queued_requests: Annotated[
        int | None,
        _option("--max-queued-requests", help="Requests that may wait; more get 429.", panel="Limits"),
    ] = None
    max_body_bytes: Annotated[
        int | None, _option("--max-body-bytes", help="Largest request body.", panel="Limits")
    ] = None
    tool_call_parser: Annotated[
        str | None,
        _option(
            "--tool-call-parser",
            help="How the model writes tool calls: auto (see its template), hermes, llama3, mistral, none.",
            metavar="NAME",
        ),
    ] = None
    generation_config: Annotated[
        str | None,
        _option(
            "--generation-config",
            help="Sampling values of requests that name none: auto (generation_config.json of the model's "
            "folder), none or vllm, or another folder.",
            metavar="auto|none|FOLDER",
        ),
    ] = None
    max_n: Annotated[int | None, _option("--max-n", help="Most choices in one request.", panel="Limits")] = (
        None
    )
    drain_seconds: Annotated[
        float | None,
        _option("--drain-seconds", help="How long requests may go on after SIGTERM.", panel="Limits"),
    ] = None
    health_stale_seconds: Annotated[
        float | None,
        _option(
            "--health-stale-seconds",
            help="An engine that shows no life for so long makes /health a 503.",
            panel="Limits",
        ),
    ] = None
    limit_mm_per_prompt: Annotated[
        str | None,
        _option(
            "--limit-mm-per-prompt",
            help="Most images and videos of a request, as image=16,video=1 or JSON.",
            panel="Images",
            metavar="LIMITS",
        ),
    ] = None
    allowed_local_media_path: Annotated[
        str | None,
        _option(
            "--allowed-local-media-path",
            help="Folder whose files requests may name by file: URLs.",
            panel="Images",
            metavar="FOLDER",
        ),
    ] = None
    allowed_media_domains: Annotated[
        list[str] | None,
        _option(
            "--allowed-media-domains",
            help="Host that images and videos may be fetched from; repeatable.",
            panel="Images",
            metavar="HOST",
        ),
    ] = None
    max_image_bytes: Annotated[
        int | None, _option("--max-image-bytes", help="Largest image file.", panel="Images")
    ] = None
    max_image_pixels: Annotated[
        int | None,
        _option("--max-image-pixels", help="Most pixels of an image or frame.", panel="Images"),
    ] = None
    max_video_bytes: Annotated[
        int | None, _option("--max-video-bytes", help="Largest video file.", panel="Images")
    ] = None
    max_video_seconds: Annotated[
        int | None, _option("--max-video-seconds", help="Longest video.", panel="Images")
    ] = None
    max_video_frames: Annotated[
        int | None,
        _option("--max-video-frames", help="Most frames taken from a video.", panel="Images"),
    ] = None
    max_decoded_pixels: Annotated[
        int | None,
        _option(
            "--max-decoded-pixels",
            help="Most pixels of all images and frames of a request.",
            panel="Images",
        ),
    ] = None
    max_media_bytes: Annotated[
        int | None,
        _option(
            "--max-media-bytes",
            help="Prepared images of all requests that wait or run; more get 429.",
            panel="Images",
        ),
    ] = None
    replicas: Annotated[
        int | None,
        _option(
            "--replicas",
            help="Engine processes, on GPUs of their own, behind this one address.",
            panel="Replicas",
        ),
    ] = None
    routing: Annotated[
        str | None,
        _option(
            "--routing",
            help="Which replica gets a request: prefix (who holds its beginning) or load (least to do).",
            panel="Replicas",
            metavar="NAME",
        ),
    ] = None
    max_replica_restarts: Annotated[
        int | None,
        _option(
            "--max-replica-restarts",
            help="How often in a row a dead replica is started again.",
            panel="Replicas",
        ),
    ] = None
    enable_cache_reset: Annotated[
        bool | None, _option("--enable-cache-reset", help="Offer POST /reset_prefix_cache.")
    ] = None
    ssl_certfile: Annotated[
        str | None, _option("--ssl-certfile", help="Certificate, for HTTPS.", metavar="FILE")
    ] = None
    ssl_keyfile: Annotated[str | None, _option("--ssl-keyfile", help="Its key.", metavar="FILE")] = None
    root_path: Annotated[
        str | None, _option("--root-path", help="Prefix that a reverse proxy takes off.", metavar="PATH")
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        _option("--cors-origin", help="Origin whose pages may call; repeatable.", metavar="URL"),
    ] = None
    access_log: Annotated[
        str | None, _option("--access-log", help="json, text or off.", panel="Logging", metavar="NAME")
    ] = None
    log_level: Annotated[
        str | None,
        _option(
            "--log-level",
            help="debug, info, warning, error or critical. Also GAPLESS_LOGGING_LEVEL.",
            panel="Logging",
            metavar="NAME",
        ),
    ] = None

    default_texts = staticmethod(server_defaults)

    def given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value not in (None, [])}


def serve(
    engine: EngineOptions,
    server: ServerOptions,
    served: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model, which may then be left out.")
    ] = None,
) -> None:
    """Serve a model over HTTP with the OpenAI API."""
    _require_extra()
    from gapless.serve.options import resolve_options

    if served is not None:
        if engine.model not in (None, served):
            raise ConfigError(f"{served} and --model={engine.model} are two models; give only one")
        engine = dataclasses.replace(engine, model=served)
    if engine.model is None and engine.config is None:
        raise ConfigError("no model: name smollm2, a model folder, or a .gguf file")
    options = resolve_options(
        engine_flags=engine.given(),
        server_flags=server.given(),
        config_file=None if engine.config is None else read_config_file(engine.config),
        env=read_env(),
    )
    code = _run(options)
    if code:
        raise typer.Exit(code)


def _run(options: ServeOptions) -> int:
    from gapless.models.sources import open_tokenizer
    from gapless.multimodal.opening import open_processor
    from gapless.serve.app import create_app
    from gapless.serve.client import EngineDeadError
    from gapless.serve.engine_process import OpenModel
    from gapless.serve.placement import place_replicas
    from gapless.serve.server import Announcements, run_server
    from gapless.serve.settings import refuse_media_options

    settings = options.server
    if not settings.served_model_names:
        settings = dataclasses.replace(settings, served_model_names=(options.engine.model,))
    _set_up_logging(settings.log_level)
    environments = None
    if settings.replicas > 1:
        environments = place_replicas(
            settings.replicas, gpus_each=options.engine.tensor_parallel_size, device=options.engine.device
        )
    tokenizer = open_tokenizer(options.engine.model)
    processor = open_processor(options.engine.model, tokenizer)
    if processor is None:
        refuse_media_options(settings)
    else:
        from gapless.multimodal.overrides import override  # needs Pillow, as has the processor

        processor = override(processor, options.engine.mm_processor_kwargs)
    with contextlib.ExitStack() as bars:

        def on_ready(info: EngineInfo) -> None:
            bars.close()
            _print_start(info, settings.to_dict())

        announce = Announcements(
            progress=bars.enter_context(show_progress()),
            on_ready=on_ready,
            on_serving=lambda address: print(_where(address), file=sys.stderr, flush=True),
        )
        try:
            return run_server(
                OpenModel(config=options.engine, logs_plan=False),
                lambda client: create_app(client, settings, tokenizer, processor),
                settings,
                announce,
                environments=environments,
            )
        except EngineDeadError as error:
            print(f"gapless: {error}", file=sys.stderr)
            return 1


def _where(address: str) -> str:
    return f"serving at {address} (clients: {address}/v1, browsers: {address}/dashboard)"


def _print_start(info: EngineInfo, server: dict[str, Any]) -> None:
    """What was resolved, then the plan with every decision's reason."""
    from gapless.cli.render import make_console, plan_lines

    console = make_console(sys.stderr)
    values = {**info.config, **server, "device": info.device, "max_model_len": info.max_model_len}
    graphs = values.pop("graphs", {})
    given = {name: value for name, value in {**values, **graphs}.items() if value not in (None, [], "")}
    console.print("config    " + ", ".join(f"{name}={value}" for name, value in given.items()), style="dim")
    for line in plan_lines(info.plan, every_decision=True):
        console.print(line, style="dim")
    tokens = (info.num_blocks - 1) * info.block_size
    console.print(f"ready in {info.startup_s:.1f} s: {info.model}, KV cache of {tokens} tokens", style="dim")


def _set_up_logging(level: str) -> None:
    """Ours and uvicorn's, in one form, on standard error; lines of the access log are whole by themselves."""
    ours = logging.getLogger("gapless")
    ours.setLevel(level.upper())
    access = logging.getLogger("gapless.access")
    access.propagate = False
    access.handlers = [logging.StreamHandler()]
    uvicorn = logging.getLogger("uvicorn")
    uvicorn.setLevel(level.upper())
    uvicorn.propagate = False
    uvicorn.handlers = list(ours.handlers)
    if level == "info":  # its life is told by us; the name is uvicorn's own, not a sign of trouble
        logging.getLogger("uvicorn.error").setLevel("WARNING")


def _require_extra() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the server needs packages that are not installed ({', '.join(missing)}): "
            "pip install 'gapless[serve]'"
        )
