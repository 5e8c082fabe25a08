"""Without a GPU the Triton kernels run under Triton's interpreter, chosen before they are imported.

Two faults of the interpreter of Triton 3.6 are mended here: ``range`` over a scalar fails with NumPy >= 2.4,
and ``dot`` multiplies the bit patterns of bfloat16.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor
    _create_dot = interpreter.InterpreterBuilder.create_dot

    def _patch_with_scalar_index(tensor: Any, scope: Any) -> None:
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def _dot_of_values(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return _create_dot(self, _widened(a), _widened(b), *rest)

    def _widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter._patch_lang_tensor = _patch_with_scalar_index
    interpreter.InterpreterBuilder.create_dot = _dot_of_values
