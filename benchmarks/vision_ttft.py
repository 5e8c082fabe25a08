"""Time to the first token of a prompt with one image: all graphs on, against all off, and against vLLM.

The model is a made-up folder with the sizes of Qwen3-VL-8B, random weights and a tokenizer of bytes; the
prompt is one image of 448² pixels and 64 tokens of text, both new in every run, so no cache knows them. Every
part is a process of its own: ``graphs`` (as shipped, with encoder graphs), ``decoder`` (graphs of the decoder
alone), ``eager`` (none), if asked for ``full`` and ``breakable`` (prefill by that strategy), and with
``--vllm-site`` (or a vLLM that Python finds, by ``--only``) ``vllm`` and ``vllm-encoder``, whose encoder
graphs are its own (``cudagraph_mm_encoder``).

    python benchmarks/vision_ttft.py --vllm-site DIR --output vision_ttft.json
    python benchmarks/vision_ttft.py --tiny      # a small model on a CPU: only proves that it runs

Prints the parts and the ratios with their targets to stderr, and everything as one line of JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from against_vllm import QUIET, run_group

import gapless
from gapless.bench.meta import describe_run
from gapless.bench.stats import spread

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
IDS = {token: 256 + index for index, token in enumerate(SPECIAL)}
"""Behind the 256 bytes."""
TEXT = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_theta": 5000000,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    "bos_token_id": IDS["<|endoftext|>"],
    "eos_token_id": IDS["<|im_end|>"],
}
VISION = {
    "model_type": "qwen3_vl",
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
TINY_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 272,
    "max_position_embeddings": 512,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
}
TINY_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
OURS: dict[str, dict[str, Any]] = {
    "graphs": {"enable_vit_cuda_graph": True},
    "full": {"enable_vit_cuda_graph": True, "cuda_graph_backend_prefill": "full"},
    "breakable": {"enable_vit_cuda_graph": True, "cuda_graph_backend_prefill": "breakable"},
    "decoder": {},
    "eager": {"enforce_eager": True},
}
DEFAULT = ("graphs", "decoder", "eager")
TINY_LIMITS = {"kv_cache_tokens": 1024, "max_running_requests": 2}
TINY_SIZES = {"cuda_graph_bs_prefill": [32], "cuda_graph_bs_decode": [1, 2]}
VLLM = {
    "vllm": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
    "vllm-encoder": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_mm_encoder": True},
}
TARGETS = {
    ("graphs", "eager"): 0.5,
    ("full", "eager"): 0.5,
    ("breakable", "eager"): 0.5,
    ("graphs", "vllm"): 0.8,
    ("graphs", "vllm-encoder"): 0.8,
    ("graphs", "decoder"): None,
}
"""Upper bounds on one part's median over another's."""


def main() -> None:
    arguments = parse_arguments()
    if arguments.part:
        run = run_vllm if arguments.part in VLLM else run_ours
        arguments.output.write_text(json.dumps(run(arguments)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name) / "qwen3-vl", is_tiny=arguments.tiny)
        parts, notes = run_parts(arguments, folder)
    result = {
        "benchmark": "vision_ttft",
        "meta": describe_run(),
        "image": f"{arguments.side}x{arguments.side}",
        "text_tokens": arguments.text_tokens,
        "tiny": arguments.tiny,
        "parts": parts,
        "ratios": ratios(parts),
        "notes": notes,
    }
    for line in (*result["ratios"], *(f"note: {note}" for note in notes)):
        print(line, file=sys.stderr)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(0 if parts else 1)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=[*OURS, *VLLM], help="parts to run")
    parser.add_argument("--vllm-site", type=Path, help="folder with vLLM's packages")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")
    parser.add_argument("--side", type=int, help="of the image, in pixels (448; tiny 64)")
    parser.add_argument("--text-tokens", type=int, help="(64; tiny 8)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--warmups", type=int, default=4)
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--part-limit", type=float, default=240.0, help="seconds for one part")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--part", choices=[*OURS, *VLLM], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.side is None:
        arguments.side = 64 if arguments.tiny else 448
    if arguments.text_tokens is None:
        arguments.text_tokens = 8 if arguments.tiny else 64
    if arguments.only is None:
        arguments.only = [*DEFAULT, *(VLLM if arguments.vllm_site is not None else ())]
    if arguments.tiny and not set(arguments.only) <= set(OURS):
        parser.error("--tiny runs on a CPU, and vLLM's parts need a GPU; leave them out")
    return arguments


def write_model(folder: Path, *, is_tiny: bool) -> Path:
    """Config, tokenizer and processor settings; no weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
        "text_config": TEXT | (TINY_TEXT if is_tiny else {}),
        "vision_config": VISION | (TINY_VISION if is_tiny else {}),
    }
    pixels = {
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3VLProcessor",
    }
    files = {
        "config.json": config,
        "preprocessor_config.json": pixels | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": pixels | {"video_processor_type": "Qwen3VLVideoProcessor"},
        "tokenizer_config.json": tokens,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def run_parts(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Each part in a process of its own. One that fails is a note; its log is shown."""
    parts: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for name in arguments.only:
        print(f"{name} …", file=sys.stderr, flush=True)
        output, log = folder.parent / f"{name}.json", folder.parent / f"{name}.log"
        words = [sys.executable, __file__, "--part", name, "--folder", str(folder), "--output", str(output)]
        for option in ("side", "text_tokens", "repeats", "warmups", "max_len"):
            words += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
        if arguments.tiny:
            words += ["--tiny", "--only", name]
        begun = time.perf_counter()
        with log.open("w") as stream:
            site = arguments.vllm_site if name in VLLM else None
            code = run_group(words, environment(site), stream, arguments.part_limit)
        if not output.exists():
            why = f"not ready after {arguments.part_limit} s" if code is None else f"exit code {code}"
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
            notes.append(f"{name}: {why}")
            continue
        parts[name] = json.loads(output.read_text()) | {"seconds": round(time.perf_counter() - begun, 1)}
        print(f"  {parts[name]}", file=sys.stderr, flush=True)
    return parts, notes


def environment(site: Path | None) -> dict[str, str]:
    """This process's; vLLM's packages first on the path and ours last."""
    paths = [*([str(site)] if site is not None else []), str(Path(gapless.__file__).parents[1])]
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(paths + ([before] if before else []))}


def run_ours(arguments: argparse.Namespace) -> dict[str, Any]:
    from gapless.llm import LLM
    from gapless.sampling.params import SamplingParams

    options = dict(OURS[arguments.part])
    if arguments.tiny:
        options |= {"device": "cpu", "dtype": "float32"} | TINY_LIMITS
        options |= {} if options.get("enforce_eager") else TINY_SIZES
        if options.get("enable_vit_cuda_graph"):
            options["vit_cuda_graph_budgets"] = [64]
    else:
        options["dtype"] = "bfloat16"
    begun = time.perf_counter()
    max_len = min(arguments.max_len, 512) if arguments.tiny else arguments.max_len
    llm = LLM(
        model=str(arguments.folder),
        load_format="dummy",
        max_model_len=max_len,
        enable_prefix_caching=False,
        mm_embedding_cache_tokens=0,
        **options,
    )
    start_s = time.perf_counter() - begun
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    with llm:
        llm.reset_report()
        found = measure(arguments, lambda prompt: llm.generate([prompt], params))
        report = llm.report()
        processor = llm.processor
        assert processor is not None
        (prompt,) = prompts(arguments, 1)
        tokens, image = prompt["prompt_token_ids"], prompt["multi_modal_data"]["image"]
        processor_ms = [timed(lambda: processor.prompt(tokens, images=[image])) for _ in range(5)]
        return {
            "engine": "gapless",
            "version": gapless.__version__,
            "start_s": round(start_s, 2),
            **found,
            "processor_ms": spread(processor_ms),
            "eager": report["eager"],
            "steps": report["steps"],
        }


def run_vllm(arguments: argparse.Namespace) -> dict[str, Any]:
    import vllm

    begun = time.perf_counter()
    llm = vllm.LLM(
        model=str(arguments.folder),
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=arguments.max_len,
        gpu_memory_utilization=0.6,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 1, "video": 0},
        compilation_config=VLLM[arguments.part],
        disable_log_stats=True,
        seed=0,
    )
    start_s = time.perf_counter() - begun
    params = vllm.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    found = measure(arguments, lambda prompt: llm.generate([prompt], params, use_tqdm=False))
    return {"engine": "vllm", "version": vllm.__version__, "start_s": round(start_s, 2), **found}


def measure(arguments: argparse.Namespace, generate: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """``ttft_ms`` with the image; ``text_ms`` of the same text without it, which is the rest."""
    drawn = list(prompts(arguments, arguments.warmups + arguments.repeats))
    with_image = [timed(partial(generate, prompt)) for prompt in drawn]
    without = [timed(partial(generate, {"prompt_token_ids": p["prompt_token_ids"][3:]})) for p in drawn]
    return {
        "ttft_ms": spread(with_image[arguments.warmups :]),
        "text_ms": spread(without[arguments.warmups :]),
    }


def prompts(arguments: argparse.Namespace, count: int) -> Iterator[dict[str, Any]]:
    """Text and image are new in each."""
    from PIL import Image

    generator = np.random.default_rng(0)
    before = [IDS["<|vision_start|>"], IDS["<|image_pad|>"], IDS["<|vision_end|>"]]
    for _ in range(count):
        pixels = generator.integers(0, 256, (arguments.side, arguments.side, 3), dtype=np.uint8)
        text = generator.integers(10, 250, arguments.text_tokens).tolist()
        yield {
            "prompt_token_ids": [*before, *text],
            "multi_modal_data": {"image": Image.fromarray(pixels)},
        }


def timed(run: Callable[[], Any]) -> float:
    """Milliseconds."""
    begun = time.perf_counter()
    run()
    return (time.perf_counter() - begun) * 1e3


def ratios(parts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for (ours, base), target in TARGETS.items():
        if ours in parts and base in parts:
            value = parts[ours]["ttft_ms"]["median"] / parts[base]["ttft_ms"]["median"]
            is_met = None if target is None else value <= target
            rows.append({"of": ours, "over": base, "value": round(value, 3), "target": target, "met": is_met})
    return rows


if __name__ == "__main__":
    main()
