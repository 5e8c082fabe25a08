"""Which part of a model each rank holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import ConfigError
from gapless.parallel.shard import WHOLE, Shard


def ranks(size: int) -> list[Shard]:
    return [Shard(rank=rank, size=size) for rank in range(size)]


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 9), total=st.integers(1, 300))
def test_padded_parts_cover_everything_once_in_order(size, total):
    parts = [shard.split_padded(total) for shard in ranks(size)]
    covered = [item for start, length in parts for item in range(start, start + length)]
    assert covered == list(range(total))
    assert all(length <= WHOLE.padded_length(total) for _, length in parts)
    assert ranks(size)[0].padded_length(total) * size >= total


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 9), each=st.integers(1, 20))
def test_even_parts_cover_everything_once_in_order(size, each):
    parts = [shard.split(size * each, what="heads") for shard in ranks(size)]
    assert [start for start, _ in parts] == [rank * each for rank in range(size)]
    assert {length for _, length in parts} == {each}


@pytest.mark.parametrize(
    ("size", "heads", "spans"),
    [
        (1, 2, [(0, 2)]),
        (2, 2, [(0, 1), (1, 1)]),
        (2, 8, [(0, 4), (4, 4)]),
        (4, 2, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (4, 1, [(0, 1)] * 4),
        (8, 4, [(head, 1) for head in (0, 0, 1, 1, 2, 2, 3, 3)]),
    ],
)
def test_kv_heads_are_divided_or_repeated(size, heads, spans):
    assert [tuple(shard.split_kv_heads(heads)) for shard in ranks(size)] == spans


@pytest.mark.parametrize(("size", "heads"), [(2, 3), (4, 3), (4, 6), (3, 2)])
def test_kv_heads_that_neither_divide_nor_repeat_are_refused(size, heads):
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size={size} .*num_key_value_heads={heads}"):
        Shard(size=size).split_kv_heads(heads)


def test_an_uneven_split_says_what_would_do():
    with pytest.raises(ConfigError, match=r"=3 does not divide num_attention_heads=8; .*: 1, 2, 4, 8"):
        Shard(size=3).split(8, what="num_attention_heads")


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(rank, size):
    with pytest.raises(ConfigError, match=f"rank {rank} of {size}"):
        Shard(rank=rank, size=size)


def test_one_rank_holds_everything():
    assert WHOLE.is_whole
    assert WHOLE.split(7, what="x") == WHOLE.split_padded(7) == WHOLE.split_kv_heads(7) == (0, 7)
