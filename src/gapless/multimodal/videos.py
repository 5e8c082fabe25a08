"""Bytes of a video file to RGB frames at chosen moments, or a refusal that says what is wrong.

Containers and codecs come from short lists, because a demuxer for playlists would read other files and
addresses, and every codec is a parser of what strangers send. First the packets are counted, without
decoding, then sampling chooses, then frames are decoded up to the last one chosen and only those are kept:
memory is bounded by what is taken, not by how long the video is. Safe to call from many threads. Frames
``F``, height ``H``, width ``W``, channels ``C``. Read ``loading.py`` for where bytes come from.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np

from gapless.errors import RequestError
from gapless.multimodal.limits import DEFAULT_LIMITS, MediaLimits
from gapless.multimodal.sampling import VideoFacts

CONTAINERS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi", "gif", "mpegts", "mpeg", "flv", "ogg")
CODECS = (
    *("h264", "hevc", "av1", "libdav1d", "vp8", "vp9", "libvpx", "libvpx-vp9"),
    *("mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "theora", "gif", "flv"),
)
MAX_PACKETS = 1_000_000
"""Of one video; an hour of 60 frames a second has 216,000."""
MAX_DECODE_S = 60.0
"""For one video. An hour at a high rate takes minutes, and whoever sends one holds up others meanwhile."""
_THREADS = 4
_FALLBACK_FPS = 24.0
"""For files that do not say, as Transformers assumes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VideoFrames:
    """Frames taken from one video."""

    frames_FHWC: np.ndarray
    """uint8, RGB."""
    indices: tuple[int, ...]
    """Which frames of the source these are, ascending."""
    facts: VideoFacts
    """Of the source."""


ChooseFrames = Callable[[VideoFacts], Sequence[int]]
"""Ascending indices of the frames to take; see ``sampling.py``."""


def decode_video(
    data: bytes, choose: ChooseFrames, *, limits: MediaLimits = DEFAULT_LIMITS, name: str = "video"
) -> VideoFrames:
    """``choose`` is asked once, or twice where a file holds fewer frames than packets. ``name`` begins every
    error. Raises ``RequestError``."""
    if not data:
        raise RequestError(f"{name}: it has no bytes")
    if len(data) > limits.max_video_bytes:
        raise RequestError(
            f"{name}: it has {len(data)} bytes, the limit is {limits.max_video_bytes}; send a smaller file, "
            "or raise the server's --max-video-bytes"
        )
    try:
        facts = _survey(data, limits, name)
        indices = _checked(choose(facts), facts, limits, name)
        frames, num_decoded = _take(data, indices, limits, name)
        if len(frames) < len(indices):  # hidden frames (VP8) and gaps count as packets only
            facts = VideoFacts(num_frames=num_decoded, fps=facts.fps)
            if not num_decoded:
                raise RequestError(f"{name}: no frame of it can be decoded")
            indices = _checked(choose(facts), facts, limits, name)
            frames, _ = _take(data, indices, limits, name)
    except av.error.FFmpegError as error:
        raise RequestError(f"{name}: the file is broken or cut short ({_line(error)})") from None
    except MemoryError:
        raise RequestError(f"{name}: there is not enough memory to decode it") from None
    return VideoFrames(frames_FHWC=np.stack(frames), indices=tuple(indices), facts=facts)


def _survey(data: bytes, limits: MediaLimits, name: str) -> VideoFacts:
    """Counts packets; none is decoded."""
    with _opened(data, name) as container:
        stream = _video_stream(container, name)
        _check_frame_size(stream.codec_context.width, stream.codec_context.height, limits, name)
        num_packets, first, last = 0, None, None
        for packet in container.demux(stream):
            if not packet.size:
                continue
            num_packets += 1
            if packet.pts is not None:
                first = packet.pts if first is None else min(first, packet.pts)
                last = packet.pts if last is None else max(last, packet.pts)
            if num_packets > MAX_PACKETS:
                raise RequestError(f"{name}: it has over {MAX_PACKETS} frames; cut it")
        if not num_packets:
            raise RequestError(f"{name}: it has no frames")
        seconds = 0.0
        if first is not None and last is not None and stream.time_base:
            seconds = float((last - first) * stream.time_base)
        fps = _FALLBACK_FPS
        if stream.average_rate:
            fps = float(stream.average_rate)
        elif seconds > 0:
            fps = (num_packets - 1) / seconds or _FALLBACK_FPS
        seconds = max(seconds, num_packets / fps)
        if seconds > limits.max_video_seconds:
            raise RequestError(
                f"{name}: it lasts {seconds:.0f} seconds, the limit is {limits.max_video_seconds}; cut "
                "it, or raise the server's --max-video-seconds"
            )
        return VideoFacts(num_frames=num_packets, fps=fps)


