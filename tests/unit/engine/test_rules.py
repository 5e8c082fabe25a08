"""What the engine tells the planner: rules, caps, features, and the plans that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from gapless.attention.registry import known_backends
from gapless.cli.main import app
from gapless.config import EngineConfig
from gapless.engine.rules import (
    DENIED_ARCHITECTURES,
    MULTIMODAL_ALLOWED,
    RULES,
    Feature,
    capabilities_for,
    is_llama_2,
    model_features,
    parse_features,
    prefill_max_cap,
    refuse_missing_encoder,
)
from gapless.errors import ConfigError
from gapless.graphs.capabilities import BackendSupport
from gapless.graphs.modes import AttentionSupport, GraphMode, Phase, Strategy
from gapless.graphs.plan import GraphRequest, resolve
from gapless.llm import LLM

HARD = {Feature.HARDWARE_WITHOUT_GRAPHS, Feature.PIPELINE_PARALLEL, Feature.MOE_ALL_TO_ALL}
ALL = frozenset(Strategy)


@dataclass(frozen=True, kw_only=True)
class Info:
    """The facts of a model that rules look at."""

    architecture: str = "Qwen3ForCausalLM"
    max_model_len: int = 40960
    vocab_size: int = 151936
    is_multimodal: bool = False
    num_experts: int = 0


def capabilities(info: Info | None = None, **facts):
    facts = {
        "attention": ("triton_attention",),
        "supports_graphs": True,
        "max_running_requests": 16,
        "chunked_prefill_size": 4096,
        "available_strategies": ALL,
        **facts,
    }
    return capabilities_for(info or Info(), **facts)  # type: ignore[arg-type]


def test_every_feature_has_exactly_one_rule_with_a_reason():
    assert sorted(rule.feature for rule in RULES) == sorted(Feature)
    assert all(len(rule.reason) > 10 for rule in RULES)


def test_exactly_the_documented_rules_are_hard():
    assert {rule.feature for rule in RULES if rule.is_hard} == HARD


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.feature)
def test_every_rule_covers_both_piecewise_strategies_of_prefill(rule):
    assert rule.strategies >= {Strategy.TC_PIECEWISE, Strategy.BREAKABLE}
    assert Phase.PREFILL in rule.phases


@pytest.mark.parametrize("has_split", [True, False], ids=["breakable", "traced"])
@pytest.mark.parametrize("feature", list(Feature), ids=str)
def test_under_auto_every_feature_turns_prefill_graphs_off_and_says_why(feature, has_split):
    plan = resolve(GraphRequest(), capabilities(features={feature}, has_layer_split=has_split))
    assert plan.prefill.strategy is Strategy.DISABLED
    assert plan.decode.strategy is (
        Strategy.DISABLED if feature is Feature.HARDWARE_WITHOUT_GRAPHS else Strategy.FULL
    )
    [decision] = [
        d for d in plan.decisions if d.phase is Phase.PREFILL and d.rule == f"auto_disable:{feature}"
    ]
    assert decision.after == "disabled"
    assert decision.reason


@pytest.mark.parametrize(
    "request_",
    [
        GraphRequest(prefill=Strategy.BREAKABLE),
        GraphRequest(prefill=Strategy.TC_PIECEWISE),
        GraphRequest(mode=GraphMode.FULL_AND_PIECEWISE),
        GraphRequest(mode=GraphMode.PIECEWISE),
    ],
    ids=["breakable", "traced", "default mode", "piecewise"],
)
@pytest.mark.parametrize("feature", list(Feature), ids=str)
def test_a_named_backend_or_mode_overrides_soft_rules_only(feature, request_):
    plan = resolve(request_, capabilities(features={feature}))
    assert (plan.prefill.strategy is Strategy.DISABLED) == (feature in HARD)


@pytest.mark.parametrize("feature", list(Feature), ids=str)
def test_forcing_traced_graphs_skips_every_rule(feature):
    request = GraphRequest(prefill=Strategy.TC_PIECEWISE, force=True)
    assert resolve(request, capabilities(features={feature})).prefill.strategy is Strategy.TC_PIECEWISE


@pytest.mark.parametrize("backend", known_backends(), ids=lambda row: row.name)
@pytest.mark.parametrize("query_len", [1, 3])
def test_the_plan_of_every_known_backend_follows_its_support(backend, query_len):
    plan = resolve(
        GraphRequest(mode=GraphMode.FULL),
        capabilities(attention=(backend.name,), uniform_query_len=query_len),
    )
    full_prefill = backend.support is AttentionSupport.ALWAYS
    full_decode = backend.support >= (
        AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE if query_len == 1 else AttentionSupport.UNIFORM_BATCH
    )
    assert (plan.prefill.strategy is Strategy.FULL, plan.decode.strategy is Strategy.FULL) == (
        full_prefill,
        full_decode,
    )


def test_a_backend_nobody_declared_supports_nothing():
    plan = resolve(
        GraphRequest(mode=GraphMode.FULL), capabilities(attention=("triton_attention", "homemade"))
    )
    assert plan.mode is GraphMode.PIECEWISE
    assert any("homemade supports NEVER" in d.reason for d in plan.decisions)


def test_support_may_be_given_as_data():
    row = BackendSupport(name="mine", support=AttentionSupport.UNIFORM_BATCH)
    assert capabilities(attention=(row,)).attention == (row,)


@pytest.mark.parametrize("architecture", sorted(DENIED_ARCHITECTURES))
def test_a_denied_architecture_turns_prefill_graphs_off_by_itself(architecture):
    plan = resolve(GraphRequest(), capabilities(Info(architecture=architecture)))
    assert plan.prefill.strategy is Strategy.DISABLED


@pytest.mark.parametrize(("is_multimodal", "expected"), [(False, set()), (True, {Feature.MULTIMODAL})])
def test_a_multimodal_model_is_off_until_it_is_on_the_list(is_multimodal, expected):
    assert model_features("LlavaForConditionalGeneration", is_multimodal=is_multimodal) == expected


@pytest.mark.parametrize("architecture", sorted(MULTIMODAL_ALLOWED))
def test_a_multimodal_model_on_the_list_has_prefill_graphs(architecture):
    plan = resolve(GraphRequest(), capabilities(Info(architecture=architecture, is_multimodal=True)))
    assert plan.prefill.strategy is Strategy.BREAKABLE


def test_naming_a_backend_overrides_the_list():
    unlisted = Info(architecture="LlavaForConditionalGeneration", is_multimodal=True)
    assert resolve(GraphRequest(), capabilities(unlisted)).prefill.strategy is Strategy.DISABLED
    named = resolve(GraphRequest(prefill=Strategy.BREAKABLE), capabilities(unlisted))
    assert named.prefill.strategy is Strategy.BREAKABLE


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (Info(architecture="LlamaForCausalLM", max_model_len=4096, vocab_size=32000), True),
        (Info(architecture="LlamaForCausalLM", max_model_len=4096, vocab_size=32016), True),
        (Info(architecture="LlamaForCausalLM", max_model_len=2048, vocab_size=32000), False),
        (Info(architecture="LlamaForCausalLM", max_model_len=131072, vocab_size=128256), False),
        (Info(architecture="LlamaForCausalLM", max_model_len=8192, vocab_size=49152), False),
        (Info(architecture="MistralForCausalLM", max_model_len=4096, vocab_size=32000), False),
    ],
)
def test_llama_2_is_told_from_its_relatives(info, expected):
    assert is_llama_2(info) is expected
    assert prefill_max_cap(info) == (4096 if expected else None)


@pytest.mark.parametrize(
    ("info", "facts", "largest"),
    [
        (Info(), {}, 8192),
        (Info(), {"is_mla": True}, 2048),
        (Info(), {"is_mla": True, "max_total_tokens": 1024}, 1024),
        (Info(architecture="LlamaForCausalLM", max_model_len=4096, vocab_size=32000), {}, 4096),
    ],
)
def test_the_default_prefill_maximum_is_capped_by_the_kind_of_model(info, facts, largest):
    plan = resolve(GraphRequest(), capabilities(info, chunked_prefill_size=8192, **facts))
    assert plan.prefill.ladder.largest == largest


@pytest.mark.parametrize(
    "option",
    [
        "pipeline_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
        "speculative_config",
        "enable_lora",
        "kv_transfer_config",
    ],
)
def test_asking_the_engine_for_a_feature_it_lacks_is_an_error_naming_it(option, tmp_path):
    with pytest.raises(ConfigError, match=f"no option {option}=2"):
        LLM(model=str(tmp_path), **{option: 2})
    with pytest.raises(ConfigError, match=f"unknown option '{option}' from the config file"):
        EngineConfig.from_sources(python={"model": "x"}, config_file={option: 2})
    flag = "--" + option.replace("_", "-")
    for command in ("generate", "serve"):
        result = CliRunner().invoke(app, [command, "--model", "x", flag, "2"])
        assert (result.exit_code, flag in result.output) == (2, True)


def test_features_are_read_by_name_and_an_unknown_one_lists_what_exists():
    assert parse_features(["lora", "multimodal"]) == {Feature.LORA, Feature.MULTIMODAL}
    with pytest.raises(ConfigError, match=r"unknown feature 'flux'; known: .*lora"):
        parse_features(["flux"])


def test_a_device_without_graphs_is_the_feature_of_that_name():
    by_device = resolve(GraphRequest(), capabilities(supports_graphs=False))
    by_feature = resolve(GraphRequest(), capabilities(features={Feature.HARDWARE_WITHOUT_GRAPHS}))
    assert by_device == by_feature
    assert by_device.mode is GraphMode.NONE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_vit_cuda_graph": True}, r"GAPLESS_VIT_ENABLE_CUDA_GRAPH=1.* takes text only; leave it out"),
        ({"mm_embedding_cache_tokens": 5}, r"--mm-embedding-cache-tokens=5 .* takes text only"),
    ],
)
def test_an_engine_without_vision_refuses_options_of_an_encoder(options, message):
    config = EngineConfig(model="m", **options)
    with pytest.raises(ConfigError, match=message):
        refuse_missing_encoder(config, Info())
    refuse_missing_encoder(config, Info(is_multimodal=True))
    refuse_missing_encoder(EngineConfig(model="m"), Info())
