"""``load_model``: from what a user names (folder, GGUF file, ``smollm2``) to a model with weights and a
tokenizer.

The one place that knows all sources. It decides dtype and length, builds the decoder, picks the loader and
collects what the engine needs besides: stop ids, tokenizer, raw config. Read ``config.py`` for what is
refused, ``weights.py``, ``gguf.py`` and ``dummy.py`` for the three loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from gapless.errors import ConfigError, MemoryLimitError, ModelError
from gapless.models.base import ModelInfo
from gapless.models.config import DecoderConfig, parse_config, token_ids
from gapless.models.decoder import Decoder
from gapless.models.dummy import fill_dummy_weights
from gapless.models.gguf import gguf_decoder_config, load_gguf
from gapless.models.gguf_file import GGUFFile
from gapless.models.gguf_tokenizer import gguf_tokenizer
from gapless.models.json_file import read_json
from gapless.models.sources import find_smollm2
from gapless.models.tokenizer import Tokenizer, load_tokenizer
from gapless.models.vl_config import is_vision_language, read_vl_config
from gapless.models.weights import Progress, load_safetensors
from gapless.multimodal.opening import processor_of
from gapless.parallel.shard import WHOLE, Shard

if TYPE_CHECKING:
    from gapless.models.vision.tower import VisionTower
    from gapless.multimodal.processor import Processor

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]

_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model ready to be bound to a cache. ``tokenizer`` is None for a folder without tokenizer files."""

    model: Decoder
    info: ModelInfo
    max_model_len: int
    """Positions the model can be run at: ``info.max_model_len``, or the smaller number that was asked for."""
    tokenizer: Tokenizer | None
    model_type: str
    raw_config: Mapping[str, Any]
    """``config.json``, or the metadata of a GGUF file without its lists."""
    source: str
    """One line for people: what was loaded from where."""
    vision: VisionTower | None = None
    """Makes embeddings of images and videos; None for a model of text."""
    processor: Processor | None = None
    """Makes prompts with images and videos; None for a model of text."""

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.chat_template is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A source before weights: its config, how to fill a model, and the rest."""

    config: DecoderConfig
    raw: Mapping[str, Any]
    fill: Callable[[Decoder, VisionTower | None, Progress | None], None]
    tokenizer: Callable[[], Tokenizer | None]
    processor: Callable[[Tokenizer | None], Processor | None]
    description: str


def load_model(
    source: str,
    *,
    dtype: str = "auto",
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    shard: Shard = WHOLE,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load ``source``: a Hugging Face folder, a ``.gguf`` file, ``smollm2``, or a config folder (``dummy``).

    ``dtype`` "auto" is the checkpoint's own on CUDA (bfloat16 for GGUF files) and float32 on a CPU.
    ``max_model_len`` caps the positions. Of a model that several ranks hold only ``shard`` is loaded, and
    ranks other than the first have no tokenizer. Raises ``ModelError`` for anything about the model,
    ``ConfigError`` for a bad option, ``MemoryLimitError`` when the weights do not fit.
    """
    if load_format not in get_args(LoadFormat):
        raise ConfigError(f"load_format={load_format!r}: choose from {', '.join(get_args(LoadFormat))}")
    opened = _open_source(source, load_format=load_format, seed=seed)
    config = opened.config
    model_len = _model_len(config, max_model_len)
    torch_dtype = resolve_dtype(dtype, stored=config.dtype_name, device=device)
    with _memory_limit(opened.description, torch_dtype, device):
        model = Decoder(config, max_positions=model_len, dtype=torch_dtype, device=device, shard=shard)
        # Before the weights: a bad one should not cost minutes.
        tokenizer = opened.tokenizer() if shard.rank == 0 else None
        processor = opened.processor(tokenizer) if shard.rank == 0 else None
        tower = _make_tower(opened, dtype=torch_dtype, device=device)
        opened.fill(model, tower, progress)
        model.pack()
    return LoadedModel(
        model=model,
        info=model.info,
        max_model_len=model_len,
        tokenizer=tokenizer,
        model_type=config.model_type,
        raw_config=opened.raw,
        source=opened.description,
        vision=tower,
        processor=processor,
    )


def _make_tower(opened: _Source, *, dtype: torch.dtype, device: torch.device) -> VisionTower | None:
    if not is_vision_language(opened.raw):
        return None
    from gapless.models.vision.tower import make_tower  # imports much that text needs nothing of

    media = read_vl_config(opened.raw, source=opened.description)
    return make_tower(media.tower_type, media.vision, dtype=dtype, device=device)


_NO_MEMORY = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
"""How torch says it on a CPU, where it has no exception class of its own for it."""


