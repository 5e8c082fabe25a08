"""Without a GPU the Triton kernels of this folder run under Triton's interpreter."""

import triton_interpreter  # noqa: F401
