"""Compiles the kernels of a mixture of experts for a Hopper GPU, without one, with the tiles that the rule
gives Qwen3-30B-A3B; prints a line of JSON per launch.

Run by ``test_compiled_moe.py`` in a process of its own, where Triton is not interpreting.
"""

from __future__ import annotations

from typing import Any

import torch
from compile_fused_kernels import CompilingKernels

from gapless.kernels import moe, moe_jit, moe_product_jit, moe_sum, moe_sum_jit

NUM_EXPERTS, TOP_K, HIDDEN, SIZE = 128, 8, 2048, 768
CASES = ((torch.bfloat16, 1), (torch.float16, 32), (torch.bfloat16, 2048), (torch.float32, 256))


def describe(args: tuple[Any, ...], constants: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": str(args[0].dtype), "block_p": constants.get("BLOCK_P")}


def main() -> None:
    for module, name, source in (
        (moe, "_kernels", moe_jit),
        (moe, "_product_kernels", moe_product_jit),
        (moe_sum, "_kernels", moe_sum_jit),
    ):
        kernels = CompilingKernels(source, describe)
        setattr(module, name, lambda kernels=kernels: kernels)
        module.launch_options = lambda device: {"EARLY": True, "launch_pdl": True}  # type: ignore[attr-defined]

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu" if len(shape) < 3 else "meta")

    for dtype, num_tokens in CASES:
        x, logits = empty(num_tokens, HIDDEN, dtype=dtype), empty(num_tokens, NUM_EXPERTS, dtype=dtype)
        gate_up = empty(NUM_EXPERTS, 2 * SIZE, HIDDEN, dtype=dtype)
        down = empty(NUM_EXPERTS, HIDDEN, SIZE, dtype=dtype)
        real, out = empty(5), torch.empty_like(x)
        block_p = moe.block_slots(num_tokens, num_experts=NUM_EXPERTS, top_k=TOP_K)
        weights, _, slots, blocks, _ = moe.route_tokens(logits, real, TOP_K, True, block_p)
        for weight, scales, num_out, is_gate_up in (
            (gate_up, None, SIZE, True),
            (down, weights, HIDDEN, False),
        ):
            tiles = moe.choose_tiles(
                num_tokens,
                num_experts=NUM_EXPERTS,
                top_k=TOP_K,
                num_out=num_out,
                is_gate_up=is_gate_up,
                itemsize=dtype.itemsize,
            )
            rows = x if is_gate_up else empty(num_tokens * TOP_K, SIZE, dtype=dtype)
            result = empty(num_tokens * TOP_K, num_out, dtype=dtype)
            moe.launch_expert_product(rows, weight, slots, blocks, scales, result, tiles, top_k=TOP_K)
        by_slot = empty(num_tokens * TOP_K, HIDDEN, dtype=dtype)
        moe_sum.combine_experts(by_slot, real, None, None, out)
        moe_sum.combine_experts(by_slot, real, x, empty(num_tokens, 1, dtype=dtype), out)
        moe_sum.combine_add_rms_norm(by_slot, real, None, None, x, empty(HIDDEN, dtype=dtype), 1e-6)


if __name__ == "__main__":
    main()
