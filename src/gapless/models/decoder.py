"""The one decoder: Llama 2/3, SmolLM2, Mistral, Mixtral, Qwen2/2.5/3 and their mixtures of experts differ
only in ``DecoderConfig``.

``embed`` → ``layers`` → ``head`` is the split the graph runtime builds on: a breakable graph holds ``layers``
only. Tokens of all requests lie in one row without a batch dimension; who belongs to whom is known to
attention alone. Invariant: the forward allocates from, reads and writes tensors only; no host read, no
attribute write, no branch on data. ``T`` tokens, ``E`` hidden size, ``H``/``K`` query/key-value heads, ``D``
head size, ``R`` sampled rows, ``V`` vocabulary, ``F`` = D/2. Read ``config.py`` for what is accepted and
``layers.py`` for the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gapless.attention.base import Attention
from gapless.graphs.context import in_short_warm_up
from gapless.kernels.select import has_fused_kernels
from gapless.models.base import ModelInfo
from gapless.models.config import DecoderConfig
from gapless.models.fused import (
    activated,
    fused_drawn_to_tail,
    fused_embed_media,
    fused_hidden_states,
    fused_layers,
    fused_linear,
    fused_tail,
    fused_to_tail,
    prepare_products,
)
from gapless.models.layers import (
    HeadNorm,
    Linear,
    Placement,
    RMSNorm,
    Slice,
    WeightTarget,
    empty_parameter,
)
from gapless.models.moe import MixtureOfExperts
from gapless.models.mrope import AxisAngles
from gapless.models.parallel_linear import ColumnParallelLinear, OutputPart, RowParallelLinear
from gapless.models.rope import rope_table, rotate
from gapless.parallel.collectives import all_reduce, gather_columns
from gapless.parallel.shard import WHOLE, Shard, Span


class Decoder(nn.Module):
    """A causal language model with empty parameters; a loader fills ``weight_targets()``, then calls
    ``pack()``.

    ``max_positions`` is how many positions the rotary table covers; a position beyond it is the caller's
    error.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__()
        placement = Placement(dtype=dtype, device=device, shard=shard)
        self.config, self.shard = config, shard
        self.info = ModelInfo(
            architecture=config.architecture,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            dtype=dtype,
            eos_token_ids=config.eos_token_ids,
            num_experts=0 if config.experts is None else config.experts.num_experts,
            rope_axes=1 if config.rope.axis_sections is None else 3,
            num_deepstack=config.num_deepstack,
            is_pooling=config.is_pooling,
            is_multimodal=config.image_token_id is not None,
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
        )
        self.tokens_held = shard.split_padded(config.vocab_size)
        """Of the vocabulary: whose rows of the embedding and the head this rank has."""
        self.embedding = self._vocabulary_rows(placement)
        blocks = [DecoderLayer(config, layer_index=i, placement=placement) for i in range(config.num_layers)]
        self.blocks = cast("Sequence[DecoderLayer]", nn.ModuleList(blocks))
        kinds = [
            (type(block.mlp), config.windows[i], i < config.num_deepstack) for i, block in enumerate(blocks)
        ]
        self.first_of_each_kind = frozenset(kinds.index(kind) for kind in kinds)
        """Layers that together launch every kernel the stack launches, in the same shapes."""
        self.final_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, placement=placement)
        self.lm_head = Linear(
            self.embedding if config.tie_word_embeddings else self._vocabulary_rows(placement)
        )
        self.rope_P2F: Tensor | None
        self.angles: AxisAngles | None = None
        table_P2F = None
        if config.rope.axis_sections is None:
            table_P2F = rope_table(config.rope, max_positions=max_positions, dtype=dtype, device=device)
        else:
            self.angles = AxisAngles(config.rope, dtype=dtype, device=device)
        self.register_buffer("rope_P2F", table_P2F, persistent=False)
        self.has_fused_kernels = has_fused_kernels(device)
        """Whether ``layers`` takes the path of ``fused.py``."""
        self.eval()

    def embed(self, input_ids_T: Tensor) -> Tensor:
        """``[T] -> [T, E]``. Each rank looks up its own tokens; the others' rows are zeros in its sum."""
        if self.shard.is_whole:
            return F.embedding(input_ids_T, self.embedding)
        row_T = input_ids_T - self.tokens_held.start
        is_held_T = (row_T >= 0) & (row_T < self.tokens_held.length)
        partial_TE = F.embedding(torch.where(is_held_T, row_T, 0), self.embedding)
        return all_reduce(torch.where(is_held_T.unsqueeze(1), partial_TE, 0), self.shard)

    def layers(
        self,
        hidden_TE: Tensor,
        positions: Tensor,
        deepstack_LTE: Tensor | None = None,
        is_media_T: Tensor | None = None,
    ) -> Tensor:
        """The layer stack and the final norm: ``[T, E], [T] -> [T, E]``.

        Positions of an m-rope model are ``[3, T]``, or ``[T]`` where all axes agree. ``deepstack_LTE`` is
        added behind each of the first ``L`` layers, to rows with ``is_media`` (bool or 0/1; what lies in
        others does not matter) or, without that, to all; None adds nothing.
        """
        if self.has_fused_kernels:
            return fused_layers(self, hidden_TE, positions, deepstack_LTE, is_media_T)
        if deepstack_LTE is not None and is_media_T is not None:
            # Chosen, not multiplied: what lies in a stale row may be NaN, and NaN times zero is NaN.
            deepstack_LTE = torch.where(is_media_T.bool().unsqueeze(1), deepstack_LTE, 0.0)
        cos_T1F, sin_T1F = self.rope_rows(positions).split(1, dim=1)
        num_deepstack = 0 if deepstack_LTE is None else deepstack_LTE.shape[0]
        is_short = in_short_warm_up()
        for index, block in enumerate(self.blocks):
            if is_short and index not in self.first_of_each_kind:
                continue
            hidden_TE = block(hidden_TE, cos_T1F, sin_T1F)
            if deepstack_LTE is not None and index < num_deepstack:
                hidden_TE = hidden_TE + deepstack_LTE[index]
        return self.final_norm(hidden_TE)

    def embed_with_media(self, input_ids_T: Tensor, media_TE: Tensor, is_media_T: Tensor) -> Tensor:
        """``merge_media(embed(ids), media, is_media)``."""
        if self.has_fused_kernels and self.shard.is_whole:
            return fused_embed_media(input_ids_T, self.embedding, media_TE, is_media_T)
        return self.merge_media(self.embed(input_ids_T), media_TE, is_media_T)

    def rope_rows(self, positions: Tensor) -> Tensor:
        """``[T, 2, F]``: cosines (0) and sines (1) of each token."""
        if self.angles is not None:
            return self.angles(positions)
        assert self.rope_P2F is not None
        return self.rope_P2F.index_select(0, positions)

    def merge_media(self, hidden_TE: Tensor, media_TE: Tensor, is_media_T: Tensor) -> Tensor:
        """Rows of ``media`` where ``is_media`` (bool or 0/1) is set, else of ``hidden``; a new tensor.

        Dense, so that a graph can hold it: rows are chosen on the device and none is counted or gathered.
        """
        return torch.where(is_media_T.bool().unsqueeze(1), media_TE, hidden_TE)

    def hidden_states_of_drawn(
        self, input_ids_T: Tensor, positions: Tensor, *, drawn_rows_T: Tensor, drawn_R: Tensor
    ) -> Tensor:
        """``layers(embed(ids), positions)``, where an id is the larger of ``input_ids[t]`` and
        ``drawn[drawn_rows[t]]``."""
        if self.has_fused_kernels:
            return fused_hidden_states(
                self, input_ids_T, positions, drawn_rows_T=drawn_rows_T, drawn_R=drawn_R
            )
        drawn_T = drawn_R.index_select(0, drawn_rows_T)
        return self.layers(self.embed(torch.maximum(input_ids_T, drawn_T)), positions)

    @property
    def has_tail(self) -> bool:
        """Whether the stack can end behind the last layer's attention (``fused.py``). A mixture of experts
        routes all tokens of a step, features of media are added to all, and ranks sum all rows."""
        is_plain = isinstance(self.blocks[-1].mlp, GatedMLP) and self.info.num_deepstack < len(self.blocks)
        return self.has_fused_kernels and self.shard.is_whole and is_plain

    def layers_to_tail(
        self,
        hidden_TE: Tensor,
        positions: Tensor,
        deepstack_LTE: Tensor | None = None,
        is_media_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``layers`` up to the last layer's attention: its heads ``[T, H * D]`` and the residual stream ``[T,
        E]``; where ``has_tail``."""
        return fused_to_tail(self, hidden_TE, positions, deepstack_LTE, is_media_T)

    def drawn_to_tail(
        self, input_ids_T: Tensor, positions: Tensor, *, drawn_rows_T: Tensor, drawn_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``hidden_states_of_drawn``, as far as ``layers_to_tail``."""
        return fused_drawn_to_tail(self, input_ids_T, positions, drawn_rows_T=drawn_rows_T, drawn_R=drawn_R)

    def tail(self, attended_RC: Tensor, residual_RE: Tensor) -> Tensor:
        """The rest of ``layers``, for rows of what ``layers_to_tail`` gave: ``-> [R, E]``."""
        return fused_tail(self, attended_RC, residual_RE)

    def head(self, hidden_RE: Tensor) -> Tensor:
        """``[R, E] -> [R, V]`` float32 logits."""
        return self.raw_logits(hidden_RE).float()

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        """``[R, E] -> [R, V]`` in the model's dtype, for a caller that widens them itself."""
        linear = fused_linear if self.has_fused_kernels else Linear.__call__
        return gather_columns(linear(self.lm_head, hidden_RE), self.info.vocab_size, self.shard)

    @property
    def head_rows(self) -> Tensor | None:
        """``[V, E]``, or more rows, where ``raw_logits`` is the product with them alone, made here and on
        fused kernels; else None: ranks hold parts, packed weights or a bias are ``raw_logits``' to know."""
        is_plain = self.has_fused_kernels and self.shard.is_whole and self.lm_head.bias is None
        return self.lm_head.weight if is_plain else None

    def forward(self, input_ids_T: Tensor, positions: Tensor) -> Tensor:
        """Logits of every token; the engine calls the three parts instead."""
        return self.head(self.layers(self.embed(input_ids_T), positions))

    def attention_layers(self) -> list[Attention]:
        """The ``Attention`` modules in layer order."""
        return [block.attention.core for block in self.blocks]

    def expert_layers(self) -> dict[int, MixtureOfExperts]:
        """By layer, the mixtures of experts; none in a dense model."""
        found = {i: block.mlp for i, block in enumerate(self.blocks)}
        return {i: mlp for i, mlp in found.items() if isinstance(mlp, MixtureOfExperts)}

    def pack(self) -> None:
        """To be called once after loading: matrices take the form in which this device multiplies fastest,
        and kernels for them are compiled."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        if self.has_fused_kernels:
            prepare_products(self)

    def weight_targets(self, stored: Collection[str] = ()) -> dict[str, WeightTarget]:
        """Checkpoint tensor name (as Hugging Face has it) → where it goes. A tied head has no entry.

        ``stored``: the names in the checkpoint, which tell in which of two forms it holds experts.
        """
        targets = {"model.embed_tokens.weight": self._vocabulary_target(self.embedding)}
        for index, block in enumerate(self.blocks):
            targets.update(block.targets(f"model.layers.{index}", stored))
        targets.update(self.final_norm.targets("model.norm"))
        if not self.config.tie_word_embeddings:
            assert self.lm_head.weight is not None, "the weights are packed already"
            targets["lm_head.weight"] = self._vocabulary_target(self.lm_head.weight)
        return targets

    def _vocabulary_rows(self, placement: Placement) -> nn.Parameter:
        """A row for each token this rank holds, and rows of zeros up to the same number on all ranks."""
        num_rows = self.shard.padded_length(self.config.vocab_size)
        rows_VE = empty_parameter(num_rows, self.config.hidden_size, placement=placement)
        rows_VE[self.tokens_held.length :].zero_()
        return rows_VE

    def _vocabulary_target(self, rows_VE: Tensor) -> WeightTarget:
        start, length = self.tokens_held
        part = None if self.shard.is_whole else Slice(dim=0, start=start, length=length)
        shape = (self.config.vocab_size, self.config.hidden_size)
        return WeightTarget(tensor=rows_VE[:length], shape=shape, part=part)


class DecoderLayer(nn.Module):
    """Norm, attention, norm, gated feed-forward, each around a residual. What attention and feed-forward of
    a rank put out is its part of a sum over ranks."""

    def __init__(self, config: DecoderConfig, *, layer_index: int, placement: Placement) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, placement=placement)
        self.attention = DecoderAttention(config, layer_index=layer_index, placement=placement)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, placement=placement)
        self.mlp = _feed_forward(config, layer_index=layer_index, placement=placement)
        self.shard = placement.shard

    def forward(self, hidden_TE: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
        partial_TE = self.attention(self.attention_norm(hidden_TE), cos_T1F, sin_T1F)
        hidden_TE = hidden_TE + all_reduce(partial_TE, self.shard)
        return hidden_TE + all_reduce(self.mlp(self.mlp_norm(hidden_TE)), self.shard)

    def targets(self, prefix: str, stored: Collection[str]) -> dict[str, WeightTarget]:
        mlp = self.mlp
        if isinstance(mlp, GatedMLP):
            feed_forward = mlp.targets(f"{prefix}.mlp")
        else:
            feed_forward = mlp.targets(prefix, stored)
        return {
            **dict(self.attention_norm.targets(f"{prefix}.input_layernorm")),
            **self.attention.targets(f"{prefix}.self_attn"),
            **dict(self.mlp_norm.targets(f"{prefix}.post_attention_layernorm")),
            **feed_forward,
        }


def _feed_forward(
    config: DecoderConfig, *, layer_index: int, placement: Placement
) -> GatedMLP | MixtureOfExperts:
    experts = config.experts
    if experts is None or not experts.sparse_layers[layer_index]:
        return GatedMLP(config, size=config.intermediate_size, placement=placement)
    shared_size = experts.shared_intermediate_size
    return MixtureOfExperts(
        experts,
        hidden_size=config.hidden_size,
        shared=None if shared_size is None else GatedMLP(config, size=shared_size, placement=placement),
        placement=placement,
    )


class DecoderAttention(nn.Module):
    """Merged q/k/v projection, head norms if any, rotation of q and k in one pass, attention, output."""

    def __init__(self, config: DecoderConfig, *, layer_index: int, placement: Placement) -> None:
        super().__init__()
        shard = placement.shard
        queries = shard.split(config.num_heads, what="num_attention_heads")
        kv_heads = shard.split_kv_heads(config.num_kv_heads)
        self.num_heads, self.num_kv_heads = queries.length, kv_heads.length
        """Of this rank."""
        self.head_size = config.head_size

        def heads(name: str, total: int, held: Span) -> OutputPart:
            size = config.head_size
            span = Span(held.start * size, held.length * size)
            return OutputPart(name=name, total=total * size, span=span, length=span.length)

        query_part = heads("q_proj", config.num_heads, queries)
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            (
                query_part,
                heads("k_proj", config.num_kv_heads, kv_heads),
                heads("v_proj", config.num_kv_heads, kv_heads),
            ),
            bias=config.qkv_bias,
            placement=placement,
        )
        self.head_norm = (
            HeadNorm(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=config.head_size,
                eps=config.rms_norm_eps,
                placement=placement,
            )
            if config.qk_norm
            else None
        )
        self.core = Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5,
            window=config.windows[layer_index],
            layer_index=layer_index,
        )
        self.out = RowParallelLinear(
            "o_proj",
            total=query_part.total,
            span=query_part.span,
            length=query_part.length,
            out_features=config.hidden_size,
            bias=config.o_bias,
            placement=placement,
        )

    def forward(self, hidden_TE: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
        heads_TGD = self.qkv(hidden_TE).unflatten(1, (-1, self.head_size))  # G = H + 2K
        num_rotated = self.num_heads + self.num_kv_heads
        rotated_TGD = heads_TGD[:, :num_rotated]
        if self.head_norm is not None:
            rotated_TGD = self.head_norm(rotated_TGD)
        rotated_TGD = rotate(rotated_TGD, cos_T1F, sin_T1F)
        out_THD = self.core(
            rotated_TGD[:, : self.num_heads], rotated_TGD[:, self.num_heads :], heads_TGD[:, num_rotated:]
        )
        return self.out(out_THD.flatten(1))

    def targets(self, prefix: str) -> dict[str, WeightTarget]:
        norms = {} if self.head_norm is None else dict(self.head_norm.targets(prefix))
        return {**dict(self.qkv.targets(prefix)), **norms, **dict(self.out.targets(prefix))}


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with gate and up in one product."""

    def __init__(self, config: DecoderConfig, *, size: int, placement: Placement) -> None:
        super().__init__()
        span, length = placement.shard.split_padded(size), placement.shard.padded_length(size)
        self.gate_up = ColumnParallelLinear(
            config.hidden_size,
            (
                OutputPart(name="gate_proj", total=size, span=span, length=length),
                OutputPart(name="up_proj", total=size, span=span, length=length),
            ),
            bias=config.mlp_bias,
            placement=placement,
        )
        self.down = RowParallelLinear(
            "down_proj",
            total=size,
            span=span,
            length=length,
            out_features=config.hidden_size,
            bias=config.mlp_bias,
            placement=placement,
        )

    def forward(self, hidden_TE: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden_TE).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

    def fused(self, hidden_TE: Tensor) -> Tensor:
        """The same on fused kernels."""
        return fused_linear(self.down, activated(self.gate_up, hidden_TE))

    def targets(self, prefix: str) -> dict[str, WeightTarget]:
        return {**dict(self.gate_up.targets(prefix)), **dict(self.down.targets(prefix))}
