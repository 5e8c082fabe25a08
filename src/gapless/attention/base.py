"""The attention seam: the live batch, the backend protocol, and the layer models use.

A backend writes new keys and values into the paged cache and computes attention over it. It is *capture-safe*
when it reads every length and block table from device memory at the time it runs; ``support`` declares for
which batches.
``Attention.forward`` is the one place where a model meets a backend, and the one break point of a breakable
capture. While ``torch.compile`` traces it is the operator ``ATTENTION_OP``, the default split op of piecewise
graphs.

Shapes: T tokens of the step (padded), B requests (padded), H query heads, K key/value heads, D head size,
N cache blocks, S slots per block, M block-table columns.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from gapless.errors import GraphError
from gapless.graphs.breakable import eager_break
from gapless.graphs.context import get_forward_context
from gapless.graphs.modes import AttentionSupport, GraphMode
from gapless.graphs.ops import register_custom_op

SINK_BLOCK = 0
"""Block 0 belongs to nobody: pad tokens write there, and the allocator never hands it out."""

ATTENTION_OP = "gapless::attention_layer"
"""The whole attention of one layer, cache included, as one opaque operator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """The batch as attention sees it. Tensors are int32 on the model's device (static buffers when graphs are
    on).

    Request ``b`` owns query rows ``query_start_loc[b] : query_start_loc[b+1]``; its keys are positions
    ``0 : seq_lens[b]``, the last of which are this step's own tokens: ``attend`` finds them in the cache,
    where ``slot_mapping`` and the block table agree they lie. Empty request slots have query length 0 and
    ``seq_lens`` 0. Rows at and past ``query_start_loc[-1]`` are padding: backends fill them with zeros. Pad
    tokens carry a slot inside ``SINK_BLOCK``.
    """

    query_start_loc: Tensor  # [B+1]
    seq_lens: Tensor  # [B]
    block_table: Tensor  # [B, M], pad SINK_BLOCK; of any strides
    slot_mapping: Tensor  # [T], cache slot = block * S + offset
    max_query_len: int
    """Host upper bound on a query length: the uniform query length for uniform decode, else the number of
    tokens of the bucket. A kernel may size its grid by it; it must be right for every smaller length."""
    max_seq_len: int
    """Host upper bound on ``seq_lens``: the model's maximum, never this batch's."""


class Rotation(NamedTuple):
    """What heads are normed and rotated by; the arguments of ``rotate_into_cache``
    (``kernels/rope_cache.py``)."""

    norm_weight_GD: Tensor | None
    eps: float
    rope_P2F: Tensor
    positions_T: Tensor | None


