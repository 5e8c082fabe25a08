"""Fused kernels around a decoder's matrix products: norm, rotation with cache write, activation, greedy head.

Between two matrix products of a decode step there is little to compute, but every torch operation is a node
of its own, and on a GPU a node that waits for another costs about a microsecond whatever it does. Each stage
is therefore one Triton kernel behind one opaque operator. All of them are capture-safe: a launch depends on
shapes only, indices are read from device memory when the kernel runs. The torch forward of the decoder is
their oracle and the path of every device without Triton. Read ``select.py`` for who uses them, ``jit.py`` for
the kernels.
"""
