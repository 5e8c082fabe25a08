"""Videos become the frames that a model is to see; broken, huge and treacherous files a ``RequestError``."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import animated, data_url, png, video
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from gapless.errors import RequestError
from gapless.multimodal import videos
from gapless.multimodal.limits import MediaLimits
from gapless.multimodal.loading import MediaLoader, open_video
from gapless.multimodal.sampling import FrameSampling
from gapless.multimodal.videos import VideoFacts, decode_video

STEPS = FrameSampling(spacing="steps")
GREYS = [10 * i for i in range(20)]


def brightness(frames: np.ndarray) -> list[int]:
    return [round(float(frame.mean())) for frame in frames]


@pytest.mark.parametrize(
    ("codec", "container"),
    [
        *(("mpeg4", "mp4"), ("libx264", "mp4"), ("libvpx", "webm"), ("libvpx-vp9", "webm"), ("mjpeg", "avi")),
        *(("mpeg2video", "mpegts"), ("gif", "gif"), ("mpeg4", "matroska")),
    ],
)
def test_the_chosen_frames_come_out(codec, container):
    found = decode_video(video(GREYS, codec=codec, container=container), STEPS.choose)
    assert found.facts == VideoFacts(num_frames=20, fps=10.0)
    assert found.indices == (0, 5, 10, 15)
    assert found.frames_FHWC.shape == (4, 48, 64, 3)
    assert np.abs(np.array(brightness(found.frames_FHWC)) - [0, 50, 100, 150]).max() <= 4


def test_a_frame_may_be_taken_twice_and_the_last_one_is_reached():
    found = decode_video(video(GREYS), lambda facts: [3, 3, facts.num_frames - 1])
    assert np.abs(np.array(brightness(found.frames_FHWC)) - [30, 30, 190]).max() <= 4


def test_an_animated_gif_is_a_video():
    data = animated("GIF", [(200, 0, 0), (0, 200, 0), (0, 0, 200), (9, 9, 9)])
    found = open_video(data_url(data, "image/gif"), lambda facts: range(facts.num_frames))
    assert found.frames_FHWC.shape[0] == 4
    assert [int(frame[5, 5].argmax()) for frame in found.frames_FHWC[:3]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_video_bytes": 100}, r"bytes, the limit is 100;.*--max-video-bytes"),
        ({"max_video_seconds": 1}, r"lasts 2 seconds, the limit is 1;.*--max-video-seconds"),
        ({"max_video_frames": 3}, r"4 frames would be taken of it, the limit is 3;.*--max-video-frames"),
        ({"max_decoded_pixels": 9000}, r"4 frames of 64 x 48 have 12288 pixels.*--max-decoded-pixels"),
        ({"max_image_pixels": 3000}, r"64 x 48 pixels, the limit is 3000 in all.*--max-image-pixels"),
    ],
)
def test_each_limit_acts_and_is_named(limits, message):
    with pytest.raises(RequestError, match=message):
        decode_video(video(GREYS), STEPS.choose, limits=MediaLimits(**limits))


def test_decoding_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(videos, "MAX_DECODE_S", -1.0)
    with pytest.raises(
        RequestError, match=r"0 frames of it took .* seconds to decode; cut it, or scale it down"
    ):
        decode_video(video(GREYS), STEPS.choose)


def test_narrow_frames_are_refused():
    with pytest.raises(RequestError, match="one side over 200 times the other"):
        decode_video(video([1, 2, 3, 4], size=(640, 2)), STEPS.choose)


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"<?xml version='1.0'?><MPD xmlns='urn:mpeg:dash:schema:mpd:2011'></MPD>",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
        b"[playlist]\nFile1=file:///etc/passwd\n",
        b"nonsense" * 100,
        b"\x00\x00\x00\x18ftypmp42" + bytes(64),
    ],
    ids=["hls", "concat", "dash", "sdp", "pls", "nonsense", "empty_mp4"],
)
def test_playlists_and_nonsense_are_no_videos(data):
    with pytest.raises(RequestError, match=r"no video that can be read|no video track|broken"):
        decode_video(data, STEPS.choose)


def test_still_images_and_sound_are_no_videos():
    with pytest.raises(RequestError, match="no video"):
        decode_video(png(), STEPS.choose)
    with pytest.raises(RequestError, match="it has no bytes"):
        decode_video(b"", STEPS.choose)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("codec", "container"), [("libx264", "mp4"), ("libvpx-vp9", "webm"), ("gif", "gif")])
def test_truncated_videos_give_frames_or_a_request_error(codec, container, share):
    data = video(GREYS, codec=codec, container=container)
    try:
        found = decode_video(data[: int(len(data) * share)], STEPS.choose)
    except RequestError:
        return
    assert len(found.indices) == len(found.frames_FHWC)
    assert found.indices[-1] < found.facts.num_frames


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([("mpeg4", "mp4"), ("mjpeg", "avi"), ("gif", "gif")]),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=12),
)
def test_any_damage_gives_frames_or_a_request_error(form, changes):
    data = bytearray(video(GREYS[:6], codec=form[0], container=form[1]))
    for position, value in changes:
        data[position % len(data)] = value
    try:
        found = decode_video(bytes(data), STEPS.choose, limits=MediaLimits(max_image_pixels=2**20))
    except RequestError:
        return
    assert found.frames_FHWC.dtype == np.uint8


@pytest.mark.parametrize("chosen", [[], [2, 1], [-1, 0], [0, 99]])
def test_what_cannot_be_taken_is_refused(chosen):
    with pytest.raises(RequestError, match="20 frames are too few"):
        decode_video(video(GREYS), lambda facts: chosen)


def test_a_file_url_of_a_video_is_read(tmp_path):
    from gapless.multimodal.access import MediaAccess

    (tmp_path / "clip.mp4").write_bytes(video(GREYS))
    loader = MediaLoader(access=MediaAccess(local_path=str(tmp_path)))
    assert loader.video(f"file://{tmp_path}/clip.mp4", STEPS.choose).indices == (0, 5, 10, 15)


@pytest.mark.parametrize("total", [1, 2, 3, 4, 5, 7, 30, 97, 600, 5000])
@pytest.mark.parametrize("fps", [0.5, 10.0, 23.976, 30.0, 60.0])
def test_qwen3_samples_as_transformers_does(total, fps):
    metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
    theirs = Qwen3VLVideoProcessor.sample_frames(_Settings, metadata)
    ours = FrameSampling(spacing="ends").choose(VideoFacts(num_frames=total, fps=fps))
    assert ours == list(theirs)


@pytest.mark.parametrize("total", [2, 3, 4, 5, 7, 30, 97, 600, 5000])
@pytest.mark.parametrize("fps", [0.5, 10.0, 23.976, 30.0, 60.0])
def test_qwen2_5_samples_as_transformers_does(total, fps):
    import torch

    patch = 2
    most = math.floor(min(768, total) / patch) * patch
    count = math.floor(min(max(total / fps * 2.0, 4), most, total) / patch) * patch
    theirs = torch.arange(0, total, total / count).int().tolist()
    assert FrameSampling(spacing="steps").choose(VideoFacts(num_frames=total, fps=fps)) == theirs


@pytest.mark.parametrize(
    ("options", "total", "expected"),
    [
        ({"spacing": "steps", "max_frames": 1}, 100, [0, 50]),
        ({"spacing": "steps", "num_frames": 1}, 100, [0, 50]),
        ({"spacing": "steps"}, 1, [0]),
        ({"spacing": "ends", "max_frames": 1}, 100, [0]),
        ({"spacing": "ends"}, 1, [0]),
    ],
)
def test_fewer_frames_than_a_patch_has_are_as_many_as_it_has(options, total, expected):
    assert FrameSampling(**options).choose(VideoFacts(num_frames=total, fps=10.0)) == expected


@pytest.mark.parametrize("spacing", ["steps", "ends"])
def test_a_number_of_frames_overrides_the_rate(spacing):
    facts = VideoFacts(num_frames=100, fps=10.0)
    sampling = FrameSampling(spacing=spacing, num_frames=6)
    assert len(sampling.choose(facts)) == 6
    with pytest.raises(RequestError, match="num_frames=6: the video has only 5"):
        sampling.choose(VideoFacts(num_frames=5, fps=10.0))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["steps", "ends"]), st.integers(1, 10_000), st.floats(0.1, 240))
def test_indices_ascend_inside_the_video(spacing, total, fps):
    indices = FrameSampling(spacing=spacing).choose(VideoFacts(num_frames=total, fps=fps))
    assert indices == sorted(indices)
    assert 0 <= indices[0] <= indices[-1] < total
    assert len(indices) <= 768


class _Settings:
    """What Transformers' rule reads of its processor, without its torchvision."""

    num_frames, fps, min_frames, max_frames, temporal_patch_size = None, 2, 4, 768, 2
