"""What encoders have made, by the content it was made of: bounded, and never without what is still needed.

An image that several requests show, or one request in several chunks, is encoded once. A sequence *pins* an
item from the step that reads its first row to the step that reads its last, so that eviction cannot come in
between. Invariants: what is not pinned never exceeds the capacity, oldest use goes first; values are copies
that nobody writes to. A content's name is its hash; where nothing is kept, the item itself will do, which
nobody has to hash. Read ``media.py`` for who encodes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from gapless.engine.request import Sequence
from gapless.models.vision.base import EncodedMedia
from gapless.multimodal.items import MediaItem

Content = bytes | MediaItem
"""What names it: as long as an item does, it is alive, and no other can have its name."""


class EmbeddingCache:
    """``capacity_bytes`` 0 keeps nothing but what is pinned, and shares nothing: an item is its own name."""

    def __init__(self, *, capacity_bytes: int) -> None:
        assert capacity_bytes >= 0, f"capacity_bytes={capacity_bytes}"
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self.num_hits = 0
        """Items that a step needed and found, once for each step and sequence."""
        self.num_encoded = 0
        self.num_evicted = 0
        self._items: OrderedDict[Content, EncodedMedia] = OrderedDict()  # least recently used first
        self._pins: dict[Sequence, dict[Content, int]] = {}  # index behind the last row needed

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, content: Content) -> bool:
        return content in self._items

    def content_of(self, item: MediaItem) -> Content:
        """Under which name it is here."""
        return item.content_hash if self.capacity_bytes else item

    @property
    def num_pinned(self) -> int:
        """Different contents that some sequence still needs, there or not."""
        return len(self._pinned())

    def get(self, content: Content) -> EncodedMedia | None:
        """Counts as a use."""
        found = self._items.get(content)
        if found is not None:
            self._items.move_to_end(content)
        return found

    def put(self, content: Content, media: EncodedMedia) -> None:
        """Nothing is evicted before ``trim``: several items may be needed together."""
        assert content not in self._items, "an item that is there was encoded again"
        self._items[content] = media
        self.num_bytes += num_bytes_of(media)
        self.num_encoded += 1

    def pin(self, sequence: Sequence, content: Content, *, until: int) -> None:
        """``sequence`` needs ``content`` until it has computed ``until`` tokens."""
        pins = self._pins.setdefault(sequence, {})
        pins[content] = max(until, pins.get(content, 0))

    def unpin(self, sequence: Sequence, *, num_computed: int) -> None:
        """``sequence`` has read what it needs for its first ``num_computed`` tokens."""
        pins = self._pins.get(sequence)
        if pins is None:
            return
        for content in [content for content, until in pins.items() if until <= num_computed]:
            del pins[content]
        if not pins:
            del self._pins[sequence]

    def release(self, sequence: Sequence) -> None:
        """``sequence`` has ended or starts over."""
        if self._pins.pop(sequence, None) is not None:
            self.trim()

    def release_all(self) -> None:
        self._pins.clear()
        self.trim()

    def trim(self) -> None:
        """Evict what is not pinned, least recently used first, until the capacity holds."""
        self._evict(down_to=self.capacity_bytes)

    def forget(self) -> None:
        """Evict everything that is not pinned."""
        self._evict(down_to=-1)

    def clear(self) -> None:
        """Forget everything, also what is pinned: nothing runs any more."""
        self._pins.clear()
        self._items.clear()
        self.num_bytes = 0

    def report(self) -> dict[str, Any]:
        return {
            "items": len(self._items),
            "bytes": self.num_bytes,
            "capacity_bytes": self.capacity_bytes,
            "pinned": self.num_pinned,
            "encoded": self.num_encoded,
            "hits": self.num_hits,
            "evicted": self.num_evicted,
        }

    def reset_counts(self) -> None:
        self.num_hits = self.num_encoded = self.num_evicted = 0

    def _evict(self, *, down_to: int) -> None:
        if self.num_bytes <= down_to:
            return
        pinned = self._pinned()
        for content in [content for content in self._items if content not in pinned]:
            self.num_bytes -= num_bytes_of(self._items.pop(content))
            self.num_evicted += 1
            if self.num_bytes <= down_to:
                return

    def _pinned(self) -> set[Content]:
        return {content for pins in self._pins.values() for content in pins}


def num_bytes_of(media: EncodedMedia) -> int:
    return media.embeds_NE.nbytes + (0 if media.deepstack_LNE is None else media.deepstack_LNE.nbytes)
