"""A prompt's token ids as one int32 array, made once at intake: what a step's arrays are cut from.

Ids come as Python integers. Loops over them (are all of them integers, which is the least, which the largest,
then one by one into an array) were half of the way to a long prompt's first launch. ``marshal`` writes an
integer of 32 bits as its type and four bytes, at a tenth of the cost, so types and values are looked at as
arrays. Invariant: what is not exactly a row of such integers is left to the caller's slow way. Read
``intake.py`` next.
"""

from __future__ import annotations

import marshal

import numpy as np

_VERSION = 2
"""Of the format: the last one without references, so that every item is written in full."""
_HEADER_BYTES = 5
_ITEM_BYTES = 5


def pack_integers(token_ids: tuple[int, ...]) -> np.ndarray | None:
    """int32 copy of ``token_ids``; None unless there are some, and each is an ``int`` of 32 bits, neither a
    bool nor of any other type."""
    try:
        written = marshal.dumps(token_ids, _VERSION)
    except ValueError:  # of a type that cannot be written
        return None
    count = len(token_ids)
    # Items follow each other, each with its type first: if all that stands where a type of a row of integers
    # would stand is the type of an integer, the first is one, hence the second, and so on.
    is_row = written[:_HEADER_BYTES] == b"(" + count.to_bytes(4, "little")
    if not count or not is_row or written[_HEADER_BYTES::_ITEM_BYTES] != b"i" * count:
        return None
    if len(written) != _HEADER_BYTES + _ITEM_BYTES * count:
        return None
    values = np.ndarray((count,), "<i4", written, _HEADER_BYTES + 1, (_ITEM_BYTES,))
    return values.astype(np.int32)
