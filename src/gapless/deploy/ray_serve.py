"""A Ray Serve application: engines on the machines of a cluster behind the HTTP API of ``gapless serve``.

Two deployments. ``EngineReplica`` runs our engine process, with one or several GPUs of one machine (a
placement group packs them strictly), and is what Ray counts, heals, drains and scales. ``HttpSide`` runs the
very application of ``gapless serve`` over a handle on the first: prompts are tokens only behind it, which is
what lets requests be routed by their prefix. ``build`` makes the application from a flat mapping, for
``gapless deploy ray`` and for Serve config files (``import_path: gapless.deploy.ray_serve:build``). Nothing
here imports Ray before it is needed. Read ``ray_client.py`` and ``ray_router.py`` next.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from gapless.deploy.ray_options import RayOptions, split_options
from gapless.deploy.wire import FAULTS, Part, encode, fault_of
from gapless.env import read_env
from gapless.errors import ConfigError
from gapless.serve.client import EngineDeadError
from gapless.serve.engine_process import EngineOpener, OpenModel
from gapless.serve.messages import EmbedRequest, GenerateRequest
from gapless.serve.options import ServeOptions
from gapless.serve.process_client import ProcessClient
from gapless.serve.settings import ServerSettings

ROUTER = "gapless.deploy.ray_router.PrefixAwareRouter"
HEALTH_PERIOD_S = 5.0
DRAIN_LOOK_S = 0.5
"""How often a draining replica looks whether it is done."""
EXIT_ENGINE_DIED = 1
CLOSE_LIMIT_S = 1.0
START_ATTEMPTS = 2
QUIET = {"enable_access_log": False}
"""For Ray: the application writes its own access log."""

logger = logging.getLogger(__name__)
_made_apps: list[Any] = []
"""In a process of ``HttpSide``: the application, between its making and Ray's taking it."""


