"""What a block of a prompt with media holds besides its tokens, as bytes for the block's name in the cache.

Two prompts may have equal tokens and different images: their placeholders are one token, repeated. So a block
is named by what stands for each placeholder in it (the item's content and the row of it) and by its positions
where they are not its indices: an image moves all tokens behind it, and a video's rate is in no patch.
Invariant: equal names mean equal keys and values; blocks that no item reaches are named as in a prompt of
text, so both share them. Read ``cache/prefix.py`` for the chain of names.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from gapless.engine.request import Request
from gapless.engine.rope_inputs import positions_of


def name_of_block(request: Request, start: int, end: int) -> bytes:
    """For the tokens ``start : end`` of a request with media; empty where the tokens alone say everything."""
    parts: list[bytes] = []
    for span in request.media_within(start, end):
        begin, stop = max(span.start, start), min(span.end, end)
        place = np.array((begin - start, stop - start, span.row + begin - span.start), dtype=np.int64)
        parts.append(place.tobytes() + blake2b(span.item.content_hash, digest_size=32).digest())
    items = b"".join(parts)
    if request.rope_positions_3T is not None:
        positions_3N = positions_of(request, start, end)
        if (positions_3N != np.arange(start, end, dtype=np.int32)).any():
            return len(parts).to_bytes(8) + items + np.ascontiguousarray(positions_3N).tobytes()
    return items and len(parts).to_bytes(8) + items
