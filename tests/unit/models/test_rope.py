"""Inverse frequencies against Transformers' own, and the rotation against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gapless.errors import ModelError
from gapless.models.rope import inverse_frequencies, parse_rope, rope_table, rotate

POSITIONS = 4096

PARAMETERS: dict[str, dict] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default-theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama-3.1": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama-3.2": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn-qwen": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn-betas": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.3,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    "yarn-untruncated": {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn-no-stretch": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_equal_transformers(name: str, head_size: int) -> None:
    ours = _parsed({"rope_parameters": PARAMETERS[name]}, head_size)
    theirs, factor = _reference(PARAMETERS[name], head_size)
    torch.testing.assert_close(inverse_frequencies(ours), theirs, rtol=2e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor)


@settings(max_examples=40, deadline=None)
@given(
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1.0, 64.0),
    original=st.integers(1024, 65536),
    head_size=st.sampled_from([32, 64, 96, 128, 256]),
    rope_type=st.sampled_from(["linear", "llama3", "yarn"]),
)
def test_frequencies_equal_transformers_for_any_parameters(
    theta: float, factor: float, original: int, head_size: int, rope_type: str
) -> None:
    parameters = {"rope_type": rope_type, "rope_theta": theta, "factor": factor}
    if rope_type != "linear":
        parameters["original_max_position_embeddings"] = original
    if rope_type == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs, _ = _reference(dict(parameters), head_size)
    ours = inverse_frequencies(_parsed({"rope_parameters": parameters}, head_size))
    torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=1e-12)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("theta_inside", [True, False])
def test_old_and_new_config_keys_mean_the_same(key: str, theta_inside: bool) -> None:
    parameters: dict = {key: "linear", "factor": 2.0}
    raw: dict = {"rope_scaling": parameters}
    (parameters if theta_inside else raw)["rope_theta"] = 5e5
    assert _parsed(raw) == _parsed(
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    )


def test_missing_rope_keys_mean_the_default() -> None:
    assert _parsed({}) == _parsed({"rope_theta": 10000, "rope_scaling": None})


def test_original_length_defaults_to_the_models_positions() -> None:
    rope = _parsed({"rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert rope.original_max_positions == POSITIONS
    assert rope.trained_positions == 2 * POSITIONS


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope"}, "longrope"),
        ({"type": "su"}, "su"),
        ({"rope_type": "mrope", "mrope_section": [1, 2]}, "mrope"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "linear", "factor": True}, "factor"),
        ({"rope_type": "linear", "factor": math.nan}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast"),
        ({"rope_type": "default", "factor": 2.0}, "factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "high_freq_factor",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": -1.0}, "beta_slow"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "yes"}, "truncate"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ([1, 2], "rope"),
    ],
)
def test_unusable_rope_parameters_are_refused_by_name(parameters: object, names: str) -> None:
    with pytest.raises(ModelError, match=names):
        _parsed({"rope_parameters": parameters})


def test_two_sets_of_rope_parameters_are_refused() -> None:
    with pytest.raises(ModelError, match="rope_scaling"):
        _parsed(
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}
        )


def test_stored_divisors_replace_the_formula() -> None:
    import dataclasses

    plain = _parsed({})
    divisors = tuple(float(i + 1) for i in range(32))
    stored = dataclasses.replace(plain, divisors=divisors)
    expected = inverse_frequencies(plain) / torch.arange(1, 33)
    torch.testing.assert_close(inverse_frequencies(stored), expected)


def test_rotation_turns_each_pair_by_position_times_frequency() -> None:
    rope = _parsed({}, head_size=8)
    table = rope_table(rope, max_positions=50, dtype=torch.float64, device=torch.device("cpu"))
    positions = torch.tensor([0, 1, 49, 7], dtype=torch.int32)
    cos, sin = table.index_select(0, positions).split(1, dim=1)
    heads = torch.randn(4, 3, 8, dtype=torch.float64)
    angles = positions.double()[:, None, None] * inverse_frequencies(rope).double()
    turned = torch.complex(heads[..., :4], heads[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(
        rotate(heads, cos, sin), torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-5, atol=1e-5
    )


def test_scores_depend_on_the_distance_of_positions_only() -> None:
    table = rope_table(_parsed({}), max_positions=600, dtype=torch.float64, device=torch.device("cpu"))
    query, key = torch.randn(2, 1, 1, 64, dtype=torch.float64)

    def score(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, *table[p : p + 1].split(1, dim=1))
            for x, p in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(3, 1) == pytest.approx(score(502, 500), abs=1e-3)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


def _parsed(raw: dict, head_size: int = 64):
    return parse_rope(raw, head_size=head_size, max_position_embeddings=POSITIONS, source="test")


def _reference(parameters: dict, head_size: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=head_size * 2,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        rope_parameters=parameters,
    )
    if parameters["rope_type"] == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
