"""A tiny random model whose tokens are bytes, so that any text can come out of it, and a server of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NAME = "tiny"
HIDDEN_SIZE = 32
MAX_MODEL_LEN = 1024
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 256,
}
TEMPLATE = """\
{%- if tools %}TOOLS {% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call>|{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] %} calls {{ c.function.name }} of {{ c.function.arguments.name }}{% endfor %}
{%- if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}|{% endfor %}
{%- if mood is defined %}mood {{ mood }}|{% endif %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
OPTIONS = ("--load-format", "dummy", "--enforce-eager", "--kv-cache-tokens", "4096", "--port", "0")


def write_model(folder: Path) -> None:
    """A byte a token, then EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps(CONFIG))


@contextmanager
def served(folder: Path, *options: str, has_graphs: bool = False, has_weights: bool = False) -> Iterator[str]:
    """The address of a server of the model in ``folder``."""
    without = ({"--enforce-eager"} if has_graphs else set()) | (
        {"--load-format", "dummy"} if has_weights else set()
    )
    base = [option for option in OPTIONS if option not in without]
    log = folder / "log"
    command = [sys.executable, "-m", "gapless.launch_server", f"--model-path={folder}", *base]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--served-model-name", NAME, *options],
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline = time.monotonic() + 120
        while (found := re.search(r"serving at (\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)
