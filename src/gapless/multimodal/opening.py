"""A model's processor from its folder, for whoever makes prompts: the engine's process or the server's.

Invariant: imports no torch. Read ``processor.py`` for what it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.errors import ConfigError, ModelError
from gapless.models.json_file import read_json
from gapless.models.vl_config import is_vision_language, read_vl_config

if TYPE_CHECKING:
    from gapless.models.tokenizer import Tokenizer
    from gapless.multimodal.processor import Processor


def open_processor(source: str, tokenizer: Tokenizer | None) -> Processor | None:
    """None for a model without vision. ``tokenizer`` is the model's own, where it has one.

    Raises ``ModelError`` for settings that are not implemented, ``ConfigError`` without Pillow.
    """
    folder = Path(source).expanduser()
    if not (folder / "config.json").is_file():
        return None
    return processor_of(read_json(folder / "config.json"), folder, tokenizer)


def processor_of(raw: Mapping[str, Any], folder: Path, tokenizer: Tokenizer | None) -> Processor | None:
    """``open_processor`` with the config read already."""
    if not is_vision_language(raw):
        return None
    try:
        from gapless.multimodal.processor import Processor
        from gapless.multimodal.processor_config import ProcessorFiles
    except ImportError as error:
        raise ConfigError(
            f"models with vision need a package that is not installed ({error.name}): "
            "pip install 'gapless[vision]'"
        ) from None
    config = read_vl_config(raw, source=str(folder))
    if tokenizer is not None:
        _check_placeholders(tokenizer, config.image_token_id, config.video_token_id, folder)
    files = ProcessorFiles(folder, config)
    return Processor(
        config,
        image=files.image(),
        video=files.video(),
        sampling=files.sampling(),
        tokenizer=tokenizer,
    )


def _check_placeholders(tokenizer: Tokenizer, image_id: int, video_id: int, folder: Path) -> None:
    """A tokenizer without these tokens would write placeholders as plain text, and no image would be seen."""
    for key, token_id in (("image_token_id", image_id), ("video_token_id", video_id)):
        text = tokenizer.id_to_token(token_id)
        if text is None or tokenizer.encode(text, add_special_tokens=False) != [token_id]:
            raise ModelError(f"{folder}: {key}={token_id} is no token of its own in the tokenizer ({text!r})")
