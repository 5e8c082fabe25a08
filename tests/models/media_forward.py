"""Helper of the model tests: ragged batches of prompts with media through a paged cache, as in the engine.

A tower, run eagerly, makes every item's rows once; a step takes those of its own tokens. Rows that are no
media hold NaN where the model must choose them away and zeros where it adds them.
"""

from __future__ import annotations

import torch
from paged_forward import PagedForward
from torch import Tensor

from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.encoder_options import EncoderMode, EncoderOptions
from gapless.models.registry import LoadedModel
from gapless.models.vision.encoder import TowerEncoder
from gapless.multimodal.items import MediaPrompt


class MediaForward(PagedForward):
    """``advance`` runs some more tokens of each prompt; ``decode`` one token behind each."""

    def __init__(self, loaded: LoadedModel, prompts: list[MediaPrompt], *, block_size: int = 4) -> None:
        super().__init__(loaded.model, num_seqs=len(prompts), max_len=256, block_size=block_size)
        self._prompts = prompts
        self._done = [0] * len(prompts)
        self._lens: list[int] = []
        info = loaded.info
        self._rows = [_rows_of(loaded, prompt) for prompt in prompts]
        self._num_deepstack = info.num_deepstack

    def advance(self, counts: list[int]) -> list[Tensor]:
        self._lens = counts
        logits = self.step(
            [
                list(prompt.token_ids[done : done + count])
                for prompt, done, count in zip(self._prompts, self._done, counts, strict=True)
            ]
        )
        self._done = [done + count for done, count in zip(self._done, counts, strict=True)]
        return logits

    def decode(self, tokens: list[int]) -> list[Tensor]:
        self._lens = [1] * len(tokens)
        logits = self.step([[token] for token in tokens])
        self._done = [done + 1 for done in self._done]
        return logits

    def hidden_states(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        positions, embeds, features, masks = [], [], [], []
        for prompt, rows, done, count in zip(self._prompts, self._rows, self._done, self._lens, strict=True):
            num_prompt = len(prompt.token_ids)
            if done < num_prompt:
                part = slice(done, done + count)
                positions.append(torch.from_numpy(prompt.rope_positions_3T[:, part]))
                embeds.append(rows[0][part])
                features.append(rows[1][:, part])
                masks.append(rows[2][part])
            else:
                positions.append(torch.full((3, 1), done + prompt.rope_delta, dtype=torch.int32))
                embeds.append(torch.full((1, rows[0].shape[1]), torch.nan))
                features.append(torch.zeros(rows[1].shape[0], 1, rows[1].shape[2]))
                masks.append(torch.zeros(1, dtype=torch.bool))
        hidden_TE = self._model.embed(ids_T)
        is_media_T = torch.cat(masks)
        deepstack_LTE = None
        if is_media_T.any():
            hidden_TE = self._model.merge_media(hidden_TE, torch.cat(embeds), is_media_T)
            deepstack_LTE = torch.cat(features, dim=1) if self._num_deepstack else None
        return self._model.layers(hidden_TE, torch.cat(positions, dim=1), deepstack_LTE)


def _rows_of(loaded: LoadedModel, prompt: MediaPrompt) -> tuple[Tensor, Tensor, Tensor]:
    """For every token: its embedding, its deepstack features ``[L, T, E]``, whether it is media."""
    info, num_tokens = loaded.info, len(prompt.token_ids)
    embeds_TE = torch.full((num_tokens, info.hidden_size), torch.nan)
    deepstack_LTE = torch.zeros(info.num_deepstack, num_tokens, info.hidden_size)
    is_media_T = torch.zeros(num_tokens, dtype=torch.bool)
    if not prompt.items:
        return embeds_TE, deepstack_LTE, is_media_T
    assert loaded.vision is not None
    encoder = TowerEncoder(
        loaded.vision, device=EmulatedDevice(), options=EncoderOptions(mode=EncoderMode.OFF)
    )
    with torch.no_grad():
        encoded = encoder.encode(prompt.items)
    for item, media in zip(prompt.items, encoded, strict=True):
        index = torch.cat([torch.arange(start, start + length) for start, length in item.ranges])
        embeds_TE[index] = media.embeds_NE
        is_media_T[index] = True
        if media.deepstack_LNE is not None:
            deepstack_LTE[:, index] = media.deepstack_LNE
    return embeds_TE, deepstack_LTE, is_media_T
