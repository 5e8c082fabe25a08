"""Positions on several rope axes: where tokens of prompts with images lie for a model that rotates by three.

A text token has its index on all axes. Rows of an image lie on a plane, so a prompt with media brings the
positions of its tokens (``Request.rope_positions_3T``), and whatever is generated behind it goes on at an
offset, ``rope_delta``: the same in every step, so a decode step needs one number per request. Read
``inputs.py`` for the other arrays of a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gapless.engine.request import Request
from gapless.engine.step import ScheduledSequence


def rope_positions(entries: Iterable[ScheduledSequence], positions: np.ndarray, *, axes: int) -> np.ndarray:
    """``[axes, T]`` int32, the caller's own memory. ``positions`` are the indices of the step's tokens."""
    made = np.empty((axes, len(positions)), dtype=np.int32)
    made[:] = positions
    row = 0
    for entry in entries:
        end = row + entry.num_new_tokens
        if entry.sequence.request.rope_positions_3T is not None:
            made[:, row:end] = positions_of(entry.sequence.request, entry.start, entry.end)
        row = end
    return made


def positions_of(request: Request, start: int, end: int) -> np.ndarray:
    """``[3, end - start]`` int32: positions of the tokens ``start : end`` of a request that brings its
    own."""
    prompt_3T = request.rope_positions_3T
    assert prompt_3T is not None
    num_prompt = prompt_3T.shape[1]
    if end <= num_prompt:
        return prompt_3T[:, start:end]
    generated = np.arange(max(start, num_prompt), end, dtype=np.int32) + request.rope_delta
    behind = np.broadcast_to(generated, (3, len(generated)))
    return behind if start >= num_prompt else np.concatenate([prompt_3T[:, start:], behind], axis=1)
