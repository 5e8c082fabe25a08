"""One engine and one model in this process: start-up, latency and the throughput of a batch, as a part.

``against_vllm.py`` starts this once per engine and model. For vLLM and SGLang the latency script that lies in
``--peers`` runs as it is, and the engine it made is kept and given the throughput shape too, so that every
engine starts once. All engines see the same prompts: the same generator draws them in the same order.

Usage: one_engine.py gapless|vllm|sglang CONFIG_DIR --output FILE [--peers DIR] [--mode NAME]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gapless.bench.throughput import ThroughputOptions, offline_runs, summary
from gapless.bench.workload import Lengths, PromptSource

Generate = Callable[[list[list[int]], int], float]
"""Prompts and tokens of each answer to seconds."""

DEFAULT_MODES = {"gapless": "default", "vllm": "FULL_AND_PIECEWISE", "sglang": "default"}


def main() -> None:
    arguments = parse_arguments()
    run = {"gapless": run_gapless, "vllm": run_vllm, "sglang": run_sglang}[arguments.engine]
    part = {
        **run(arguments),
        "engine": arguments.engine,
        "model": Path(arguments.config).name,
        "mode": arguments.mode or DEFAULT_MODES[arguments.engine],
    }
    arguments.output.write_text(json.dumps(part, indent=1) + "\n")
    print(json.dumps(part), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=sorted(DEFAULT_MODES))
    parser.add_argument("config")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--peers", type=Path, help="folder with vllm_bench.py and sglang_bench.py")
    parser.add_argument("--mode", help="the engine's graph mode, in its own words")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-len", type=int, default=8192)
    parser.add_argument("--prefill", default="16,64,128,256,512,1024,2048,4096")
    parser.add_argument("--decode", default="1,8,32,128")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out-len", type=int, default=200)
    parser.add_argument("--requests", type=int, default=256, help="of the throughput shape; 0: none")
    parser.add_argument("--lengths", default="128:1024")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--throughput-repeats", type=int, default=3)
    return parser.parse_args()


def run_gapless(arguments: argparse.Namespace) -> dict[str, Any]:
    import gapless.engine.build
    from gapless.bench.latency import LatencyOptions, measure_latency, timed_generate
    from gapless.config_sources import parse_sizes
    from gapless.llm import LLM

    modes = (
        {}
        if arguments.mode in (None, "default")
        else {"compilation_config": {"cudagraph_mode": arguments.mode}}
    )
    start = time.perf_counter()
    llm = LLM(
        model=arguments.config,
        load_format="dummy",
        dtype=arguments.dtype,
        max_model_len=arguments.max_len,
        **modes,
    )
    start_s = time.perf_counter() - start
    options = LatencyOptions(
        prefill_tokens=parse_sizes("--prefill", arguments.prefill),
        decode_batches=parse_sizes("--decode", arguments.decode),
        repeats=arguments.repeats,
        decode_tokens=arguments.out_len,
    )
    with llm:
        found = measure_latency(llm, options, on_row=lambda row: print(row, file=sys.stderr, flush=True))
        report = llm.report()
        part = {
            "version": gapless.__version__,
            "start_s": round(start_s, 2),
            **{name: found[name] for name in ("prefill_ms", "decode_ms", "rows", "notes")},
            "startup": report["startup"]["seconds"],
            "eager": report["eager"],
        }
        return part | throughput(
            lambda prompts, tokens: timed_generate(llm, prompts, tokens), llm.runner.vocab_size, arguments
        )


def run_vllm(arguments: argparse.Namespace) -> dict[str, Any]:
    import vllm

    kept: list[Any] = []

    class Kept(vllm.LLM):  # type: ignore[misc, name-defined]
        """The engine that the script makes, kept when the script lets go of it."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            kept.append(self)

    vllm.LLM = Kept
    part = run_script(arguments, "vllm_bench.py") | {"version": vllm.__version__}
    params = {"temperature": 0, "ignore_eos": True, "detokenize": False}

    def generate(prompts: list[list[int]], tokens: int) -> float:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        sampling = vllm.SamplingParams(max_tokens=tokens, **params)
        start = time.perf_counter()
        outputs = kept[0].generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        return seconds

    return part | throughput(generate, vocab_size(arguments.config), arguments)


def run_sglang(arguments: argparse.Namespace) -> dict[str, Any]:
    import sglang.srt.entrypoints.engine as entry

    kept: list[Any] = []

    class Kept(entry.Engine):  # type: ignore[misc, name-defined]
        """The engine that the script makes; it asks for the end, which comes after the throughput."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            kept.append(self)

        def shutdown(self) -> None:
            if not kept:
                super().shutdown()

    entry.Engine = Kept
    part = run_script(arguments, "sglang_bench.py")
    engine = kept[0]

    def generate(prompts: list[list[int]], tokens: int) -> float:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        start = time.perf_counter()
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.perf_counter() - start
        assert all(len(output["output_ids"]) == tokens for output in outputs)
        return seconds

    try:
        return part | throughput(generate, vocab_size(arguments.config), arguments)
    finally:
        kept.clear()
        engine.shutdown()


def run_script(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run a latency script of ``--peers`` as the main program; its last line is its result."""
    if arguments.peers is None or not (arguments.peers / name).is_file():
        raise SystemExit(f"--peers={arguments.peers}: there is no {name} in it")
    words = [arguments.config, arguments.mode or DEFAULT_MODES[arguments.engine]]
    for option in ("prefill", "decode", "repeats", "out_len", "max_len"):
        words += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    printed = Overheard(sys.stdout)
    with command_line([name, *words]), contextlib.redirect_stdout(printed):  # type: ignore[type-var]
        runpy.run_path(str(arguments.peers / name), run_name="__main__")
    lines = [line for line in "".join(printed.texts).splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


class Overheard:
    """Standard output with what was written to it. All else is the real one's: engines ask for its fileno."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        self.texts.append(text)
        return self._out.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


@contextlib.contextmanager
def command_line(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


def throughput(generate: Generate, vocab: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The throughput shape, as a part's ``throughput``; a failure is reported and keeps the rest."""
    if arguments.requests == 0:
        return {}
    options = ThroughputOptions(
        requests=arguments.requests,
        lengths=Lengths.parse(arguments.lengths),
        output_tokens=arguments.output_tokens,
        repeats=arguments.throughput_repeats,
    )
    try:
        rows = offline_runs(generate, PromptSource(vocab), options.lengths, options)
    except Exception as error:
        return {"throughput": None, "throughput_error": f"{type(error).__name__}: {error}"}
    return {"throughput": {"rows": rows, **summary(rows)}}


def vocab_size(config: str) -> int:
    return json.loads((Path(config) / "config.json").read_text())["vocab_size"]


if __name__ == "__main__":
    main()
