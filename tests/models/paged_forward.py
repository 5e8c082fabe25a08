"""Helper of the model tests: run a model over ragged batches through a paged cache, as the engine does.

Blocks are handed out in an order that is not ascending, so a test fails when a block table is ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.attention.base import AttentionMetadata
from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.models.decoder import Decoder


class PagedForward:
    """Keeps a cache for a fixed set of sequences; ``step`` appends tokens to each and returns all their
    logits."""

    def __init__(self, model: Decoder, *, num_seqs: int, max_len: int, block_size: int = 4) -> None:
        self._model, self._block_size, self._max_len = model, block_size, max_len
        self._lengths = [0] * num_seqs
        per_seq = -(-max_len // block_size)
        numbers = torch.arange(1, 1 + num_seqs * per_seq, dtype=torch.int32)
        self._block_table = numbers.flip(0).view(per_seq, num_seqs).t().contiguous()
        info = model.info
        shape = (1 + num_seqs * per_seq, block_size, info.num_kv_heads, info.head_size)
        backend = TorchReferenceBackend()
        for layer in model.attention_layers():
            # NaN, so that a read of a slot never written shows.
            k_cache = torch.full(shape, torch.nan, dtype=info.dtype)
            layer.bind(backend, k_cache, torch.full_like(k_cache, torch.nan))

    def step(self, new_tokens: list[list[int]]) -> list[Tensor]:
        """Logits ``[n_i, V]`` of the new tokens of each sequence."""
        starts, positions, slots = [0], [], []
        for seq, tokens in enumerate(new_tokens):
            for position in range(self._lengths[seq], self._lengths[seq] + len(tokens)):
                block = int(self._block_table[seq, position // self._block_size])
                positions.append(position)
                slots.append(block * self._block_size + position % self._block_size)
            self._lengths[seq] += len(tokens)
            starts.append(starts[-1] + len(tokens))
        metadata = AttentionMetadata(
            query_start_loc=_int32(starts),
            seq_lens=_int32(self._lengths),
            block_table=self._block_table,
            slot_mapping=_int32(slots),
            max_query_len=max(len(tokens) for tokens in new_tokens),
            max_seq_len=self._max_len,
        )
        ids = _int32([token for tokens in new_tokens for token in tokens])
        with torch.no_grad(), use_forward_context(ForwardContext(batch=metadata)):
            hidden = self.hidden_states(ids, _int32(positions))
            logits = self._model.head(hidden)
        return list(logits.split([len(tokens) for tokens in new_tokens]))

    def hidden_states(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Of the new tokens of all sequences in a row."""
        return self._model.layers(self._model.embed(ids_T), positions_T)


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
