"""Steps launched ahead: one step is in flight while the next is scheduled, and no output may change."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from engine_fakes import PagedFakeRunner

from gapless.engine.core import EngineCore
from gapless.engine.outputs import RequestOutput
from gapless.engine.step import ScheduledBatch, StepResult
from gapless.sampling.params import SamplingParams


@dataclass
class LatePending:
    result: StepResult
    log: list[str]
    step_id: int
    error: Exception | None = None

    def wait(self) -> StepResult:
        self.log.append(f"wait {self.step_id}")
        if self.error is not None:
            raise self.error
        return self.result


class LateRunner(PagedFakeRunner):
    """Computes at the launch, hands over at the wait, and keeps a log of both."""

    def __init__(self, *, max_steps_ahead: int, **options: int) -> None:
        super().__init__(max_steps_ahead=max_steps_ahead, **options)
        self.log: list[str] = []
        self.fails_at: int | None = None

    def launch(self, batch: ScheduledBatch) -> LatePending:  # type: ignore[override]
        self.log.append(f"launch {batch.step_id}")
        error = RuntimeError("device lost") if batch.step_id == self.fails_at else None
        return LatePending(self.execute(batch), self.log, batch.step_id, error)


def run(core: EngineCore, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, RequestOutput]:
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        core.add_request(str(index), prompt, param)
    outputs: dict[str, RequestOutput] = {}
    for _ in range(5000):
        if not core.has_unfinished():
            return outputs
        outputs.update({output.request_id: output for output in core.step()})
    raise AssertionError("the engine does not come to an end")


def workload(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(1, 60))] for _ in range(14)]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=rng.randint(1, 40),
            n=rng.choice((1, 1, 2)),
            stop_token_ids=[rng.randrange(1000) for _ in range(rng.choice((0, 40)))],
            min_tokens=0,
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            detokenize=False,
        )
        for _ in prompts
    ]
    return prompts, params


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_blocks", [64, 30])
def test_outputs_are_those_of_steps_one_at_a_time(seed: int, num_blocks: int) -> None:
    prompts, params = workload(seed)
    results = []
    for ahead in (0, 1, 2):
        runner = LateRunner(max_steps_ahead=ahead, num_blocks=num_blocks, max_model_len=110)
        core = EngineCore(runner)
        outputs = run(core, prompts, params)
        results.append(
            {key: [(c.token_ids, c.finish_reason) for c in o.outputs] for key, o in outputs.items()}
        )
        allocator = core.scheduler.allocator
        assert (allocator.num_used, allocator.num_held) == (0, 0), "every block came back"
        assert core.scheduler.num_in_flight == 0
    assert results[0] == results[1] == results[2]


def test_the_next_step_is_launched_before_the_last_one_is_waited_for() -> None:
    runner = LateRunner(max_steps_ahead=1)
    run(EngineCore(runner), [[1, 2, 3]], [SamplingParams(temperature=0.0, max_tokens=4, detokenize=False)])
    assert runner.log[:5] == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1"]


def test_penalties_do_not_hold_the_next_step_back() -> None:
    runner = LateRunner(max_steps_ahead=1)
    params = SamplingParams(temperature=0.0, max_tokens=3, presence_penalty=1.0, detokenize=False)
    run(EngineCore(runner), [[1, 2, 3]], [params])
    assert runner.log == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]


def test_a_step_that_fails_late_fails_its_own_sequences_and_frees_their_blocks() -> None:
    runner = LateRunner(max_steps_ahead=1, max_num_reqs=1)
    runner.fails_at = 2
    core = EngineCore(runner)
    params = SamplingParams(temperature=0.0, max_tokens=6, detokenize=False)
    outputs = run(core, [[1, 2], [3, 4]], [params, params])
    assert outputs["0"].outputs[0].finish_reason == "error"
    assert "device lost" in (outputs["0"].outputs[0].error or "")
    assert outputs["1"].outputs[0].finish_reason == "length"
    assert len(outputs["1"].outputs[0].token_ids) == 6
    assert core.scheduler.allocator.num_used == 0


@pytest.mark.parametrize("at_step", range(1, 8))
def test_abort_while_a_step_is_in_flight_loses_nothing_else(at_step: int) -> None:
    runner = LateRunner(max_steps_ahead=1)
    core = EngineCore(runner)
    params = SamplingParams(temperature=0.0, max_tokens=10, detokenize=False)
    core.add_request("gone", [5, 6, 7], params)
    core.add_request("stays", [8, 9], params)
    outputs: dict[str, RequestOutput] = {}
    for step in range(60):
        if step == at_step:
            core.abort_request("gone")
        if not core.has_unfinished():
            break
        outputs.update({output.request_id: output for output in core.step()})
    assert outputs["gone"].outputs[0].finish_reason == "abort"
    alone = run(EngineCore(LateRunner(max_steps_ahead=0)), [[8, 9]], [params])
    assert outputs["stays"].outputs[0].token_ids == alone["0"].outputs[0].token_ids
    allocator = core.scheduler.allocator
    assert (allocator.num_used, allocator.num_held) == (0, 0)
