"""What an engine makes at start-up for a model that takes images: its encoder, and room for what that makes.

On a GPU the largest run of the encoder is tried before the KV cache is sized, so that an image of the largest
size finds the memory it needs. Its graphs are captured by then and are not free any more. Read
``models/vision/encoder.py`` for the encoder, ``media.py`` for who calls it.
"""

from __future__ import annotations

import math

import torch

from gapless.config import EngineConfig
from gapless.engine.embedding_cache import num_bytes_of
from gapless.errors import MemoryLimitError, ModelError
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.encoder_options import EncoderMode, EncoderOptions
from gapless.graphs.report import StepLog
from gapless.models.base import ModelInfo
from gapless.models.registry import LoadedModel
from gapless.models.vision.base import MediaEncoder
from gapless.models.vision.encoder import TowerEncoder
from gapless.multimodal.items import MediaItem

DEFAULT_CACHE_TOKENS = 8192
"""Eight images of 1024 tokens."""


def make_encoder(
    config: EngineConfig, loaded: LoadedModel, *, device: GraphDevice, log: StepLog
) -> TowerEncoder:
    """The encoder of a model's vision tower, nothing captured yet; its runs are counted in ``log``.

    Raises ``ConfigError`` for options that its attention does not allow, ``ModelError`` without a tower.
    """
    if loaded.vision is None:
        raise ModelError(f"{loaded.source}: the model takes images, but has no vision tower")
    return TowerEncoder(loaded.vision, device=device, options=encoder_options(config), log=log)


def encoder_options(config: EngineConfig) -> EncoderOptions:
    if not config.enable_vit_cuda_graph:
        return EncoderOptions(mode=EncoderMode.OFF)
    budgets = config.vit_cuda_graph_budgets
    given = max(budgets) if budgets is not None else config.vit_cuda_graph_max_tokens
    mode = EncoderMode(config.vit_cuda_graph_mode or "budget")
    if given is None:
        return EncoderOptions(mode=mode)
    return EncoderOptions(mode=mode, budgets=budgets, max_tokens=given)


def embedding_cache_bytes(config: EngineConfig, info: ModelInfo) -> int:
    """What embeddings that nobody needs at the moment may take."""
    tokens = config.mm_embedding_cache_tokens
    row_bytes = (1 + info.num_deepstack) * info.hidden_size * info.dtype.itemsize
    return (DEFAULT_CACHE_TOKENS if tokens is None else tokens) * row_bytes


def measure_media(
    encoder: MediaEncoder, config: EngineConfig, loaded: LoadedModel, *, device: GraphDevice
) -> int:
    """Bytes to set aside on a GPU: embeddings that are kept, those of the largest item on top (it may be
    needed whatever else is kept), and what encoding it takes meanwhile.

    Raises ``MemoryLimitError`` when it does not fit.
    """
    item = largest_item(config, loaded)
    device.synchronize()
    torch.cuda.empty_cache()
    allocated = torch.cuda.memory_allocated(device.torch_device)
    torch.cuda.reset_peak_memory_stats(device.torch_device)
    try:
        with torch.no_grad(), device.stream_scope():
            made = encoder.encode([item])
            kept_bytes = sum(num_bytes_of(media) for media in made)
            device.synchronize()
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"an image of the largest size, {item.num_patches} patches, cannot be encoded beside the "
            "weights: lower the processor's largest size (size.longest_edge) or --max-model-len"
        ) from error
    peak = torch.cuda.max_memory_allocated(device.torch_device)
    options = encoder_options(config)
    later_bytes = options.max_bytes if options.mode is EncoderMode.EXACT else 0  # captured while serving
    return embedding_cache_bytes(config, loaded.info) + max(0, peak - allocated) + kept_bytes + later_bytes


def largest_item(config: EngineConfig, loaded: LoadedModel) -> MediaItem:
    """The most patches that a run may have: of the largest image or video that the processor lets through and
    a prompt has room for, or of small items that run together."""
    assert loaded.vision is not None
    tower, processor = loaded.vision, loaded.processor
    most_patches = (loaded.max_model_len - 1) * tower.granule
    if processor is not None:
        image, video = processor.image, processor.video
        per_image = image.max_pixels // image.patch_size**2
        per_video = most_patches
        if video.limits_hold_for == "video":
            per_video = video.max_pixels // (video.patch_size**2 * video.temporal_patch_size)
        most_patches = min(most_patches, max(per_image, per_video))
    most_patches = max(most_patches, encoder_options(config).max_tokens)
    side = max(1, math.isqrt(most_patches // tower.granule))
    return tower.blank((1, side * tower.merge_size, side * tower.merge_size))
