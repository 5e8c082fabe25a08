"""Helper of the model tests: small random Transformers models whose every parameter matters.

Transformers initialises norms with 1 and biases with 0, which hides a loader that drops them; here all are
random.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

CONFIG_CLASSES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
}

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def random_model(model_type: str, *, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A float32 model in evaluation mode with plain ("eager") attention."""
    torch.manual_seed(seed)
    config = CONFIG_CLASSES[model_type](**{**_SIZES, **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:  # experts are stacked
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.3)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """``[n, V]``: one forward over the whole sequence, no cache."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def random_tokens(*lengths: int, vocab_size: int = 96, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]
