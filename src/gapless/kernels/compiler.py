"""What Triton does once per process before it compiles anything, and once per signature before it launches.

Its first kernel waits while it hashes its own library (415 MB, Triton 3.6: half a second and more), imports
Gluon, and builds a C module for the driver. ``prepare_compiler`` does all of that in a thread, beside imports
and weights; ``wait_for_compiler`` is for whoever compiles or launches next. ``WithLaunchers`` compiles
kernels side by side, and beside them the C that calls them, which the system's compiler takes 0.2 s for: a
launcher depends on a kernel's signature alone, so it waits for no kernel, and kernels of one signature share
it.
Read ``launch.py`` for who uses it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any

from triton import AsyncCompileMode

logger = logging.getLogger(__name__)

_MOST_HELD_BACK_S = 1.0

_lock = threading.Lock()
_preparing: threading.Thread | None = None


def prepare_compiler() -> None:
    """Start the thread, once per process."""
    global _preparing
    with _lock:
        if _preparing is None:
            _preparing = threading.Thread(target=_prepare, name="gapless-compiler", daemon=True)
            _preparing.start()


def wait_for_compiler() -> None:
    """Until the thread is done, if one was started: what it does would else be done twice."""
    if _preparing is not None:
        _preparing.join()


def _prepare() -> None:
    try:
        import triton.experimental.gluon  # noqa: F401  asked for by the first look at arguments
        from triton.runtime.cache import triton_key
        from triton.runtime.driver import driver

        triton_key()
        assert driver.active is not None  # the module of C is built when the driver is made
    except Exception as error:  # whoever needs it tries again, and reports
        logger.debug("Triton is made ready at the first kernel: %s", error)


class WithLaunchers(AsyncCompileMode):
    """Triton's mode in which kernels compile in threads, with their launchers."""

    def __init__(self, executor: Executor, *, begins: threading.Event) -> None:
        """Nothing is compiled before ``begins`` is set, or a second has passed since the first was asked for:
        whoever waits for a kernel in the meantime would wait for ever. A kernel that fails is left for its
        first launch."""
        super().__init__(executor, ignore_errors=True)
        self._begins = begins
        self._signatures: set[tuple[Any, ...]] = set()

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Any) -> Any:
        source = _source_of(compile_fn)
        is_apart = source is not None
        if is_apart:
            signature = tuple(source.signature.values())
            if signature not in self._signatures:
                self._signatures.add(signature)
                self.executor.submit(self._build_launcher, source)

        def compile_one() -> Any:
            self._wait_for_begin()
            compiled = compile_fn()
            if not is_apart:
                build_launcher(compiled.src, compiled.metadata)
            return compiled

        return super().submit(key, compile_one, finalize_fn)

    def _build_launcher(self, source: Any) -> None:
        self._wait_for_begin()
        build_launcher(source, _ANY_METADATA)

    def _wait_for_begin(self) -> None:
        if not self._begins.wait(_MOST_HELD_BACK_S):
            self._begins.set()  # else each of them in its turn would be held back for as long


def build_launcher(source: Any, metadata: Any) -> None:
    """The C module that calls a kernel: it stays in Triton's store, where the first launch finds it."""
    try:
        from triton.runtime.driver import driver

        driver.active.launcher_cls(source, metadata)
    except Exception as error:  # the first launch tries again, and reports
        logger.debug("a kernel's launcher is built at its first launch: %s", error)


_ANY_METADATA = SimpleNamespace(
    num_ctas=1,
    tensordesc_meta=None,
    global_scratch_size=0,
    global_scratch_align=1,
    profile_scratch_size=0,
    profile_scratch_align=1,
    launch_cooperative_grid=False,
    launch_pdl=False,
)
"""What a launcher object keeps of a compiled kernel; the C it is made of has none of it."""


def _source_of(compile_fn: Callable[[], Any]) -> Any:
    """What Triton's closure compiles, if a launcher can be made of it: descriptors of tensors in a signature
    are known when the kernel is. None, too, where Triton has its closure otherwise."""
    names = getattr(getattr(compile_fn, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(compile_fn, "__closure__", None) or (), strict=True))
    source = cells["src"].cell_contents if "src" in cells else None
    signature = getattr(source, "signature", None)
    if not isinstance(signature, dict):
        return None
    kinds = [kind for kind in signature.values() if isinstance(kind, str)]
    return None if any(kind.startswith("tensordesc") for kind in kinds) else source
