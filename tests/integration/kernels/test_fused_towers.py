"""Vision towers on fused kernels equal Transformers' own modules, alone and as graphs."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from encoder_cases import (
    CONFIGS,
    assert_close,
    assert_equal,
    fill,
    media,
    of_transformers,
    runner_of,
    tiny_tower,
)
from gapless.graphs.device import get_device
from gapless.graphs.encoder_adapter import fresh_run
from gapless.models.vision import qwen_vl
from gapless.models.vision.fused import activate_in_products, feed_forward, padded_width
from gapless.models.vision.tower import VisionTower, make_tower

CPU = get_device("cpu")
GRIDS = [(1, 4, 4), (2, 2, 4), (1, 2, 10)]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def tower(request: pytest.FixtureRequest) -> VisionTower:
    return tiny_tower(request.param, device=CPU, is_fused=True)


def test_fused_blocks_equal_transformers(tower: VisionTower) -> None:
    assert tower.is_fused
    items = [media(tower, grid) for grid in GRIDS]
    with runner_of(tower, "off", device=CPU) as runner:
        assert_close(runner.run(items), [of_transformers(tower, item) for item in items])


@pytest.mark.parametrize("mode", ["budget", "exact"])
def test_graphs_of_fused_blocks_equal_their_oracle(tower: VisionTower, mode: str) -> None:
    items = [media(tower, grid) for grid in ((1, 2, 2), (2, 2, 2))]
    options = {"budgets": (16,)} if mode == "budget" else {"max_tokens": 16}
    with runner_of(tower, mode, device=CPU, **options) as runner:
        oracle = runner.padded_eager if mode == "budget" else runner.eager
        assert_equal(runner.run(items), oracle(items))
        assert not runner.report()["failures"]


def test_poisoned_padding_reaches_no_real_row(tower: VisionTower) -> None:
    item = media(tower, (1, 2, 4))
    with runner_of(tower, "budget", device=CPU, budgets=(16,)) as runner:
        before = runner.run([item])
        assert runner._memory is not None
        runner._memory.inputs.poison = True
        assert_equal(runner.run([item]), before)


def test_merged_projections_are_filled_through_the_checkpoints_names() -> None:
    tower = make_tower(
        "qwen2_5_vl", CONFIGS["qwen2_5_vl"], dtype=torch.float32, device=CPU.torch_device, is_fused=True
    )
    plain = tiny_tower("qwen2_5_vl", device=CPU, is_fused=False)
    targets = tower.weight_targets()
    assert set(targets) == set(plain.weight_targets())
    for name, target in targets.items():
        target.load(name, plain.module.state_dict()[name.removeprefix("visual.")], source="test")
    mlp = tower.module.blocks[0].mlp  # type: ignore[union-attr, index]
    assert torch.equal(mlp.gate_up_weight, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    item = media(plain, (1, 4, 4))
    with runner_of(tower, "off", device=CPU) as runner:
        assert_close(runner.run([item]), [of_transformers(plain, item)])


@pytest.mark.parametrize("width", [44, 66, 130])
def test_an_odd_width_is_padded_with_zeros_that_change_nothing(width: int) -> None:
    config = {**CONFIGS["qwen2_5_vl"], "intermediate_size": width}
    towers = []
    for is_fused in (True, False):
        tower = make_tower(
            "qwen2_5_vl", config, dtype=torch.float32, device=CPU.torch_device, is_fused=is_fused
        )
        fill(tower)  # through the names of the checkpoint
        towers.append(tower)
    fused, plain = towers
    mlp, oracle = fused.module.blocks[0].mlp, plain.module.blocks[0].mlp  # type: ignore[union-attr, index]
    padded = padded_width(width)
    assert padded % 64 == 0
    assert mlp.gate_up_weight.shape == (2 * padded, 32)
    assert mlp.down_weight.shape == (32, padded)
    for half, name in enumerate(("gate_proj", "up_proj")):
        rows = mlp.gate_up_weight[half * padded : (half + 1) * padded]
        assert torch.equal(rows[:width], getattr(oracle, name).weight)
        assert not rows[width:].any()
        assert not mlp.gate_up_bias[half * padded + width : (half + 1) * padded].any()
    assert torch.equal(mlp.down_weight[:, :width], oracle.down_proj.weight)
    assert not mlp.down_weight[:, width:].any()
    hidden = torch.randn(5, 32)
    torch.testing.assert_close(feed_forward(mlp, hidden), oracle(hidden), atol=1e-5, rtol=1e-5)
    items = [media(fused, grid) for grid in GRIDS]
    with runner_of(fused, "off", device=CPU) as runner:
        assert_close(runner.run(items), [of_transformers(plain, item) for item in items])


@pytest.mark.parametrize(
    ("width", "padded"), [(8, 8), (48, 48), (4304, 4304), (3420, 3456), (1, 64), (65, 128)]
)
def test_only_widths_that_cannot_be_read_in_16_bytes_are_padded(width: int, padded: int) -> None:
    assert padded_width(width) == padded


def test_an_activation_without_a_kernel_keeps_its_own_mlp() -> None:
    config = {**CONFIGS["qwen2_5_vl"], "hidden_act": "gelu"}
    tower = make_tower("qwen2_5_vl", config, dtype=torch.float32, device=CPU.torch_device, is_fused=True)
    assert not hasattr(tower.module.blocks[0].mlp, "gate_up_weight")  # type: ignore[union-attr, index]


def test_a_product_that_applies_the_activation_is_an_mlp_like_any_other(monkeypatch) -> None:
    """On CUDA the operator takes the tanh form, as it does here; on a CPU it takes the other one."""

    def product(bias: Tensor, x: Tensor, weight: Tensor, *, use_gelu: bool) -> Tensor:
        assert use_gelu
        return torch.nn.functional.gelu(torch.addmm(bias, x, weight), approximate="tanh")

    monkeypatch.setattr(torch, "_addmm_activation", product)
    tower = tiny_tower("qwen3_vl", device=CPU, is_fused=True)
    blocks: Any = tower.module.blocks
    assert not hasattr(blocks[0].mlp, "activates_in_product")  # no Hopper GPU
    items = [media(tower, grid) for grid in GRIDS]
    expected = [of_transformers(tower, item) for item in items]
    activate_in_products(blocks)
    monkeypatch.setattr(type(blocks[0].mlp), "forward", None)
    with runner_of(tower, "off", device=CPU) as runner:
        assert_close(runner.run(items), expected)


@pytest.mark.parametrize(
    ("options", "dtype", "activates"),
    [
        ({}, torch.bfloat16, True),
        ({}, torch.float16, True),
        ({}, torch.float32, False),
        ({"hidden_act": "gelu"}, torch.bfloat16, False),
    ],
)
def test_products_apply_the_tanh_form_in_half_precision_on_hopper(
    options: dict[str, Any], dtype: torch.dtype, activates: bool, monkeypatch
) -> None:
    monkeypatch.setattr(qwen_vl, "is_hopper", lambda device: True)
    config = {**CONFIGS["qwen3_vl"], **options}
    for is_fused in (True, False):
        tower = make_tower("qwen3_vl", config, dtype=dtype, device=CPU.torch_device, is_fused=is_fused)
        blocks: Any = tower.module.blocks
        assert hasattr(blocks[0].mlp, "activates_in_product") == (activates and is_fused)


class LiveBytes(TorchDispatchMode):
    """The most bytes that live at a time of what ops make; ``known`` tensors do not count."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.most = self._now = 0
        self._keys = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        tensors = made if isinstance(made, (tuple, list)) else [made]
        for tensor in filter(torch.is_tensor, tensors):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._keys:
                self._keys.add(storage.data_ptr())
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._free, storage.data_ptr(), storage.nbytes())
        return made

    def _free(self, key: int, num_bytes: int) -> None:
        self._keys.discard(key)
        self._now -= num_bytes


