"""Hugging Face safetensors folders: memory-mapped shards streamed tensor by tensor into the model's
parameters.

Nothing is held twice: a tensor is mapped, converted to the target dtype and device by one copy, and
forgotten; of a tensor that ranks share, only this rank's slice is read. Every parameter must be filled
exactly once and every tensor of the files must have a place; what is missing, truncated, surplus or of
another shape is a ``ModelError`` naming file and tensor. ``layers.WeightTarget`` does the copy.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gapless.errors import ModelError
from gapless.models.decoder import Decoder
from gapless.models.layers import WeightTarget

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) as loading goes on."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_TABLES = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
"""Old checkpoints carry frequency tables, which follow from the config."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_BASE_NAME = re.compile(r"(embed_tokens|layers|norm)\.")
"""Tensors of a base model that was stored by itself, which is how most models for embeddings are."""
_NESTED = {"model.language_model.": "model.", "model.visual.": "visual."}
"""Where vision-language checkpoints put the two models, and where older ones had them."""


def load_safetensors(
    model: Decoder,
    folder: Path,
    *,
    tower: Mapping[str, WeightTarget] | None = None,
    progress: Progress | None = None,
) -> None:
    """Fill ``model``, and the vision ``tower`` beside it, from ``folder``. Raises ``ModelError``; what they
    hold is undefined after an error."""
    files = _shard_files(folder)
    plain_name = _plain_name if tower is not None else _full_name
    missing = {
        **model.weight_targets([plain_name(name) for name in _all_names(files)]),
        **(tower or {}),
    }
    finished, total = 0, sum(path.stat().st_size for path in files)
    repeated_head: tuple[Path, Tensor | None] | None = None
    embedding = missing[_EMBEDDING]
    for path, names in files.items():
        done = finished
        for stored_name, stored in _stored_tensors(path, names):
            name = plain_name(stored_name)
            if _TABLES.fullmatch(name):
                continue
            if name == _HEAD and model.config.tie_word_embeddings:
                repeated_head = path, stored.read(embedding) if stored.shape == embedding.shape else None
                continue
            target = missing.pop(name, None)
            if target is None:
                raise ModelError(
                    f"{path}: tensor '{stored_name}' has no place in a {model.info.architecture} with this "
                    f"config; config and weights do not belong together"
                )
            target = target.of_shape(stored.shape)
            target.check_shape(name, stored.shape, source=str(path))
            part = stored.read(target)
            target.load_part(name, part, source=str(path))
            done += math.prod(stored.shape) * part.element_size()
            if progress is not None:
                progress("weights", done, total)
        finished += path.stat().st_size
    if missing:
        names_text = ", ".join(list(missing)[:3]) + (" …" if len(missing) > 3 else "")
        if set(missing) == {_HEAD}:
            base = model.info.architecture.replace("ForCausalLM", "Model")
            names_text += f"; a model for embeddings alone must name the architecture {base} in its config"
        raise ModelError(f"{folder}: {len(missing)} tensors are missing from the shards: {names_text}")
    if repeated_head is not None:
        _check_tied(repeated_head[1], embedding.tensor, source=str(repeated_head[0]))
    if progress is not None:
        progress("weights", total, total)


def _full_name(name: str) -> str:
    return f"model.{name}" if _BASE_NAME.match(name) else name


def _plain_name(name: str) -> str:
    for prefix, plain in _NESTED.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _shard_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """Files to read and, where an index says so, the tensors each must hold."""
    index = folder / _INDEX
    if index.is_file():
        return _indexed_files(folder, index)
    single = folder / _SINGLE
    if single.is_file():
        return {single: None}
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if found:
        raise ModelError(
            f"{folder}: has {', '.join(found)} but neither {_SINGLE} nor {_INDEX}; add the index file"
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelError(f"{folder}: has pickled weights only; convert them to safetensors")
    raise ModelError(f"{folder}: no weights ({_SINGLE} or {_INDEX}); load_format='dummy' makes random ones")


def _indexed_files(folder: Path, index: Path) -> dict[Path, frozenset[str] | None]:
    weight_map = _read_weight_map(index)
    names_by_file: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        names_by_file.setdefault(file_name, set()).add(name)
    for file_name, names in names_by_file.items():
        if not (folder / file_name).is_file():
            raise ModelError(f"{folder}: shard {file_name} is missing; {_INDEX} needs it for '{min(names)}'")
    for path in folder.glob("*.safetensors"):
        if _SHARD.fullmatch(path.name) and path.name not in names_by_file:
            raise ModelError(f"{path}: this shard is surplus: {_INDEX} does not mention it")
    return {folder / file_name: frozenset(names) for file_name, names in sorted(names_by_file.items())}


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index}: not a safetensors index: {error}") from error
    is_map = isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values())
    if not is_map or not weight_map:
        raise ModelError(f"{index}: weight_map must name a file for each tensor")
    for file_name in set(weight_map.values()):
        if Path(file_name).name != file_name:
            raise ModelError(f"{index}: shard {file_name!r} is not a file name inside the folder")
    return weight_map


def _all_names(files: dict[Path, frozenset[str] | None]) -> frozenset[str]:
    names: set[str] = set()
    for path, listed in files.items():
        if listed is None:
            with _opened(path) as shard:
                names.update(shard.keys())
        else:
            names.update(listed)
    return frozenset(names)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: truncated or not a safetensors file ({error}); download it again"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredTensor:
    """A tensor of an open file: nothing of it is read before it is asked for."""

    file: Any
    name: str
    shape: tuple[int, ...]

    def read(self, target: WeightTarget) -> Tensor:
        """The part that goes to ``target``, mapped."""
        if target.part is None:
            return self.file.get_tensor(self.name)
        return target.part_of(self.file.get_slice(self.name))


def _stored_tensors(path: Path, expected: frozenset[str] | None) -> Iterator[tuple[str, _StoredTensor]]:
    with _opened(path) as shard:
        names = list(shard.keys())
        if expected is not None:
            _check_names(path, expected, frozenset(names))
        for name in names:
            shape = tuple(shard.get_slice(name).get_shape())
            yield name, _StoredTensor(file=shard, name=name, shape=shape)


def _check_names(path: Path, expected: frozenset[str], found: frozenset[str]) -> None:
    if expected - found:
        raise ModelError(
            f"{path}: tensor '{min(expected - found)}' is missing, though {_INDEX} places it there"
        )
    if found - expected:
        raise ModelError(
            f"{path}: tensor '{min(found - expected)}' is surplus: {_INDEX} does not place it there"
        )


def _check_tied(head: Tensor | None, embedding: Tensor, *, source: str) -> None:
    """A tied checkpoint may repeat the embedding as head; a different one would be lost in silence. ``head``
    is None where its shape differs."""
    if head is not None:
        same = head.to(dtype=embedding.dtype, device=embedding.device)
        if torch.equal(same, embedding):
            return
    raise ModelError(
        f"{source}: tensor '{_HEAD}' differs from '{_EMBEDDING}', but the config says "
        f"tie_word_embeddings=true; set it to false"
    )
