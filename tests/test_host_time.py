"""``benchmarks/host_time.py``: the arithmetic of its stages, and one run on a CPU."""

from __future__ import annotations

import json
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from gapless.graphs.batch import BatchDescriptor
from loaded_scripts import load_script

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "host_time.py"
sys.path.append(str(SCRIPT.parent))
import replay_path  # noqa: E402

host_time = load_script(SCRIPT)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


class Clock:
    """Time that passes only when something is said to take it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


clock = Clock()


@pytest.fixture(autouse=True)
def made_up_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "time", clock)


class Base:
    def inherited(self) -> None:
        clock.now += 1e-6


class Worker(Base):
    def outer(self) -> str:
        clock.now += 2e-6
        self.inner()
        return "done"

    def inner(self) -> None:
        clock.now += 4e-6

    def fails(self) -> None:
        raise ValueError("no")


def test_a_stage_is_timed_without_the_stages_it_calls() -> None:
    stages = host_time.Stages()
    stages.wrap(Worker, "outer", "outer")
    stages.wrap(Worker, "inner", "inner")
    assert Worker().outer() == "done"
    stages.unwrap()
    assert stages.us == {"outer": pytest.approx(2), "inner": pytest.approx(4)}


def test_a_function_that_an_object_holds_is_a_stage_too() -> None:
    class Holder:
        __slots__ = ("call",)

    holder, stages = Holder(), host_time.Stages()
    holder.call = call = Worker().inherited
    stages.wrap(holder, "call", "call")
    holder.call()
    stages.unwrap()
    assert holder.call is call
    assert stages.us == {"call": pytest.approx(1)}


def test_wrapped_methods_are_put_back_inherited_ones_too_and_after_an_error() -> None:
    before = dict(vars(Worker))
    stages = host_time.Stages()
    for method in ("inner", "inherited", "fails"):
        stages.wrap(Worker, method, method)
    Worker().inherited()
    with pytest.raises(ValueError, match="no"):
        Worker().fails()
    stages.unwrap()
    assert dict(vars(Worker)) == before
    assert stages.us == {"inherited": pytest.approx(1), "fails": pytest.approx(0)}


def test_sizes_of_replays_are_measured_in_turns_and_no_step_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is busy for one round spoils a part of every size, not one size."""
    order: list[tuple[str, int]] = []

    class Path:
        def __init__(self, opened: object, runner: SimpleNamespace, descriptor: SimpleNamespace, _: object):
            self.name = f"{runner.phase} {descriptor.num_tokens}"

        def take_turns(self, turns: int) -> None:
            order.append((self.name, turns))

        def figures(self) -> dict[str, int]:
            return {"turns": sum(turns for name, turns in order if name == self.name)}

    sizes = {"decode": (2, 1), "prefill": (8,)}
    descriptors = {p: tuple(SimpleNamespace(num_tokens=n) for n in sizes[p]) for p in sizes}
    graphs = SimpleNamespace(
        store=SimpleNamespace(device=SimpleNamespace(stream_scope=nullcontext)),
        **{phase: SimpleNamespace(phase=phase) for phase in sizes},
    )
    dispatcher = SimpleNamespace(capture_descriptors=descriptors.get)
    opened = SimpleNamespace(runner=SimpleNamespace(graphs=graphs, dispatcher=dispatcher))
    monkeypatch.setattr(replay_path, "ReplayPath", Path)
    figures = replay_path.replay_figures(opened, steps=12)
    assert [name for name, _ in order] == ["decode 1", "decode 2", "prefill 8"] * replay_path.ROUNDS
    assert {name: found["turns"] for name, found in figures.items()} == dict.fromkeys(figures, 12)


def test_the_spread_of_one_and_of_many_samples() -> None:
    assert replay_path.spread([3.04]) == {"min": 3.0, "p25": 3.0, "p75": 3.0}
    assert replay_path.spread(range(100, -1, -1)) == {"min": 0, "p25": 25, "p75": 75}


def runner_with(**others: int) -> SimpleNamespace:
    sizes = {"block_size": 16, "num_blocks": 40, "max_num_reqs": 8, "max_num_batched_tokens": 1024}
    facts = sizes | {"max_model_len": 512, "vocab_size": 97, "max_steps_ahead": 1} | others
    return SimpleNamespace(graphs=SimpleNamespace(rope_axes=1, makes_slots=False), **facts)


@pytest.mark.parametrize("num_tokens", [1, 100, 512, 700])
def test_a_prefill_size_is_timed_with_whole_prompts_and_their_whole_tables(num_tokens: int) -> None:
    runner = runner_with()
    arrays = replay_path.engine_arrays(runner, BatchDescriptor(num_tokens=num_tokens, num_reqs=8))
    assert arrays.query_lens == ((num_tokens,) if num_tokens <= 512 else (512, num_tokens - 512))
    assert arrays.values["seq_lens"].tolist() == list(arrays.query_lens)
    assert len(arrays.values["input_ids"]) == len(arrays.values["slot_mapping"]) == num_tokens
    table = arrays.values["block_table"]
    assert table.shape == (len(arrays.query_lens), -(-min(num_tokens, 512) // 16))
    assert table[0].all()
    assert (table < runner.num_blocks).all()


@pytest.mark.parametrize(("max_steps_ahead", "max_model_len", "num_tokens"), [(1, 512, 170), (0, 64, 64)])
def test_a_decode_size_is_timed_with_requests_in_the_middle_of_a_run(
    max_steps_ahead: int, max_model_len: int, num_tokens: int
) -> None:
    runner = runner_with(max_steps_ahead=max_steps_ahead, max_model_len=max_model_len)
    descriptor = BatchDescriptor(num_tokens=3, num_reqs=3, uniform=True)
    arrays = replay_path.engine_arrays(runner, descriptor)
    assert arrays.query_lens == (1, 1, 1)
    assert arrays.values["seq_lens"].tolist() == [num_tokens] * 3
    assert arrays.values["block_table"].shape == (3, -(-num_tokens // 16))
    assert arrays.has_unknown == (max_steps_ahead == 1)
    assert len(arrays.values["drawn_rows"]) == 3 * max_steps_ahead


@pytest.mark.parametrize("prefill", ["full", "breakable"])
def test_a_run_on_a_cpu_reports_every_section(
    tmp_path: Path, prefill: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = [
        *("--model", str(tmp_path), "--device", "cpu", "--steps", "4"),
        *("--batch", "2", "--prompt-tokens", "5", "--max-model-len", "256", "--max-running-requests", "4"),
        *("--kv-cache-tokens", "1024", "--prefill-sizes", "8", "--decode-sizes", "2", "--prefill", prefill),
        *("--cold-mib", "1"),
    ]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    decode = result["decode"]["2"]
    assert 0 < decode["cpu"] <= decode["wall"]
    assert {"schedule", "build", "fill", "replay call", "accept"} <= decode["stages"].keys()
    assert result["first_token"]["5"]["cpu"] > 0
    assert {"decode 2", "prefill 8"} == set(result["replay"])
    assert 0 < decode["spread"]["min"] <= decode["spread"]["p25"] <= decode["cpu"] <= decode["cpu_max"]
    replay = result["replay"]["decode 2"]
    assert {"total", "switched", "dispatch", "fill", "launch"} == replay["spread"].keys() & replay.keys()
    total = replay["spread"]["total"]
    assert 0 < total["min"] <= total["p25"] <= replay["total"] <= total["p75"]
    assert ("per_segment" in result["replay"]["prefill 8"]) == (prefill == "breakable")
