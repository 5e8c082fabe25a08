"""The cache of embeddings: bounds, order of eviction, pins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.engine.embedding_cache import EmbeddingCache, num_bytes_of
from gapless.engine.request import Request, Sequence
from gapless.models.vision.base import EncodedMedia
from gapless.multimodal.items import MediaItem
from gapless.sampling.params import SamplingParams

ROW = 16  # bytes of one row of four float32


def media(num_rows: int, *, has_deepstack: bool = False) -> EncodedMedia:
    deepstack = torch.zeros(2, num_rows, 4) if has_deepstack else None
    return EncodedMedia(embeds_NE=torch.zeros(num_rows, 4), deepstack_LNE=deepstack)


def sequence() -> Sequence:
    request = Request(
        request_id="r", prompt=None, prompt_token_ids=(1,), params=SamplingParams(), max_total_tokens=9
    )
    return Sequence(request=request, index=0, seed=0, token_ids=[1], block_table=[])


def item_of(pixel: int) -> MediaItem:
    patches_PC = np.full((4, 12), pixel, np.uint8)
    return MediaItem(kind="image", patches_PC=patches_PC, grid_thw=(1, 2, 2), ranges=((0, 1),))


def names(cache: EmbeddingCache) -> set[bytes]:
    return {name for name in (bytes([i]) for i in range(32)) if name in cache}


def test_contents_are_named_by_their_hash_and_only_where_something_is_kept():
    one, same, other = item_of(1), item_of(1), item_of(2)
    nothing_kept = EmbeddingCache(capacity_bytes=0)
    assert nothing_kept.content_of(one) is one
    assert nothing_kept.content_of(one) != nothing_kept.content_of(same)
    assert "content_hash" not in vars(one), "that takes time"
    cache = EmbeddingCache(capacity_bytes=ROW)
    assert cache.content_of(one) == cache.content_of(same) != cache.content_of(other)


def test_deepstack_features_count_as_bytes():
    assert num_bytes_of(media(3)) == 3 * ROW
    assert num_bytes_of(media(3, has_deepstack=True)) == 9 * ROW


def test_the_least_recently_used_goes_first():
    cache = EmbeddingCache(capacity_bytes=3 * ROW)
    for i in range(3):
        cache.put(bytes([i]), media(1))
    cache.get(bytes([0]))
    cache.put(bytes([3]), media(1))
    assert len(cache) == 4, "nothing goes before the step has what it needs"
    cache.trim()
    assert names(cache) == {b"\0", b"\2", b"\3"}
    assert cache.report()["evicted"] == 1


def test_what_is_pinned_stays_however_large():
    cache, needed = EmbeddingCache(capacity_bytes=ROW), sequence()
    cache.pin(needed, b"\0", until=10)
    cache.put(b"\0", media(5))
    cache.trim()
    cache.unpin(needed, num_computed=9)
    cache.trim()
    assert names(cache) == {b"\0"}
    cache.unpin(needed, num_computed=10)
    cache.trim()
    assert names(cache) == set()
    assert cache.num_bytes == 0


def test_an_item_lasts_until_its_last_row_in_the_sequence():
    cache, shows_twice = EmbeddingCache(capacity_bytes=0), sequence()
    cache.pin(shows_twice, b"\0", until=30)
    cache.pin(shows_twice, b"\0", until=10)
    cache.unpin(shows_twice, num_computed=10)
    assert cache.num_pinned == 1


@pytest.mark.parametrize("end", ["release", "release_all"])
def test_pins_of_a_sequence_that_ends_are_gone_with_what_they_kept(end: str):
    cache, one, other = EmbeddingCache(capacity_bytes=0), sequence(), sequence()
    for owner, name in ((one, b"\0"), (other, b"\1"), (one, b"\1")):
        cache.pin(owner, name, until=5)
    for name in (b"\0", b"\1"):
        cache.put(name, media(2))
    if end == "release":
        cache.release(one)
        assert names(cache) == {b"\1"}, "the other one still needs it"
        cache.release(other)
    else:
        cache.release_all()
    assert (len(cache), cache.num_bytes, cache.num_pinned) == (0, 0, 0)


def test_forgetting_keeps_what_is_pinned():
    cache, needed = EmbeddingCache(capacity_bytes=100 * ROW), sequence()
    cache.pin(needed, b"\0", until=5)
    for i in range(3):
        cache.put(bytes([i]), media(1))
    cache.forget()
    assert names(cache) == {b"\0"}


def test_counts_start_anew_and_contents_stay():
    cache = EmbeddingCache(capacity_bytes=ROW)
    cache.put(b"\0", media(1))
    cache.reset_counts()
    assert {k: v for k, v in cache.report().items() if v} == {
        "items": 1, "bytes": ROW, "capacity_bytes": ROW
    }  # fmt: skip


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(0, 9), st.integers(0, 3)),
        st.tuples(st.just("done"), st.integers(0, 9), st.integers(0, 3)),
        st.tuples(st.just("end"), st.just(0), st.integers(0, 3)),
    ),
    max_size=40,
)


@settings(max_examples=50, deadline=None)
@given(actions=ACTIONS, capacity=st.integers(0, 12))
def test_bytes_are_right_and_what_is_not_pinned_never_exceeds_the_capacity(
    actions: list[tuple[str, int, int]], capacity: int
):
    cache = EmbeddingCache(capacity_bytes=capacity * ROW)
    owners = [sequence() for _ in range(4)]
    pinned: dict[int, set[int]] = {i: set() for i in range(4)}
    for action, item, owner in actions:
        name, rows = bytes([item]), item % 3 + 1
        if action == "use":
            cache.pin(owners[owner], name, until=item + 1)
            pinned[owner].add(item)
            if cache.get(name) is None:
                cache.put(name, media(rows))
        elif action == "done":
            cache.unpin(owners[owner], num_computed=item + 1)
            pinned[owner] = {i for i in pinned[owner] if i > item}
        else:
            cache.release(owners[owner])
            pinned[owner] = set()
        cache.trim()
        needed = set().union(*pinned.values())
        assert {bytes([i]) for i in needed} <= names(cache)
        sizes: dict[Any, int] = {i: (i % 3 + 1) * ROW for i in range(10) if bytes([i]) in cache}
        assert cache.num_bytes == sum(sizes.values())
        free = sum(size for i, size in sizes.items() if i not in needed)
        assert cache.num_bytes <= cache.capacity_bytes or free == 0
