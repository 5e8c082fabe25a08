"""A model's processor with settings that an operator has changed.

Read ``config_media.py`` for what may be changed, ``processor_config.py`` for what a model's folder says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gapless.config_media import FRAMES, GROUPS, PIXELS, Pairs
from gapless.errors import ConfigError
from gapless.multimodal.pixels import PixelSettings
from gapless.multimodal.processor import Processor


def override(processor: Processor, kwargs: Pairs) -> Processor:
    """``kwargs`` as ``parse_processor_kwargs`` made them. Raises ``ConfigError`` where they leave no size
    that an image may have."""
    if not kwargs:
        return processor
    given = dict(kwargs)
    images, videos = (dict(given.pop(name, ())) for name in GROUPS)
    return processor.with_settings(
        image=_resized(processor.image, {**given, **images}),
        video=_resized(processor.video, {**given, **videos}),
        sampling={name: number for name, number in {**given, **videos}.items() if name in FRAMES},
    )


def _resized(settings: PixelSettings, pixels: Mapping[str, int]) -> PixelSettings:
    low, high = (pixels.get(name, getattr(settings, name)) for name in PIXELS)
    settings = replace(settings, min_pixels=low, max_pixels=high)
    if settings.min_pixels > settings.max_pixels:
        raise ConfigError(
            f"--mm-processor-kwargs: min_pixels={settings.min_pixels} exceeds max_pixels="
            f"{settings.max_pixels}; the model's own value holds for the one that is not given"
        )
    return settings
