"""Decode speed on a CPU: Gapless and Transformers ``generate()`` in one process, on the same weights.

The Transformers model gets copies of the float32 tensors that Gapless dequantises from the packaged file of
SmolLM2-135M-Instruct. Both decode greedily from the same token ids, with one request and with eight at
once, by turns, so that whatever else the machine does hits both alike. A run's *decode* speed counts tokens
from the moment every request has its first one, so prompts do not matter; *wall* counts all tokens over the
whole call.

    python benchmarks/cpu_generate.py --output benchmarks/results/cpu_generate.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gapless import LLM, SamplingParams
from gapless.cli.environment import cpu_name, num_cores
from gapless.models.decoder import Decoder
from gapless.models.gguf import gguf_decoder_config, load_gguf
from gapless.models.gguf_file import GGUFFile
from gapless.models.registry import find_smollm2

QUESTIONS = [
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Why is the sky blue?",
    "Give me a recipe for a simple tomato soup, with the steps in order.",
    "Explain what a graph is in computer science, and name two ways to store one.",
    "List the planets of the solar system.",
    "Write a polite letter to a neighbour who plays loud music every evening after ten.",
    "What should I pack for a three-day walk in the mountains in early autumn, if rain is likely?",
]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One timed run of all its requests."""

    decode_tokens_per_s: float
    wall_tokens_per_s: float
    token_ids: list[list[int]]


def main() -> None:
    arguments = parse_arguments()
    load_before = os.getloadavg()[0]
    torch.manual_seed(0)
    reference = transformers_copy()
    llm = LLM("smollm2", device="cpu", dtype="float32", enable_prefix_caching=False)  # prompts repeat
    prompts = [render(llm, question) for question in QUESTIONS]

    systems: dict[str, Callable[[list[list[int]], int], Run]] = {
        "gapless": lambda batch, num_tokens: run_gapless(llm, batch, num_tokens),
        "transformers": lambda batch, num_tokens: run_transformers(reference, batch, num_tokens),
    }
    batches = {"1": prompts[:1], "8": prompts}
    runs: dict[tuple[str, str], list[Run]] = {(s, b): [] for s in systems for b in batches}
    for system in systems.values():  # warm up
        for batch in batches.values():
            system(batch, 4)
    llm.reset_report()
    for repeat in range(arguments.repeats):
        for size, batch in batches.items():
            for name, system in systems.items():
                runs[name, size].append(system(batch, arguments.max_tokens))
        print(f"repeat {repeat + 1} of {arguments.repeats} done", file=sys.stderr)

    num_eager = sum(row["count"] for row in llm.report()["eager"])
    result = summarize(runs, arguments, num_eager=num_eager, load_before=load_before)
    llm.shutdown()
    print_table(result)
    text = json.dumps(result)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each kind")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per request")
    parser.add_argument("--output", type=Path, help="also write the result there")
    return parser.parse_args()


def render(llm: LLM, question: str) -> list[int]:
    return list(llm.render_chat([{"role": "user", "content": question}])[0]["prompt_token_ids"])  # type: ignore[index]


def transformers_copy() -> Any:
    """Transformers' model of the same config, with copies of the tensors that Gapless loads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    file = GGUFFile.open(find_smollm2())
    config = gguf_decoder_config(file)
    model = Decoder(config, max_positions=1, dtype=torch.float32, device=torch.device("cpu"))
    load_gguf(model, file)
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_size,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            max_position_embeddings=config.max_model_len,
            tie_word_embeddings=config.tie_word_embeddings,
            eos_token_id=None,
        )
    )
    tensors = {name: target.tensor.detach().clone() for name, target in model.weight_targets().items()}
    lost = reference.load_state_dict(tensors, strict=False)
    if lost.unexpected_keys or set(lost.missing_keys) - {"lm_head.weight"}:
        raise RuntimeError(f"the weights do not fit: {lost}")
    reference.tie_weights()
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    return reference.eval()


def run_gapless(llm: LLM, batch: list[list[int]], num_tokens: int) -> Run:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    counts = [0] * len(batch)
    outputs: dict[int, list[int]] = {}
    clock = DecodeClock()
    for output in llm.stream(batch, params):
        index = int(output.request_id.rpartition("-")[2])
        outputs[index] = list(output.outputs[0].token_ids)
        counts[index] = len(outputs[index])
        clock.tick(counts)
    return clock.result([outputs[index] for index in range(len(batch))])


def run_transformers(reference: Any, batch: list[list[int]], num_tokens: int) -> Run:
    """``generate()`` on a left-padded batch; a stopping criterion that never stops reads the clock."""
    longest = max(map(len, batch))
    input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
    clock = DecodeClock()

    def read_clock(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        clock.tick([ids.shape[1] - longest] * len(batch))
        return torch.zeros(len(batch), dtype=torch.bool)

    with torch.no_grad():
        ids = reference.generate(
            input_ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=num_tokens,
            stopping_criteria=[read_clock],
        )
    return clock.result([row[longest:].tolist() for row in ids])


class DecodeClock:
    """Remembers when every request had its first token, and when the last token came."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: tuple[float, int] | None = None
        self._last = (self._start, 0)

    def tick(self, counts: list[int]) -> None:
        self._last = (time.perf_counter(), sum(counts))
        if self._first is None and all(counts):
            self._first = self._last

    def result(self, token_ids: list[list[int]]) -> Run:
        assert self._first is not None
        (first_s, first_count), (last_s, last_count) = self._first, self._last
        return Run(
            decode_tokens_per_s=(last_count - first_count) / (last_s - first_s),
            wall_tokens_per_s=last_count / (last_s - self._start),
            token_ids=token_ids,
        )


