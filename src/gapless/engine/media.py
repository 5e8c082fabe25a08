"""Images and videos in a step: what has to be encoded before it, and the rows it finds in its buffers.

``prepare`` looks at a step before it is launched: items whose placeholders it covers and whose embeddings are
not in the cache are encoded, those of all requests together. An item that cannot be encoded fails the
sequences that show it and nobody else. ``stage`` then copies the rows of this step into the static buffers
and says which tokens they belong to. Both run on the device's stream, so an embedding may be evicted as soon
as its rows have been staged. Invariant: rows that a step reads are those of its own tokens; all others are
masked (``media_buffers.py``). Read ``embedding_cache.py`` for what is kept, ``runner.py`` for who calls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch

from gapless.engine.embedding_cache import Content, EmbeddingCache
from gapless.engine.media_buffers import MediaBuffers
from gapless.engine.request import Sequence
from gapless.engine.step import DecodeRun, ScheduledBatch, ScheduledSequence
from gapless.errors import GaplessError
from gapless.graphs.device.base import GraphDevice
from gapless.models.vision.base import EncodedMedia, MediaEncoder
from gapless.multimodal.items import MediaItem

logger = logging.getLogger(__name__)


class Span(NamedTuple):
    """Rows ``first : first + num_rows`` of ``item`` are rows ``row : row + num_rows`` of the step, in which
    its sequence is entry number ``position``."""

    position: int
    item: MediaItem
    row: int
    first: int
    num_rows: int


class StepMedia:
    """The media of one engine's steps. ``buffers`` are those of the graphs; what they read, this writes."""

    def __init__(
        self, encoder: MediaEncoder, buffers: MediaBuffers, *, device: GraphDevice, capacity_bytes: int
    ) -> None:
        self.encoder = encoder
        self.cache = EmbeddingCache(capacity_bytes=capacity_bytes)
        self._buffers, self._device = buffers, device
        self._nothing = np.zeros(len(buffers.embeds_TE), dtype=np.int32)
        self._prepared: ScheduledBatch | None = None
        self._spans: list[Span] = []
        """Of the batch that was prepared last."""
        self._run: DecodeRun | None = None

    def prepare(self, batch: ScheduledBatch) -> dict[int, str]:
        """Encode what ``batch`` needs; what went wrong, by position in ``batch.entries``. Sequences that
        failed must end: their rows are not there."""
        self._prepared = batch
        if batch.run is not None and batch.run is self._run:
            self._spans = []  # only the first step of a run can reach into a prompt
            return {}
        self._run = batch.run
        self._spans = list(find_spans(batch.entries))
        if not self._spans:
            return {}
        missing: dict[Content, MediaItem] = {}
        for position, item in dict.fromkeys((span.position, span.item) for span in self._spans):
            content = self.cache.content_of(item)
            self.cache.pin(batch.entries[position].sequence, content, until=_end(item))
            if content in self.cache or content in missing:
                self.cache.num_hits += 1
            else:
                missing[content] = item
        failed = self._encode(list(missing.values())) if missing else {}
        if failed:
            self._spans = [s for s in self._spans if self.cache.content_of(s.item) not in failed]
        self.cache.trim()
        return self._failures(batch.entries, failed) if failed else {}

    def stage(self, batch: ScheduledBatch, num_tokens: int) -> np.ndarray:
        """Put the rows of ``batch`` where its step reads them; ``is_media`` of its tokens, int32.

        Raises ``GaplessError`` when an item of a batch that nobody has prepared cannot be encoded.
        """
        if batch is not self._prepared:
            for message in self.prepare(batch).values():
                raise GaplessError(message)
        if not self._spans:
            return self._nothing[:num_tokens]
        is_media_T = np.zeros(num_tokens, dtype=np.int32)
        for position, item, row, first, num_rows in self._spans:
            if batch.entries[position].is_stale:
                continue  # another of its items has failed
            media = self.cache.get(self.cache.content_of(item))
            assert media is not None, "a pinned item was evicted"
            self._buffers.write(row, media, first, num_rows)
            is_media_T[row : row + num_rows] = 1
        for entry in batch.entries:
            self.cache.unpin(entry.sequence, num_computed=entry.end)
        self.cache.trim()
        return is_media_T

    def release(self, sequence: Sequence) -> None:
        """``sequence`` has ended or starts over: nothing is kept for it."""
        self.cache.release(sequence)

    def release_all(self) -> None:
        """No sequence runs any more."""
        self.cache.release_all()

    def forget(self) -> None:
        """Embeddings that no running sequence needs are made anew from now on."""
        self.cache.forget()

    def report(self) -> dict[str, Any]:
        return {"embedding_cache": self.cache.report(), "encoder": self.encoder.report()["encoder"]}

    def add_graphs(self, report: dict[str, Any]) -> dict[str, Any]:
        """``report`` of an engine with the encoder's graphs beside the decoder's."""
        own = self.encoder.report()
        memory = {name: value + own["memory"][name] for name, value in report["memory"].items()}
        lists = {name: report[name] + own[name] for name in ("graphs", "failures")}
        return {**report, **lists, "memory": memory}

    def shut_down(self) -> None:
        """Give graphs, buffers and embeddings back. Safe to call twice."""
        self.cache.clear()
        self.encoder.release()

    def _encode(self, items: Seq[MediaItem]) -> dict[Content, str]:
        """Put ``items`` into the cache, together where that works; by content, why one is not there."""
        try:
            self._store(items)
        except Exception as error:
            if len(items) > 1:  # find out whose fault it is
                return {c: m for item in items for c, m in self._encode([item]).items()}
            item = items[0]
            logger.error("the %s of grid %s cannot be encoded", item.kind, item.grid_thw, exc_info=error)
            return {self.cache.content_of(item): f"{type(error).__name__}: {error}"}
        return {}

    def _store(self, items: Seq[MediaItem]) -> None:
        with torch.no_grad(), self._device.step_scope():
            made = self.encoder.encode(items)
        for item, media in zip(items, made, strict=True):
            self._check(item, media)
        for item, media in zip(items, made, strict=True):
            self.cache.put(self.cache.content_of(item), media)

    def _check(self, item: MediaItem, media: EncodedMedia) -> None:
        num_rows, features = len(media.embeds_NE), media.deepstack_LNE
        if num_rows != item.num_tokens or (features is not None and features.shape[1] != num_rows):
            raise GaplessError(f"the encoder made {num_rows} rows for {item.num_tokens} placeholders")

    def _failures(self, entries: Seq[ScheduledSequence], failed: dict[Content, str]) -> dict[int, str]:
        failures: dict[int, str] = {}
        for position, item, *_ in find_spans(entries):
            message = failed.get(self.cache.content_of(item))
            if message is not None and position not in failures:
                where = item.ranges[0][0]
                failures[position] = f"the {item.kind} at prompt token {where} cannot be encoded: {message}"
        return failures


def find_spans(entries: Iterable[ScheduledSequence]) -> Iterator[Span]:
    """Where media rows lie in a step, in the order of its tokens."""
    row = 0
    for position, entry in enumerate(entries):
        request = entry.sequence.request
        if entry.start < request.media_end:
            for span in request.media_within(entry.start, entry.end):
                begin, end = max(span.start, entry.start), min(span.end, entry.end)
                first = span.row + begin - span.start
                yield Span(position, span.item, row + begin - entry.start, first, end - begin)
        row += entry.num_new_tokens


def _end(item: MediaItem) -> int:
    start, length = item.ranges[-1]
    return start + length
