"""Two engine processes against one on this machine, and what is lost when one of them is killed under load.

Rates are measured at the seam that the HTTP side uses (``serve/client.py``), with whole answers, so that what
is compared is engines and not JSON; each engine has one thread, and the two sides take turns several times
within one run, because a shared machine is not the same a minute later. The second part streams requests
through two replicas, kills one process in the middle, and counts: a request that had not begun to stream must
end whole. The model is random; its size is chosen so that a step takes milliseconds, as on a GPU. With
``--step-ms`` engines compute nothing and wait so long in each step, as for a GPU: what two are worth then
depends on this program alone, also where other work takes the cores. On CUDA (``--device cuda``) each replica
gets GPUs of its own and ``--model`` may be any folder. With ``--ray`` (on a CPU) both sides are deployments
on a Ray cluster of this machine.

    python benchmarks/replicas.py --output replicas.json
    python benchmarks/replicas.py --step-ms 10 --output replicas_waiting.json
    python benchmarks/replicas.py --step-ms 10 --ray --output ray_waiting.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "serve"))

from engine_process_fakes import OpenFake

from gapless.bench.meta import describe_run, package_version
from gapless.bench.stats import spread
from gapless.config import EngineConfig
from gapless.serve.client import EngineClient, ManagedClient, ReplicaLostError
from gapless.serve.engine_process import EngineOpener, OpenModel
from gapless.serve.messages import GenerateRequest
from gapless.serve.placement import place_replicas
from gapless.serve.process_client import ProcessClient
from gapless.serve.replica import RestartRule
from gapless.serve.replicas import ReplicaSet

WANTED_RATIO = 1.9
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2047,
}
MAX_OTHERS = 0.06
"""Of all cores: what a machine without other work takes for itself is below."""
MAX_ATTEMPTS = 5
_ids = itertools.count()


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
            options.model = folder
        result = _run_on_ray(options) if options.ray else asyncio.run(_run(options))
    meta = describe_run(argv) | ({"ray": package_version("ray")} if options.ray else {})
    result = {"benchmark": "replicas", "meta": meta, **result}
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if result["killed"]["lost_before_streaming"] == 0 else 1


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    opener = _opener(options)
    places = [{"OMP_NUM_THREADS": "1"}] * 2
    if options.device == "cuda":
        places = place_replicas(2, device="cuda")
    async with AsyncExitStack() as stack:
        one: ManagedClient = ProcessClient(opener, log_level="error", environment=places[0])
        two: ManagedClient = ReplicaSet(
            opener,
            environments=places,
            log_level="error",
            restart=RestartRule(max_restarts=0),
        )
        stack.push_async_callback(one.close)
        stack.push_async_callback(two.close)
        await two.start()
        if options.device == "cpu":
            await one.start()
            rates = await _rates_in_turns(one, two, options)
            killed = await _kill_one(two, options)
        else:  # an engine has the memory of its GPU to itself: the single one comes when the pair is gone
            pair = await _rounds(two, options)
            killed = await _kill_one(two, options)
            await two.close()
            await one.start()
            single = await _rounds(one, options)
            rates = [{"one": a, "two": b} for a, b in zip(single, pair, strict=True)]
    return _result(rates, killed, options)


def _run_on_ray(options: argparse.Namespace) -> dict[str, Any]:
    import ray
    from ray import serve

    from gapless.deploy.ray_client import RayClient
    from gapless.deploy.ray_options import RayOptions
    from gapless.deploy.ray_serve import engine_deployment
    from gapless.serve.settings import ServerSettings

    async def run(handles: list[Any]) -> dict[str, Any]:
        one, two = (RayClient(handle) for handle in handles)
        for client in (one, two):
            await client.start()
        rates = await _rates_in_turns(one, two, options)
        killed = await _kill_one(two, options)
        return _result(rates, killed, options)

    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    try:
        handles = []
        for num_replicas in (1, 2):
            needs = RayOptions(replicas=str(num_replicas), cpus_per_replica=0.5)
            engines = engine_deployment(
                _opener(options), needs, ServerSettings(log_level="error"), num_gpus=0
            )
            handles.append(serve.run(engines, name=f"of_{num_replicas}", route_prefix=None))
        return asyncio.run(run(handles))
    finally:
        serve.shutdown()
        ray.shutdown()


def _opener(options: argparse.Namespace) -> EngineOpener:
    if options.step_ms:
        return OpenFake(max_num_reqs=options.batch, step_s=options.step_ms / 1e3)
    config = EngineConfig(
        model=options.model,
        load_format="dummy",
        device=options.device,
        max_running_requests=options.batch,
        kv_cache_tokens=options.batch * 512,
    )
    return OpenModel(config=config)


def _result(
    rates: Sequence[dict[str, float]], killed: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    ratios = [each["two"] / each["one"] for each in rates]
    return {
        "through": "ray" if options.ray else "processes",
        "engine": f"waits {options.step_ms} ms per step" if options.step_ms else "model",
        "num_cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "cpu_part_of_others": spread([each.get("others", 0.0) for each in rates]),
        "tokens_per_s": {side: spread([each[side] for each in rates], digits=1) for side in ("one", "two")},
        "ratio": spread(ratios),
        "wanted_ratio": WANTED_RATIO,
        "killed": killed,
    }


async def _rates_in_turns(
    one: EngineClient, two: EngineClient, options: argparse.Namespace
) -> list[dict[str, float]]:
    """The first round is not counted, and one in which other programs took a part of the cores is repeated, a
    few times at most: two engines need two whole cores."""
    rounds: list[dict[str, float]] = []
    pids = [os.getpid(), *(view.pid for client in (one, two) for view in client.replicas() if view.pid)]
    for attempt in range(1 + MAX_ATTEMPTS * options.rounds):
        meter = CpuMeter([] if options.ray or options.step_ms else pids)
        made = {"one": await _rate(one, options), "two": await _rate(two, options)}
        made["others"] = meter.part_of_others()
        left = MAX_ATTEMPTS * options.rounds - attempt
        if attempt and (made["others"] <= MAX_OTHERS or left < options.rounds - len(rounds)):
            rounds.append(made)
        if len(rounds) == options.rounds:
            break
    return rounds


async def _rounds(client: EngineClient, options: argparse.Namespace) -> list[float]:
    return [await _rate(client, options) for _ in range(options.rounds + 1)][1:]


class CpuMeter:
    """CPU time of all programs but ``pids`` since it was made, as part of all cores; 0 without ``pids``."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._start = self._read()

    def part_of_others(self) -> float:
        if not self._pids:
            return 0.0
        busy, total, own = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return max(0.0, busy - own) / max(total, 1)

    def _read(self) -> tuple[int, int, int]:
        """Clock ticks: busy, passed, and busy for ``pids``."""
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        own = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            own += int(fields[11]) + int(fields[12])
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks), own


