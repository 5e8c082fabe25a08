"""``gapless chat`` against the real application: what is sent, what is shown, and what Ctrl-C does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from live_server import MODEL, FakeClient, Served, answer, spell, until

from gapless.cli.chat import ChatFailure, ChatServer, Conversation, shown, talk
from gapless.cli.main import main


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served(FakeClient())
    yield server
    server.close()


def start(served: Served, **values) -> Conversation:
    server = ChatServer(served.url, api_key=values.pop("api_key", None), timeout_s=20.0)
    return Conversation(server=server, model=MODEL, options=values.pop("options", {}), **values)


def say(conversation: Conversation, *lines: str) -> tuple[str, int]:
    out = io.StringIO()
    code = talk(conversation, io.StringIO("".join(f"{line}\n" for line in lines)), out)
    return out.getvalue(), code


def prompts(served: Served) -> list[str]:
    return [
        bytes(token for token in request.prompt_token_ids if token < 256).decode()
        for request in served.client.requests
    ]


def test_an_answer_is_printed_with_a_line_about_it(served, capsys):
    assert say(start(served), "Hi") == ("Hello, wörld!\n", 0)
    assert capsys.readouterr().err.startswith("(14 tokens, ")


def test_each_question_is_sent_with_what_was_said_before(served):
    say(start(served), "first", "second")
    one, two = prompts(served)
    assert "first" in one
    assert [two.index(word) for word in ("first", "wörld", "second")] == sorted(
        two.index(word) for word in ("first", "wörld", "second")
    )


def test_reset_forgets(served):
    say(start(served), "first", "/reset", "second")
    assert "first" not in prompts(served)[1]


def test_system_text_comes_first_and_can_be_taken_back(served):
    say(start(served, system="be brief"), "a", "/system be long", "b", "/system", "c")
    one, two, three = prompts(served)
    assert "be brief" in one
    assert "be long" in two
    assert "system" not in three


def test_quit_stops_reading(served):
    say(start(served), "/quit", "never sent")
    assert served.client.requests == []


@pytest.mark.parametrize("line", ["/help", "/nonsense"])
def test_other_commands_show_the_commands_and_send_nothing(served, capsys, line):
    say(start(served), line)
    assert "/reset" in capsys.readouterr().err
    assert served.client.requests == []


@pytest.mark.parametrize("line", ["", "   "])
def test_empty_lines_send_nothing(served, line):
    say(start(served), line)
    assert served.client.requests == []


def test_options_reach_the_engine(served):
    say(start(served, options={"max_tokens": 7, "temperature": 0.5, "seed": 3}), "Hi")
    params = served.client.requests[0].params
    assert (params["max_tokens"], params["temperature"], params["seed"]) == (7, 0.5, 3)


def test_an_answer_that_was_cut_says_so(served, capsys):
    served.client.script = answer("Once", finish_reason="length")
    say(start(served), "Hi")
    assert "cut at its limit" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "a\rb", "\u202eabc", "\x00"])
def test_control_characters_of_a_model_do_not_reach_the_terminal(text):
    assert all(character >= " " and character not in "\x9b\u202e" for character in shown(text))


@pytest.mark.parametrize("text", ["Grüße", "a\nb\tc", "日本", "🙂"])
def test_text_is_shown_as_it_is(text):
    assert shown(text) == text


def test_a_failure_is_told_and_the_question_forgotten(served, capsys):
    served.client.script = lambda request: [ValueError("a bug")]
    conversation = start(served)
    out, code = say(conversation, "Hi")
    assert (out, code) == ("\n", 1)
    assert "failed: " in capsys.readouterr().err
    assert conversation.turns == []


def test_a_stream_that_breaks_keeps_what_was_shown(served, capsys):
    served.client.script = lambda request: [*[[d] for d in spell(request, "abc")[:2]], ValueError("a bug")]
    conversation = start(served)
    assert say(conversation, "Hi") == ("ab\n", 1)
    assert conversation.turns[-1] == {"role": "assistant", "content": "ab"}


def test_a_server_that_is_not_there_is_one_sentence(capsys):
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err == (
        "gapless: 127.0.0.1:9: no server listens there (yet); gapless serve starts one\n"
    )


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999999"])
def test_an_address_that_is_none_is_refused(url, capsys):
    assert main(["chat", "--url", url]) == 2
    assert url in capsys.readouterr().err


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_wrong_key_is_told(key, capsys):
    server = Served(FakeClient(), api_keys=("right",))
    try:
        with pytest.raises(ChatFailure, match="no valid API key"):
            ChatServer(server.url, api_key=key, timeout_s=5.0).first_model()
        assert ChatServer(server.url + "/v1", api_key="right", timeout_s=5.0).first_model() == MODEL
    finally:
        server.close()


def test_ctrl_c_ends_the_answer_and_not_the_program(served):
    def script(request):
        yield [spell(request, "Once upon")[0]]
        for _ in range(400):
            yield 0.05

    served.client.script = script
    screen = Screen(["--url", served.url])
    try:
        screen.wait_for("> ")
        screen.write("a story\n")
        screen.wait_for("O")
        until(lambda: served.client.running)
        screen.write("\x03")
        screen.wait_for("(aborted)")
        until(lambda: served.client.aborted)
        served.client.script = answer("Fine.")
        screen.write("how are you?\n")
        screen.wait_for("Fine.")
        screen.wait_for("> ")
        screen.press_until("\x03", "/quit leaves")
        screen.write("/quit\n")
        assert screen.process.wait(10) == 0
    finally:
        screen.close()


class Screen:
    """The command on a terminal of its own."""

    def __init__(self, words: list[str]) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gapless.cli.main", "chat", *words],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=make_controlling, env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        os.close(theirs)
        self._text = ""

    def write(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def press_until(self, key: str, text: str) -> None:
        """A key that comes between the prompt and the reading is lost: CPython sees it with the next one."""
        for _ in range(10):
            self.write(key)
            with contextlib.suppress(AssertionError):
                return self.wait_for(text, seconds=1.0)
        self.wait_for(text)

    def wait_for(self, text: str, *, seconds: float = 20.0) -> None:
        """Until it has been shown after what was waited for last."""
        end = time.monotonic() + seconds
        while text not in self._text:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"never shown: {text!r}, but {self._text!r}"
            self._text += os.read(self._ours, 4096).decode(errors="replace")
        self._text = self._text.partition(text)[2]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


def make_controlling() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_the_request_has_the_shape_that_openai_documents(served):
    sent: list[dict] = []
    conversation = start(served, options={"max_tokens": 4})
    stream = conversation.server.stream
    conversation.server.stream = lambda body: (sent.append(json.loads(json.dumps(body))), stream(body))[1]
    say(conversation, "Hi")
    assert sent == [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 4,
        }
    ]
