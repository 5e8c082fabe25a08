"""``gapless serve`` and ``vllm serve`` on one machine in one run: the same load over HTTP, by turns.

Each server runs with random weights and one made-up tokenizer, so that both turn tokens into text and neither
has prompts in a cache. Loads, from ``gapless.bench.serve_load``: one request at a time (``single``), 256
streams at once (``streams``), and requests that arrive at a rate (``open``). Between the two, our own engine
runs without a server in a process of its own, which shows what HTTP costs. Prints the table of ratios
ours / theirs with the targets, and as its last line everything as JSON. A part that failed is named and
counts as not measured.

    python benchmarks/serve_against_vllm.py --model DIR/qwen3-0.6b --output result.json
    python benchmarks/serve_against_vllm.py --model DIR/qwen3-0.6b --only ours offline

``--vllm-site`` names the folder into which vLLM was unpacked. ``--ours-command`` and ``--vllm-command`` start
something else instead; ``{port}`` and ``{model}`` in them are filled in.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import gapless
from gapless.bench.meta import describe_run
from gapless.bench.serve_load import LoadOptions, measure_serving
from gapless.bench.workload import Lengths

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
OURS = (
    "{python} -m gapless.cli.main serve --model-path {model} --load-format dummy --dtype {dtype} "
    "--port {port} --max-model-len {max_len} --served-model-name bench --access-log off --log-level warning"
)
VLLM = (
    "{python} -m vllm.entrypoints.openai.api_server --model {model} --load-format dummy --dtype {dtype} "
    "--port {port} --max-model-len {max_len} --served-model-name bench --gpu-memory-utilization 0.6 "
    "--no-enable-prefix-caching --disable-log-stats"
)
PARTS = ("ours", "vllm", "offline")
FIGURES = {
    "ttft p50": ("median_ttft_ms", "ms"),
    "itl p50": ("median_itl_ms", "ms"),
    "rate": ("output_throughput", "tokens/s"),
}
TARGETS = {("ttft p50", "vllm"): 0.5, ("itl p50", "vllm"): 0.6, ("rate", "vllm"): 1.3}
"""Bounds on ours / theirs; a rate must be at least that, a time at most."""
ITL_OVER_OFFLINE_MS = 0.15
RATE_OF_OFFLINE = 0.9


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = with_tokenizer(arguments.model, Path(folder) / arguments.model.name)
        parts, notes = run_parts(arguments, model)
    result = make_result(arguments, parts, notes)
    for line in [*table_lines(result["rows"]), *(f"note: {note}" for note in notes)]:
        print(line, file=sys.stderr)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(0 if parts else 1)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--vllm-site", type=Path, help="folder with vLLM's packages")
    parser.add_argument("--ours-command", default=OURS)
    parser.add_argument("--vllm-command", default=VLLM)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--input-len", default="128:512", help="tokens of prompts")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--streams", type=int, default=256, help="requests at once")
    parser.add_argument("--requests", type=int, default=512, help="of the load with many streams")
    parser.add_argument("--single-requests", type=int, default=8)
    parser.add_argument("--request-rate", type=float, default=40.0, help="of the open loop; 0: none")
    parser.add_argument(
        "--start-limit", type=float, default=400.0, help="seconds until a server must be ready"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    if not (arguments.model / "config.json").is_file():
        parser.error(f"--model: there is no config.json in {arguments.model}")
    return arguments


def with_tokenizer(source: Path, folder: Path) -> Path:
    """``source`` with a byte-level tokenizer as large as its vocabulary, which both servers can load. A model
    that has a tokenizer keeps it."""
    shutil.copytree(source, folder)
    if (folder / "tokenizer.json").exists():
        return folder
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [letter for letter in alphabet if letter.isascii() and letter.isalpha()]
    vocabulary = {word: index for index, word in enumerate(alphabet[:size])}
    merges: list[tuple[str, str]] = []
    for first in [a + b for a in letters for b in letters]:  # "Ġab" and so on: words of four letters
        for second in letters:
            for word, pair in ((first, (first[0], first[1])), (first + second, (first, second))):
                if word not in vocabulary and len(vocabulary) < size:
                    vocabulary[word] = len(vocabulary)
                    merges.append(pair)
    for number in range(size - len(vocabulary)):
        vocabulary[f"Ġ{number}x"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1_000_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def run_parts(arguments: argparse.Namespace, model: Path) -> tuple[dict[str, Any], list[str]]:
    parts: dict[str, Any] = {}
    notes: list[str] = []
    for name in arguments.only:
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            if name == "offline":
                parts[name] = measure_offline(arguments, model)
            else:
                parts[name] = measure_server(name, arguments, model)
        except Exception as error:
            notes.append(f"{name} was not measured: {type(error).__name__}: {error}")
    return parts, notes


def measure_server(name: str, arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    start = time.perf_counter()
    with running(name, arguments, model) as url:
        start_s = time.perf_counter() - start
        found: dict[str, Any] = {"start_s": round(start_s, 2)}
        for load, options in loads(arguments, model).items():
            found[load] = measure_serving(LoadOptions(url=url, **options))
            print(f"  {load}: {brief(found[load])}", file=sys.stderr, flush=True)
            if found[load]["failed"]:
                raise RuntimeError(f"{load}: {found[load]['failed']} failed: {found[load]['errors']}")
    return found


def loads(arguments: argparse.Namespace, model: Path) -> dict[str, dict[str, Any]]:
    common = {
        "model": "bench",
        "lengths": Lengths.parse(arguments.input_len),
        "output_len": arguments.output_len,
        "vocab_size": json.loads((model / "config.json").read_text())["vocab_size"],
    }
    many = {**common, "num_prompts": arguments.requests}
    found = {
        "single": {
            **common,
            "num_prompts": arguments.single_requests,
            "max_concurrency": 1,
            "num_warmups": 3,
        },
        "streams": {**many, "max_concurrency": arguments.streams, "num_warmups": 3, "seed": 2},
    }
    if arguments.request_rate:
        found["open"] = {**many, "request_rate": arguments.request_rate, "seed": 4}
    return found


@contextlib.contextmanager
def running(name: str, arguments: argparse.Namespace, model: Path) -> Iterator[str]:
    """The address of a server that is ready. Nothing of it stays: a worker would keep the GPU's memory."""
    port = free_port()
    template = arguments.ours_command if name == "ours" else arguments.vllm_command
    text = template.format(
        python=sys.executable, model=model, port=port, dtype=arguments.dtype, max_len=arguments.max_len
    )
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            shlex.split(text),
            env=environment(arguments.vllm_site if name == "vllm" else None),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(process, url, log, arguments.start_limit)
            yield url
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: IO[str], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}: {last_line(log)}")
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
                if response.status == 200:
                    return
        if time.monotonic() > end:
            raise TimeoutError(f"it was not ready after {limit_s:.0f} s: {last_line(log)}")
        time.sleep(0.1)


