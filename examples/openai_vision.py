"""Images and a video in a chat, with the official ``openai`` package.

    gapless serve --model-path Qwen2.5-VL-7B-Instruct &
    pip install openai
    python examples/openai_vision.py PICTURE... [CLIP.mp4] [--url URL]

Files go along as data URLs, so the server needs no access to anything.
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai


def part(path: Path) -> dict[str, Any]:
    """One image or video of a message."""
    mime = mimetypes.guess_type(path.name)[0] or "image/png"
    kind = "video_url" if mime.startswith("video/") else "image_url"
    return {
        "type": kind,
        kind: {"url": f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"},
    }


def main(
    files: Sequence[Path],
    *,
    question: str = "What do you see?",
    url: str = "http://127.0.0.1:8000",
    api_key: str = "none",
    max_tokens: int = 64,
) -> dict[str, Any]:
    """The answer, streamed, and how many tokens the question had with everything it shows."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)
    content: list[Any] = [*(part(path) for path in files), {"type": "text", "text": question}]
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        max_completion_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, prompt_tokens = "", 0
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        if chunk.usage is not None:
            prompt_tokens = chunk.usage.prompt_tokens
    return {"answer": text, "prompt_tokens": prompt_tokens}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--question", default="What do you see?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    for name, value in main(**vars(options)).items():
        print(f"{name}: {value!r}")
