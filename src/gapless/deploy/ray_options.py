"""What a Ray Serve application is told: how many replicas, what each needs, and how it is served.

One flat mapping holds these and the options of ``gapless serve`` (the names of its config file), so that the
arguments of a Serve config file, a TOML file and the command line say the same things. Invariant: whatever
can be found wrong without a cluster is found here. Read ``ray_serve.py`` for what becomes of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gapless.env import Env
from gapless.errors import ConfigError
from gapless.serve.options import ServeOptions, resolve_options

MAX_REPLICAS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions:
    """Beside the engine's and the server's own. Raises ``ConfigError`` for values out of range."""

    replicas: str = "1"
    """How many engines: ``N``, or ``MIN..MAX`` to follow the load."""
    http_replicas: int = 1
    """Processes for HTTP, templates and tokenising."""
    target_ongoing_requests: int = 32
    """Requests per replica at which a ``MIN..MAX`` deployment is content."""
    max_ongoing_requests: int = 256
    """Requests that a replica holds at most; others wait where they came in."""
    cpus_per_replica: float = 1.0
    gpus_per_replica: int | None = None
    """None: as many as the model is split over, on a cluster with GPUs; 0: the CPU."""
    app_name: str = "gapless"

    def __post_init__(self) -> None:
        _ = self.bounds
        for name in ("http_replicas", "target_ongoing_requests", "max_ongoing_requests"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_REPLICAS:
                raise ConfigError(f"{name}={value!r}: must be an integer between 1 and {MAX_REPLICAS}")
        if isinstance(self.cpus_per_replica, bool) or not 0 < float(self.cpus_per_replica) <= 1024:
            raise ConfigError(f"cpus_per_replica={self.cpus_per_replica}: must be above 0 and at most 1024")
        gpus = self.gpus_per_replica
        if gpus is not None and (not isinstance(gpus, int) or not 0 <= gpus <= 64):
            raise ConfigError(f"gpus_per_replica={gpus!r}: must be an integer between 0 and 64")
        if not re.fullmatch(r"[\w-]{1,64}", self.app_name):
            raise ConfigError(f"app_name={self.app_name!r}: letters, digits, _ and -, at most 64")

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most replicas."""
        match = re.fullmatch(r"(\d{1,5})(?:\.\.(\d{1,5}))?", str(self.replicas))
        if match is None:
            raise ConfigError(f"replicas={self.replicas}: a number, or MIN..MAX such as 1..4")
        least, most = int(match[1]), int(match[2] or match[1])
        if not 1 <= least <= most <= MAX_REPLICAS:
            raise ConfigError(f"replicas={self.replicas}: must be 1 <= MIN <= MAX <= {MAX_REPLICAS}")
        return least, most


RAY_FIELDS = tuple(field.name for field in dataclasses.fields(RayOptions))


def split_options(
    args: Mapping[str, Any],
    env: Env | None = None,
    *,
    engine_flags: Mapping[str, Any] | None = None,
    server_flags: Mapping[str, Any] | None = None,
) -> tuple[RayOptions, ServeOptions]:
    """``args``: names as in a config file of ``gapless serve``, and the fields of ``RayOptions``; flags of a
    command line win over them."""
    plain = {name.lstrip("-").replace("-", "_"): value for name, value in args.items()}
    ours = {name: plain.pop(name) for name in RAY_FIELDS if name in plain}
    if isinstance(ours.get("replicas"), int):
        ours["replicas"] = str(ours["replicas"])
    if not (engine_flags or {}).get("model") and not {"model", "model_path"} & plain.keys():
        raise ConfigError("no model: give model_path, a folder that every machine has")
    options = resolve_options(
        engine_flags=engine_flags or {}, server_flags=server_flags or {}, config_file=plain, env=env
    )
    server = options.server
    if not server.served_model_names:
        server = dataclasses.replace(server, served_model_names=(options.engine.model,))
    return RayOptions(**ours), dataclasses.replace(options, server=server)