def last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def environment(site: Path | None) -> dict[str, str]:
    """This process's, with an engine's packages first on the path and ours last."""
    paths = [] if site is None else [str(site)]
    paths += [str(Path(gapless.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(paths)}


def measure_offline(arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Our engine without a server: a decode step of one request, and the token rate of all streams."""
    common = [sys.executable, "-m", "gapless.cli.main", "bench"]
    engine = ["--model", str(model), "--load-format", "dummy", "--dtype", arguments.dtype, "--json"]
    engine += ["--max-model-len", str(arguments.max_len)]
    latency = run_bench([*common, "latency", *engine, "--prefill", "", "--decode", "1"])
    rate = run_bench(
        [
            *(*common, "throughput", *engine, "--requests", str(arguments.requests), "--repeats", "1"),
            *("--lengths", arguments.input_len, "--output-tokens", str(arguments.output_len)),
            *("--max-running-requests", str(arguments.streams)),
        ]
    )
    return {
        "decode_ms": latency["rows"][0]["ms"]["median"],
        "output_throughput": rate["output_tokens_per_s"]["median"],
    }


def run_bench(words: list[str]) -> dict[str, Any]:
    done = subprocess.run(words, env=environment(None), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[3:5])} ended with {done.returncode}: {done.stderr[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])


def make_result(arguments: argparse.Namespace, parts: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    rows = compare(parts)
    return {
        "benchmark": "serve_against_vllm",
        "model": arguments.model.name,
        "meta": describe_run(),
        "loads": {
            name: getattr(arguments, name)
            for name in ("input_len", "output_len", "streams", "requests", "single_requests", "request_rate")
        },
        "parts": parts,
        "rows": rows,
        "met": sum(row["met"] is True for row in rows),
        "missed": sum(row["met"] is False for row in rows),
        "notes": notes,
    }


def compare(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for every figure of ours that another part has too; with its target, if there is one."""
    rows: list[dict[str, Any]] = []
    ours, vllm, offline = (parts.get(name) for name in PARTS)
    if ours and vllm:
        for load in ("single", "streams", "open"):
            for figure, (field, unit) in FIGURES.items():
                if load not in ours or load not in vllm or (load == "open" and figure == "rate"):
                    continue  # an open loop's rate is the rate of its arrivals
                ratio = ours[load][field] / vllm[load][field]
                bound = TARGETS[figure, "vllm"]
                is_met = ratio >= bound if figure == "rate" else ratio <= bound
                target = f"{'≥' if figure == 'rate' else '≤'} {bound}"
                # The targets were set for many streams; other loads are shown without one.
                is_target = load == "streams"
                rows.append(
                    {
                        **{"load": load, "figure": figure, "unit": unit, "peer": "vllm"},
                        **{"ours": ours[load][field], "theirs": vllm[load][field], "ratio": round(ratio, 4)},
                        **{"target": target if is_target else None, "met": is_met if is_target else None},
                    }
                )
    if ours and offline:
        itl, step = ours["single"]["median_itl_ms"], offline["decode_ms"]
        rate, most = ours["streams"]["output_throughput"], offline["output_throughput"]
        rows += [
            {
                **{"load": "single", "figure": "itl p50", "unit": "ms", "peer": "offline", "ours": itl},
                **{"theirs": step, "ratio": round(itl / step, 4), "target": f"≤ +{ITL_OVER_OFFLINE_MS} ms"},
                "met": itl <= step + ITL_OVER_OFFLINE_MS,
            },
            {
                **{"load": "streams", "figure": "rate", "unit": "tokens/s", "peer": "offline", "ours": rate},
                **{"theirs": most, "ratio": round(rate / most, 4), "target": f"≥ {RATE_OF_OFFLINE}"},
                "met": rate >= RATE_OF_OFFLINE * most,
            },
        ]
    return rows


def table_lines(rows: list[dict[str, Any]]) -> list[str]:
    cells = [("load", "figure", "unit", "peer", "ours", "theirs", "ratio", "target", "")]
    for row in rows:
        cells.append(
            (
                *(row["load"], row["figure"], row["unit"], row["peer"], f"{row['ours']:.4g}"),
                *(f"{row['theirs']:.4g}", f"{row['ratio']:.3f}", row["target"] or ""),
                {None: "", True: "met", False: "MISSED"}[row["met"]],
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def brief(found: dict[str, Any]) -> str:
    return ", ".join(f"{figure} {found[field]} {unit}" for figure, (field, unit) in FIGURES.items())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
