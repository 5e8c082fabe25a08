"""Gapless: a CUDA-graph runtime for PyTorch, and an LLM engine in which every step runs as a graph.

Importing this package imports neither torch nor any of its own parts: each public name is loaded when it is
first used, so command lines start fast and a library user pays only for what he takes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from gapless.errors import (
        CaptureError,
        ConfigError,
        GaplessError,
        GraphError,
        MemoryLimitError,
        ModelError,
        RequestError,
    )
    from gapless.graphs.arguments import Input
    from gapless.graphs.breakable import eager_break
    from gapless.graphs.encoder import ImageBatch, encoder_graphs
    from gapless.graphs.graphed import graphed
    from gapless.graphs.real_sizes import num_real
    from gapless.llm import LLM
    from gapless.sampling.params import SamplingParams
    from gapless.sampling.structured import StructuredOutputsParams

_HOME = {
    "CaptureError": "gapless.errors",
    "CompletionOutput": "gapless.engine.outputs",
    "ConfigError": "gapless.errors",
    "GaplessError": "gapless.errors",
    "GraphError": "gapless.errors",
    "ImageBatch": "gapless.graphs.encoder",
    "Input": "gapless.graphs.arguments",
    "LLM": "gapless.llm",
    "Logprob": "gapless.engine.outputs",
    "MemoryLimitError": "gapless.errors",
    "ModelError": "gapless.errors",
    "RequestError": "gapless.errors",
    "RequestOutput": "gapless.engine.outputs",
    "SamplingParams": "gapless.sampling.params",
    "StructuredOutputsParams": "gapless.sampling.structured",
    "eager_break": "gapless.graphs.breakable",
    "encoder_graphs": "gapless.graphs.encoder",
    "graphed": "gapless.graphs.graphed",
    "num_real": "gapless.graphs.real_sizes",
}

__all__ = [
    "LLM",
    "CaptureError",
    "CompletionOutput",
    "ConfigError",
    "GaplessError",
    "GraphError",
    "ImageBatch",
    "Input",
    "Logprob",
    "MemoryLimitError",
    "ModelError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "eager_break",
    "encoder_graphs",
    "graphed",
    "num_real",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("gapless")
        except PackageNotFoundError:  # run from a source folder on the path
            return "unknown"
    if name not in _HOME:
        raise AttributeError(f"module 'gapless' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
