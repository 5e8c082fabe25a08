"""What a decoder does for media: three positions a token, rows chosen, features added; all captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from gapless.attention.base import ATTENTION_OP
from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.graphs.capture import capture_program
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.modes import Strategy
from gapless.graphs.piecewise import PiecewiseConfig, PiecewiseForward
from gapless.models.config import parse_config
from gapless.models.decoder import Decoder
from gapless.models.dummy import fill_dummy_weights
from gapless.models.mrope import AxisAngles, frequency_axes
from gapless.models.rope import RopeConfig, rope_table
from ragged_batches import make_batch
from vl_checkpoints import FAMILIES, vl_config

CPU = torch.device("cpu")
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal")
LENGTHS = [(0, 5), (7, 1), (3, 2)]
NUM_TOKENS = 8


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Case:
    """A tiny model on a ragged batch, and inputs of a step with media."""

    def __init__(self, family: str, *, fused: bool = False) -> None:
        config = parse_config(vl_config(family).to_dict(), source="test")
        self.model = Decoder(config, max_positions=64, dtype=torch.float32, device=CPU)
        fill_dummy_weights(self.model, seed=0)
        for name, parameter in self.model.named_parameters():
            if parameter.dim() == 2 and "norm" not in name:
                parameter.mul_(5)  # else a token hardly looks at others
        self.model.has_fused_kernels = fused
        self.use(LENGTHS)
        self.inputs = self.values(seed=0)

    def use(self, lengths: list[tuple[int, int]]) -> None:
        """A batch of these (tokens in the cache, new tokens), and caches of its own."""
        info = self.model.info
        self.batch = make_batch(
            lengths,
            num_heads=info.num_heads,
            num_kv_heads=info.num_kv_heads,
            head_size=info.head_size,
            dtype=torch.float32,
        )
        for layer in self.model.attention_layers():
            layer.bind(TorchReferenceBackend(), self.batch.k_cache.clone(), self.batch.v_cache.clone())

    def values(self, *, seed: int) -> list[Tensor]:
        """Token ids, positions, media rows, which rows are media, deepstack features."""
        info, generator = self.model.info, torch.Generator().manual_seed(seed)
        is_media_T = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1], dtype=torch.int32).roll(seed)
        media_TE = torch.randn(NUM_TOKENS, info.hidden_size, generator=generator)
        media_TE[is_media_T == 0] = torch.nan
        features_LTE = torch.randn(info.num_deepstack, NUM_TOKENS, info.hidden_size, generator=generator)
        return [
            torch.randint(256, (NUM_TOKENS,), generator=generator, dtype=torch.int32),
            torch.randint(300, (3, NUM_TOKENS), generator=generator, dtype=torch.int32),
            media_TE,
            is_media_T,
            torch.where(is_media_T.bool()[None, :, None], features_LTE, torch.nan),
        ]

    def forward(self, *inputs: Tensor) -> Tensor:
        ids_T, positions_3T, media_TE, is_media_T, features_LTE = inputs
        hidden_TE = self.model.embed_with_media(ids_T, media_TE, is_media_T)
        has_features = features_LTE.shape[0] > 0
        return self.model.layers(hidden_TE, positions_3T, features_LTE if has_features else None, is_media_T)

    def run(self, *inputs: Tensor) -> Tensor:
        with torch.no_grad(), self.step():
            return self.forward(*inputs)

    def step(self) -> Any:
        return use_forward_context(ForwardContext(batch=self.batch.metadata))


@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        ("chunked", (16, 24, 24)),
        ("chunked", (4, 2, 2)),
        ("interleaved", (24, 20, 20)),
        ("interleaved", (4, 2, 2)),
        ("interleaved", (3, 3, 2)),
        ("interleaved", (6, 1, 1)),
    ],
)
def test_angles_are_those_of_transformers(layout: Any, sections: tuple[int, int, int]) -> None:
    family = "qwen2_5_vl" if layout == "chunked" else "qwen3_vl"
    head_size = 2 * sum(sections)
    rope = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": list(sections)}
    theirs = vl_config(family, rope_parameters=rope).text_config
    theirs.head_dim, theirs.hidden_size = head_size, 4 * head_size
    module = Qwen2_5_VLRotaryEmbedding if family == "qwen2_5_vl" else Qwen3VLTextRotaryEmbedding
    positions_3T = torch.randint(100_000, (3, 50), generator=torch.Generator().manual_seed(1))
    cos, sin = module(theirs)(torch.zeros(1), positions_3T[:, None])
    config = RopeConfig(
        rope_type="default",
        theta=5000.0,
        head_size=head_size,
        axis_sections=sections,
        axis_layout=layout,
    )
    rows_T2F = AxisAngles(config, dtype=torch.float32, device=CPU)(positions_3T.int())
    half = head_size // 2
    torch.testing.assert_close(rows_T2F[:, 0], cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(rows_T2F[:, 1], sin[0, :, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize("sections", [(24, 20, 20), (4, 2, 2), (3, 3, 2)])
def test_interleaved_axes_have_as_many_frequencies_as_their_section(sections: tuple[int, int, int]) -> None:
    axes = frequency_axes(sections, layout="interleaved")
    assert [axes.count(axis) for axis in range(3)] == list(sections)


@pytest.mark.parametrize("layout", ["chunked", "interleaved"])
def test_text_turns_as_in_a_model_with_one_axis(layout: Any) -> None:
    common: dict[str, Any] = {"rope_type": "yarn", "theta": 1000.0, "head_size": 16, "factor": 2.0}
    common.update(original_max_positions=64, attention_factor=1.2)
    plain = rope_table(RopeConfig(**common), max_positions=90, dtype=torch.float32, device=CPU)
    config = RopeConfig(**common, axis_sections=(4, 2, 2), axis_layout=layout)
    angles = AxisAngles(config, dtype=torch.float32, device=CPU)
    positions_T = torch.arange(90, dtype=torch.int32)
    torch.testing.assert_close(angles(positions_T), plain, rtol=0, atol=1e-7)
    assert torch.equal(angles(positions_T), angles(positions_T.expand(3, -1)))


@pytest.mark.parametrize(("family", "fused"), [("qwen2_5_vl", False), ("qwen3_vl", True)])
def test_positions_of_one_axis_stand_for_three(family: str, fused: bool) -> None:
    case = Case(family, fused=fused)
    _, positions_3T, *rest = case.inputs
    alike_3T = positions_3T[:1].expand(3, -1)
    outs = [case.run(case.inputs[0], positions, *rest) for positions in (alike_3T, positions_3T[0])]
    assert outs[0].isfinite().all()
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], case.run(*case.inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_kernels_take_media_as_the_modules_do(family: str) -> None:
    plain, fused = Case(family), Case(family, fused=True)
    torch.testing.assert_close(fused.run(*fused.inputs), plain.run(*plain.inputs), rtol=1e-4, atol=1e-5)


def test_rows_that_are_no_media_are_chosen_away_whatever_they_hold() -> None:
    model = Case("qwen2_5_vl").model
    hidden_TE, media_TE = torch.ones(3, 64), torch.full((3, 64), torch.nan)
    media_TE[1] = 2.0
    for dtype in (torch.bool, torch.int32):
        merged = model.merge_media(hidden_TE, media_TE, torch.tensor([0, 1, 0]).to(dtype))
        assert merged[:, 0].tolist() == [1.0, 2.0, 1.0]
    assert hidden_TE.eq(1).all()


@pytest.mark.parametrize("fused", [False, True])
def test_features_are_added_behind_their_layer_and_none_costs_nothing(fused: bool) -> None:
    case = Case("qwen3_vl", fused=fused)
    ids_T, positions_3T, *_, features_LTE = case.inputs
    features_LTE = features_LTE.nan_to_num(0.5)
    with torch.no_grad(), case.step():
        hidden_TE = case.model.embed(ids_T)
        counts, outs = [], []
        for features in (None, torch.zeros_like(features_LTE), features_LTE[:1], features_LTE):
            with Recorder() as recorder:
                outs.append(case.model.layers(hidden_TE, positions_3T, features))
            counts.append(recorder.names.count("aten::add.Tensor"))
    torch.testing.assert_close(outs[0], outs[1])
    assert not torch.equal(outs[2], outs[3])
    assert [count - counts[0] for count in counts] == ([0] * 4 if fused else [0, 2, 1, 2])


def test_media_cost_a_fused_step_no_kernel() -> None:
    """As many with an image as with text alone, and one for positions on three axes."""
    case = Case("qwen3_vl", fused=True)
    ids_T, positions_3T = case.inputs[:2]
    counts = []
    for has_media in (False, True):
        with torch.no_grad(), case.step(), Recorder() as recorder:
            if has_media:
                case.forward(*case.inputs)
            else:
                case.model.layers(case.model.embed(ids_T), positions_3T)
        kernels = [name for name in recorder.names if not is_view(name)]
        counts.append(len(kernels) + kernels.count("gapless::linear_add_rms_norm"))  # a product and a norm
        assert kernels.count("gapless::axis_rows") == 1
    assert counts[0] == counts[1]


def is_view(name: str) -> bool:
    operator = name.removeprefix("aten::").partition(".")[0]
    return operator in (
        "view",
        "slice",
        "select",
        "transpose",
        "unsqueeze",
        "empty",
        "new_empty",
        "_unsafe_view",
    )


@pytest.mark.parametrize(("family", "fused"), [("qwen2_5_vl", False), ("qwen3_vl", True)])
def test_a_step_with_media_reads_nothing_on_the_host(family: str, fused: bool) -> None:
    case = Case(family, fused=fused)
    with torch.no_grad(), case.step(), Recorder() as recorder:
        case.forward(*case.inputs)
    model_ops = [name for name in recorder.names if not name.startswith("gapless::")]
    assert model_ops
    assert [n for n in model_ops if any(word in n for word in HOST_READS)] == case_reads(case)


def case_reads(case: Case) -> list[str]:
    """What the reference attention itself reads, which a GPU's does not."""
    ids_T, positions_3T, *_ = case.inputs
    with torch.no_grad(), case.step(), Recorder() as recorder:
        case.model.layers(case.model.embed(ids_T), positions_3T[0])
    return [n for n in recorder.names if any(word in n for word in HOST_READS)]


