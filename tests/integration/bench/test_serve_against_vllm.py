"""``benchmarks/serve_against_vllm.py`` with two made-up servers: runs, ratios, failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loaded_scripts import load_script

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "serve_against_vllm.py"
CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "vocab_size": 300},
    **{"intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "rms_norm_eps": 1e-5},
    "max_position_embeddings": 128,
}
FAKE_SERVER = """
import asyncio, json, sys
port, pause_s, wrong = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
if wrong == ["dies"]:
    sys.exit("there is no GPU here")
async def serve(reader, writer):
    try:
        while True:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode().lower()
            if head.startswith("get"):
                writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
                continue
            length = int(head.split("content-length:")[1].split()[0])
            body = json.loads(await reader.readexactly(length))
            assert body["model"] == "bench"
            writer.write(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n")
            count = body["max_tokens"]
            events = [{"choices": [{"text": "a", "finish_reason": None}]} for _ in range(count)]
            events[-1]["choices"][0]["finish_reason"] = "length"
            usage = {"completion_tokens": count, "prompt_tokens": len(body["prompt"])}
            for event in [*events, {"choices": [], "usage": usage}]:
                send(writer, json.dumps(event))
                await asyncio.sleep(pause_s)
            if wrong != ["breaks"]:
                send(writer, "[DONE]")
            writer.write(b"0\\r\\n\\r\\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
def send(writer, text):
    data = f"data: {text}\\n\\n".encode()
    writer.write(f"{len(data):x}\\r\\n".encode() + data + b"\\r\\n")
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("bench")
    (made / "model").mkdir()
    (made / "model" / "config.json").write_text(json.dumps(CONFIG))
    (made / "server.py").write_text(FAKE_SERVER)
    return made


def words_of(folder: Path, *flags: str, ours: str = "0.002", vllm: str = "0.008") -> list[str]:
    server = f"{{python}} {folder / 'server.py'} {{port}}"
    return [
        *("--model", str(folder / "model"), "--ours-command", f"{server} {ours}"),
        *("--vllm-command", f"{server} {vllm}", "--input-len", "4:8", "--output-len", "6", "--streams", "4"),
        *("--requests", "8", "--single-requests", "2", "--request-rate", "200", *flags),
    ]


@pytest.fixture
def run(script, folder, tmp_path, capsys):
    """The script's own steps in this process: importing torch takes longer than all of them."""

    def steps(*flags: str, **servers: str) -> tuple[dict[str, Any], str]:
        arguments = script.parse_arguments(words_of(folder, *flags, **servers))
        model = script.with_tokenizer(arguments.model, tmp_path / "model")
        result = script.make_result(arguments, *script.run_parts(arguments, model))
        return result, "\n".join(script.table_lines(result["rows"]))

    return steps


def test_both_servers_get_the_same_loads_and_are_compared(run):
    result, text = run("--only", "ours", "vllm")
    rows = {(row["load"], row["figure"]): row for row in result["rows"]}
    assert set(rows) == {
        *(("single", figure) for figure in ("ttft p50", "itl p50", "rate")),
        *(("streams", figure) for figure in ("ttft p50", "itl p50", "rate")),
        *(("open", figure) for figure in ("ttft p50", "itl p50")),
    }
    assert rows["streams", "itl p50"]["ratio"] < 0.6
    assert rows["streams", "itl p50"]["met"]
    assert rows["streams", "rate"]["ratio"] > 1.3
    assert rows["single", "rate"]["target"] is None
    for part in result["parts"].values():
        assert (part["streams"]["completed"], part["streams"]["total_output_tokens"]) == (8, 48)
    assert "itl p50" in text


def test_a_slower_server_misses_its_targets(run):
    result, text = run("--only", "ours", "vllm", ours="0.008", vllm="0.002")
    assert result["missed"] >= 2
    assert "MISSED" in text


@pytest.mark.parametrize(
    ("wrong", "message"), [("dies", "there is no GPU here"), ("breaks", "the stream ended")]
)
def test_a_server_that_fails_is_named_and_not_measured(run, wrong, message):
    result, _ = run("--only", "ours", "vllm", vllm=f"0.001 {wrong}")
    assert set(result["parts"]) == {"ours"}
    assert result["rows"] == []
    assert message in result["notes"][0]


def test_the_script_writes_its_result_and_prints_it_last(folder, tmp_path):
    words = words_of(folder, "--only", "ours", "--request-rate", "0", "--output", str(tmp_path / "r.json"))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=60, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "r.json").read_text()) == result
    assert "open" not in result["parts"]["ours"]
    assert str(tmp_path) not in json.dumps(result), "no folder of this machine is in it"


def test_the_tokenizer_is_as_large_as_the_vocabulary_and_turns_every_token_into_text(
    script, folder, tmp_path
):
    from tokenizers import Tokenizer

    for size in (100, 300, 5000):
        source = tmp_path / f"source{size}"
        source.mkdir()
        (source / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": size}))
        made = script.with_tokenizer(source, tmp_path / f"made{size}")
        tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
        assert tokenizer.get_vocab_size() == size
        assert all(isinstance(tokenizer.decode([token]), str) for token in range(0, size, 7))
        assert tokenizer.decode([size - 1]) != ""


def test_a_model_with_a_tokenizer_keeps_it(script, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("its own")
    assert (script.with_tokenizer(source, tmp_path / "made") / "tokenizer.json").read_text() == "its own"


def part(itl: float, rate: float) -> dict[str, Any]:
    load = {"median_ttft_ms": 10.0, "median_itl_ms": itl, "output_throughput": rate}
    return {"single": load, "streams": load}


@pytest.mark.parametrize(
    ("itl", "rate", "met"),
    [(1.10, 95.0, [True, True]), (1.151, 95.0, [False, True]), (1.0, 89.0, [True, False])],
)
def test_the_offline_engine_bounds_what_http_may_cost(script, itl, rate, met):
    rows = script.compare(
        {"ours": part(itl, rate), "offline": {"decode_ms": 1.0, "output_throughput": 100.0}}
    )
    assert [row["met"] for row in rows] == met


@pytest.mark.parametrize("names", [["ours"], ["vllm"], ["offline"], ["vllm", "offline"], []])
def test_what_lacks_its_other_half_gives_no_row(script, names):
    parts = {
        "ours": part(1.0, 1.0),
        "vllm": part(1.0, 1.0),
        "offline": {"decode_ms": 1.0, "output_throughput": 1.0},
    }
    assert script.compare({name: parts[name] for name in names}) == []


def test_both_commands_are_complete(script):
    for command in (script.OURS, script.VLLM):
        text = command.format(python="py", model="m", port=1, dtype="d", max_len=2)
        assert "--port 1" in text
        assert "{" not in text


@pytest.mark.soak
def test_our_server_and_our_engine_are_measured(folder):
    server = f"{{python}} {folder / 'server.py'} {{port}} 0.01"
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), "--model", str(folder / "model"), "--only", "ours", "offline"),
            *("--dtype", "float32", "--max-len", "64", "--input-len", "4:8", "--output-len", "6"),
            *("--streams", "4", "--requests", "8", "--request-rate", "0", "--vllm-command", server),
        ],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["parts"]) == {"ours", "offline"}, result["notes"]
    assert [row["peer"] for row in result["rows"]] == ["offline", "offline"]
