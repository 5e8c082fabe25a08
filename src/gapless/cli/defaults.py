"""What an option is when nobody gives it, for ``--help``.

Options of the command line default to None, "not given", because a file or the environment may give them. The
true defaults are those of the config classes, so they are read from there, and only when help is printed: the
classes need not be imported to run a command. Invariant: no default is written here that a config class
holds; words stand only for those that are found out at start-up. Read ``options.py`` for the options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from gapless.config_sources import ALIASES

FOUND_OUT = {
    "max_model_len": "the longest that the model was made for",
    "max_total_tokens": "as many as fit",
    "prefill_max": "the largest step",
    "decode_max": "the most requests of a step",
    "prefill_sizes": "chosen up to the largest",
    "decode_sizes": "chosen up to the largest",
    "tc_compiler": "eager",
    "vit_cuda_graph_mode": "budget",
    "vit_cuda_graph_budgets": "chosen up to the largest",
    "mm_embedding_cache_tokens": "8192",
    "mm_processor_kwargs": "those of the model's folder",
    "served_model_names": "what --model says",
    "gpus_per_replica": "as many as --tp",
}
"""For fields whose default says "not given"."""
_DEVICES = ("cuda", "cpu")
_NOT_GIVEN = (None, (), "")


def engine_defaults(names: Iterable[str]) -> dict[str, str]:
    """Of the options among ``names`` that have one."""
    from gapless.config import EngineConfig, GraphConfig

    config = EngineConfig(model="-")
    values = _values(GraphConfig()) | _values(config) | _later_defaults()
    del values["model"]
    by_device = {device: _values(config.with_device_defaults(device)) for device in _DEVICES}
    texts: dict[str, str | None] = {}
    for name in names:
        field = ALIASES.get(name, name)
        if field == "device":
            texts[name] = config.device
            continue
        on_gpu, on_cpu = (by_device[device].get(field) for device in _DEVICES)
        if on_gpu != on_cpu:
            texts[name] = f"{'measured' if on_gpu is None else on_gpu} on a GPU, {on_cpu} on a CPU"
        else:
            texts[name] = _text(field, values.get(field))
    return _said(texts)


def server_defaults(names: Iterable[str]) -> dict[str, str]:
    from gapless.serve.options import SERVER_ALIASES
    from gapless.serve.settings import ServerSettings

    values = _values(ServerSettings())
    fields = {name: SERVER_ALIASES.get(name, name) for name in names}
    return _said({name: _text(field, values.get(field)) for name, field in fields.items()})


def cluster_defaults(names: Iterable[str]) -> dict[str, str]:
    """Where both classes have a field, the cluster's counts."""
    from gapless.deploy.ray_options import RayOptions

    names = list(names)
    values = _values(RayOptions())
    return server_defaults(names) | _said({n: _text(n, values[n]) for n in names if n in values})


def _later_defaults() -> dict[str, Any]:
    """Those that other modules fill in."""
    from gapless.graphs.encoder_options import EncoderOptions

    return {"vit_cuda_graph_max_tokens": EncoderOptions().max_tokens}


def _values(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _text(field: str, value: Any) -> str | None:
    if value in _NOT_GIVEN:
        return FOUND_OUT.get(field)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(f"{name}={number}" for name, number in value)
    if field.endswith("_bytes") and value % 2**20 == 0:
        return f"{value // 2**20} MiB" if value % 2**30 else f"{value // 2**30} GiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _said(texts: Mapping[str, str | None]) -> dict[str, str]:
    return {name: text for name, text in texts.items() if text is not None}