async def _rate(client: EngineClient, options: argparse.Namespace) -> float:
    """Tokens a second, with as many requests as two full batches, so that both sides do the same work."""
    start = time.perf_counter()
    answers = await asyncio.gather(
        *(_tokens(client, number, options.tokens, stream=False) for number in range(2 * options.batch))
    )
    return sum(answers) / (time.perf_counter() - start)


async def _tokens(client: EngineClient, number: int, num_tokens: int, *, stream: bool) -> int:
    count = 0
    async for deltas in client.generate(_request(number, num_tokens, stream=stream)):
        count += sum(len(delta.token_ids) for delta in deltas)
    return count


async def _kill_one(client: EngineClient, options: argparse.Namespace) -> dict[str, Any]:
    """Three requests per place, so that two thirds have not begun when the process dies."""
    num_requests = 6 * options.batch
    begun: set[int] = set()
    outcome = {"whole": 0, "lost_while_streaming": 0, "lost_before_streaming": 0}

    async def one(number: int) -> None:
        count = 0
        try:
            async for deltas in client.generate(_request(number, options.tokens, stream=True)):
                begun.add(number)
                count += sum(len(delta.token_ids) for delta in deltas)
        except ReplicaLostError:
            count = -1
        if count == options.tokens:
            outcome["whole"] += 1
        else:
            outcome["lost_while_streaming" if number in begun else "lost_before_streaming"] += 1

    tasks = [asyncio.create_task(one(number)) for number in range(num_requests)]
    while len(begun) < 2 * options.batch and not all(task.done() for task in tasks):
        await asyncio.sleep(0.005)
    pid = client.replicas()[1].pid
    assert pid is not None
    num_begun = len(begun)
    os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*tasks)
    retried = None  # Ray does not count them
    if not options.ray:
        retried = sum(view.num_routed.get("retry", 0) for view in client.replicas())
    return {"requests": num_requests, "begun_at_the_kill": num_begun, "sent_again": retried, **outcome}


def _request(number: int, num_tokens: int, *, stream: bool) -> GenerateRequest:
    """Prompts of 16 tokens that have nothing in common."""
    return GenerateRequest(
        request_id=f"r{next(_ids)}",
        prompt_token_ids=[(number * 31 + position * 7) % 2000 for position in range(16)],
        params={"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False},
        stream=stream,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", help="a folder with a config.json; else a small random model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ray", action="store_true", help="as deployments on a local Ray cluster")
    parser.add_argument("--step-ms", type=float, default=0.0, help="engines that only wait so long")
    parser.add_argument("--batch", type=int, default=8, help="sequences that run at once in an engine")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
