"""Which kernel multiplies: the store of timings, and what is chosen without one."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from product_shapes import CPU, GEMV, PARTS, TILE, make_product, make_summed

from gapless.kernels import linear_choice, select
from gapless.kernels.linear_choice import choose, forget_stored_choices, store_choices, store_path
from gapless.kernels.linear_tiles import Product, Tiles, token_bucket

pytestmark = pytest.mark.usefixtures("own_store")


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (33, 64), (64, 64)]
)
def test_calls_of_a_bucket_share_a_choice(num_tokens: int, bucket: int) -> None:
    assert token_bucket(num_tokens) == bucket


def test_stored_choices_are_found_by_the_next_process() -> None:
    choices = {make_product(): GEMV, make_product(8, is_gated=True, dtype=torch.float16): TILE}
    store_choices({**choices, make_product(64): None}, CPU)
    forget_stored_choices()
    assert {p: choose(p, CPU) for p in choices} == choices
    assert choose(make_product(64), CPU) is None


def test_stored_choices_add_up() -> None:
    store_choices({make_product(1): GEMV}, CPU)
    store_choices({make_product(2): TILE}, CPU)
    forget_stored_choices()
    assert (choose(make_product(1), CPU), choose(make_product(2), CPU)) == (GEMV, TILE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "null",
        '{"product": 1}',
        '[{"product": {}, "tiles": null}]',
        '[{"product": {"num_tokens": 1, "num_in": 1, "num_out": 1, "is_gated": false, "dtype": "x"}}]',
        '[{"product": {"num_tokens": "1", "num_in": 1, "num_out": 1, "is_gated": false, '
        '"dtype": "torch.float16"}, "tiles": null}]',
        '[{"product": {"num_tokens": 1, "num_in": 1, "num_out": 1, "is_gated": false, '
        '"dtype": "torch.float16"}, "tiles": {"block_o": 3}}]',
    ],
)
def test_a_damaged_store_costs_one_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    store_path(CPU).parent.mkdir()
    store_path(CPU).write_text(text)
    with caplog.at_level(logging.WARNING):
        for num_tokens in (1, 2, 64):
            assert choose(make_product(num_tokens), CPU) == default_tiles_on_cpu(num_tokens)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(store_path(CPU)) in caplog.text


def default_tiles_on_cpu(num_tokens: int) -> Tiles | None:
    return linear_choice.built_in_choice(make_product(num_tokens), CPU)


@pytest.mark.parametrize(
    ("capability", "has_tiles"), [((8, 0), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)]
)
def test_the_built_in_rule_is_for_hopper_alone(
    capability: tuple[int, int], has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tiles take up to 196,608 bytes of shared memory, of which others may have 101,376."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    select.is_hopper.cache_clear()
    try:
        tiles = linear_choice.built_in_choice(make_product(16), torch.device("cuda", 0))
    finally:
        select.is_hopper.cache_clear()
    assert (tiles is not None) is has_tiles


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "file" / "store"))
    with caplog.at_level(logging.WARNING):
        store_choices({make_product(): GEMV}, CPU)
    assert "cannot be stored" in caplog.text
    assert choose(make_product(), CPU) == GEMV


def test_a_store_belongs_to_one_gpu_and_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {store_path(CPU)}
    monkeypatch.setattr(linear_choice, "_device_name", lambda device: "another")
    paths.add(store_path(CPU))
    monkeypatch.setattr(torch, "__version__", "9.9")
    paths.add(store_path(CPU))
    monkeypatch.setattr(linear_choice, "_kernel_source", lambda: "other kernels")
    paths.add(store_path(CPU))
    assert len(paths) == 4


def test_a_store_does_not_change_under_a_running_process() -> None:
    before = choose(make_product(), CPU)
    other = GEMV if before != GEMV else TILE
    entry = {
        "product": {"num_tokens": 1, "num_in": 1024, "num_out": 4096, "is_gated": False,
                    "dtype": "torch.bfloat16"},
        "tiles": {"on_tensor_cores": other.on_tensor_cores, "block_o": other.block_o,
                  "block_i": other.block_i, "num_early": 1, "num_warps": 4},
    }  # fmt: skip
    store_path(CPU).parent.mkdir()
    store_path(CPU).write_text(json.dumps([entry]))
    assert choose(make_product(), CPU) == before
    forget_stored_choices()
    assert choose(make_product(), CPU) != before


def test_timings_made_later_do_not_change_what_graphs_were_captured_with() -> None:
    """A second engine in the process tunes again: the first one's graphs and eager runs must still agree."""
    store_choices({make_product(1): GEMV}, CPU)
    before = choose(make_product(1), CPU), choose(make_product(2), CPU)
    store_choices({make_product(1): TILE, make_product(2): GEMV, make_product(4): TILE}, CPU)
    assert (choose(make_product(1), CPU), choose(make_product(2), CPU)) == before
    assert choose(make_product(4), CPU) == TILE
    forget_stored_choices()  # the next process
    assert (choose(make_product(1), CPU), choose(make_product(2), CPU)) == (TILE, GEMV)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_early": 0},
        {"num_early": 5},
        {"on_tensor_cores": True, "num_early": 3},
        {"block_o": 0},
        {"block_o": 12},
        {"block_i": 96},
        {"split": 3},
        {"num_warps": 5},
        {"num_stages": 0},
        {"prefetch": -64},
        {"prefetch": 32},  # less than a line of the cache
        {"prefetch": 192},
    ],
    ids=str,
)
def test_stored_tiles_that_no_kernel_understands_are_not_used(
    wrong: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Some of them would leave columns out of the sums, or take them twice."""
    store_choices({make_product(): replace(GEMV, **wrong)}, CPU)
    forget_stored_choices()
    with caplog.at_level(logging.WARNING):
        assert choose(make_product(), CPU) is None
    assert "cannot be read" in caplog.text


def test_parts_are_stored_for_products_that_a_norm_follows() -> None:
    store_choices({make_summed(256): PARTS, make_summed(128): None}, CPU)
    forget_stored_choices()
    assert (choose(make_summed(256), CPU), choose(make_summed(128), CPU)) == (PARTS, None)
    assert choose(make_summed(256, is_summed=False), CPU) is None


def test_timings_stored_before_there_were_parts_say_nothing_of_products_with_a_norm_behind_them() -> None:
    store_choices({make_product(8): TILE}, CPU)
    entries = json.loads(store_path(CPU).read_text())
    for entry in entries:
        del entry["product"]["is_summed"], entry["tiles"]["parts"]
    store_path(CPU).write_text(json.dumps(entries))
    forget_stored_choices()
    assert choose(make_product(8), CPU) == TILE
    assert choose(make_product(8, is_summed=True), CPU) is None


@pytest.mark.parametrize(
    ("product", "wrong"),
    [
        (make_product(16, num_in=2048), {}),  # nothing would add them up
        (make_summed(16), {"parts": 3}),
        (make_summed(16), {"parts": 0}),
        (make_summed(16), {"parts": 32}),
        (make_summed(16, num_in=2048 + 32), {}),  # a part would begin on 16 bytes
        (make_summed(1), {"on_tensor_cores": False}),
    ],
)
def test_stored_parts_that_no_kernel_adds_up_are_not_used(
    product: Product, wrong: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    store_choices({product: replace(PARTS, **wrong)}, CPU)
    forget_stored_choices()
    with caplog.at_level(logging.WARNING):
        assert choose(product, CPU) is None
    assert "cannot be read" in caplog.text
