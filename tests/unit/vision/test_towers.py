"""The towers equal Transformers' own forward, whatever attention they run on; their weights and refusals."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from encoder_cases import CONFIGS, GRIDS, assert_close, fill, media, of_transformers, tiny_tower
from gapless.errors import ConfigError, ModelError
from gapless.graphs.device import get_device
from gapless.graphs.encoder import EncoderMode, EncoderOptions, EncoderRunner
from gapless.models.vision import grids
from gapless.models.vision.encoder import TowerEncoder
from gapless.models.vision.tower import VisionTower, make_tower

CPU = get_device("cpu")
TOWERS = sorted(CONFIGS)


@pytest.fixture(scope="module", params=TOWERS)
def tower(request: pytest.FixtureRequest) -> VisionTower:
    return tiny_tower(request.param, device=CPU)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_one_image_or_video_equals_transformers(tower: VisionTower, grid) -> None:
    runner = EncoderRunner(tower, device=CPU, options=EncoderOptions(mode=EncoderMode.OFF))
    item = media(tower, grid)
    assert_close(runner.run([item]), [of_transformers(tower, item)])


def test_several_sizes_in_one_forward_equal_transformers_one_by_one(tower: VisionTower) -> None:
    runner = EncoderRunner(tower, device=CPU, options=EncoderOptions(mode=EncoderMode.OFF))
    items = [media(tower, grid, seed=i) for i, grid in enumerate(GRIDS)]
    assert_close(runner.run(items), [of_transformers(tower, item) for item in items])
    assert len(runner.log.eager) == 1
    assert runner.log.eager.total() == 1


@pytest.mark.parametrize("attention", ["torch_reference", "torch_segments"])
@pytest.mark.parametrize("model_type", TOWERS)
def test_every_attention_of_a_cpu_equals_transformers(model_type: str, attention: str) -> None:
    tower = tiny_tower(model_type, device=CPU, attention=attention)
    runner = EncoderRunner(tower, device=CPU, options=EncoderOptions(mode=EncoderMode.OFF))
    items = [media(tower, grid) for grid in GRIDS[:6]]
    assert_close(runner.eager(items), [of_transformers(tower, item) for item in items])


@pytest.mark.parametrize("full", [[], [0], [0, 1]], ids=str)
def test_windowed_and_full_layers_equal_transformers(full: list[int]) -> None:
    config = {**CONFIGS["qwen2_5_vl"], "fullatt_block_indexes": full}
    tower = make_tower("qwen2_5_vl", config, dtype=torch.float32, device=CPU.torch_device)
    fill(tower)
    runner = EncoderRunner(tower, device=CPU, options=EncoderOptions(mode=EncoderMode.OFF))
    items = [media(tower, grid) for grid in ((1, 10, 6), (2, 4, 6))]
    assert_close(runner.run(items), [of_transformers(tower, item) for item in items])


@pytest.mark.parametrize("taps", [[], [0, 1], [1, 0]], ids=str)
def test_any_number_of_deepstack_layers_equals_transformers(taps: list[int]) -> None:
    config = {**CONFIGS["qwen3_vl"], "deepstack_visual_indexes": taps}
    tower = make_tower("qwen3_vl", config, dtype=torch.float32, device=CPU.torch_device)
    fill(tower)
    encoder = TowerEncoder(tower, device=CPU, options=EncoderOptions(mode=EncoderMode.OFF))
    item = media(tower, (1, 4, 6))
    (encoded,) = encoder.encode([item])
    expected = of_transformers(tower, item)
    assert tower.num_deepstack == len(taps)
    torch.testing.assert_close(encoded.embeds_NE, expected[0], atol=1e-4, rtol=0)
    if not taps:
        assert encoded.deepstack_LNE is None
        return
    assert encoded.deepstack_LNE is not None
    assert encoded.deepstack_LNE.shape == (2, 6, tower.hidden_size)
    torch.testing.assert_close(encoded.deepstack_LNE, expected[1].transpose(0, 1), atol=1e-4, rtol=0)


def test_frames_of_a_video_are_segments_of_their_own(tower: VisionTower) -> None:
    """What is in one frame changes nothing in another, though both are one item."""
    runner = EncoderRunner(tower, device=CPU, options=EncoderOptions(mode=EncoderMode.OFF))
    video = media(tower, (2, 4, 4))
    patches = video.patches_PC.copy()
    patches[16:] += 1.0
    other = replace(video, patches_PC=patches)
    (first,), (second,) = runner.run([video]), runner.run([other])
    assert torch.equal(first[0][:4], second[0][:4])
    assert not torch.equal(first[0][4:], second[0][4:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_positions_in_float32(tower: VisionTower, dtype: torch.dtype) -> None:
    model_type = type(tower).__name__.removesuffix("Tower")
    half = tiny_tower("qwen3_vl" if model_type == "Qwen3" else "qwen2_5_vl", device=CPU, dtype=dtype)
    assert {b.dtype for b in half.module.buffers()} == {torch.float32}
    runner = EncoderRunner(half, device=CPU, options=EncoderOptions(mode=EncoderMode.OFF))
    ((embeds, *_),) = runner.run([media(half, (1, 4, 4))])
    assert embeds.dtype == dtype
    assert embeds.isfinite().all()


def test_weight_targets_are_the_names_of_transformers_checkpoints(tower: VisionTower) -> None:
    targets = tower.weight_targets()
    state = {f"visual.{name}": value for name, value in tower.module.state_dict().items()}
    assert set(targets) == set(state)
    assert all(target.shape == tuple(state[name].shape) for name, target in targets.items())
    assert set(tower.weight_targets("model.visual.")) == {f"model.{name}" for name in targets}


def test_what_is_loaded_through_the_targets_is_what_runs(tower: VisionTower) -> None:
    other = make_tower(
        "qwen2_5_vl" if tower.has_windows else "qwen3_vl",
        CONFIGS["qwen2_5_vl" if tower.has_windows else "qwen3_vl"],
        dtype=torch.float32,
        device=CPU.torch_device,
    )
    for name, target in other.weight_targets().items():
        target.load(name, tower.module.state_dict()[name.removeprefix("visual.")], source="test")
    item = media(tower, (1, 4, 6))
    options = EncoderOptions(mode=EncoderMode.OFF)
    runs = [EncoderRunner(made, device=CPU, options=options).run([item])[0] for made in (tower, other)]
    assert torch.equal(runs[0][0], runs[1][0])


@pytest.mark.parametrize("grid", [(0, 2, 2), (1, 3, 2), (1, 2, 5), (1, -2, 2)], ids=str)
def test_a_grid_that_no_image_has_is_refused(tower: VisionTower, grid) -> None:
    item = replace(media(tower, (1, 2, 2)), grid_thw=grid)
    with pytest.raises(ModelError, match="multiples of 2"):
        tower.sizes_of(item)


@pytest.mark.parametrize("shape", [(4, 95), (3, 96), (8, 96)], ids=str)
def test_patches_that_are_not_the_grids_are_refused(tower: VisionTower, shape: tuple[int, int]) -> None:
    item = replace(media(tower, (1, 2, 2)), patches_PC=np.zeros(shape, np.float32))
    with pytest.raises(ModelError, match="do not belong to grid"):
        tower.sizes_of(item)


def test_a_model_without_a_tower_is_refused() -> None:
    with pytest.raises(ModelError, match="qwen2_5_vl, qwen3_vl"):
        make_tower("llama", {}, dtype=torch.float32, device=CPU.torch_device)


def test_a_config_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match="depth"):
        make_tower("qwen3_vl", {"depth": "many"}, dtype=torch.float32, device=CPU.torch_device)


def test_attention_that_fixes_boundaries_has_no_budgets(tower: VisionTower) -> None:
    fixed = tiny_tower("qwen3_vl", device=CPU, attention="torch_segments")
    with pytest.raises(ConfigError, match="mode exact"):
        EncoderRunner(fixed, device=CPU, options=EncoderOptions(max_tokens=32))


def test_the_convolution_over_patches_is_the_matrix_product(tower: VisionTower) -> None:
    projection: Any = tower.module.patch_embed.proj  # type: ignore[union-attr]
    patches = torch.randn(6, tower.patch_values)
    assert isinstance(projection, nn.Conv3d)
    expected = tower.module.patch_embed(patches)  # type: ignore[operator]
    torch.testing.assert_close(tower.embed_patches(patches, projection), expected, atol=1e-5, rtol=0)


def test_arrays_of_grids_are_made_once_and_the_number_kept_is_bounded(monkeypatch) -> None:
    made: list[grids.Grid] = []

    def make(grid: grids.Grid) -> grids.GridArrays:
        made.append(grid)
        return grids.GridArrays(full_lens_N=grids.full_lens(grid), positions_P2=grids.positions(grid, 2))

    monkeypatch.setattr(grids, "_MAX_KEPT", 2)
    cache = grids.GridCache(make)
    for grid in ((1, 2, 2), (1, 2, 4), (1, 2, 2), (1, 4, 4), (1, 2, 2), (1, 2, 4)):
        assert cache[grid].positions_P2.shape == (np.prod(grid), 2)
    assert made == [(1, 2, 2), (1, 2, 4), (1, 4, 4), (1, 2, 4)]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 14), st.integers(1, 14), st.sampled_from([8, 16, 20, 24]))
def test_no_grid_has_more_of_anything_than_its_patches_allow(frames, rows, columns, window_size) -> None:
    """What budgets are made for; windows at an edge are smaller, and never empty."""
    grid = (frames, 2 * rows, 2 * columns)
    order_U, lens_W = grids.windows(grid, merge_size=2, window_size=window_size, patch_size=4)
    assert sorted(order_U) == list(range(frames * rows * columns))
    assert lens_W.min() >= 4
    assert lens_W.max() <= (window_size // 4) ** 2
    assert lens_W.sum() == 4 * len(order_U)
    ends = set(np.cumsum(lens_W))
    assert ends >= {4 * rows * columns * frame for frame in range(1, frames + 1)}  # none spans two frames


def test_what_is_kept_of_large_grids_is_bounded_in_patches(monkeypatch) -> None:
    monkeypatch.setattr(grids, "_MAX_KEPT_PATCHES", 40)
    made: list[grids.Grid] = []
    cache = grids.GridCache(lambda grid: made.append(grid) or grid)
    for grid in ((1, 4, 4), (1, 2, 4), (1, 4, 4), (1, 2, 8), (1, 4, 4), (1, 2, 4), (1, 20, 20), (1, 20, 20)):
        assert cache[grid] == grid
    assert made == [(1, 4, 4), (1, 2, 4), (1, 2, 8), (1, 20, 20)]
    assert list(cache._kept) == [(1, 20, 20)]  # the one that is in use stays, whatever its size


def test_threads_may_ask_for_grids_while_others_push_them_out(monkeypatch) -> None:
    monkeypatch.setattr(grids, "_MAX_KEPT", 2)
    cache = grids.GridCache(lambda grid: grid)
    errors: list[BaseException] = []

    def ask(offset: int) -> None:
        try:
            for number in range(4000):
                grid = (1, 2, 2 * (1 + (number * offset) % 5))
                assert cache[grid] == grid
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(offset,)) for offset in (1, 2, 3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_the_tower_of_the_model_with_experts_is_the_same() -> None:
    from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

    config = CONFIGS["qwen3_vl"]
    tower = make_tower("qwen3_vl_moe", config, dtype=torch.float32, device=CPU.torch_device)
    fill(tower)
    theirs = Qwen3VLMoeVisionModel._from_config(Qwen3VLMoeVisionConfig(**config), dtype=torch.float32).eval()
    theirs.load_state_dict(tower.module.state_dict())
    item = media(tower, (2, 4, 6))
    runner = EncoderRunner(tower, device=CPU, options=EncoderOptions(mode=EncoderMode.OFF))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(item.patches_PC), grid_thw=torch.tensor([item.grid_thw]))
    torch.testing.assert_close(runner.run([item])[0][0], expected.pooler_output, atol=1e-4, rtol=0)


def test_patches_that_may_not_be_written_are_taken(tower: VisionTower, recwarn) -> None:
    item = media(tower, (1, 2, 4))
    frozen = np.frombuffer(item.patches_PC.tobytes(), np.float32).reshape(item.patches_PC.shape)
    runner = EncoderRunner(tower, device=CPU, options=EncoderOptions(mode=EncoderMode.OFF))
    assert_close(runner.run([replace(item, patches_PC=frozen)]), runner.run([item]))
    assert not [warning for warning in recwarn if "writable" in str(warning.message)]
