"""What the graph runtime relies on: no host read, no rebinding, fixed shapes, every part reachable by
itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import TINY, empty_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.attention.base import Attention
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.modes import AttentionSupport
from gapless.models.decoder import Decoder
from gapless.models.dummy import fill_dummy_weights

CPU = torch.device("cpu")
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal")
FAMILIES: dict[str, dict] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {},
    "tied": {"tie_word_embeddings": True},
}


class CopyValues:
    """An attention backend of one operation: each query head gets its value head."""

    name = "copy_values"
    support = AttentionSupport.ALWAYS
    preferred = None

    def write_kv(self, key_TKD: Tensor, value_TKD: Tensor, *rest: Any) -> None:
        self.value_TKD = value_TKD

    def attend(self, query_THD: Tensor, k: Any, v: Any, out_THD: Tensor, metadata: Any, **rest: Any) -> None:
        groups = query_THD.shape[1] // self.value_TKD.shape[1]
        out_THD.copy_(self.value_TKD.repeat_interleave(groups, dim=1))


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_reads_nothing_on_the_host(family: str, dtype: torch.dtype) -> None:
    model = _model(family, dtype)
    ids, positions = torch.arange(6, dtype=torch.int32), torch.arange(6, dtype=torch.int32)
    with Recorder() as recorder:
        _forward(model, ids, positions)
    assert recorder.names
    reads = [name for name in recorder.names if any(word in name for word in HOST_READS)]
    assert reads == []
    assert sum("mm" in name for name in recorder.names) == 4 * model.info.num_layers + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_rebinds_no_attribute(family: str) -> None:
    model = _model(family, torch.float32)
    before = _state(model)
    _forward(model, torch.arange(6), torch.arange(6))
    assert _state(model) == before


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_parts_have_the_documented_shapes_and_dtypes(num_tokens: int, index_dtype: torch.dtype) -> None:
    model = _model("qwen3", torch.bfloat16)
    ids = torch.full((num_tokens,), 49, dtype=index_dtype)
    with _step():
        hidden = model.embed(ids)
        out = model.layers(hidden, torch.full((num_tokens,), 63, dtype=index_dtype))
        logits = model.head(out[:1])
    assert (hidden.shape, hidden.dtype) == ((num_tokens, 32), torch.bfloat16)
    assert (out.shape, out.dtype) == ((num_tokens, 32), torch.bfloat16)
    assert (logits.shape, logits.dtype) == ((1, 50), torch.float32)


def test_layers_leave_their_input_alone() -> None:
    model = _model("llama", torch.float32)
    with _step():
        hidden = model.embed(torch.arange(5))
        copy = hidden.clone()
        model.layers(hidden, torch.arange(5))
    assert torch.equal(hidden, copy)


def test_attention_layers_are_in_order_and_know_their_window() -> None:
    raw = {
        **FAMILIES["qwen2"],
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,
    }
    layers = empty_model({**TINY, **raw}).attention_layers()
    assert all(isinstance(layer, Attention) for layer in layers)
    assert [layer.layer_index for layer in layers] == [0, 1, 2]
    assert [layer.window for layer in layers] == [None, None, 4]
    assert {(layer.num_heads, layer.num_kv_heads, layer.head_size) for layer in layers} == {(4, 2, 8)}
    assert {layer.scale for layer in layers} == {8**-0.5}


def test_tied_head_is_the_embedding_itself() -> None:
    tied = empty_model({**TINY, "tie_word_embeddings": True})
    assert tied.lm_head.weight is tied.embedding
    assert "lm_head.weight" not in tied.weight_targets()
    assert "lm_head.weight" in empty_model().weight_targets()


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_changes_neither_logits_nor_the_rest_of_the_model(family: str) -> None:
    model = _model(family, torch.float32)
    ids, positions = torch.arange(9), torch.arange(9)
    plain = _forward(model, ids, positions)
    kept = {name: p.data_ptr() for name, p in model.named_parameters() if "norm" in name or "embed" in name}
    model.pack()
    torch.testing.assert_close(_forward(model, ids, positions), plain, rtol=1e-4, atol=1e-5)
    after = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert kept.items() <= after.items()
    model.pack()  # a second call has nothing to do
    torch.testing.assert_close(_forward(model, ids, positions), plain, rtol=1e-4, atol=1e-5)


def test_weight_targets_cover_every_parameter_exactly_once() -> None:
    for changes in FAMILIES.values():
        model = empty_model({**TINY, **changes})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            for target in model.weight_targets().values():
                target.tensor.add_(1)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, torch.ones_like(parameter)), name


def test_rows_do_not_depend_on_their_neighbours() -> None:
    model = _model("qwen3", torch.float64)
    ids, positions = torch.tensor([3, 9, 27, 3]), torch.tensor([0, 5, 9, 0])
    together = _forward(model, ids, positions)
    for row in range(4):
        alone = _forward(model, ids[row : row + 1], positions[row : row + 1])
        torch.testing.assert_close(alone[0], together[row])


def _model(family: str, dtype: torch.dtype) -> Decoder:
    model = empty_model({**TINY, **FAMILIES[family]}, dtype=dtype)
    fill_dummy_weights(model, seed=0)
    for layer in model.attention_layers():
        layer.bind(CopyValues(), torch.empty(0), torch.empty(0))
    return model


def _forward(model: Decoder, ids: Tensor, positions: Tensor) -> Tensor:
    with _step():
        return model(ids, positions)


@contextmanager
def _step() -> Iterator[None]:
    batch = SimpleNamespace(slot_mapping=None)  # all that Attention itself reads
    with torch.no_grad(), use_forward_context(ForwardContext(batch=batch)):
        yield


def _state(model: Decoder) -> dict[str, object]:
    state: dict[str, object] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not isinstance(value, dict):
                state[f"{name}.{key}"] = value.data_ptr() if isinstance(value, Tensor) else repr(type(value))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state[name] = (tensor.data_ptr(), tensor._version)
    return state