def test_beside_the_activation_of_an_mlp_lives_only_the_residual_stream(monkeypatch) -> None:
    """What lives at most is the size of a graph's pool."""
    hidden, inner = CONFIGS["qwen2_5_vl"]["hidden_size"], 512
    config = {**CONFIGS["qwen2_5_vl"], "intermediate_size": inner}
    tower = make_tower("qwen2_5_vl", config, dtype=torch.float32, device=CPU.torch_device, is_fused=True)
    fill(tower)
    monkeypatch.setattr(tower.backend, "attend", lambda q, k, v, out, *args, **options: out.zero_())
    item = media(tower, (1, 16, 16))
    sizes, bounds = tower.sizes_of(item), tower.bounds_of([item])
    run = fresh_run(tower, tower.prepare([item]), sizes=sizes, bounds=bounds, device=tower.device)
    module = tower.module
    known = [*module.parameters(), *module.buffers(), *run.tensors.values(), *run.workspaces.values()]
    with torch.no_grad(), LiveBytes(known) as live:
        tower.forward(run)
    row_bytes = sizes["tokens"] * torch.float32.itemsize
    rows_of_hidden, gate_up, gated = 2, 2 * inner, inner
    rows_of_hidden += 2  # the interpreter keeps what a kernel was launched with until the next launch
    assert live.most / row_bytes <= rows_of_hidden * hidden + gate_up + gated
