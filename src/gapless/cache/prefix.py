"""Names for the contents of full blocks: a hash of a block's tokens and of everything before them.

Keys and values of a token depend on the tokens before it, on its position, and on what else a request brings
into the forward: ``extra`` for all of it (an adapter), ``block_extra`` for what belongs to some of its blocks
(images, and positions that they shift). A chain of hashes covers all three, so equal names mean equal
contents. 256 bits of BLAKE2b: nobody can make two prompts that share a name, which would
hand one user's answer to another; a tuple hash of 64 bits could be forged in hours. About 1 µs per block of
16 tokens, and only as far as a prompt is found. Read ``blocks.py`` for what is kept under these names.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np

_DIGEST_BYTES = 32


def extend_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int] | np.ndarray,
    *,
    num_blocks: int,
    block_size: int,
    extra: bytes = b"",
    block_extra: Callable[[int, int], bytes] | None = None,
) -> None:
    """Append to ``hashes``, those of the first blocks of ``token_ids``, until there are ``num_blocks``.

    An array of ids is int32 (and faster). ``extra`` names whatever else changes the keys and values of all
    these tokens, ``block_extra(start, end)`` what does so from the block of the tokens ``start : end`` on;
    empty where nothing does.
    """
    for index in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else _root(extra)
        first = index * block_size
        own = b"" if block_extra is None else block_extra(first, first + block_size)
        hashes.append(_hash_block(parent, token_ids[first : first + block_size], own))


def _root(extra: bytes) -> bytes:
    return blake2b(extra, digest_size=_DIGEST_BYTES).digest()


def _hash_block(parent: bytes, token_ids: Sequence[int] | np.ndarray, extra: bytes) -> bytes:
    ids = token_ids.tobytes() if isinstance(token_ids, np.ndarray) else array("i", token_ids).tobytes()
    # Fixed widths before what may have any length, so that no two inputs look alike.
    return blake2b(parent + ids + extra, digest_size=_DIGEST_BYTES).digest()
