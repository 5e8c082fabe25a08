"""``graphed`` on real hardware: the main cases of the unit tests, and what only a GPU can show."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gapless.cli.main import main
from gapless.errors import GraphError
from gapless.graphs.breakable import eager_break
from gapless.graphs.device import get_device
from gapless.graphs.graphed import Graphed, Input, SharedPool, State, graphed
from gapless.graphs.ops import register_custom_op
from gapless.graphs.real_sizes import num_real
from loaded_scripts import load_script

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ROWS = Input(dims={0: "rows"})
SIZES = [1, 4, 16, 64]
WIDTH = 64


@register_custom_op(out_shape="x", name="test_cuda_graphed_softmax")
def rows_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


@eager_break
def shrink(h: Tensor) -> Tensor:
    """Decides on the host, on data that only a live run has."""
    largest = float(h[: int(num_real("rows"))].abs().max())
    return h / largest if largest > 1 else h.clone()


class Net(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.register_buffer("offset", torch.randn(WIDTH))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu() + self.offset
            if self.kind == "break":
                x = shrink(x)
            elif self.kind == "split":
                x = rows_softmax(x)
        return x


STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("plain", {"strategy": "full"}),
    "breakable": ("break", {"strategy": "breakable"}),
    "auto": ("break", {}),
    "tc_piecewise": (
        "split",
        {"strategy": "tc_piecewise", "split_ops": ["gapless::test_cuda_graphed_softmax"]},
    ),
}


def rows(n: int, **options: Any) -> Tensor:
    return torch.randn(n, WIDTH, device=DEVICE, **options)


def make(kind: str = "plain", **options: Any) -> tuple[Net, Graphed]:
    net = Net(kind).to(DEVICE)
    return net, graphed(net, inputs={"x": ROWS}, **{"sizes": SIZES, **options}).capture(rows(20))


@pytest.fixture(scope="module", params=STRATEGIES)
def made(request: pytest.FixtureRequest) -> Graphed:
    kind, options = STRATEGIES[request.param]
    return make(kind, **options)[1]


@pytest.mark.parametrize("n", [1, 2, 4, 5, 15, 16, 17, 40, 64])
def test_every_size_equals_padded_eager_bit_for_bit_and_eager_closely(made: Graphed, n: int) -> None:
    for scale in (0.1, 10.0):
        x = rows(n) * scale
        result = made(x)
        assert torch.equal(result, made.padded_eager(x))
        torch.testing.assert_close(result, made.eager(x), atol=1e-4, rtol=1e-4)


def test_verification_passes(made: Graphed) -> None:
    report = made.verify()
    assert report.is_ok, str(report)
    assert any(result.check == "ignores padding" for result in report.results)


def test_interleaved_sizes_survive_allocator_churn(made: Graphed) -> None:
    batches = [rows(n) for n in (64, 1, 16, 3, 40)]
    expected = [made(x) for x in batches]
    for _ in range(5):
        for x, want in zip(reversed(batches), reversed(expected), strict=True):
            held = [torch.full((1 << e,), float("nan"), device=DEVICE) for e in range(8, 22)]
            del held
            assert torch.equal(made(x), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    net = Net().to(DEVICE, dtype)
    made = graphed(net, inputs={"x": ROWS}, sizes=[8, 64]).capture(rows(20, dtype=dtype))
    x = rows(33, dtype=dtype)
    assert torch.equal(made(x), made.padded_eager(x))
    assert made.verify().is_ok


def test_autocast_is_captured_and_must_stay() -> None:
    net = Net().to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        made = graphed(net, inputs={"x": ROWS}, sizes=[8]).capture(rows(5))
        x = rows(7)
        assert torch.equal(made(x), made.padded_eager(x))
    with pytest.raises(GraphError, match="autocast"):
        made(rows(7))


def test_random_results_differ_from_call_to_call_and_repeat_with_their_seed() -> None:
    made = graphed(lambda x: nn.functional.dropout(x), inputs={"x": ROWS}, sizes=[16]).capture(rows(16))
    x = torch.ones(16, WIDTH, device=DEVICE)
    assert not torch.equal(made(x), made(x))
    torch.manual_seed(5)
    first = made(x)
    torch.manual_seed(5)
    assert torch.equal(made(x), first)


@pytest.mark.parametrize("n", [1, 5, 16])
def test_num_real_is_refreshed_at_every_replay(n: int) -> None:
    def mean(x: Tensor) -> Tensor:
        is_real = torch.arange(x.shape[0], device=x.device) < num_real("rows")
        return torch.where(is_real[:, None], x, 0).sum(0) / num_real("rows")

    made = graphed(mean, inputs={"x": ROWS}, sizes=[4, 16]).capture(rows(9))
    for _ in range(3):
        x = rows(n)
        torch.testing.assert_close(made(x), x.mean(0))


def test_a_host_read_leaves_that_size_eager_and_later_captures_work() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] != 16 else x * (2 + 0 * x.sum().item())

    made = graphed(fn, inputs={"x": ROWS}, sizes=[4, 16, 64]).capture(rows(20))
    report = made.report()
    assert [graph["num_tokens"] for graph in report["graphs"]] == [64, 4]
    assert "usual causes" in report["failures"][0]["message"]
    for n in (3, 16, 64):
        x = rows(n)
        torch.testing.assert_close(made(x), x * 2)
    make()[1](rows(5))
    assert torch.rand(3, device=DEVICE).isfinite().all()


def test_an_input_of_another_device_is_refused() -> None:
    _, made = make()
    with pytest.raises(GraphError, match="on cpu; captured were"):
        made(torch.randn(3, WIDTH))


# --- life cycle --------------------------------------------------------------------------------------------


def held_bytes() -> int:
    """What this process's allocator has from the driver, pools included: others may use the card, so its free
    memory tells nothing of ours. Cached blocks are given back first."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def big_forward(x: Tensor) -> Tensor:
    wide = x.repeat(1, 256)
    return (wide.sin() + wide.cos())[:, :WIDTH]


