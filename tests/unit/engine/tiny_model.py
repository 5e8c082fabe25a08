"""A two-layer model with dummy weights and a runner around it: the least that runs every kind of step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gapless.config import EngineConfig
from gapless.engine.build import OpenedEngine, open_engine
from gapless.engine.request import Request, Sequence
from gapless.engine.step import ScheduledBatch, ScheduledSequence
from gapless.sampling.params import SamplingParams

VOCAB_SIZE = 97
BLOCK_SIZE = 16

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def write_config(folder: Path, **changes: Any) -> str:
    """A config folder for ``load_format="dummy"``; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(folder)


def open_tiny(folder: Path, *, device: str = "cpu", **options: Any) -> OpenedEngine:
    """An engine with small limits: 4 requests, 32 tokens a step, 32 blocks."""
    defaults: dict[str, Any] = {
        "max_running_requests": 4,
        "chunked_prefill_size": 32,
        "kv_cache_tokens": 32 * BLOCK_SIZE,
    }
    source = write_config(folder)
    values = {"model": source, "load_format": "dummy", "device": device, **defaults, **options}
    return open_engine(EngineConfig.from_sources(python=values))


class BatchMaker:
    """Makes scheduled batches of sequences with blocks of their own, without a scheduler."""

    def __init__(self, **params: Any) -> None:
        self.params = SamplingParams(**{"temperature": 0.0, "max_tokens": 1000, **params})
        self.sequences: list[Sequence] = []
        self.next_block = 1
        self.step_id = 0

    def sequence(self, tokens: list[int]) -> Sequence:
        request = Request(
            request_id=str(len(self.sequences)),
            prompt=None,
            prompt_token_ids=tuple(tokens),
            params=self.params,
            max_total_tokens=128,
        )
        sequence = Sequence(
            request=request,
            index=0,
            seed=len(self.sequences),
            token_ids=list(tokens),
            block_table=[],
            arrival=len(self.sequences),
        )
        self.sequences.append(sequence)
        return sequence

    def batch(self, work: list[tuple[Sequence, int]]) -> ScheduledBatch:
        """Compute the next ``count`` tokens of each sequence."""
        entries = []
        for sequence, count in work:
            start = sequence.num_computed_tokens
            while len(sequence.block_table) * BLOCK_SIZE < start + count:
                sequence.block_table.append(self.next_block)
                self.next_block += 1
            sequence.num_computed_tokens += count
            entries.append(
                ScheduledSequence(
                    sequence=sequence,
                    start=start,
                    num_new_tokens=count,
                    samples=start + count == len(sequence.token_ids),
                    generation=sequence.generation,
                    block_table=sequence.block_table,
                )
            )
        self.step_id += 1
        return ScheduledBatch(step_id=self.step_id, entries=tuple(entries))
