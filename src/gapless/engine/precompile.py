"""Kernels compiled before the first capture needs them, all at once.

A kernel compiles when it is launched for the first time, which takes tenths of a second, one after another.
Here every runner runs once on a few of its sizes while launches do nothing but compile, in threads, so that
the warm-ups find everything ready. Which kernels a size needs follows from rules over its numbers, so not
every size has to be asked: small ones decide the tiles, larger ones differ in what divides by 16. A kernel
missed here compiles in its size's warm-up as before. Read ``kernels/launch.py`` for how.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.modes import Strategy
from gapless.graphs.runner import GraphRunner
from gapless.kernels.launch import can_compile_ahead, compiling_ahead

logger = logging.getLogger(__name__)

_ALL_UP_TO = 64
"""Tokens up to which every size is asked; above, one of eight."""


def precompile(
    work: Sequence[tuple[GraphRunner, Sequence[BatchDescriptor]]],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Compile what the captures of ``work`` will launch. Does nothing where there is no Triton to ask.

    ``on_progress`` is told how many sizes have been asked, and of the last one when all kernels are compiled.

    What goes wrong here (too little memory for a size, say) is left to the captures, which know what to do.
    """
    todo = [
        (runner, d)
        for runner, descriptors in work
        for d in chosen(descriptors)
        if runner.strategy is not Strategy.DISABLED
    ]
    if not todo or not can_compile_ahead(todo[0][0].store.device.torch_device):
        return
    with compiling_ahead():
        for done, (runner, descriptor) in enumerate(todo):
            on_progress(done, len(todo))
            try:
                runner.compile(descriptor)
            except Exception as error:
                logger.info("kernels of %s %s are compiled later: %s", runner.phase, descriptor, error)
    on_progress(len(todo), len(todo))


def chosen(descriptors: Sequence[BatchDescriptor]) -> list[BatchDescriptor]:
    """The sizes to ask, smallest first; always the largest."""
    ordered = sorted(descriptors)
    small = [d for d in ordered if d.num_tokens <= _ALL_UP_TO]
    large = [d for d in ordered if d.num_tokens > _ALL_UP_TO]
    return small + large[-1::-8][::-1]
