"""Headless Chromium over its debugging pipe: JSON messages that end in a zero byte, no further package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
    "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
LIMIT_S = 20.0


class Browser:
    """One page. ``messages``: what its console said and every exception; a good page has none."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.mkdtemp(prefix="gapless-browser-")
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        words = [CHROMIUM, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        # Chromium reads from descriptor 3 and writes to 4; a shell puts the pipes there.
        script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        self.messages: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def set_window(self, width: int, height: int, *, is_dark: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression; promises are awaited."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str, *, limit_s: float = LIMIT_S) -> None:
        """Until ``expression`` is true."""
        end = time.monotonic() + limit_s
        script = f"(() => {{ try {{ return !!({expression}) }} catch {{ return false }} }})()"
        while not self.value(script):
            assert time.monotonic() < end, f"never true: {expression}\n{self.text()}\n{self.messages}"
            time.sleep(0.02)

    def text(self) -> str:
        return self.value("document.body ? document.body.innerText : ''")

    def type_text(self, text: str) -> None:
        """Into what has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        event = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": codes[key],
            "modifiers": 8 if shift else 0,
            **({"text": "\r"} if key == "Enter" else {}),
        }
        self._call("Input.dispatchKeyEvent", type="keyDown", **event)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        os.close(self._out)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.messages.append(str([arg.get("value") for arg in message["params"]["args"]]))
            case "Runtime.exceptionThrown":
                self.messages.append(str(message["params"]["exceptionDetails"]))
            case "Log.entryAdded":
                self.messages.append(message["params"]["entry"]["text"])
        return message
