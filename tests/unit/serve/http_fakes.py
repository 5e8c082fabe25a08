"""An engine client that answers from a script, a byte tokenizer, and an ASGI connection a test can close."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI

from gapless.serve.app import create_app
from gapless.serve.client import ReplicaView
from gapless.serve.messages import Delta, EmbedRequest, EngineInfo, GenerateRequest, TokenLogprob
from gapless.serve.settings import ServerSettings

MODEL = "fake-model"
WAIT = "wait"
"""In a script: nothing more comes until the request is given up."""

Script = Callable[[GenerateRequest], Iterable[Any]]


class ByteTokenizer:
    """A token is a byte; 256 is BOS, added where special tokens are."""

    chat_template = "{{ tools }} <tool_call>"
    vocab_size = 257

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        parts = bytes(token for token in token_ids if token < 256)
        bos = "<bos>" if 256 in token_ids and not skip_special_tokens else ""
        return bos + parts.decode("utf-8", "replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        if any("template-fails" in str(message) for message in messages):
            raise ValueError("no such role")
        lines = [json.dumps(dict(message), ensure_ascii=False) for message in messages]
        lines += [f"{name}={value!r}" for name, value in sorted(variables.items())]
        return "\n".join(lines) + ("\nassistant:" if add_generation_prompt else "")


def spell(
    request: GenerateRequest,
    text: str,
    *,
    index: int = 0,
    sizes: Iterable[int] = (),
    finish_reason: str = "stop",
    stop_reason: Any = None,
    num_cached_tokens: int = 0,
) -> list[Delta]:
    """``text`` as deltas of ``sizes`` bytes (then one byte each), a character's text with its last byte."""
    data, deltas, pending = text.encode(), [], b""
    k = request.params.get("logprobs")
    sizes = iter(sizes)
    while data:
        size = max(1, next(sizes, 1))
        piece, data = data[:size], data[size:]
        pending += piece
        ready = _whole_characters(pending)
        pending = pending[len(ready) :]
        deltas.append(
            Delta(
                request.request_id,
                index,
                ready.decode(),
                list(piece),
                None if k is None else [candidates(byte, k) for byte in piece],
            )
        )
    deltas.append(
        Delta(
            request.request_id,
            index,
            "",
            [],
            finish_reason=finish_reason,  # type: ignore[arg-type]
            stop_reason=stop_reason,
            num_cached_tokens=num_cached_tokens,
        )
    )
    return deltas


def candidates(token: int, k: int) -> list[TokenLogprob]:
    """The token first, with rank 2, then others up to ``k``."""
    others = [TokenLogprob((token + r) % 256, -0.5 * r, r, f"t{r}") for r in range(1, k + 1) if r != 2]
    text = bytes([token]).decode("latin-1")
    return [TokenLogprob(token, -1.25, 2, text), *others]


def _whole_characters(data: bytes) -> bytes:
    for end in range(len(data), max(-1, len(data) - 4), -1):
        try:
            data[:end].decode()
        except UnicodeDecodeError:
            continue
        return data[:end]
    return b""


def answer(text: str, **options: Any) -> Script:
    """Every choice says ``text``; choices take turns, one delta per list."""

    def script(request: GenerateRequest) -> Iterable[list[Delta]]:
        n = request.params.get("n", 1)
        per_choice = [spell(request, text, index=index, **options) for index in range(n)]
        lists = [[delta] for turn in zip(*per_choice, strict=True) for delta in turn]
        if request.prompt_logprobs is not None:
            first = lists[0][0]
            prompt: list[list[TokenLogprob] | None] = [None]
            prompt += [candidates(t % 256, request.prompt_logprobs) for t in request.prompt_token_ids[1:]]
            lists[0] = [msgspec.structs.replace(first, prompt_logprobs=prompt)]
        return lists

    return script


class FakeClient:
    """``script`` gives, for each request, lists of deltas, seconds to wait, ``WAIT``, or what to raise."""

    def __init__(self, script: Script | None = None, **info: Any) -> None:
        self.script = script or answer("Hello, wörld!")
        self.requests: list[Any] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.is_healthy, self.is_draining = True, False
        self.age_s: float | None = 0.0
        self.statistics: dict[str, Any] = {}
        self.num_resets = 0
        self.vector = [0.5, -1.0, 0.25]
        self.embed_script: list[Any] = []
        facts: dict[str, Any] = {
            "model": MODEL,
            "vocab_size": 257,
            "max_model_len": 4096,
            "max_running_requests": 8,
            "block_size": 16,
            "num_blocks": 64,
            "eos_token_ids": [0],
            "device": "cpu",
            "config": {"dtype": "float32"},
            "plan": {"prefill": "piecewise"},
            "startup_s": 1.5,
        }
        self.info = EngineInfo(**{**facts, **info})

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Delta]]:
        self.requests.append(request)
        self.running.add(request.request_id)
        is_done = False
        try:
            for item in self.script(request):
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                if item == WAIT:
                    await asyncio.Event().wait()
                elif isinstance(item, float):
                    await asyncio.sleep(item)
                else:
                    yield item
            is_done = True
        finally:
            self.running.discard(request.request_id)
            if not is_done:
                self.aborted.append(request.request_id)

    async def embed(self, request: EmbedRequest) -> list[float]:
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            for item in self.embed_script:
                if isinstance(item, Exception):
                    raise item
                await asyncio.Event().wait()
            return self.vector
        finally:
            self.running.discard(request.request_id)

    async def report(self) -> dict[str, Any]:
        return {"steps": [], "eager": []}

    async def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def stats(self) -> dict[str, Any]:
        return self.statistics

    def replicas(self) -> list[ReplicaView]:
        return [ReplicaView(index=0, state="ready", is_healthy=True, pid=None, stats=self.statistics)]

    def step_age_s(self) -> float | None:
        return self.age_s


def make_app(client: FakeClient | None = None, tokenizer: Any = "bytes", **settings: Any) -> FastAPI:
    settings.setdefault("access_log", "off")
    made = ByteTokenizer() if tokenizer == "bytes" else tokenizer
    return create_app(client or FakeClient(), ServerSettings(**settings), made)


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """One request; an exception that leaves the application fails the test."""

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await asyncio.wait_for(http.request(method, path, **options), 10)

    return asyncio.run(go())


def post(app: FastAPI, path: str, body: Any = None, **options: Any) -> httpx.Response:
    if body is not None:
        options["json"] = body
    return call(app, "POST", path, **options)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}


def text_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once", **fields}


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of each event; checks the framing and that the stream ended as it should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.content.endswith(b"\n\n")
    frames = response.content.decode().removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


class Connection:
    """One request whose other side a test may close, stall or break."""

    def __init__(
        self, app: FastAPI, path: str, body: bytes, *, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.fails_to_send = False
        self._body = [body]
        given = [(b"content-type", b"application/json"), *((a.encode(), b.encode()) for a, b in headers)]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": given,
            "client": ("127.0.0.1", 1),
            "server": ("server", 80),
        }
        self.task = asyncio.ensure_future(app(self._scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self.fails_to_send:
            raise OSError("the other side has gone")
        self.sent.append(message)
        await asyncio.sleep(0)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]

    @property
    def is_complete(self) -> bool:
        """The answer was sent to its end."""
        return bool(self.bodies) and not self.sent[-1].get("more_body", False)