def test_a_captured_step_with_media_serves_other_media(device: Any) -> None:
    case = Case("qwen3_vl", fused=True)
    static = [tensor.clone() for tensor in case.inputs]
    with torch.no_grad(), case.step():
        case.forward(*static)
        program, out = capture_program(
            lambda: case.forward(*static), device=device, pool=device.new_pool(), strategy=Strategy.FULL
        )
        for seed in (3, 5):
            values = case.values(seed=seed)
            for buffer, value in zip(static, values, strict=True):
                buffer.copy_(value)
            program.replay()
            assert torch.equal(out, case.forward(*values))


@pytest.mark.parametrize("fused", [False, True])
def test_a_traced_step_with_media_serves_other_sizes(fused: bool, device: Any) -> None:
    case = Case("qwen3_vl", fused=fused)

    def forward(ids: Tensor, positions: Tensor, media: Tensor, is_media: Tensor, features: Tensor) -> Tensor:
        return case.forward(ids, positions, media, is_media, features)

    traced = PiecewiseForward(
        forward,
        config=PiecewiseConfig(split_ops=(ATTENTION_OP,)),
        device=device,
        dynamic_dims={"positions": 1, "features": 1},
    )
    for lengths in (LENGTHS, LENGTHS[:1], LENGTHS[:2]):
        num_tokens = sum(count for _, count in lengths)
        case.use(lengths)
        ids, positions, media, is_media, features = case.inputs
        inputs = (
            ids[:num_tokens],
            positions[:, :num_tokens].contiguous(),
            media[:num_tokens],
            is_media[:num_tokens],
            features[:, :num_tokens].contiguous(),
        )
        context = ForwardContext(batch=case.batch.metadata, use_compiled=True)
        with torch.no_grad(), use_forward_context(context):
            out = traced(*inputs)
        torch.testing.assert_close(out, case.run(*inputs), rtol=1e-5, atol=1e-5)
    assert traced.stats.num_traces == 1
