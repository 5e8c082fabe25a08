"""Command-line options that several commands share, and what they become for the engine.

Each group is a dataclass whose fields are typer options; ``expand`` gives a command the fields of every
group among its parameters. So a flag is written once, ``generate``, ``demo`` and ``inspect`` cannot drift
apart, and a command receives one object. Only what was given is passed on: defaults, file and environment
are decided below the command line. Values are not judged here beyond their type; the engine's configuration
does that for every caller alike.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from gapless.cli.arguments import normalise_args, refuse_contradictions
from gapless.cli.defaults import engine_defaults

_BACKENDS = "full, breakable, tc_piecewise or disabled."


def _option(*names: str, help: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What loads and runs the model."""

    model: Annotated[
        str | None,
        _option(
            "--model",
            "--model-path",
            help="smollm2 (packaged), a Hugging Face folder, or a GGUF file.",
            panel="Model",
        ),
    ] = None
    config: Annotated[
        str | None, _option("--config", help="TOML file with these options.", panel="Model", metavar="FILE")
    ] = None
    load_format: Annotated[
        str | None,
        _option(
            "--load-format",
            help="auto, safetensors, gguf, or dummy: random weights.",
            panel="Model",
            metavar="NAME",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        _option("--dtype", help="auto, float32, bfloat16 or float16.", panel="Model", metavar="NAME"),
    ] = None
    device: Annotated[
        str | None, _option("--device", help="auto, cuda or cpu.", panel="Model", metavar="NAME")
    ] = None
    max_model_len: Annotated[
        int | None, _option("--max-model-len", help="Longest prompt plus answer, in tokens.", panel="Model")
    ] = None
    max_running_requests: Annotated[
        int | None, _option("--max-running-requests", help="Requests in one step.", panel="Batching")
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        _option("--chunked-prefill-size", help="Most prompt tokens in one step.", panel="Batching"),
    ] = None
    max_total_tokens: Annotated[
        int | None, _option("--max-total-tokens", help="Most tokens in the KV cache.", panel="Memory")
    ] = None
    block_size: Annotated[
        int | None, _option("--block-size", help="Tokens in one KV cache block.", panel="Memory")
    ] = None
    kv_cache_tokens: Annotated[
        int | None, _option("--kv-cache-tokens", help="Size of the KV cache on a CPU.", panel="Memory")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        _option(
            "--gpu-memory-utilization",
            "--mem-fraction-static",
            help="Part of the GPU's memory to use.",
            panel="Memory",
        ),
    ] = None
    attention_backend: Annotated[
        str | None, _option("--attention-backend", help="Attention kernels.", panel="Model", metavar="NAME")
    ] = None
    tensor_parallel_size: Annotated[
        int | None,
        _option(
            "--tensor-parallel-size",
            "--tp-size",
            "--tp",
            help="GPUs that hold the model together, a process for each.",
            panel="Model",
        ),
    ] = None
    break_at_all_reduce: Annotated[
        bool | None,
        _option(
            "--break-at-all-reduce", help="Breakable graphs break at sums over GPUs too.", panel="Graphs"
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None,
        _option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Compute the beginning that prompts share once.",
            panel="Memory",
        ),
    ] = None
    count_expert_tokens: Annotated[
        bool | None,
        _option("--count-expert-tokens", help="Tokens per expert, in the report.", panel="Model"),
    ] = None
    enforce_eager: Annotated[
        bool | None, _option("--enforce-eager", help="No graphs at all.", panel="Graphs")
    ] = None
    cuda_graph_backend_prefill: Annotated[
        str | None,
        _option(
            "--cuda-graph-backend-prefill",
            help=f"Prefill and mixed steps: {_BACKENDS}",
            panel="Graphs",
            metavar="NAME",
        ),
    ] = None
    cuda_graph_backend_decode: Annotated[
        str | None,
        _option(
            "--cuda-graph-backend-decode", help=f"Decode steps: {_BACKENDS}", panel="Graphs", metavar="NAME"
        ),
    ] = None
    cuda_graph_max_bs_prefill: Annotated[
        int | None, _option("--cuda-graph-max-bs-prefill", help="Largest size, in tokens.", panel="Graphs")
    ] = None
    cuda_graph_max_bs_decode: Annotated[
        int | None, _option("--cuda-graph-max-bs-decode", help="Largest size, in requests.", panel="Graphs")
    ] = None
    cuda_graph_bs_prefill: Annotated[
        str | None,
        _option(
            "--cuda-graph-bs-prefill",
            help="Exactly these sizes, in tokens; commas or spaces.",
            panel="Graphs",
            metavar="N,N,…",
        ),
    ] = None
    cuda_graph_bs_decode: Annotated[
        str | None,
        _option(
            "--cuda-graph-bs-decode",
            help="Exactly these sizes, in requests; commas or spaces.",
            panel="Graphs",
            metavar="N,N,…",
        ),
    ] = None
    cuda_graph_tc_compiler: Annotated[
        str | None,
        _option(
            "--cuda-graph-tc-compiler",
            help="Compiler of tc_piecewise graphs: eager or inductor.",
            panel="Graphs",
            metavar="NAME",
        ),
    ] = None
    enable_vit_cuda_graph: Annotated[
        bool | None,
        _option("--enable-vit-cuda-graph", help="Graphs for the vision encoder too.", panel="Vision"),
    ] = None
    vit_cuda_graph_mode: Annotated[
        str | None,
        _option(
            "--vit-cuda-graph-mode",
            help="budget: images packed into sizes captured at start-up; exact: a graph per image size.",
            panel="Vision",
            metavar="NAME",
        ),
    ] = None
    vit_cuda_graph_budgets: Annotated[
        str | None,
        _option(
            "--vit-cuda-graph-budgets",
            help="Exactly these sizes, in patches; commas or spaces.",
            panel="Vision",
            metavar="N,N,…",
        ),
    ] = None
    vit_cuda_graph_max_tokens: Annotated[
        int | None,
        _option("--vit-cuda-graph-max-tokens", help="Largest size, in patches.", panel="Vision"),
    ] = None
    mm_processor_kwargs: Annotated[
        str | None,
        _option(
            "--mm-processor-kwargs",
            help='Settings of the model\'s processor as JSON, such as {"max_pixels": 1003520} or {"fps": 1}.',
            panel="Vision",
            metavar="JSON",
        ),
    ] = None
    mm_embedding_cache_tokens: Annotated[
        int | None,
        _option(
            "--mm-embedding-cache-tokens",
            help="Image and video tokens whose embeddings are kept.",
            panel="Vision",
        ),
    ] = None
    compilation_config: Annotated[
        str | None,
        _option(
            "--compilation-config",
            help='Both phases at once, e.g. \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\'.',
            panel="Graphs",
            metavar="JSON",
        ),
    ] = None

    default_texts = staticmethod(engine_defaults)

    def given(self) -> dict[str, Any]:
        """The options that were given, as text where they have a grammar of their own."""
        values = {name: value for name, value in _items(self) if value is not None}
        values.pop("config", None)
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """What each answer is like; the defaults are the command line's own (greedy, 128 tokens)."""

    max_tokens: Annotated[
        int, _option("--max-tokens", help="Most tokens in an answer.", panel="Sampling")
    ] = 128
    temperature: Annotated[float, _option("--temperature", help="0 is greedy.", panel="Sampling")] = 0.0
    top_p: Annotated[float, _option("--top-p", help="Nucleus sampling.", panel="Sampling")] = 1.0
    top_k: Annotated[int, _option("--top-k", help="0 means all tokens.", panel="Sampling")] = 0
    min_p: Annotated[
        float, _option("--min-p", help="Least probability, relative to the best.", panel="Sampling")
    ] = 0.0
    seed: Annotated[
        int | None, _option("--seed", help="The same seed gives the same answer.", panel="Sampling")
    ] = None
    n: Annotated[int, _option("--n", help="Answers per prompt.", panel="Sampling")] = 1
    logprobs: Annotated[
        int | None, _option("--logprobs", help="Log-probabilities of this many tokens.", panel="Sampling")
    ] = None
    stop: Annotated[
        list[str] | None, _option("--stop", help="Text that ends an answer; repeatable.", panel="Sampling")
    ] = None
    ignore_eos: Annotated[bool, _option("--ignore-eos", help="Go on to --max-tokens.", panel="Sampling")] = (
        False
    )

    def sampling_kwargs(self) -> dict[str, Any]:
        return {name: value for name, value in _items(self) if value is not None}


class Command(TyperCommand):
    """A command that also takes ``--flag_name`` for ``--flag-name`` and size lists of several words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        args = normalise_args(args, known)
        refuse_contradictions(args, self.params)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """With the defaults of options that are decided below the command line."""
        for group in getattr(self.callback, "groups", ()):
            texts = group.default_texts([field.name for field in dataclasses.fields(group)])
            for param in self.params:
                if param.default is None and param.name in texts:
                    param.show_default = texts[param.name]  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


def expand(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` with each dataclass parameter replaced by that dataclass's fields, for typer to read."""
    signature = inspect.signature(function, eval_str=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if not dataclasses.is_dataclass(parameter.annotation):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        group: Any = parameter.annotation
        groups[parameter.name] = group
        fields = inspect.signature(group, eval_str=True).parameters.values()
        parameters.extend(field.replace(kind=inspect.Parameter.KEYWORD_ONLY) for field in fields)

    def command(**values: Any) -> None:
        arguments: dict[str, Any] = {}
        for name, cls in groups.items():
            arguments[name] = cls(**{f.name: values.pop(f.name) for f in dataclasses.fields(cls)})
        function(**arguments, **values)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.groups = [  # type: ignore[attr-defined]
        group for group in groups.values() if hasattr(group, "default_texts")
    ]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _items(options: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(options, field.name)) for field in dataclasses.fields(options)]