def test_release_gives_the_memory_back_to_the_driver() -> None:
    graphed(big_forward, inputs={"x": ROWS}, sizes=[8]).capture(rows(8)).release()  # one-time costs
    before = held_bytes()
    made = graphed(big_forward, inputs={"x": ROWS}, sizes=[512, 2048]).capture(rows(2048))
    made(rows(1500))
    assert made.report()["memory"]["pool_bytes"] > 100 << 20
    assert held_bytes() - before > 100 << 20
    made.release()
    assert torch.cuda.memory_reserved() - before < 8 << 20  # at once, without help


def test_recapture_many_times_does_not_grow() -> None:
    made = graphed(big_forward, inputs={"x": ROWS}, sizes=[64, 512]).capture(rows(512))
    made.recapture()
    before = torch.cuda.memory_reserved()  # of this process: others may use the card
    for _ in range(5):
        made.recapture()
    assert torch.cuda.memory_reserved() - before < 8 << 20


@pytest.mark.parametrize("how", ["rebind", "data"])
def test_weights_rebound_are_named_and_until_then_the_old_ones_are_read(how: str) -> None:
    net, made = make(audit="never")
    x = rows(10)
    before = made(x)
    weight = net.layers[1].weight
    if how == "rebind":
        net.layers[1].weight = nn.Parameter(torch.randn_like(weight), requires_grad=False)
    else:
        weight.data = torch.randn_like(weight)
    del weight
    gc.collect()
    churn = [torch.full((WIDTH, WIDTH), float("nan"), device=DEVICE) for _ in range(500)]
    assert torch.equal(made(x), before)
    del churn
    assert [change.name for change in made.audit()] == ["Net.layers.1.weight"]
    with pytest.raises(GraphError, match=r"Net\.layers\.1\.weight: moved"):
        made.revalidate(on_change="raise")
    made.revalidate()
    assert torch.equal(made(x), made.padded_eager(x))


def test_weights_copied_in_place_are_live() -> None:
    net, made = make()
    x = rows(10)
    before = made(x)
    for parameter in net.parameters():
        parameter.copy_(torch.randn_like(parameter) / 8)
    assert made.revalidate() == []
    assert not torch.equal(made(x), before)
    assert torch.equal(made(x), made.padded_eager(x))


