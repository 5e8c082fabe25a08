"""``gapless bench serve``: load for a server that is already running, ours or any OpenAI-compatible one.

Options and fields have the names of ``vllm bench serve``. The last line of standard output is the result as
JSON; the exit code is 1 when a request failed or answers did not agree. What is measured and how:
``gapless/bench/serve_load.py``.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from gapless.env import read_env
from gapless.errors import ConfigError


def bench_serve(
    base_url: Annotated[
        str, typer.Option("--base-url", metavar="URL", help="Where the server is.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Default: the first of /v1/models.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", help="Default: GAPLESS_API_KEY.")
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests to send.")] = 100,
    random_input_len: Annotated[
        str,
        typer.Option("--random-input-len", metavar="N", help="Prompt tokens: 512, 128:1024, log:16:4096."),
    ] = "512",
    random_output_len: Annotated[
        int, typer.Option("--random-output-len", min=1, help="Tokens of each answer.")
    ] = 128,
    request_rate: Annotated[
        float, typer.Option("--request-rate", help="Requests a second; inf: all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float, typer.Option("--burstiness", help="1 is Poisson, below it burstier, above more even.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", min=1, help="Most requests at once.")
    ] = None,
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", min=2, help="Prompts use token ids below it.")
    ] = 32_000,
    num_warmups: Annotated[int, typer.Option("--num-warmups", min=0, help="Requests before.")] = 1,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    respect_eos: Annotated[
        bool, typer.Option("--respect-eos", help="Answers may end before their full length.")
    ] = False,
    goodput: Annotated[
        list[str] | None,
        typer.Option("--goodput", metavar="NAME:MS", help="Count requests within ttft, tpot, e2el:MS."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Few prompts, sent often: all answers must agree.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for one request.")] = 600.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of prompts and arrivals.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write the result.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON line.")] = False,
) -> None:
    """Time to the first token, between tokens, and tokens per second of a running server."""
    from gapless.bench.http_stream import Endpoint, HttpFailure
    from gapless.bench.serve_figures import parse_goodput
    from gapless.bench.serve_load import LoadOptions, measure_serving
    from gapless.bench.workload import Lengths

    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"{output}: there is no folder {output.parent}")
    keys = read_env().api_keys
    options = LoadOptions(
        url=base_url,
        model=model,
        api_key=api_key or (keys[0] if keys else None),
        num_prompts=num_prompts,
        lengths=Lengths.parse(random_input_len),
        output_len=random_output_len,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        vocab_size=vocab_size,
        seed=seed,
        num_warmups=num_warmups,
        temperature=temperature,
        ignore_eos=not respect_eos,
        check=check,
        goodput=parse_goodput(goodput or []),
        timeout_s=timeout,
    )
    try:
        found = measure_serving(options, on_done=_show_progress)
    except HttpFailure as error:
        raise _failed(str(error)) from None
    except ConnectionRefusedError:
        raise _failed(Endpoint.parse(base_url).nobody_listens) from None
    except OSError as error:
        raise _failed(f"{base_url}: {error.strerror or error}") from None
    result = _with_meta(found)
    if not as_json:
        _print_table(result)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)
    if found["failed"] or not found.get("check", {"ok": True})["ok"]:
        raise typer.Exit(1)


def _with_meta(found: dict[str, Any]) -> dict[str, Any]:
    from gapless.bench.meta import command_text, num_cores

    words = ["gapless", *sys.argv[1:]]
    if "--api-key" in words[:-1]:
        words[words.index("--api-key") + 1] = "…"
    words = [word if not word.startswith("--api-key=") else "--api-key=…" for word in words]
    meta = {"command": command_text(words), "date": time.strftime("%Y-%m-%d"), "client_cores": num_cores()}
    return {
        "type": "bench",
        "benchmark": "serve",
        "meta": meta,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        **found,
    }


def _show_progress(done: int, total: int) -> None:
    if done == total or done % max(1, total // 20) == 0:
        print(f"{done} of {total} requests are done", file=sys.stderr, flush=True)


def _print_table(result: dict[str, Any]) -> None:
    from gapless.cli.bench_tables import serve_tables
    from gapless.cli.render import make_console

    console = make_console()
    for table in serve_tables(result):
        console.print(table)
    for error in result["errors"]:
        console.print(f"failed: {error}", markup=False)


def _failed(message: str) -> typer.Exit:
    print(f"gapless: {message}", file=sys.stderr)
    return typer.Exit(1)
