"""Transformers on the same random weights, three ways: eager, ``generate_batch``, and compiled with graphs.

- ``transformers``: ``generate()`` as it is.
- ``transformers-batch``: ``generate_batch()``, its continuous batching with a paged cache.
- ``transformers-compiled``: ``torch.compile(mode="reduce-overhead")``; decode with a static cache inside
  ``generate()``, prefill as a compiled forward of exactly that length.

Prefill is one prompt and one new token; decode is the difference of a long and a short run over the tokens,
as for every engine here. A way that fails says so and leaves the others alone.

    python benchmarks/against_transformers.py CONFIG_DIR [--ways eager batch compiled] [--output FILE]

The last line is a list of parts as JSON, which ``against_vllm.py --merge`` and ``ratios.py`` understand.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from gapless.bench.meta import describe_run
from gapless.bench.workload import PromptSource

WAYS = {"eager": "transformers", "batch": "transformers-batch", "compiled": "transformers-compiled"}
Generate = Callable[[list[list[int]], int], None]
WARMUPS = 3


def main() -> None:
    arguments = parse_arguments()
    parts = []
    for way in arguments.ways:
        try:
            parts.append(measure(way, arguments))
        except Exception as error:
            traceback.print_exc()
            parts.append({"error": f"{type(error).__name__}: {error}"})
        parts[-1] |= {
            "engine": WAYS[way],
            "model": Path(arguments.config).name,
            "version": transformers.__version__,
            "meta": describe_run(),
        }
    if arguments.output:
        arguments.output.write_text(json.dumps(parts, indent=1) + "\n")
    print(json.dumps(parts))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--out-len", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


@torch.no_grad()
def measure(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    model = make_model(arguments)
    start_s = time.perf_counter() - start
    source = PromptSource(model.config.vocab_size)
    prefill_ms, decode_ms = {}, {}
    for tokens in arguments.prefill:
        with ready(way, model, arguments, is_prefill=True) as generate:
            times = [timed(generate, [source.prompt(tokens)], 1) for _ in range(arguments.repeats + WARMUPS)]
        prefill_ms[tokens] = round(1e3 * statistics.median(times[WARMUPS:]), 3)
        print(f"{way}: prefill {tokens}: {prefill_ms[tokens]} ms", file=sys.stderr, flush=True)
    for size in arguments.decode:
        per_token = []
        with ready(way, model, arguments, is_prefill=False) as generate:
            for _ in range(1 + 3):  # the first also compiles
                prompts = [source.prompt(arguments.prompt_tokens) for _ in range(2 * size)]
                short = timed(generate, prompts[:size], 8)
                long = timed(generate, prompts[size:], 8 + arguments.out_len)
                per_token.append((long - short) / arguments.out_len)
        decode_ms[size] = round(1e3 * statistics.median(per_token[1:]), 3)
        print(f"{way}: decode {size}: {decode_ms[size]} ms", file=sys.stderr, flush=True)
    return {"start_s": round(start_s, 2), "prefill_ms": prefill_ms, "decode_ms": decode_ms}


@contextmanager
def ready(way: str, model: Any, arguments: argparse.Namespace, *, is_prefill: bool) -> Iterator[Generate]:
    """What generates, for as long as the block runs."""
    if way == "batch":
        with batch(model, arguments) as generate:
            yield generate
    elif way == "compiled":
        yield compiled_prefill(model) if is_prefill else compiled(model)
    else:
        yield eager(model)


def make_model(arguments: argparse.Namespace) -> Any:
    config = AutoConfig.from_pretrained(arguments.config)
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype))
    return model.eval()


def timed(generate: Generate, prompts: list[list[int]], tokens: int) -> float:
    synchronize()
    start = time.perf_counter()
    generate(prompts, tokens)
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def eager(model: Any) -> Generate:
    def generate(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts, device=model.device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **exactly(tokens))
        assert output.shape[1] == ids.shape[1] + tokens

    return generate


@contextmanager
def batch(model: Any, arguments: argparse.Namespace) -> Iterator[Generate]:
    """The manager of ``generate_batch``, open for all calls: starting and stopping it is not what is timed.

    Its cache fits what is asked of it; left to itself it takes all memory, also that of a CPU.
    """
    most = max(arguments.decode, default=1)
    longest = max([*arguments.prefill, arguments.prompt_tokens + 8 + arguments.out_len])
    sizes = transformers.ContinuousBatchingConfig(
        num_blocks=most * (1 + longest // 256) + 16,
        max_batch_tokens=max(256, *arguments.prefill, most * arguments.prompt_tokens),
        max_requests_per_batch=max(8, most),
        allow_block_sharing=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True)
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=sizes, block=True, timeout=20
    ) as manager:

        def generate(prompts: list[list[int]], tokens: int) -> None:
            manager.add_requests(inputs=prompts, max_new_tokens=tokens)
            lengths = []
            while len(lengths) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    lengths.append(len(result.generated_tokens))
                elif result is None and not manager.is_running():
                    raise RuntimeError("the generation thread has ended")
            if lengths != [tokens] * len(prompts):
                raise RuntimeError(f"asked for {tokens} tokens of {len(prompts)} requests, got {lengths}")

        yield generate


def compiled(model: Any) -> Generate:
    from transformers import CompileConfig

    if model.device.type != "cuda":
        raise RuntimeError(f"generate() does not compile on {model.device.type}, so there is nothing to time")
    config = CompileConfig(mode="reduce-overhead", fullgraph=False, dynamic=False)

    def generate(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts, device=model.device)
        options = exactly(tokens) | {"cache_implementation": "static", "compile_config": config}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert output.shape[1] == ids.shape[1] + tokens

    return generate


def compiled_prefill(model: Any) -> Generate:
    forward = torch.compile(model.forward, mode="reduce-overhead", dynamic=False)

    def generate(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts, device=model.device)
        output = forward(input_ids=ids, use_cache=False, logits_to_keep=1)
        output.logits.argmax(-1).tolist()

    return generate


def exactly(tokens: int) -> dict[str, Any]:
    """Greedy, and neither more nor fewer tokens."""
    return {
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }


if __name__ == "__main__":
    main()
