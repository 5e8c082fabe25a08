"""An ``LLM`` that answers at once, for tests of the command line alone.

Every prompt is answered in capitals, one token per letter; a prompt that contains ``bad`` fails.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from gapless.engine.outputs import CompletionOutput, Logprob, RequestOutput
from gapless.errors import RequestError

REPORT = {
    "plan": {
        "mode": "FULL_AND_PIECEWISE",
        "shares_graphs": False,
        "uniform_query_len": 1,
        "tc_compiler": None,
        "prefill": {"strategy": "breakable", "unit": "tokens", "sizes": list(range(4, 68, 4)), "dropped": []},
        "decode": {
            "strategy": "full",
            "unit": "requests",
            "sizes": [1, 2, 4],
            "dropped": [{"size": 99, "reason": "above the reachable 4"}],
        },
        "decisions": [
            {
                "rule": "auto",
                "phase": "decode",
                "before": "auto",
                "after": "FULL",
                "reason": "the default mode",
            },
            {
                "rule": "attention_support",
                "phase": "prefill",
                "before": "full",
                "after": "breakable",
                "reason": "attention backend x supports UNIFORM_BATCH",
            },
        ],
    },
    "graphs": [{"phase": "decode"}] * 3,
    "failures": [],
    "steps": [
        {"phase": "decode", "strategy": "full", "bucket": 4, "count": 10, "tokens": 30, "padding": 10},
        {"phase": "decode", "strategy": "full", "bucket": 1, "count": 2, "tokens": 2, "padding": 0},
        {"phase": "prefill", "strategy": "breakable", "bucket": 64, "count": 1, "tokens": 60, "padding": 4},
        {"phase": "head", "strategy": "full", "bucket": 4, "count": 1, "tokens": 3, "padding": 1},
    ],
    "eager": [{"phase": "prefill", "reason": "larger_than_largest_size", "count": 2}],
    "startup": {
        "architecture": "FakeForCausalLM",
        "dtype": "float32",
        "device": "cpu",
        "graph_device": "emulated",
        "attention_backend": "torch_reference",
        "seconds": {"load": 0.5, "cache": 0.1, "capture": 1.5},
    },
    "memory": {"pool_bytes": 3 * 2**20, "driver_bytes": 0, "capture_s": 1.25},
}


class FakeLLM:
    """Stands in for ``gapless.llm.LLM``; ``made`` lists the instances of a test."""

    made: list[FakeLLM] = []
    has_template = True
    has_tokenizer = True
    eager_differs_at: int | None = None
    error: Exception | None = None

    def __init__(self, progress=None, **options):
        if self.error is not None:
            raise self.error
        self.options = options
        template = "{{ messages }}" if self.has_template else None
        self.tokenizer = SimpleNamespace(chat_template=template) if self.has_tokenizer else None
        self.processor = None
        self.prompts, self.params = [], None
        self.is_shut_down = self.is_eager = False
        self.num_resets = 0
        self.has_cached_prompts = False
        progress("weights", 1, 1)
        FakeLLM.made.append(self)

    def render_chat(self, messages):
        text = messages[0]["content"]
        if "unrenderable" in text:
            raise RequestError("the template refuses this")
        return [{"prompt": f"<user>{text}", "prompt_token_ids": [1]}]

    def stream(self, prompts, params, *, errors):
        assert errors == "return"
        self.prompts, self.params = prompts, params
        self.has_cached_prompts = True
        answers = [_answer(prompt) for prompt in prompts]
        for position in reversed(range(len(prompts))):  # the last prompt finishes first
            for end in (1, len(answers[position] or "")):
                yield self._output(position, answers[position], end, params)

    def generate(self, prompts, params):
        return [self._output(i, _answer(p), len(_answer(p) or ""), params) for i, p in enumerate(prompts)]

    @contextmanager
    def padded_eager(self):
        assert not self.has_cached_prompts, "the oracle must do equal work"
        self.is_eager = True
        yield
        self.is_eager = False

    def report(self):
        return REPORT

    def reset_report(self):
        self.num_resets += 1

    def reset_prefix_cache(self):
        self.has_cached_prompts = False

    def shutdown(self):
        self.is_shut_down = True

    def _output(self, position, answer, end, params):
        if answer is None:
            choices = [
                CompletionOutput(index=i, text="", token_ids=(), finish_reason="error", error="a bad prompt")
                for i in range(params.n)
            ]
        else:
            choices = [self._choice(i, answer, end, params) for i in range(params.n)]
        return RequestOutput(request_id=f"7-{position}", prompt=None, prompt_token_ids=(1,), outputs=choices)

    def _choice(self, index, answer, end, params):
        tokens = [ord(letter) for letter in answer[:end]]
        if self.is_eager and self.eager_differs_at is not None and len(tokens) > self.eager_differs_at:
            tokens[self.eager_differs_at] += 1
        return CompletionOutput(
            index=index,
            text=answer[:end],
            token_ids=tuple(tokens),
            finish_reason="length" if end == len(answer) else None,
            logprobs=None
            if params.logprobs is None
            else tuple({token: Logprob(logprob=-0.5, rank=1)} for token in tokens),
        )


def _answer(prompt):
    text = prompt["prompt"] if isinstance(prompt, dict) else prompt
    if isinstance(text, list):
        return "IDS"
    return None if "bad" in text else text.upper().replace("<USER>", "")
