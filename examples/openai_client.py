"""The official ``openai`` package against a running server: models, a chat, a stream, tokens in and out.

    gapless serve --model-path smollm2 &
    pip install openai
    python examples/openai_client.py [URL]

Everything that is not OpenAI's own goes through ``extra_body``.
"""

from __future__ import annotations

import sys
from typing import Any

import openai

QUESTION = "What is the capital of France?"


def main(url: str = "http://127.0.0.1:8000", api_key: str = "none") -> dict[str, Any]:
    """What the server answered. ``api_key`` is only looked at by servers that were started with one."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)
    model = client.models.list().data[0].id

    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_completion_tokens=24,
        temperature=0,
    )

    streamed = ""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_completion_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            streamed += chunk.choices[0].delta.content or ""
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens

    # Token ids in place of text, with what only this server and its relatives know.
    continued = client.completions.create(
        model=model,
        prompt=[40, 41, 42, 43],
        max_tokens=8,
        temperature=0,
        logprobs=1,
        extra_body={"ignore_eos": True, "min_p": 0.0},
    )
    return {
        "model": model,
        "chat": chat.choices[0].message.content,
        "streamed": streamed,
        "streamed_tokens": tokens,
        "continued": continued.choices[0].text,
        "first_logprob": continued.choices[0].logprobs.token_logprobs[0],
    }


if __name__ == "__main__":
    for name, value in main(*sys.argv[1:]).items():
        print(f"{name}: {value!r}")
