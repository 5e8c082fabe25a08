"""Messages with arrays cross the wire whole, and small ones are one frame."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from gapless.multimodal.items import MediaItem, MediaPrompt, Normalisation
from gapless.serve.channel import Addresses, ClientChannel, EngineChannel
from gapless.serve.frames import FrameDecoder, FrameEncoder
from gapless.serve.messages import AbortRequest, GenerateRequest, Media, Refused, ToEngine

PIXELS = Normalisation(rescale_factor=1 / 255, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), num_repeats=2)


def media(num_patches: int = 6) -> Media:
    def item(kind, seed):
        random = np.random.default_rng(seed)
        if kind == "image":
            patches = random.integers(0, 256, (num_patches, 6), np.uint8)
        else:
            patches = random.standard_normal((num_patches, 5)).astype(np.float32)
        return MediaItem(
            kind=kind,
            patches_PC=patches,
            normalisation=PIXELS if kind == "image" else None,
            grid_thw=(1, 2, num_patches // 2),
            known_hash=bytes([seed]) * 32,
            ranges=((seed, 3), (seed + 4, 2)),
        )

    prompt = MediaPrompt(
        token_ids=tuple(range(20)),
        items=(item("image", 1), item("video", 9)),
        rope_positions_3T=np.arange(60, dtype=np.int32).reshape(3, 20),
        rope_delta=-3,
    )
    return Media.of(prompt)


def request(name: str, **fields) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=list(range(20)), **fields)


def same(found: GenerateRequest, sent: GenerateRequest) -> None:
    assert found.request_id == sent.request_id
    for one, other in zip(found.media.parts, sent.media.parts, strict=True):
        np.testing.assert_array_equal(one.patches_PC, other.patches_PC)
        assert one.patches_PC.dtype == other.patches_PC.dtype
        assert (one.kind, one.grid_thw, one.content_hash) == (other.kind, other.grid_thw, other.content_hash)
        assert one.ranges == other.ranges
        assert one.normalisation == other.normalisation
    np.testing.assert_array_equal(found.media.rope_positions_3T, sent.media.rope_positions_3T)
    assert found.media.rope_delta == sent.media.rope_delta


def test_arrays_are_frames_of_their_own_and_not_copied():
    sent = request("a", media=media())
    head, *arrays = FrameEncoder().encode(sent)
    assert len(arrays) == 3
    assert np.shares_memory(np.frombuffer(arrays[0], np.uint8), sent.media.parts[0].patches_PC)
    found = FrameDecoder(ToEngine).decode(head, arrays)
    same(found, sent)


def test_messages_without_arrays_are_one_frame():
    encoder = FrameEncoder()
    encoder.encode(request("a", media=media()))
    (head,) = encoder.encode(AbortRequest(request_id="b"))
    assert FrameDecoder(ToEngine).decode(head) == AbortRequest(request_id="b")


@pytest.mark.parametrize("array", [np.zeros((0, 5), np.float32), np.arange(12.0).reshape(3, 4).T])
def test_empty_and_strided_arrays_arrive_as_they_are(array):
    class Holder(msgspec.Struct):
        values: np.ndarray

    head, *arrays = FrameEncoder().encode(Holder(values=array))
    np.testing.assert_array_equal(FrameDecoder(Holder).decode(head, arrays).values, array)


@pytest.mark.parametrize(
    "damage", [lambda a: a[:-1], lambda a: [*a[:-1], a[-1][:7]], lambda a: [b"", *a[1:]]]
)
def test_arrays_that_are_missing_or_short_are_found(damage):
    head, *arrays = FrameEncoder().encode(request("a", media=media()))
    with pytest.raises(msgspec.ValidationError, match="not there or has another size"):
        FrameDecoder(ToEngine).decode(head, damage(arrays))


def test_what_is_no_array_is_not_sent():
    with pytest.raises(NotImplementedError, match="object cannot be sent"):
        FrameEncoder().encode(request("a", params={"x": object()}))


def test_a_message_that_cannot_be_sent_leaves_no_frames_for_the_next():
    encoder = FrameEncoder()
    with pytest.raises(NotImplementedError):
        encoder.encode(request("a", params={"x": np.zeros(3), "y": object()}))
    assert len(encoder.encode(request("b"))) == 1
    same(FrameDecoder(ToEngine).decode(*_split(encoder.encode(sent := request("c", media=media())))), sent)


def _split(frames: list) -> tuple:
    return frames[0], frames[1:]


@pytest.fixture
def wire():
    addresses = Addresses.make()
    engine, client = EngineChannel(addresses), ClientChannel(addresses)
    yield engine, client
    client.close()
    engine.close()
    addresses.remove()


def received(engine: EngineChannel, count: int) -> list:
    messages: list = []
    end = time.monotonic() + 10
    while len(messages) < count and time.monotonic() < end:
        messages += engine.receive(0.1)
    return messages


def test_the_wire_carries_them_between_small_messages(wire):
    engine, client = wire
    sent = [
        request("a"),
        request("b", media=media(2000)),
        AbortRequest(request_id="a"),
        request("c", media=media()),
    ]
    for message in sent:
        client.send(message)
    found = received(engine, 4)
    assert [m.request_id for m in found] == ["a", "b", "a", "c"]
    same(found[1], sent[1])
    same(found[3], sent[3])
    assert found[0] == sent[0]


def test_a_broken_message_is_refused_and_the_next_one_read(wire):
    engine, client = wire
    client.send(request("a", media=media(), prompt_logprobs="many"))
    client.send(request("b", media=media()))
    (found,) = received(engine, 1)
    assert found.request_id == "b"
    end = time.monotonic() + 10
    answer = None
    while answer is None and time.monotonic() < end:
        answer = client.receive()
    assert isinstance(answer, Refused)
    assert answer.request_id == "a"
