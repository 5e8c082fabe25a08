"""Static inputs on a GPU: pinned staging, the ring that guards it, tables of which only a part is copied."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gapless.engine.inputs import token_fields
from gapless.graphs.buffers import StaticInputs

pytestmark = pytest.mark.gpu


def test_loads_that_follow_each_other_closely_arrive_complete() -> None:
    """Without waiting for the device in between: more loads than the ring has slots, over buckets that share
    memory."""
    fields = token_fields(max_blocks=2560, vocab_size=1000, max_num_reqs=128)
    inputs = StaticInputs(
        fields, max_sizes={"tokens": 512, "reqs": 128, "rows": 128}, torch_device=torch.device("cuda")
    )
    rng, generator = random.Random(0), np.random.default_rng(0)
    copies, expected = [], []
    torch.cuda._sleep(20_000_000)
    for _ in range(40):
        bucket, width = rng.choice([1, 8, 128]), rng.choice([0, 1, 7, 60, 2560])
        num_reqs = rng.randint(1, bucket)
        views = inputs.views({"tokens": bucket, "reqs": bucket, "rows": bucket})
        table = np.zeros((bucket, 2560), dtype=np.int32)
        table[:num_reqs, :width] = generator.integers(1, 1000, (num_reqs, width))
        values = {f.name: np.zeros(num_reqs, dtype=np.int32) for f in fields}
        values["positions"] = generator.integers(1, 1000, num_reqs).astype(np.int32)
        values["query_start_loc"] = np.arange(num_reqs + 1, dtype=np.int32)
        values["block_table"] = table[:num_reqs, :width]
        inputs.load(views, values)
        copies.append((views["block_table"].clone(), views["positions"].clone()))
        expected.append((table, values["positions"]))
    for (copied, positions), (table, wanted) in zip(copies, expected, strict=True):
        assert np.array_equal(copied.cpu().numpy(), table)
        assert np.array_equal(positions.cpu().numpy()[: len(wanted)], wanted)
