"""What an engine sets aside and makes for a vision encoder, as far as a CPU can tell."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from media_engine import NamedEncoder, open_media_engine

from gapless.config import EngineConfig
from gapless.engine.build import _Build
from gapless.engine.embedding_cache import num_bytes_of
from gapless.engine.media_setup import (
    DEFAULT_CACHE_TOKENS,
    embedding_cache_bytes,
    encoder_options,
    largest_item,
    make_encoder,
)
from gapless.errors import ModelError
from gapless.graphs.device import get_device
from gapless.graphs.encoder import EncoderMode
from gapless.graphs.report import StepLog
from gapless.models.registry import LoadedModel, load_model
from vl_checkpoints import write_vl_folder


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_vl_folder(tmp_path_factory.mktemp("vl"), request.param, has_weights=False)
    return load_model(str(folder), device=torch.device("cpu"), load_format="dummy")


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="m", **options)


@pytest.mark.parametrize(
    ("options", "mode", "max_tokens", "budgets"),
    [
        ({}, EncoderMode.OFF, 8192, None),
        ({"enable_vit_cuda_graph": True}, EncoderMode.BUDGET, 8192, None),
        ({"enable_vit_cuda_graph": True, "vit_cuda_graph_max_tokens": 96}, EncoderMode.BUDGET, 96, None),
        (
            {"enable_vit_cuda_graph": True, "vit_cuda_graph_budgets": (64, 512)},
            EncoderMode.BUDGET, 512, (64, 512),
        ),
        ({"enable_vit_cuda_graph": True, "vit_cuda_graph_mode": "exact"}, EncoderMode.EXACT, 8192, None),
    ],
)  # fmt: skip
def test_options_of_an_engine_are_those_of_its_encoder(
    options: dict[str, Any], mode: EncoderMode, max_tokens: int, budgets: tuple[int, ...] | None
) -> None:
    made = encoder_options(config(**options))
    assert (made.mode, made.max_tokens, made.budgets) == (mode, max_tokens, budgets)


@pytest.mark.parametrize("tokens", [None, 0, 7])
def test_the_embedding_cache_holds_as_many_rows_as_it_is_said_to(
    loaded: LoadedModel, tokens: int | None
) -> None:
    item = largest_item(config(), loaded)
    made = NamedEncoder(loaded.info).rows_of(item)
    row_bytes = num_bytes_of(made) // item.num_tokens
    wanted = DEFAULT_CACHE_TOKENS if tokens is None else tokens
    held = embedding_cache_bytes(config(mm_embedding_cache_tokens=tokens), loaded.info)
    assert held == wanted * row_bytes


def test_the_largest_run_is_that_of_the_largest_image_or_of_a_whole_pack(loaded: LoadedModel) -> None:
    assert loaded.processor is not None
    small = config(enable_vit_cuda_graph=True, vit_cuda_graph_max_tokens=4)
    item = largest_item(small, loaded)
    assert math.prod(item.grid_thw) == item.num_patches == 4 * item.num_tokens
    most = 4 * (loaded.max_model_len - 1)  # a limit on frames does not bound a video
    if loaded.processor.video.limits_hold_for == "video":
        most = max(64 * 64 // 16, loaded.processor.video.max_pixels // (16 * 2))
    assert 0.8 * most <= item.num_patches <= most
    packed = largest_item(config(enable_vit_cuda_graph=True, vit_cuda_graph_max_tokens=4096), loaded)
    assert packed.num_patches == 4096


def test_no_item_is_larger_than_a_prompt_can_be(loaded: LoadedModel) -> None:
    small = config(enable_vit_cuda_graph=True, vit_cuda_graph_max_tokens=4)
    assert largest_item(small, replace(loaded, max_model_len=11)).num_tokens <= 10


def test_the_largest_run_is_one_that_the_tower_takes(loaded: LoadedModel) -> None:
    options = config(enable_vit_cuda_graph=True, vit_cuda_graph_max_tokens=64)
    device = get_device(torch.device("cpu"))
    encoder = make_encoder(options, loaded, device=device, log=StepLog())
    item = largest_item(options, loaded)
    (made,) = encoder.encode([item])
    assert len(made.embeds_NE) == item.num_tokens
    encoder.release()


def test_a_model_without_a_tower_has_no_encoder(loaded: LoadedModel) -> None:
    with pytest.raises(ModelError, match="has no vision tower"):
        make_encoder(
            config(), replace(loaded, vision=None), device=get_device(torch.device("cpu")), log=StepLog()
        )


def test_a_start_that_fails_releases_the_encoder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[NamedEncoder] = []
    init = NamedEncoder.__init__

    def watched(self: NamedEncoder, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no graphs today")

    monkeypatch.setattr(NamedEncoder, "__init__", watched)
    monkeypatch.setattr("gapless.engine.build._Build._graph_set", fail)
    with pytest.raises(RuntimeError, match="no graphs today"):
        open_media_engine(tmp_path)
    assert made[0].is_released


def test_collections_of_a_start_look_at_what_is_new_alone(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_aside: list[int] = []
    capture = _Build._capture

    def watched(build: _Build, *args: Any) -> None:
        set_aside.append(gc.get_freeze_count())
        capture(build, *args)

    monkeypatch.setattr(_Build, "_capture", watched)
    had_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        engine, _ = open_media_engine(tmp_path)
        assert set_aside[0] > 1000
        assert gc.get_freeze_count() == 0
    finally:
        if had_frozen:
            gc.freeze()
    engine.runner.shutdown()
