"""An interrupt (Ctrl-C in a notebook) at any line of the engine's own code: the engine can go on.

A trace function raises ``KeyboardInterrupt`` at the n-th line that runs in the files of the bookkeeping. What
is still there must end, whatever ends by length must have the right tokens, a new request must run, and no
block may be lost.
"""

from __future__ import annotations

import logging
import os
import sys
from types import FrameType
from typing import Any

import pytest
from engine_fakes import expected_tokens
from test_core_ahead import LateRunner

from gapless.engine.core import EngineCore
from gapless.engine.outputs import CompletionOutput
from gapless.sampling.params import SamplingParams

FILES = tuple(f"engine/{name}.py" for name in ("core", "scheduler", "choice", "step", "request"))
FILES += ("cache/blocks.py",)
PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [9, 8], "c": [4] * 9}
LATER = [3, 3, 3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, detokenize=False)
STRIDE = 4 if os.environ.get("GAPLESS_SOAK") == "1" else 36
"""Of the two to three thousand lines, every so many: all of them take a quarter of a minute."""
MIN_LINES = 1200


class Interrupter:
    def __init__(self, at_line: int) -> None:
        self.at_line, self.num_lines, self.where = at_line, 0, ""
        self.is_telling = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.line if frame.f_code.co_filename.endswith(FILES) else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at_line:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                self.is_telling = "_run_step" not in callers(frame)
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


def callers(frame: FrameType | None) -> set[str]:
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def drain(core: EngineCore, outputs: dict[str, CompletionOutput]) -> None:
    for _ in range(200):
        if not core.has_unfinished():
            return
        outputs.update({output.request_id: output.outputs[0] for output in core.step()})
    raise AssertionError("the engine does not come to an end")


def interrupted_at(at_line: int, core: EngineCore, outputs: dict[str, CompletionOutput]) -> Interrupter:
    interrupter, before = Interrupter(at_line), sys.gettrace()
    sys.settrace(interrupter)
    try:
        drain(core, outputs)
    except KeyboardInterrupt:
        assert interrupter.where
    finally:
        sys.settrace(before)
    return interrupter


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(
    ("ahead", "num_blocks"), [(0, 40), (1, 40), (1, 8)], ids=["one at a time", "ahead", "ahead, preempting"]
)
def test_an_engine_interrupted_at_any_line_goes_on(
    ahead: int, num_blocks: int, part: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    at_line = 1 + part * STRIDE // 4
    while True:
        runner = LateRunner(
            max_steps_ahead=ahead,
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=60,
            max_num_batched_tokens=12,
            max_num_reqs=4,
        )
        core = EngineCore(runner)
        for name, prompt in PROMPTS.items():
            core.add_request(name, prompt, GREEDY)
        outputs: dict[str, CompletionOutput] = {}
        interrupter = interrupted_at(at_line, core, outputs)
        if not interrupter.where:
            assert interrupter.num_lines > MIN_LINES, "nearly nothing was traced"
            return
        core.add_request("later", LATER, GREEDY)
        drain(core, outputs)
        for name, output in outputs.items():
            expected = expected_tokens(PROMPTS.get(name, LATER), num_tokens=6, vocab_size=runner.vocab_size)
            # Outputs that were on their way to the caller are lost with the call.
            is_lost = output.finish_reason is None and interrupter.is_telling
            assert output.finish_reason in ("length", "error") or is_lost, (interrupter.where, name)
            if output.finish_reason == "length":
                assert list(output.token_ids) == expected, (interrupter.where, name)
        assert outputs["later"].finish_reason == "length", interrupter.where
        allocator = core.scheduler.allocator
        assert (allocator.num_used, allocator.num_held) == (0, 0), interrupter.where
        assert core.scheduler.num_in_flight == 0, interrupter.where
        at_line += STRIDE
