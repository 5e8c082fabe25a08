"""``gapless chat``: a conversation with a running server, in a terminal.

It speaks OpenAI's API over the standard library's HTTP client, so it talks to other servers too and needs no
further package. Ctrl-C ends the answer that is being written, by closing its connection, and never the
program. Text from a model is data: control characters in it are shown, not obeyed, because a terminal would
take them for commands. Invariant: the history holds exactly what was shown. Read ``serve/routes/chat.py`` for
the other end.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Annotated, Any

import typer

from gapless.env import read_env
from gapless.errors import GaplessError

_HELP = """/reset   forget the conversation
/system TEXT   what the model is told first; without TEXT: nothing
/quit   leave (Ctrl-D does too)
Ctrl-C ends an answer. Everything else is a message."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Also marks that turn the direction of text, with which it could be made to read as something else."""


class ChatFailure(GaplessError):
    """The server cannot be reached, or did not answer as it should."""


def chat(
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="Where the server is.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Default: the first of /v1/models.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", help="Default: GAPLESS_API_KEY.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="What the model is told first.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Most tokens in an answer.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, max=2.0, help="0 is greedy.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answer.")] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds without a token that are too many.")
    ] = 300.0,
) -> None:
    """Talk to a running server."""
    keys = read_env().api_keys
    server = ChatServer(url, api_key=api_key or (keys[0] if keys else None), timeout_s=timeout)
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    try:
        conversation = Conversation(
            server=server,
            model=model or server.first_model(),
            options={name: value for name, value in options.items() if value is not None},
            system=system,
        )
    except ChatFailure as error:
        print(f"gapless: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    raise typer.Exit(talk(conversation, sys.stdin, sys.stdout))


class ChatServer:
    """One server, asked over a connection per answer."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        from gapless.bench.http_stream import Endpoint

        self._endpoint = Endpoint.parse(url, option="--url")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        with self._answer("GET", "/v1/models", None) as response:
            models = json.loads(response.read())["data"]
        if not models:
            raise ChatFailure("the server names no model; give --model")
        return str(models[0]["id"])

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Chunks of a chat answer; closing the iterator closes the connection, which ends the request."""
        with self._answer("POST", "/v1/chat/completions", body) as response:
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ChatFailure(str(chunk["error"]["message"]))
                yield chunk
        raise ChatFailure("the connection was closed before the answer was complete")

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        endpoint = self._endpoint
        if endpoint.is_tls:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                endpoint.host,
                endpoint.port,
                timeout=self._timeout_s,
                context=ssl.create_default_context(),
            )
        else:
            connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=self._timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, endpoint.base_path + path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ChatFailure(_message_of(response.status, response.read()))
            yield response
        except TimeoutError:
            raise ChatFailure(f"nothing from the server for {self._timeout_s:g} seconds") from None
        except ConnectionRefusedError:
            raise ChatFailure(endpoint.nobody_listens) from None
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise ChatFailure(f"{endpoint.authority}: {error or type(error).__name__}") from None
        finally:
            connection.close()


@dataclass(kw_only=True, slots=True)
class Conversation:
    """What was said so far, and how the next answer is asked for."""

    server: ChatServer
    model: str
    options: dict[str, Any]
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str, out: IO[str]) -> str:
        """Write the answer to ``out`` as it comes; a line about it. Raises ``ChatFailure``. A question
        without any answer is forgotten."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages += [*self.turns, {"role": "user", "content": text}]
        body = {
            **{"model": self.model, "messages": messages, "stream": True},
            **{"stream_options": {"include_usage": True}, **self.options},
        }
        start = time.perf_counter()
        first_s: float | None = None
        num_tokens, written, note = 0, "", ""
        stream = self.server.stream(body)
        try:
            with heeding_interrupts():
                for chunk in stream:
                    if chunk.get("usage"):
                        num_tokens = chunk["usage"]["completion_tokens"]
                    for choice in chunk["choices"]:
                        piece = choice["delta"].get("content") or ""
                        if piece and first_s is None:
                            first_s = time.perf_counter() - start
                        written += piece
                        out.write(shown(piece))
                        out.flush()
                        note = ", cut at its limit" if choice["finish_reason"] == "length" else note
        except KeyboardInterrupt:
            note = "aborted"
        finally:
            stream.close()  # type: ignore[attr-defined]
            if written:
                self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": written}]
        if note == "aborted":
            return note
        rest_s = time.perf_counter() - start - (first_s or 0.0)
        rate = f", {(num_tokens - 1) / rest_s:.1f} tokens/s" if num_tokens > 1 and rest_s > 0 else ""
        return f"{num_tokens} tokens{rate}, first after {1e3 * (first_s or 0.0):.0f} ms{note}"


def talk(conversation: Conversation, source: IO[str], out: IO[str]) -> int:
    """Read lines until there are none; the exit code: 1 if an answer failed and nobody could see it."""
    is_terminal = source.isatty()
    notes = sys.stderr
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines with it)
        print(f"{conversation.model}. /help shows what else can be typed.", file=notes)
    has_failed = False
    while (line := _next_line(source, is_terminal=is_terminal, out=out)) is not None:
        text = line.strip()
        if text.startswith("/"):
            if text == "/quit":
                break
            print(_command(conversation, text), file=notes)
        elif text:
            try:
                note = conversation.ask(text, out)
            except ChatFailure as error:
                has_failed, note = True, f"failed: {error}"
            out.write("\n")
            out.flush()
            print(f"({note})", file=notes)
    return int(has_failed and not is_terminal)


@contextlib.contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Within the block a Ctrl-C ends a blocking read within a quarter of a second.

    One that comes between the interpreter's last look for signals and the read's system call would else wait
    for as long as that read does. The alarm interrupts the read, and the interpreter looks again.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    handler = signal.signal(signal.SIGALRM, lambda number, frame: None)
    timer = signal.setitimer(signal.ITIMER_REAL, 0.25, 0.25)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def shown(text: str) -> str:
    """``text`` with control characters as their names; new lines and tabs stay."""
    return _CONTROL.sub(lambda found: f"<{ord(found[0]):#04x}>", text)


def _command(conversation: Conversation, text: str) -> str:
    name, _, rest = text.partition(" ")
    if name == "/reset":
        conversation.turns.clear()
        return "(a new conversation)"
    if name == "/system":
        conversation.system = rest.strip() or None
        return (
            "(the model is told that first)" if conversation.system else "(the model is told nothing first)"
        )
    return _HELP if name == "/help" else f"there is no {name}\n{_HELP}"


def _next_line(source: IO[str], *, is_terminal: bool, out: IO[str]) -> str | None:
    """None at the end. Ctrl-C at the prompt drops the line."""
    if not is_terminal:
        return source.readline() or None
    while True:
        try:
            return input("> ")
        except EOFError:
            out.write("\n")
            return None
        except KeyboardInterrupt:
            out.write("\n")
            print("(Ctrl-D or /quit leaves)", file=sys.stderr)


def _message_of(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {status}: {body[:200].decode(errors='replace')}"