def _checked(chosen: Sequence[int], facts: VideoFacts, limits: MediaLimits, name: str) -> list[int]:
    indices = [int(index) for index in chosen]
    if not indices or indices != sorted(indices) or not 0 <= indices[0] <= indices[-1] < facts.num_frames:
        raise RequestError(f"{name}: {facts.num_frames} frames are too few to sample; send a longer video")
    if len(indices) > limits.max_video_frames:
        raise RequestError(
            f"{name}: {len(indices)} frames would be taken of it, the limit is {limits.max_video_frames}; "
            "sample fewer (fps or num_frames), or raise the server's --max-video-frames"
        )
    return indices


def _take(
    data: bytes, indices: Sequence[int], limits: MediaLimits, name: str
) -> tuple[list[np.ndarray], int]:
    """The frames at ``indices``, and how many were decoded: fewer than asked for when the file ends early."""
    taken: list[np.ndarray] = []
    wanted = iter([*indices, -1])
    index = next(wanted)
    position = 0
    size: tuple[int, int] | None = None
    deadline_s = time.monotonic() + MAX_DECODE_S
    with _opened(data, name) as container:
        for frame in _frames(container, name):
            if time.monotonic() > deadline_s:
                raise RequestError(
                    f"{name}: {position} frames of it took {MAX_DECODE_S:.0f} seconds to decode; cut it, or "
                    "scale it down"
                )
            _check_frame_size(frame.width, frame.height, limits, name)
            if position == index:
                if size is None:
                    size = (frame.width, frame.height)
                    _check_total(size, len(indices), limits, name)
                # A stream may change its size; frames of one video have one.
                picture = frame.to_ndarray(format="rgb24", width=size[0], height=size[1])
            while position == index:
                taken.append(picture)
                index = next(wanted)
            position += 1
            if index < 0:
                break
    return taken, position


def _frames(container: Any, name: str) -> Iterator[Any]:
    stream = _video_stream(container, name)
    stream.thread_type = "AUTO"
    stream.codec_context.thread_count = _THREADS
    yield from container.decode(stream)


def _opened(data: bytes, name: str) -> Any:
    options = {
        "format_whitelist": ",".join(CONTAINERS),
        "codec_whitelist": ",".join(CODECS),
        "protocol_whitelist": "",
    }
    try:
        return av.open(io.BytesIO(data), mode="r", container_options=options, metadata_errors="replace")
    except (av.error.FFmpegError, ValueError):
        raise RequestError(
            f"{name}: these bytes are no video that can be read (MP4, WebM, MKV, AVI, MPEG, FLV, Ogg, GIF), "
            "or it is cut short"
        ) from None


def _video_stream(container: Any, name: str) -> Any:
    if not container.streams.video:
        raise RequestError(f"{name}: the file has no video track")
    stream = container.streams.video[0]
    if stream.codec_context is None or stream.codec_context.name not in CODECS:
        codec = "unknown" if stream.codec_context is None else stream.codec_context.name
        raise RequestError(f"{name}: its codec ({codec}) is not supported; use H.264, H.265, VP9 or AV1")
    return stream


def _check_frame_size(width: int, height: int, limits: MediaLimits, name: str) -> None:
    if width < 1 or height < 1:
        raise RequestError(f"{name}: its frames are {width} x {height} pixels; at least 1 x 1 is needed")
    if width * height > limits.max_image_pixels:
        raise RequestError(
            f"{name}: its frames are {width} x {height} pixels, the limit is {limits.max_image_pixels} in "
            "all; scale it down, or raise the server's --max-image-pixels"
        )
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise RequestError(
            f"{name}: its frames are {width} x {height} pixels, one side over {limits.max_aspect_ratio} "
            "times the other; crop it"
        )


def _check_total(size: tuple[int, int], num_frames: int, limits: MediaLimits, name: str) -> None:
    total = size[0] * size[1] * num_frames
    if total > limits.max_decoded_pixels:
        raise RequestError(
            f"{name}: {num_frames} frames of {size[0]} x {size[1]} have {total} pixels, the limit is "
            f"{limits.max_decoded_pixels}; scale it down, cut it, sample fewer frames, or raise "
            "the server's --max-decoded-pixels"
        )


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:119] + "…"