def summarize(
    runs: dict[tuple[str, str], list[Run]],
    arguments: argparse.Namespace,
    *,
    num_eager: int,
    load_before: float,
) -> dict[str, Any]:
    rows = []
    for (system, size), found in runs.items():
        decode = [run.decode_tokens_per_s for run in found]
        rows.append(
            {
                "system": system,
                "requests": int(size),
                "decode_tokens_per_s": round(statistics.median(decode), 2),
                "decode_min": round(min(decode), 2),
                "decode_max": round(max(decode), 2),
                "wall_tokens_per_s": round(statistics.median(run.wall_tokens_per_s for run in found), 2),
            }
        )
    decode_of = {(row["system"], row["requests"]): row["decode_tokens_per_s"] for row in rows}
    single = decode_of["transformers", 1]
    return {
        "benchmark": "cpu_generate",
        "model": "SmolLM2-135M-Instruct, float32",
        "rows": rows,
        "ratio_1_request": round(decode_of["gapless", 1] / single, 3),
        "ratio_8_requests_to_1_of_transformers": round(decode_of["gapless", 8] / single, 3),
        "ratio_8_requests": round(decode_of["gapless", 8] / decode_of["transformers", 8], 3),
        "tokens": [asdict(match) for match in compare_tokens(runs)],
        "eager_steps_of_gapless": num_eager,
        "meta": {
            "command": f"python benchmarks/cpu_generate.py --repeats {arguments.repeats} "
            f"--max-tokens {arguments.max_tokens}",
            "repeats": arguments.repeats,
            "max_tokens": arguments.max_tokens,
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "cpu": cpu_name(),
            "cores": num_cores(),
            "threads": torch.get_num_threads(),
            "load_average_before": round(load_before, 2),
            "versions": {name: metadata.version(name) for name in ("gapless", "torch", "transformers")},
        },
    }


def commit() -> str:
    """What was measured; ``-dirty`` marks changes that are not committed."""
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder).stdout.strip()


@dataclass(frozen=True, kw_only=True)
class TokenMatch:
    """How far both systems' greedy tokens agree; float noise may decide between two equally good tokens."""

    requests: int
    num_equal: int
    first_differences: dict[int, int]


def compare_tokens(runs: dict[tuple[str, str], list[Run]]) -> list[TokenMatch]:
    matches = []
    for size in sorted({size for _, size in runs}):
        pairs = zip(runs["gapless", size][0].token_ids, runs["transformers", size][0].token_ids, strict=True)
        differences = {
            index: next(i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y)
            for index, (ours, theirs) in enumerate(pairs)
            if ours != theirs
        }
        matches.append(
            TokenMatch(
                requests=int(size), num_equal=int(size) - len(differences), first_differences=differences
            )
        )
    return matches


def print_table(result: dict[str, Any]) -> None:
    print(f"{'system':<14}{'requests':>9}{'decode tokens/s':>17}{'spread':>16}{'wall tokens/s':>15}")
    for row in result["rows"]:
        spread = f"{row['decode_min']:.1f}-{row['decode_max']:.1f}"
        print(
            f"{row['system']:<14}{row['requests']:>9}{row['decode_tokens_per_s']:>17.1f}{spread:>16}"
            f"{row['wall_tokens_per_s']:>15.1f}"
        )
    print(f"one request: {result['ratio_1_request']:.2f}x Transformers")
    print(f"eight at once: {result['ratio_8_requests_to_1_of_transformers']:.2f}x Transformers with one")
    print(f"eight at once: {result['ratio_8_requests']:.2f}x Transformers with eight")


if __name__ == "__main__":
    main()
