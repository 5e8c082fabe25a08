"""From an engine's options to an engine that is ready to serve, with the facts the HTTP process wants.

The counterpart of ``LLM.__init__`` for the server: it opens the same engine and puts the same core around it.
Read ``engine/build.py`` for what takes the time.
"""

from __future__ import annotations

import dataclasses
import time

from gapless.config import EngineConfig
from gapless.engine.build import OpenedEngine, open_engine
from gapless.engine.core import EngineCore
from gapless.env import read_torchrun
from gapless.errors import ConfigError
from gapless.serve.engine_process import ReportProgress, ServedEngine
from gapless.serve.messages import EngineInfo


def open_served_model(config: EngineConfig, progress: ReportProgress) -> ServedEngine:
    """Load, plan, capture. Errors are those of ``open_engine``."""
    if config.tensor_parallel_size > 1 and read_torchrun() is not None:
        raise ConfigError("gapless serve starts its ranks itself: run it without torchrun")
    start = time.perf_counter()
    opened = open_engine(config, progress)
    loaded = opened.loaded
    core = EngineCore(
        opened.runner,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.info.eos_token_ids,
        seed=opened.config.seed,
        enable_prefix_caching=opened.config.enable_prefix_caching,
        makes_text=not loaded.info.is_pooling,
    )
    return ServedEngine(core=core, info=_info(opened, startup_s=time.perf_counter() - start))


def _info(opened: OpenedEngine, *, startup_s: float) -> EngineInfo:
    runner, config, loaded = opened.runner, opened.config, opened.loaded
    return EngineInfo(
        model=config.model,
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        max_running_requests=runner.max_num_reqs,
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        eos_token_ids=list(loaded.info.eos_token_ids),
        device=runner.report()["startup"]["device"],
        takes_media=runner.media is not None,
        config=dataclasses.asdict(config),
        plan=runner.plan.to_dict(),
        startup_s=round(startup_s, 3),
    )
