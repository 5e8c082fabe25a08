"""``gapless deploy ray``: a model on a Ray cluster, behind the same HTTP API as ``gapless serve``.

Without an address a cluster of this machine is made, which ends with the command; with one the application is
handed over and stays. Options of the server that have no flag here stand in the config file. Read
``deploy/ray_serve.py`` for what is deployed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from gapless.cli.defaults import cluster_defaults
from gapless.cli.options import Command, EngineOptions, expand
from gapless.config_sources import read_config_file
from gapless.env import read_env

deploy = typer.Typer(name="deploy", help="Run a model on several machines.")


def _option(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel="Cluster")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Names as in ``RayOptions``, and where to listen."""

    replicas: Annotated[
        str | None, _option("--replicas", help="Engines: N, or MIN..MAX to follow the load.", metavar="N")
    ] = None
    http_replicas: Annotated[
        int | None, _option("--http-replicas", help="Processes for HTTP and tokenising.")
    ] = None
    target_ongoing_requests: Annotated[
        int | None,
        _option("--target-ongoing-requests", help="Requests per engine at which MIN..MAX is content."),
    ] = None
    max_ongoing_requests: Annotated[
        int | None, _option("--max-ongoing-requests", help="Most requests in one engine.")
    ] = None
    cpus_per_replica: Annotated[
        float | None, _option("--cpus-per-replica", help="CPUs that each engine reserves.")
    ] = None
    gpus_per_replica: Annotated[int | None, _option("--gpus-per-replica", help="GPUs of each engine.")] = None
    app_name: Annotated[
        str | None, _option("--app-name", help="The application's name in Ray.", metavar="NAME")
    ] = None
    routing: Annotated[
        str | None,
        _option(
            "--routing",
            help="prefix (who holds the prompt's beginning) or load (Ray's own choice).",
            metavar="NAME",
        ),
    ] = None
    host: Annotated[str | None, _option("--host", help="Address to listen on.")] = None
    port: Annotated[int | None, _option("--port", help="Port to listen on.")] = None
    address: Annotated[
        str | None,
        _option("--address", help="Of a running cluster, or auto; none: one on this machine.", metavar="A"),
    ] = None

    default_texts = staticmethod(cluster_defaults)

    def given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@deploy.callback()
def _group() -> None:
    """Keeps ``ray`` a command of its own while it is the only one."""


def _ray(engine: EngineOptions, cluster: ClusterOptions) -> None:
    """Serve a model on a Ray cluster."""
    from gapless.deploy.ray_options import RAY_FIELDS, split_options
    from gapless.deploy.ray_serve import make_application, require_ray

    given = cluster.given()
    address = given.pop("address", None)
    args = {} if engine.config is None else dict(read_config_file(engine.config))
    args |= {name: given.pop(name) for name in RAY_FIELDS if name in given}
    ray_options, options = split_options(args, read_env(), engine_flags=engine.given(), server_flags=given)
    require_ray()
    import ray
    from ray import serve

    ray.init(address=address, include_dashboard=False if address is None else None)
    settings = options.server
    serve.start(http_options={"host": settings.host, "port": settings.port})
    try:
        serve.run(make_application(ray_options, options), name=ray_options.app_name, route_prefix="/")
    except RuntimeError as error:  # all that Serve says; the reason is a traceback within
        if address is None:
            serve.shutdown()
            ray.shutdown()
        print(f"gapless: {_reason(str(error))}; the log has more", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"serving at http://{settings.host}:{settings.port}", file=sys.stderr, flush=True)
    if address is not None:
        print(f"it stays on the cluster; `serve delete {ray_options.app_name}` ends it", file=sys.stderr)
        return
    try:
        _wait_for_signal()
    finally:
        serve.shutdown()
        ray.shutdown()


def _reason(text: str) -> str:
    """The line of a traceback that says what is wrong, if there is one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = [line for line in lines if "Error: " in line]
    return (reasons or lines or ["the application could not start"])[-1]


def _wait_for_signal() -> None:
    import signal

    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    with contextlib.suppress(InterruptedError):
        while not received:
            signal.pause()


deploy.command("ray", cls=Command)(expand(_ray))
