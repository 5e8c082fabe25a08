"""Names of blocks with media: what must differ does, what may be shared is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_engine import media_prompt

from gapless.cache.prefix import extend_hashes
from gapless.engine.media_names import name_of_block
from gapless.engine.request import Request
from gapless.multimodal.items import MediaPrompt
from gapless.sampling.params import SamplingParams

BLOCK = 4


def request_of(prompt: MediaPrompt) -> Request:
    return Request(
        request_id="r",
        prompt=None,
        prompt_token_ids=prompt.token_ids,
        params=SamplingParams(),
        max_total_tokens=1000,
        media=prompt.items,
        rope_positions_3T=prompt.rope_positions_3T,
        rope_delta=prompt.rope_delta,
    )


def hashes_of(prompt: MediaPrompt | list[int], *, answer: list[int] | None = None) -> list[bytes]:
    """Of all full blocks of the prompt and what follows it."""
    hashes: list[bytes] = []
    if isinstance(prompt, MediaPrompt):
        request = request_of(prompt)
        tokens, name = [*prompt.token_ids, *(answer or [])], lambda a, b: name_of_block(request, a, b)
    else:
        tokens, name = [*prompt, *(answer or [])], None
    extend_hashes(hashes, tokens, num_blocks=len(tokens) // BLOCK, block_size=BLOCK, block_extra=name)
    return hashes


def num_shared(one: list[bytes], other: list[bytes]) -> int:
    """Blocks at the start that have one name; none behind the first that differs."""
    equal = [a == b for a, b in zip(one, other, strict=False)]
    assert equal == sorted(equal, reverse=True)
    return sum(equal)


def test_other_content_differs_from_its_first_row_on():
    one = media_prompt([1] * 6, (b"a", 2, 4), [2] * 9)
    other = media_prompt([1] * 6, (b"b", 2, 4), [2] * 9)
    assert one.token_ids == other.token_ids
    assert num_shared(hashes_of(one), hashes_of(other)) == 1  # the image begins at token 7
    assert hashes_of(one) == hashes_of(media_prompt([1] * 6, (b"a", 2, 4), [2] * 9))


def test_text_before_the_first_image_is_shared_with_text():
    image, text = media_prompt([1] * 8, (b"a", 2, 4), [2] * 9), [1] * 30
    assert num_shared(hashes_of(image), hashes_of(text)) == 2


@pytest.mark.parametrize(("shape", "num_equal"), [((4, 4), 3), ((8, 2), 2), ((1, 16), 4)])
def test_the_same_content_on_another_grid_differs_where_positions_do(shape: tuple[int, int], num_equal: int):
    """The grid is in an item's hash; this holds even where a processor forgot that."""
    one, other = media_prompt([1] * 7, (b"a", 2, 8), [2] * 9), media_prompt([1] * 7, (b"a", *shape), [2] * 9)
    assert num_shared(hashes_of(one), hashes_of(other)) == num_equal


def test_two_images_in_another_order_differ():
    one = media_prompt((b"a", 1, 6), (b"b", 1, 6))
    other = media_prompt((b"b", 1, 6), (b"a", 1, 6))
    assert num_shared(hashes_of(one), hashes_of(other)) == 0


def test_a_video_at_another_rate_differs_though_its_patches_are_equal():
    prompt = media_prompt([1] * 8, (b"a", 2, 4), [2] * 9)
    slower = replace(prompt, rope_positions_3T=prompt.rope_positions_3T + np.array([[3], [0], [0]], np.int32))
    assert num_shared(hashes_of(prompt), hashes_of(slower)) == 0


def test_a_later_turn_shares_what_the_answer_before_it_left():
    """Generated tokens as part of the next prompt are at the positions they were generated at."""
    first, answer = media_prompt([1] * 3, (b"a", 3, 5), [2] * 2), [5, 6, 7, 8, 9]
    second = media_prompt([1] * 3, (b"a", 3, 5), [2] * 2, answer, [3] * 6)
    generated = hashes_of(first, answer=answer)
    assert num_shared(generated, hashes_of(second)) == len(generated)


PARTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 2), max_size=5),
        st.tuples(st.sampled_from([b"a", b"b"]), st.integers(1, 3), st.integers(1, 3)),
    ),
    max_size=4,
)


def meanings(prompt: MediaPrompt) -> list[tuple[object, ...]]:
    """Everything that decides the keys and values of each token of its own."""
    rows: list[object] = [None] * len(prompt.token_ids)
    for item in prompt.items:
        for start, length in item.ranges:
            rows[start : start + length] = [(item.content_hash, i) for i in range(length)]
    columns = zip(*prompt.rope_positions_3T.tolist(), strict=True) if prompt.token_ids else ()
    return list(zip(prompt.token_ids, rows, columns, strict=True))


@settings(max_examples=50, deadline=None)
@given(one=PARTS, other=PARTS)
def test_blocks_are_shared_exactly_as_far_as_everything_is_equal(one: list, other: list):
    prompts = media_prompt(*one), media_prompt(*other)
    first, second = (meanings(prompt) for prompt in prompts)
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    assert num_shared(*(hashes_of(prompt) for prompt in prompts)) == same // BLOCK
