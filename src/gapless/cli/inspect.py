"""``gapless inspect``: the plan for these options, without loading a single weight.

It answers "what would run as which graph, at which sizes, and why" for any model, device and attention
backend, also for those this machine or this build does not have, and for features the engine lacks
(``--feature``). What memory cuts off is known only when an engine starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapless.cli.options import EngineOptions
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.config import EngineConfig
    from gapless.models.base import ModelInfo

_FACTS: dict[str, dict[str, Any]] = {
    "pooling": {"is_pooling": True},
    "mla": {"is_mla": True},
    "cascade_attention": {"uses_cascade": True},
    "no_layer_split": {"has_layer_split": False},
}
"""Facts about a model or a batch that the plan depends on and no rule of the table is about."""


def inspect(
    engine: EngineOptions,
    feature: Annotated[
        list[str] | None,
        typer.Option("--feature", help="A feature to plan with; repeatable. A wrong name lists all."),
    ] = None,
    draft_tokens: Annotated[
        int, typer.Option("--draft-tokens", min=0, max=64, help="Tokens drafted per step (speculation).")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
) -> None:
    """Show which steps would run as which graphs, at which sizes, and why. Loads no weights."""
    facts = explain(engine, features=feature or [], draft_tokens=draft_tokens)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    from gapless.cli.render import make_console, plan_lines

    console = make_console()
    for name in ("model", "device", "attention", "step"):
        console.print(f"{name:<10}{facts[name]}")
    if facts["encoder"] is not None:
        console.print(f"encoder   {_encoder_text(facts['encoder'])}")
    if facts["features"]:
        console.print(f"features  {', '.join(facts['features'])}")
    for line in plan_lines(facts["plan"], every_decision=True):
        console.print(line)
    for phase in ("prefill", "decode"):
        sizes = facts["plan"][phase]["sizes"]
        if sizes:
            console.print(f"\n{phase} sizes, in {facts['plan'][phase]['unit']}:")
            console.print(", ".join(map(str, sizes)), soft_wrap=False, style="dim")


def explain(options: EngineOptions, *, features: list[str], draft_tokens: int = 0) -> dict[str, Any]:
    """The plan and what it follows from, as plain values. Raises ``ConfigError`` and ``ModelError``."""
    from gapless.attention.registry import get_support, select_backend
    from gapless.config import EngineConfig
    from gapless.config_sources import read_config_file
    from gapless.engine.planning import make_plan, max_step_tokens
    from gapless.engine.rules import refuse_divided_encoder, refuse_missing_encoder

    given = {"model": "any", **options.given()}
    from_file = {} if options.config is None else read_config_file(options.config)
    if options.model is None and "model" in from_file:
        del given["model"]
    config = EngineConfig.from_sources(flags=given, config_file=from_file)
    device_type = _device_type(config.device)
    config = config.with_device_defaults(device_type)
    info = _model_info(config)
    if config.model != "any":
        refuse_missing_encoder(config, info)
        refuse_divided_encoder(config, info)
    max_model_len = min(config.max_model_len or info.max_model_len, info.max_model_len)
    backend = config.attention_backend
    if backend == "auto":
        backend = select_backend("auto", device_type=device_type)
    rules, facts = _split_features(features)
    plan = make_plan(
        config,
        info,
        attention=[backend],
        supports_graphs=True,
        max_model_len=max_model_len,
        features=rules,
        uniform_query_len=1 + draft_tokens,
        **facts,
    )
    return {
        "model": f"{info.architecture}, {info.num_layers} layers, {info.max_model_len} positions"
        if config.model != "any"
        else "any decoder (--model names one)",
        "device": device_type,
        "attention": f"{backend}, in full graphs: {get_support(backend).name}",
        "step": f"at most {max_step_tokens(config, max_model_len)} tokens of {config.max_running_requests} "
        "requests",
        "encoder": _encoder(config) if info.is_multimodal else None,
        "features": sorted(features),
        "plan": plan.to_dict(),
    }


def _device_type(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _model_info(config: EngineConfig) -> ModelInfo:
    import torch

    from gapless.models.base import ModelInfo

    if config.model == "any":
        return ModelInfo(
            architecture="any",
            num_layers=1,
            hidden_size=1,
            num_heads=1,
            num_kv_heads=1,
            head_size=1,
            vocab_size=1,
            max_model_len=2**20,
            dtype=torch.float32,
        )
    from gapless.models.registry import read_model_info
    from gapless.parallel.shard import Shard

    return read_model_info(config.model, shard=Shard(size=config.tensor_parallel_size))


def _encoder(config: EngineConfig) -> dict[str, Any]:
    """What the graphs of a model's vision encoder would be; sizes are captured at start-up."""
    from gapless.engine.media_setup import encoder_options
    from gapless.graphs.encoder_options import EncoderMode
    from gapless.models.json_file import read_json
    from gapless.models.vl_config import read_vl_config

    vision = read_vl_config(read_json(Path(config.model) / "config.json"), source=config.model)
    options = encoder_options(config)
    ladder = options.ladder(granule=vision.merge_size**2)
    return {
        "mode": str(options.mode),
        "sizes": list(ladder) if options.mode is EncoderMode.BUDGET else [],
        "max_tokens": None if options.mode is EncoderMode.OFF else ladder[-1],
    }


def _encoder_text(encoder: dict[str, Any]) -> str:
    if encoder["max_tokens"] is None:
        return "off"
    sizes = ", ".join(map(str, encoder["sizes"])) or f"any size up to {encoder['max_tokens']}"
    return f"{encoder['mode']}: {sizes} patches"


def _split_features(names: list[str]) -> tuple[Any, dict[str, Any]]:
    """Features that rules are about, and facts that ``resolve`` takes directly."""
    from gapless.engine.rules import Feature, parse_features

    known = [*Feature, *_FACTS]
    for name in names:
        if name not in known:
            raise ConfigError(f"--feature {name}: no such feature; choose from {', '.join(known)}")
    facts: dict[str, Any] = {}
    for name in names:
        facts |= _FACTS.get(name, {})
    return parse_features(name for name in names if name not in _FACTS), facts
