"""What an engine makes at start-up for a model that takes images: its encoder, and how much is kept."""

from __future__ import annotations

from gapless.config import EngineConfig
from gapless.graphs.device.base import GraphDevice
from gapless.models.base import ModelInfo
from gapless.models.registry import LoadedModel
from gapless.models.vision.base import MediaEncoder

DEFAULT_CACHE_TOKENS = 8192
"""Eight images of 1024 tokens, or two of the largest that most processors make."""


def embedding_cache_bytes(config: EngineConfig, info: ModelInfo) -> int:
    """What embeddings that nobody needs at the moment may take."""
    tokens = config.mm_embedding_cache_tokens
    return (DEFAULT_CACHE_TOKENS if tokens is None else tokens) * bytes_per_token(info)


def bytes_per_token(info: ModelInfo) -> int:
    """Of one placeholder's row, deepstack features included."""
    return (1 + info.num_deepstack) * info.hidden_size * info.dtype.itemsize


def make_encoder(config: EngineConfig, loaded: LoadedModel, *, device: GraphDevice) -> MediaEncoder:
    raise NotImplementedError