def test_pause_lets_weights_go_and_resume_captures_where_they_came_back() -> None:
    net, made = make()
    x = rows(10)
    expected = made(x)
    made.pause(keep_graphs=False)
    net.to("cpu")
    torch.cuda.empty_cache()
    with pytest.raises(GraphError, match="is paused"):
        made(x)
    net.to(DEVICE)
    made.resume()
    assert made.state is State.READY
    assert torch.equal(made(x), expected)


@pytest.mark.parametrize("release_first", [0, 1])
def test_two_models_share_one_pool(release_first: int) -> None:
    pool = SharedPool.on(DEVICE)
    both = [make("plain", pool=pool)[1], make("break", pool=pool)[1]]
    batches = [rows(n) for n in (64, 3, 16)]
    expected = [[made(x) for x in batches] for made in both]
    for _ in range(3):
        for index, x in enumerate(batches):
            for made, want in zip(both, expected, strict=True):
                assert torch.equal(made(x), want[index])
    both[release_first].release()
    survivor, want = both[1 - release_first], expected[1 - release_first]
    for x, result in zip(batches, want, strict=True):
        assert torch.equal(survivor(x), result)
    survivor.release()
    assert pool.num_bytes == 0
    again = make("plain", pool=pool)[1]
    again(rows(5))


def test_graphs_dropped_without_release_take_nobody_with_them() -> None:
    keep = make()[1]
    for _ in range(3):
        make()[1](rows(5))
        gc.collect()
    x = rows(30)
    assert torch.equal(keep(x), keep.padded_eager(x))


# --- streams and threads -----------------------------------------------------------------------------------


def test_calls_run_on_the_stream_that_is_current() -> None:
    _, made = make()
    stream = torch.cuda.Stream()
    x = rows(10)
    expected = made(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = x + 0
        result = made(late)
    stream.synchronize()
    assert torch.equal(result, expected)


def test_calls_from_several_threads_take_turns() -> None:
    _, made = make()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(30):
                x = torch.randn(1 + seed * 7, WIDTH, device=DEVICE)
                torch.testing.assert_close(made(x), made.fn(x), atol=1e-4, rtol=1e-4)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_callable_captured_inside_another_becomes_part_of_it() -> None:
    _, inner = make()
    outer = graphed(lambda x: inner(x) * 2, inputs={"x": ROWS}, sizes=[16]).capture(rows(9))
    x = rows(12)
    torch.testing.assert_close(outer(x), inner.fn(x) * 2, atol=1e-4, rtol=1e-4)
    assert outer.report()["graphs"][0]["nodes"] > 3


# --- what it costs -----------------------------------------------------------------------------------------


def test_the_ledger_knows_nodes_memory_and_time(made: Graphed) -> None:
    for graph in made.report()["graphs"]:
        assert graph["nodes"] > 0
        assert graph["capture_s"] > 0
    assert made.report()["memory"]["pool_bytes"] > 0


def test_a_replay_is_one_launch_and_cheaper_than_eager() -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(40)])
    net = net.to(DEVICE).requires_grad_(False)
    made = graphed(net, inputs={"input": ROWS}, sizes=[16], copy_outputs=False).capture(rows(16))
    x = rows(10)
    device = get_device(DEVICE)
    replay = device.time(lambda: made(x), repeats=30)
    eager = device.time(lambda: net(x), repeats=30)
    assert replay < eager


# --- examples and the command ------------------------------------------------------------------------------

CLIENTS = {"openai_client", "openai_vision"}
"""They talk to a running server and use no device: tests/serve runs them."""
EXAMPLES = [
    path for path in sorted((Path(__file__).parents[2] / "examples").glob("*.py")) if path.stem not in CLIENTS
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_on_the_gpu(path: Path) -> None:
    module = load_script(path)
    assert torch.device(module.DEVICE).type == "cuda"
    assert module.main()["failures"] == []


@pytest.mark.parametrize("strategy", ["full", "breakable", "tc_piecewise"])
def test_the_engines_graphs_pass_verification(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ["--model", str(tmp_path), "--load-format", "dummy", "--device", "cuda"]
    limits = ["--max-running-requests", "16", "--chunked-prefill-size", "256", "--kv-cache-tokens", "8192"]
    code = main(["check", *model, *limits, "--few-sizes", "--cuda-graph-backend-prefill", strategy])
    assert code == 0, capsys.readouterr().out