class EngineReplica:
    """One engine. Ray Serve makes it where the resources are, and asks ``check_health``."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, open_engine: EngineOpener, client_options: Mapping[str, Any]
    ) -> None:
        # A replica takes what Ray sends: limits are Ray's.
        self._client = ProcessClient(open_engine, max_queued_requests=2**20, **client_options)
        await self._client.start()
        self._watcher = asyncio.create_task(self._end_with_engine())
        # What Ray awaits once a replica has drained. It asks the object for it; Python, which would drop the
        # coroutine, asks the class.
        self.__del__ = self._close

    async def generate(self, request: GenerateRequest) -> AsyncIterator[bytes]:
        """Parts of the answer. Ray cancels this when the caller has gone, which aborts the request."""
        stream = self._client.generate(request)
        try:
            async for deltas in stream:
                yield encode(Part(deltas))
        except EngineDeadError:
            await asyncio.Event().wait()  # this process ends now, and Ray tells the caller
        except FAULTS as error:
            yield encode(Part(fault=fault_of(error)))
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def embed(self, request: EmbedRequest) -> bytes:
        try:
            return encode(Part(values=await self._client.embed(request)))
        except EngineDeadError:
            await asyncio.Event().wait()
            raise
        except FAULTS as error:
            return encode(Part(fault=fault_of(error)))

    async def info(self) -> bytes:
        return msgspec.msgpack.encode(self._client.info)

    async def status(self) -> dict[str, Any]:
        """What ``ReplicaView`` needs."""
        from ray import get_runtime_context, serve

        return {
            "replica": serve.get_replica_context().replica_id.unique_id,
            "node": get_runtime_context().get_node_id(),
            "pid": self._client.pid,
            "is_healthy": self._client.is_healthy,
            "step_age_s": self._client.step_age_s(),
            "num_inside": self._client.num_inside,
            "stats": self._client.stats(),
        }

    async def report(self) -> dict[str, Any]:
        from ray import serve

        report = await self._client.report()
        return {"replica": serve.get_replica_context().replica_id.unique_id, "report": report}

    async def reset_prefix_cache(self) -> None:
        await self._client.reset_prefix_cache()

    async def check_health(self) -> None:
        """An exception, and Ray replaces the replica: a silent engine may not come back by itself."""
        if not self._client.is_healthy:
            raise RuntimeError("the engine shows no life")

    async def _close(self) -> None:
        """Killed with its engine, a replica would leave the folder of its socket files behind."""
        self._watcher.cancel()
        await self._client.close()

    async def _end_with_engine(self) -> None:
        """A replica without its engine would look idle, and draw requests that it cannot answer."""
        logger.error("this replica ends: %s", await self._client.wait_dead())
        with contextlib.suppress(TimeoutError):  # nobody else removes its socket files
            await asyncio.wait_for(self._client.close(), CLOSE_LIMIT_S)
        os._exit(EXIT_ENGINE_DIED)


class HttpSide:
    """The application over a handle on the engines. Wrapped by ``serve.ingress``, which serves it."""

    async def __init__(self, engines: Any, options: ServeOptions) -> None:  # type: ignore[misc]
        from gapless.deploy.ray_client import RayClient
        from gapless.models.sources import open_tokenizer
        from gapless.multimodal.opening import open_processor
        from gapless.serve.app import create_app

        model = options.engine.model
        tokenizer = open_tokenizer(model)
        processor = open_processor(model, tokenizer)
        if processor is not None:
            from gapless.multimodal.overrides import override

            processor = override(processor, options.engine.mm_processor_kwargs)
        client = RayClient(engines)
        await client.start()
        _made_apps.append(create_app(client, options.server, tokenizer, processor))


def take_app() -> Any:
    """Called by Ray in the process of an ``HttpSide``, right after it has been made."""
    return _made_apps.pop()


def build(args: Mapping[str, Any]) -> Any:
    """The application, to be given to ``serve.run``; ``args``: see ``ray_options.py``.

    Raises ``ConfigError``.
    """
    require_ray()
    ray_options, options = split_options(args, read_env())
    return make_application(ray_options, options)


def make_application(ray_options: RayOptions, options: ServeOptions) -> Any:
    """From checked options."""
    from ray import serve

    settings, engine = options.server, options.engine
    num_gpus = ray_options.gpus_per_replica
    if num_gpus is None:
        num_gpus = _num_gpus(engine.device, engine.tensor_parallel_size)
    engines = engine_deployment(
        OpenModel(config=engine), ray_options, settings, num_gpus=num_gpus, block_size=engine.block_size
    )
    http_side = serve.deployment(
        serve.ingress(take_app)(HttpSide),
        name="http",
        num_replicas=ray_options.http_replicas,
        # Everything that may run or wait, and health probes besides: limits are those of the engines.
        max_ongoing_requests=4
        * (settings.max_queued_requests + ray_options.bounds[1] * ray_options.max_ongoing_requests),
        graceful_shutdown_timeout_s=settings.drain_s,
        logging_config=QUIET,
    )
    return http_side.bind(engines, options)


def engine_deployment(
    open_engine: EngineOpener,
    ray_options: RayOptions,
    settings: ServerSettings,
    *,
    num_gpus: int,
    block_size: int = 16,
) -> Any:
    """The engines alone, bound; what has a handle on them may be a ``RayClient``."""
    from ray import serve

    deployment = serve.deployment(
        EngineReplica,
        name="engine",
        logging_config=QUIET,
        **_few_attempts(serve.deployment),
        **engine_needs(ray_options, settings, num_gpus=num_gpus),
        **_routing(settings.routing, block_size),
    )
    return deployment.bind(
        open_engine, {"log_level": settings.log_level, "stalled_after_s": settings.health_stale_s}
    )


def engine_needs(ray_options: RayOptions, settings: ServerSettings, *, num_gpus: int) -> dict[str, Any]:
    """How many engines, what each gets of a machine, and its limits, as options of a deployment."""
    least, most = ray_options.bounds
    if least == most:
        scale: dict[str, Any] = {"num_replicas": least}
    else:
        scale = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "target_ongoing_requests": ray_options.target_ongoing_requests,
            }
        }
    bundle = {"CPU": ray_options.cpus_per_replica} | ({"GPU": num_gpus} if num_gpus else {})
    return {
        **scale,
        "ray_actor_options": {"num_cpus": ray_options.cpus_per_replica, "num_gpus": num_gpus},
        # One bundle is never divided: all GPUs of a replica, and its processes, are on one machine.
        "placement_group_bundles": [bundle],
        "placement_group_strategy": "STRICT_PACK",
        "max_ongoing_requests": ray_options.max_ongoing_requests,
        "max_queued_requests": settings.max_queued_requests,
        "graceful_shutdown_timeout_s": settings.drain_s,
        "graceful_shutdown_wait_loop_s": DRAIN_LOOK_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": max(HEALTH_PERIOD_S, settings.health_stale_s),
    }


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed: pip install 'gapless[ray]'")


def _routing(routing: str, block_size: int) -> dict[str, Any]:
    """Ray's own choice, two random replicas compared, where its version lets nobody else choose."""
    if routing == "load":
        return {}
    if importlib.util.find_spec("ray.serve.request_router") is None:
        logger.warning("this version of Ray has no request router API: requests go to the less busy of two")
        return {}
    from ray.serve.config import RequestRouterConfig

    return {
        "request_router_config": RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"block_size": block_size}
        )
    }


def _few_attempts(deployment: Callable[..., Any]) -> dict[str, Any]:
    """A wrong option stays wrong; Ray would try twenty times. Versions that lack the option do."""
    name = "max_constructor_retry_count"
    return {name: START_ATTEMPTS} if name in inspect.signature(deployment).parameters else {}


def _num_gpus(device: str, tp: int) -> int:
    """``auto`` looks at the cluster as it is now: say ``device: cuda`` where GPUs come later."""
    import ray

    if device == "cpu":
        return 0
    if device == "cuda":
        return tp
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1
    return tp if has_gpus else 0
