"""Grammars in the engine's loop: they compile beside the steps of others, and nothing gets lost meanwhile."""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest
from engine_process_fakes import WordTokenizer, make_core

from gapless.engine.core import EngineCore
from gapless.serve import engine_loop
from gapless.serve.engine_loop import EngineLoop
from gapless.serve.messages import AbortRequest, GenerateRequest, Grammar, Refused, Shutdown, StepOutput

pytest.importorskip("xgrammar")
LETTERS = Grammar(kind="regex", text="a*")


class LetterTokenizer(WordTokenizer):
    """Every token but the last is the letter a, so any draw fits ``a*``."""

    def token_bytes(self) -> list[bytes]:
        return [b"a"] * 49_999 + [b""]


class ScriptedChannel:
    """Hands out one entry of ``script`` per look; a callable is run, and may say what has arrived."""

    def __init__(self, *script) -> None:
        self.script, self.sent, self.waits = deque(script), [], []

    def receive(self, timeout_s):
        self.waits.append(timeout_s)
        if not self.script:
            return [Shutdown(drain_s=60)]
        entry = self.script.popleft()
        return (entry() or []) if callable(entry) else entry

    def send(self, message):
        self.sent.append(message)

    def refusals(self):
        return {m.request_id: m.message for m in self.sent if isinstance(m, Refused)}

    def deltas(self, name):
        outputs = [m for m in self.sent if isinstance(m, StepOutput)]
        return [d for output in outputs for d in output.deltas if d.request_id == name]


@pytest.fixture
def core() -> EngineCore:
    core = make_core()
    return EngineCore(core.runner, tokenizer=LetterTokenizer(), eos_token_ids=[49_999])


@pytest.fixture
def gate(core, monkeypatch):
    """Compilations wait until it is set."""
    gate = threading.Event()
    compile_now = core.grammars._compile
    monkeypatch.setattr(core.grammars, "_compile", lambda *args: (gate.wait(30), compile_now(*args))[1])
    yield gate
    gate.set()


def generate(name, grammar=None, num_tokens=4, **values):
    params = {"max_tokens": num_tokens, "temperature": 0.0, **values.pop("params", {})}
    return GenerateRequest(request_id=name, prompt_token_ids=[1], params=params, grammar=grammar, **values)


def run(core, *script, **options):
    channel = ScriptedChannel(*script)
    loop = EngineLoop(core, channel, report=core.runner.report, **options)
    loop.run()
    return channel, loop


@pytest.mark.parametrize(
    "grammar",
    [
        LETTERS,
        Grammar(kind="ebnf", text='root ::= "a" root | "a"'),
        Grammar(kind="regex", text="a{2,9}"),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_a_constrained_request_is_answered(core, grammar):
    channel, loop = run(core, [generate("a", grammar)])
    assert [t for d in channel.deltas("a") for t in d.token_ids]
    assert channel.deltas("a")[-1].finish_reason == "length"
    assert channel.refusals() == {}
    assert loop.stats()["num_waiting"] == 0


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar(kind="regex", text="(a"), "Regex parsing error"),
        (Grammar(kind="regex", text=""), "non-empty"),
        (Grammar(kind="ebnf", text="root ::= b"), "not defined"),
        (Grammar(kind="json_schema", text="{"), "not JSON"),
        (Grammar(kind="json_schema", text='{"type": "strnig"}'), "strnig"),
        (Grammar(kind="json_schema", text='{"not": {}}'), "'not' is not supported"),
        (Grammar(kind="regex", text="a" * 300_000), "characters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_grammar_is_refused_with_its_reason_and_others_go_on(core, grammar, words):
    channel, loop = run(core, [generate("a", grammar), generate("b")])
    assert words in channel.refusals()["a"]
    assert channel.deltas("a") == []
    assert len(channel.deltas("b")) == 4
    assert loop.stats()["requests_refused"] == 1


def test_a_wrong_grammar_that_is_found_late_is_compiled_and_refused_once(core, gate, monkeypatch):
    compiled = []
    compile_now = core.grammars._compile
    monkeypatch.setattr(
        core.grammars, "_compile", lambda *args: (compiled.append(args), compile_now(*args))[1]
    )

    def wait():
        gate.set()
        time.sleep(0.2)

    channel, _ = run(core, [generate("a", Grammar(kind="regex", text="(a"))], wait, [], [])
    assert "Regex parsing error" in channel.refusals()["a"]
    assert len(compiled) == 1


def test_a_bug_while_compiling_fails_the_request_that_meets_it(core, gate, monkeypatch):
    def breaks(*args):
        gate.wait(30)
        raise ZeroDivisionError("unlucky")

    monkeypatch.setattr(core.grammars, "_compile", breaks)
    channel, _ = run(core, [generate("a", LETTERS), generate("b")], gate.set, [])
    assert [(d.finish_reason, d.error) for d in channel.deltas("a")] == [
        ("error", "ZeroDivisionError: unlucky")
    ]
    assert len(channel.deltas("b")) == 4


def test_others_run_while_a_grammar_compiles(core, gate):
    def release():
        assert channel.deltas("b")[-1].finish_reason == "length"
        assert channel.deltas("a") == []
        assert loop.stats()["num_waiting"] == 1
        gate.set()

    channel = ScriptedChannel([generate("a", LETTERS), generate("b")], [], [], [], [], release)
    loop = EngineLoop(core, channel, report=core.runner.report)
    loop.run()
    assert channel.deltas("a")[-1].finish_reason == "length"


def test_the_loop_does_not_spin_while_it_waits_for_a_grammar(core, gate):
    channel, _ = run(core, [generate("a", LETTERS)], [], [], gate.set)
    assert all(0.0 < wait <= engine_loop.COMPILE_POLL_S for wait in channel.waits[1:4])


@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_while_compiling_ends_every_choice_at_once(core, gate, n):
    def check():
        assert len(channel.deltas("a")) == n
        gate.set()

    abort = [AbortRequest(request_id="a")]
    channel = ScriptedChannel([generate("a", LETTERS, params={"n": n})], abort, check)
    EngineLoop(core, channel, report=core.runner.report).run()
    assert [(d.index, d.finish_reason) for d in channel.deltas("a")] == [(i, "abort") for i in range(n)]
    assert not core.has_unfinished()


def test_a_name_in_use_is_refused_while_its_grammar_compiles(core, gate):
    channel, _ = run(core, [generate("a", LETTERS), generate("a", LETTERS)], gate.set)
    assert "already in use" in channel.refusals()["a"]
    assert channel.deltas("a")[-1].finish_reason == "length"


def test_a_grammar_that_takes_too_long_is_refused(core, gate):
    seconds = iter(range(0, 10**6, 5))
    channel, _ = run(core, [generate("a", LETTERS)], *[[]] * 30, clock=lambda: next(seconds))
    assert "compile" in channel.refusals()["a"]


def test_a_shutdown_waits_for_grammars_until_its_deadline(core, gate):
    channel, _ = run(core, [generate("a", LETTERS)], [Shutdown(drain_s=30)], gate.set, [])
    assert channel.deltas("a")[-1].finish_reason == "length"


def test_after_the_deadline_compiling_requests_are_aborted(core, gate):
    channel, _ = run(core, [generate("a", LETTERS)], [Shutdown(drain_s=0)])
    assert [d.finish_reason for d in channel.deltas("a")] == ["abort"]


def test_a_compiled_grammar_starts_at_once(core):
    core.grammars.compile(engine_loop._structured_outputs(LETTERS))
    channel, _ = run(core, [generate("a", LETTERS)])
    assert len(channel.deltas("a")) == 4
    assert channel.waits[1] == 0.0
