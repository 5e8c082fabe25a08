"""Piecewise graphs by ``torch.compile``: the forward is traced once and cut at its split ops.

Start with ``compile.py`` (the trampoline), then ``backend.py``, ``split.py``, ``compilers.py``, ``piece.py``,
``passes.py`` and ``failure.py``.
"""

from __future__ import annotations

from gapless.graphs.piecewise.backend import PiecewiseConfig
from gapless.graphs.piecewise.compile import PiecewiseForward, install, uninstall
from gapless.graphs.piecewise.passes import FuseOutputCast, register_pass, registered_passes, unregister_pass

__all__ = [
    "FuseOutputCast",
    "PiecewiseConfig",
    "PiecewiseForward",
    "install",
    "register_pass",
    "registered_passes",
    "uninstall",
    "unregister_pass",
]
