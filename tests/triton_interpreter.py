"""Without a GPU kernels run under Triton's interpreter (``conftest.py`` chooses it). Importing this mends it.

The interpreter of Triton 3.6 cuts bfloat16 results off instead of rounding them to nearest even, as the
hardware and PyTorch do, multiplies tiles of bfloat16 by their bit patterns, and with NumPy >= 2.4 fails at
``range`` over a scalar. ``quick_interpreter.py`` makes it faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    import triton
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    _cast = interpreter.InterpreterBuilder.cast_impl

    def _cast_rounding(self: Any, src: Any, dst_type: Any) -> Any:
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
            return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            widened = (np.asarray(src.data).astype(np.uint32) << 16).view(np.float32)
            return interpreter.TensorHandle(widened, tl.float32)
        return _cast(self, src, dst_type)

    _dot = interpreter.InterpreterBuilder.create_dot

    def _dot_widening(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        left, right = (
            _cast_rounding(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return _dot(self, left, right, *rest)

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch_with_scalar_index(tensor: Any, scope: Any) -> None:
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_scalar_index
    interpreter.InterpreterBuilder.cast_impl = _cast_rounding
    interpreter.InterpreterBuilder.create_dot = _dot_widening

    if triton.__version__.startswith("3.6."):
        import quick_interpreter  # noqa: F401
