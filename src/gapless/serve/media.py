"""Images and videos of requests to prompts, on threads beside the event loop, within bounds.

Reading, decoding and preparing take milliseconds to seconds of a processor, so they happen in a small pool
that no stream waits for. What waits for the pool is bounded in bytes: beyond that a request is told to come
back. A caller that goes away while waiting takes its work with it; work that has begun runs to its end, and
is counted until then. Invariant: an error names the part of the message that it is about. Read
``multimodal/loading.py`` for what is refused, ``multimodal/processor.py`` for what a prompt becomes.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gapless.errors import RequestError
from gapless.multimodal.access import FETCH_TIMEOUT_S
from gapless.multimodal.items import MediaPrompt
from gapless.multimodal.loading import MediaLoader
from gapless.serve.client import EngineBusyError, EngineDrainingError
from gapless.serve.errors import ApiError
from gapless.serve.metrics import RequestMetrics
from gapless.serve.protocol.chat import Message
from gapless.serve.protocol.media_parts import ContentPart

if TYPE_CHECKING:
    from PIL import Image

    from gapless.multimodal.processor import Processor
    from gapless.multimodal.videos import VideoFrames
    from gapless.serve.settings import ServerSettings

MAX_THREADS = 4
"""Each holds one request's pixels (``max_decoded_pixels``), and cores are needed for other things, too."""
MAX_HELD_BODIES = 16
"""Of the largest size, as for bodies that are being read."""
LOW_DETAIL_PIXELS = 512
"""Longer side of an image whose detail is ``low``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPart:
    """An image or video and where in the request it stands, as errors name it."""

    name: str
    part: ContentPart


class MediaDesk:
    """Makes prompts with media for one application. Its methods run on the event loop."""

    def __init__(
        self,
        processor: Processor,
        loader: MediaLoader,
        *,
        settings: ServerSettings,
        metrics: RequestMetrics,
        num_threads: int | None = None,
    ) -> None:
        self._processor, self._loader, self._metrics = processor, loader, metrics
        self._per_prompt = dict(settings.limit_mm_per_prompt)
        sampling, most = processor.sampling(), loader.limits.max_video_frames
        self._sampling = replace(sampling, max_frames=min(sampling.max_frames, most))
        self._max_held = MAX_HELD_BODIES * settings.max_body_bytes
        self._max_inside = settings.max_queued_requests
        num_threads = num_threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="media")
        # A slow web server may hold up those who ask it, but nobody who sends images along.
        self._web_pool = ThreadPoolExecutor(num_threads, thread_name_prefix="media-web")
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_inside = self.num_held = 0
        """Requests that wait for the pool or are in it, and the characters of their URLs."""

    async def prompt(
        self, token_ids: Sequence[int], parts: Sequence[PlacedPart], *, max_tokens: int
    ) -> MediaPrompt:
        """``token_ids`` has one placeholder for each of ``parts``. Raises ``ApiError``, ``RequestError``,
        ``EngineBusyError`` or, once closed, ``EngineDrainingError``."""
        self._check_counts(parts)
        size = sum(len(placed.part.url) for placed in parts)
        if self._is_closed:
            raise _draining()
        with self._lock:
            is_too_large = self.num_held > 0 and self.num_held + size > self._max_held
            if is_too_large or self.num_inside >= self._max_inside:
                raise EngineBusyError(
                    "the server is preparing too many images and videos at once; try again later",
                    retry_after_s=1.0,
                )
            self.num_held += size
            self.num_inside += 1
        asks_the_web = any(placed.part.url[:4].lower() == "http" for placed in parts)
        pool = self._web_pool if asks_the_web else self._pool
        work = pool.submit(self._make, token_ids, parts, max_tokens)

        def release(_: Future[Any]) -> None:  # done, or given up before it began
            with self._lock:
                self.num_held -= size
                self.num_inside -= 1

        work.add_done_callback(release)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and (task is None or not task.cancelling()):
                raise _draining() from None  # the work was given up, not its caller
            raise

    def close(self) -> None:
        """Give up what has not begun; it and what comes later is told that the server shuts down."""
        self._is_closed = True
        for pool in (self._pool, self._web_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_counts(self, parts: Sequence[PlacedPart]) -> None:
        counts: Counter[str] = Counter()
        for placed in parts:
            kind = placed.part.media_kind
            assert kind is not None
            counts[kind] += 1
            limit = self._per_prompt.get(kind, 0)
            if counts[kind] > limit:
                raise ApiError(
                    f"{placed.name}: a request may have at most {limit} {kind}s; send fewer, or raise "
                    f"--limit-mm-per-prompt {kind}=N",
                    param=placed.name,
                    code="invalid_value",
                )

    def _make(self, token_ids: Sequence[int], parts: Sequence[PlacedPart], max_tokens: int) -> MediaPrompt:
        start = time.perf_counter()
        deadline_s = time.monotonic() + FETCH_TIMEOUT_S
        images: list[Image.Image] = []
        videos: list[VideoFrames] = []
        num_pixels = 0
        for placed in parts:
            url, name = placed.part.url, placed.name
            left_s = max(0.001, deadline_s - time.monotonic())
            try:
                if placed.part.media_kind == "image":
                    image = self._loader.image(url, name=name, timeout_s=left_s)
                    if placed.part.detail == "low":
                        image.thumbnail((LOW_DETAIL_PIXELS, LOW_DETAIL_PIXELS))
                    images.append(image)
                    num_pixels += image.width * image.height
                else:
                    video = self._loader.video(url, self._sampling.choose, name=name, timeout_s=left_s)
                    videos.append(video)
                    num_pixels += video.frames_FHWC.size // 3
                self._loader.limits.check_together(num_pixels, name)
            except RequestError as error:
                raise ApiError(str(error), param=name, code="invalid_value") from None
        prompt = self._processor.prompt(token_ids, images=images, videos=videos, max_tokens=max_tokens)
        for item in prompt.items:
            _ = item.content_hash  # computed here, on a thread of its own, and kept
        seconds = time.perf_counter() - start
        with self._lock:
            self._metrics.media_items.update(placed.part.media_kind or "" for placed in parts)
            self._metrics.media_prepare_s.observe(seconds)
        return prompt


def _draining() -> EngineDrainingError:
    return EngineDrainingError("the server is shutting down and takes no new requests")


def media_of(messages: Sequence[Message]) -> Iterator[PlacedPart]:
    """In the order in which a template writes their placeholders."""
    for number, message in enumerate(messages):
        for position, part in message.media_parts():
            yield PlacedPart(name=f"messages[{number}].content[{position}]", part=part)