class AttentionBackend(Protocol):
    name: str
    support: AttentionSupport
    preferred: GraphMode | None

    def write_kv(
        self, key_TKD: Tensor, value_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store this step's keys and values. Caches are ``[N, S, K, D]``."""

    def attend(
        self,
        query_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out_THD: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        """Causal attention of each request's new tokens over its cached keys; every row of ``out`` is
        written.

        Keys of earlier steps were in the cache before the first kernel of this step started: they may be read
        while the kernel ahead, which stores the new ones, still runs. ``window``: a token at position p sees
        keys in ``(p - window, p]`` (Transformers' sliding window); None = all.
        """


@runtime_checkable
class RotatingBackend(AttentionBackend, Protocol):
    """A backend that norms and rotates heads itself, for some batches."""

    def can_rotate(self, qkv_TC: Tensor, k_cache: Tensor, metadata: AttentionMetadata) -> bool:
        """Whether it does for this batch; by shapes and host numbers alone. Eager steps ask in each layer."""

    def attend_rotating(
        self,
        qkv_TC: Tensor,
        rotation: Rotation,
        k_cache: Tensor,
        v_cache: Tensor,
        out_THD: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        """``rotate_into_cache`` and ``attend`` at once: ``qkv`` has the rows of the merged product, columns
        of ``H + 2K`` heads. Keys and values go where the block table has each request's last position."""


class Attention(nn.Module):
    """Paged attention of one layer. ``bind`` gives it a backend and its part of the cache before the first
    step."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        window: int | None,
        layer_index: int,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.window, self.layer_index = scale, window, layer_index
        self.layer_name = f"attention.{layer_index}#{next(_serials)}"
        """Unique in the process: how traced code finds this layer again."""
        _layers[self.layer_name] = self
        self.backend: AttentionBackend | None = None
        self._may_rotate = False
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None

    def bind(self, backend: AttentionBackend, k_cache: Tensor, v_cache: Tensor) -> None:
        """Attach backend and cache. Graphs captured before a rebind are invalid; the engine binds once."""
        self.backend, self.k_cache, self.v_cache = backend, k_cache, v_cache
        self._may_rotate = isinstance(backend, RotatingBackend)  # here, for it takes Python 20 us

    def unbind(self) -> None:
        """Let go of the cache, so that its memory can be freed; no step before the next ``bind``."""
        self.backend = self.k_cache = self.v_cache = None

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Keys and values of this layer. Raises ``GraphError`` before ``bind``."""
        if self.k_cache is None or self.v_cache is None:
            raise GraphError(
                f"attention layer {self.layer_index} has no cache: call bind() before the first step"
            )
        return self.k_cache, self.v_cache

    def forward(
        self, query_THD: Tensor, key_TKD: Tensor | None = None, value_TKD: Tensor | None = None
    ) -> Tensor:
        """``[T, H, D], [T, K, D], [T, K, D] -> [T, H, D]``; reads the live batch from the forward context.

        Without keys and values: the caller has written them to the cache at this step's slots.
        """
        out_THD = torch.empty_like(query_THD)
        if torch.compiler.is_compiling():
            attention_layer(query_THD, key_TKD, value_TKD, out_THD, self.layer_name)
        else:
            _attend(self, query_THD, key_TKD, value_TKD, out_THD)
        return out_THD

    def can_rotate(self, qkv_TC: Tensor) -> bool:
        """Whether the backend can norm and rotate this step's heads itself (``attend_rotating``)."""
        if not self._may_rotate or self.k_cache is None:
            return False
        backend = cast(RotatingBackend, self.backend)
        return backend.can_rotate(qkv_TC, self.k_cache, get_forward_context().batch)

    def attend_rotating(self, qkv_TC: Tensor, rotation: Rotation) -> Tensor:
        """``[T, (H + 2K) * D] -> [T, H, D]``, where ``can_rotate``; keys and values go to the cache."""
        head_size = self.caches[0].shape[3]
        out_THD = qkv_TC.new_empty((qkv_TC.shape[0], self.num_heads, head_size))
        _attend_rotating(self, qkv_TC, rotation, out_THD)
        return out_THD


_layers: weakref.WeakValueDictionary[str, Attention] = weakref.WeakValueDictionary()
_serials = itertools.count()


@register_custom_op(mutates_args=["out_THD"])
def attention_layer(
    query_THD: Tensor, key_TKD: Tensor | None, value_TKD: Tensor | None, out_THD: Tensor, layer_name: str
) -> None:
    """``Attention.forward`` of the layer called ``layer_name``, into ``out_THD``. It also writes the layer's
    cache, which the schema cannot say and no traced code looks at."""
    layer = _layers.get(layer_name)
    if layer is None:
        raise GraphError(
            f"attention layer {layer_name!r} no longer exists: the model it was traced in is gone"
        )
    _attend(layer, query_THD, key_TKD, value_TKD, out_THD)


@eager_break
def _attend(
    layer: Attention, query_THD: Tensor, key_TKD: Tensor | None, value_TKD: Tensor | None, out_THD: Tensor
) -> None:
    metadata = get_forward_context().batch
    k_cache, v_cache = layer.caches
    assert layer.backend is not None
    if key_TKD is not None and value_TKD is not None:
        layer.backend.write_kv(key_TKD, value_TKD, k_cache, v_cache, metadata.slot_mapping)
    layer.backend.attend(
        query_THD, k_cache, v_cache, out_THD, metadata, scale=layer.scale, window=layer.window
    )


@eager_break
def _attend_rotating(layer: Attention, qkv_TC: Tensor, rotation: Rotation, out_THD: Tensor) -> None:
    metadata, backend = get_forward_context().batch, cast(RotatingBackend, layer.backend)
    backend.attend_rotating(
        qkv_TC, rotation, *layer.caches, out_THD, metadata, scale=layer.scale, window=layer.window
    )