@contextmanager
def _memory_limit(description: str, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(t in str(error) for t in _NO_MEMORY):
            raise
        name = str(dtype).removeprefix("torch.")
        raise MemoryLimitError(
            f"{description}: does not fit into the memory of {device} in {name}; "
            f"use a smaller dtype, a smaller max_model_len or a smaller model ({error})"
        ) from error


def read_model_info(source: str, *, shard: Shard = WHOLE) -> ModelInfo:
    """The numbers of a model without its weights. Raises ``ModelError`` as ``load_model`` does, and
    ``ConfigError`` where it cannot be divided as ``shard`` asks."""
    config = _open_source(source, load_format="auto", seed=0).config
    meta = torch.device("meta")
    return Decoder(config, max_positions=1, dtype=torch.float32, device=meta, shard=shard).info


def resolve_dtype(dtype: str, *, stored: str | None, device: torch.device) -> torch.dtype:
    """The torch dtype for an option value. Raises ``ConfigError`` for a name that does not exist."""
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype={dtype!r}: choose from auto, float32, float16, bfloat16")
        return _DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    if stored is None:
        return torch.bfloat16
    if stored not in _DTYPES:
        raise ModelError(f"the config's dtype {stored!r} is not implemented; name one with dtype=")
    return _DTYPES[stored]


def _open_source(source: str, *, load_format: str, seed: int) -> _Source:
    if source == "smollm2" and not Path(source).exists():
        return _open_gguf(find_smollm2(), load_format=load_format, seed=seed)
    path = Path(source).expanduser()
    if path.is_dir():
        return _open_folder(path, load_format=load_format, seed=seed)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _open_gguf(path, load_format=load_format, seed=seed)
    if path.is_file():
        raise ModelError(f"{source}: not a model; give a folder with config.json or a .gguf file")
    raise ModelError(
        f"{source}: no such folder or file; give a local Hugging Face folder, a .gguf file, or 'smollm2' "
        f"(models are not downloaded)"
    )


def _open_folder(folder: Path, *, load_format: str, seed: int) -> _Source:
    if load_format == "gguf":
        raise ModelError(f"{folder}: load_format='gguf' needs a .gguf file, this is a folder")
    if not (folder / "config.json").is_file():
        found = [path.name for path in sorted(folder.glob("*.gguf"))]
        hint = f"name the file itself: {found[0]}" if found else "give a Hugging Face folder or a .gguf file"
        raise ModelError(f"{folder}: no config.json; {hint}")
    raw = read_json(folder / "config.json")
    config = parse_config(raw, source=str(folder))
    generation = folder / "generation_config.json"
    if generation.is_file():
        ids = token_ids(read_json(generation).get("eos_token_id"), source=str(generation))
        config = replace(config, eos_token_ids=ids or config.eos_token_ids)
    _check_pooling(folder / "1_Pooling" / "config.json")
    return _Source(
        config=config,
        raw=raw,
        fill=_dummy_filler(seed)
        if load_format == "dummy"
        else lambda model, tower, progress: load_safetensors(
            model, folder, tower=None if tower is None else tower.weight_targets(), progress=progress
        ),
        tokenizer=lambda: load_tokenizer(folder),
        processor=lambda tokenizer: processor_of(raw, folder, tokenizer),
        description=_describe(config, folder, load_format),
    )


def _check_pooling(file: Path) -> None:
    """What Sentence Transformers writes beside a model for embeddings. Raises ``ModelError``."""
    if not file.is_file():
        return
    chosen = sorted(key for key, value in read_json(file).items() if "pooling_mode_" in key and value is True)
    if chosen != ["pooling_mode_lasttoken"]:
        raise ModelError(
            f"{file}: {', '.join(chosen) or 'no mode'} is not implemented, only pooling_mode_lasttoken; "
            "without this file the last token's hidden state is taken"
        )


def _open_gguf(path: Path, *, load_format: str, seed: int) -> _Source:
    if load_format == "safetensors":
        raise ModelError(
            f"{path}: load_format='safetensors' needs a Hugging Face folder, this is a GGUF file"
        )
    file = GGUFFile.open(path)
    config = gguf_decoder_config(file)
    return _Source(
        config=config,
        raw={key: value for key, value in file.metadata.items() if not isinstance(value, list)},
        fill=_dummy_filler(seed)
        if load_format == "dummy"
        else lambda model, tower, progress: load_gguf(model, file, progress=progress),
        tokenizer=lambda: gguf_tokenizer(file),
        processor=lambda tokenizer: None,
        description=_describe(config, path, load_format),
    )


def _describe(config: DecoderConfig, path: Path, load_format: str) -> str:
    return f"{config.architecture} from {path}" + (" (dummy weights)" if load_format == "dummy" else "")


def _dummy_filler(seed: int) -> Callable[[Decoder, VisionTower | None, Progress | None], None]:
    return lambda model, tower, progress: fill_dummy_weights(
        model, seed=seed, tower=None if tower is None else tower.weight_targets(), progress=progress
    )


def _model_len(config: DecoderConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.max_model_len
    if not 1 <= wanted <= config.max_model_len:
        raise ConfigError(
            f"max_model_len={wanted}: must be between 1 and the model's own limit of {config.max_model_len}"
        )
    return wanted
