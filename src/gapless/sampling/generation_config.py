"""What a model's authors recommend for sampling: ``generation_config.json`` beside its weights.

A server takes these values for requests that do not name their own, as vLLM does and under the same option:
``auto`` reads the model's folder, ``vllm`` (or ``none``) reads nothing, anything else is another folder.
``do_sample`` is not looked at: a temperature that was written down is meant. ``SamplingParams``' own defaults
stay what they are. Invariant: what is returned has been checked by making a ``SamplingParams`` of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gapless.errors import ConfigError, RequestError
from gapless.sampling.params import SamplingParams

FILE_NAME = "generation_config.json"
NEITHER = ("none", "vllm")
"""Values of the option with which nothing is read."""
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_sampling_defaults(source: str, *, model: str) -> dict[str, Any]:
    """Fields of ``SamplingParams`` by name; those that the file leaves out are absent. ``source``: the value
    of ``--generation-config``. Raises ``ConfigError`` for a folder without the file, and for what is no
    JSON object or out of range."""
    if source in NEITHER:
        return {}
    path = Path(model if source == "auto" else source).expanduser() / FILE_NAME
    if source == "auto" and not path.is_file():  # a GGUF file, or a folder that recommends nothing
        return {}
    values = _read(path, source)
    found = {field: values[key] for key, field in _FIELDS.items() if values.get(key) is not None}
    try:
        SamplingParams(**found)
    except (RequestError, OverflowError) as error:
        raise ConfigError(f"{path}: {error}; --generation-config=none leaves the file alone") from None
    return found


def _read(path: Path, source: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--generation-config={source}: {path}: {error.strerror or error}; name auto, none, or a folder "
            f"with a {FILE_NAME}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return values
