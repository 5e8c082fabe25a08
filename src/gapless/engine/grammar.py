"""Grammars: compiled beside the step loop, and the matcher that says which tokens may come next.

Compiling runs in threads (xgrammar leaves the interpreter free meanwhile), so a large schema holds up nobody
but its own request; what is compiled is kept by its text, for all requests. A matcher belongs to one choice:
it takes each token that was drawn and gives a bit per token of the vocabulary for the next. Its state follows
``Sequence.token_ids``, which a preemption keeps. Invariants: whatever is wrong with a grammar is a
``RequestError`` with the compiler's reason; a grammar whose masks become expensive ends its own request only;
what a matcher allows is valid UTF-8 (``utf8.py``). Read ``grammar_masks.py`` for the way of the bits to the
device.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from gapless.engine.detokenizer import TokenizerLike
from gapless.engine.grammar_schema import close_gaps, prepare_schema
from gapless.engine.utf8 import START, Utf8Masks
from gapless.errors import GaplessError, RequestError
from gapless.sampling.structured import GrammarKind, StructuredOutputsParams

MAX_GRAMMAR_CHARS = 1 << 18
"""A schema of this size, a thousand fields, compiles in about a second."""
MAX_WHITESPACE = 40
"""Between two parts of a JSON text: enough for an indented line, and no model is lost in blanks."""
MAX_MASK_S = 0.25
"""Processor time of one mask; ambiguous grammars need more with each token, up to minutes."""
_CACHE_BYTES = 1 << 28
_NUM_WORKERS = 2
_MAX_THREADS = 4
"""Of one compilation."""


class CompiledGrammar:
    """A grammar over the tokens of one model, shared by all who ask for it."""

    def __init__(self, handle: Any, utf8: Utf8Masks) -> None:
        self.handle, self.utf8 = handle, utf8
        self.num_bytes: int = handle.memory_size_bytes


class GrammarMatcher:
    """Where one choice stands in its grammar. ``end_ids``: the tokens that may end it."""

    def __init__(self, grammar: CompiledGrammar, end_ids: Iterable[int]) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar.handle, override_stop_tokens=sorted(end_ids))
        self._utf8, self._utf8_state = grammar.utf8, START
        self._spent_s = 0.0

    @property
    def is_terminated(self) -> bool:
        """An end token has been taken."""
        return self._matcher.is_terminated()

    def fill(self, words_W: np.ndarray, *, banned: Iterable[int] = ()) -> None:
        """Set the bit of every token that may come next, 32 to an int32 word, lowest first.

        ``banned`` tokens are left out as long as there are others. Raises ``GaplessError`` when no token
        fits, or when finding them has become too expensive.
        """
        start = time.thread_time()
        if not self._matcher.fill_next_token_bitmask(words_W[None]):
            words_W[:] = -1  # all of them
        words_W &= self._utf8.words_SW[self._utf8_state]
        if self._spent_s + time.thread_time() - start > MAX_MASK_S:
            raise GaplessError(
                f"the grammar has become too expensive: one token takes more than {MAX_MASK_S} s to check; "
                "make it less ambiguous (nested repetitions, as in (a*)*, are the usual cause)"
            )
        if not words_W.any():
            raise GaplessError("the grammar allows no token here: no text fits it")
        remaining_W = words_W.view(np.uint32).copy()
        for token in banned:
            remaining_W[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        if remaining_W.any():
            words_W[:] = remaining_W.view(np.int32)

    def accept(self, token_id: int) -> bool:
        """Take the token drawn from the last mask; False when it does not fit."""
        start = time.thread_time()
        utf8_state = self._utf8.advance(self._utf8_state, token_id)
        if utf8_state is None or not self._matcher.accept_token(token_id):
            return False
        self._utf8_state = utf8_state
        self._spent_s = time.thread_time() - start
        return True


class GrammarCompiler:
    """Compiles for one vocabulary; any thread may call it. Threads start with the first grammar."""

    def __init__(
        self, tokenizer: TokenizerLike | None, *, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._lock = threading.Lock()
        self._setup_lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._compiler: Any = None
        self._utf8: Utf8Masks | None = None
        self._special_ids: frozenset[int] = frozenset()
        self._cache: OrderedDict[tuple[GrammarKind, str], Future[CompiledGrammar]] = OrderedDict()

    def start(self, wanted: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """Begin to compile, or find what is compiled already. The future, or this, raises
        ``RequestError``."""
        text = wanted.text
        if len(text) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"structured_outputs: the {wanted.kind} has {len(text)} characters, more than the "
                f"{MAX_GRAMMAR_CHARS} that are allowed"
            )
        if not hasattr(self._tokenizer, "token_bytes"):
            raise RequestError("structured_outputs need a tokenizer, and this model has none")
        key = (wanted.kind, text)
        with self._lock:
            future = self._cache.get(key)
            is_new = future is None
            if future is None:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="gapless-grammar")
                future = self._cache[key] = self._pool.submit(self._compile, wanted.kind, text)
            self._cache.move_to_end(key)
        if is_new:  # without the lock, which the callback takes
            future.add_done_callback(lambda done: self._settle(key, done))
        return future

    def compile(self, wanted: StructuredOutputsParams) -> CompiledGrammar:
        """``start``, and wait. Raises ``RequestError``."""
        return self.start(wanted).result()

    def end_ids(self, stop_token_ids: Iterable[int]) -> frozenset[int]:
        """Tokens that may end a text which fits its grammar, once something has been compiled: the model's
        own, and those stop tokens that are no text themselves. Raises ``RequestError`` without any."""
        end_ids = self.eos_token_ids.union(t for t in stop_token_ids if t in self._special_ids)
        if not end_ids:
            raise RequestError(
                "structured_outputs need a token that ends the text, and this model names none; give a "
                "special token in stop_token_ids"
            )
        return end_ids

    def _compile(self, kind: GrammarKind, text: str) -> CompiledGrammar:
        compiler = self._get_compiler()
        if kind == "json_object":
            kind, text = "json_schema", '{"type": "object"}'
        elif kind == "json_schema":
            text = prepare_schema(text)
        try:
            if kind == "json_schema":
                handle = compiler.compile_grammar(_schema_grammar(text))
            elif kind == "regex":
                handle = compiler.compile_regex(text)
            else:
                handle = compiler.compile_grammar(text)
        except Exception as error:  # of many types; all mean that this grammar cannot be used
            name = {"json_schema": "JSON schema", "regex": "regular expression", "ebnf": "grammar"}[kind]
            raise RequestError(f"the {name} cannot be used: {_reason(error)}") from None
        assert self._utf8 is not None
        return CompiledGrammar(handle, self._utf8)

    def _get_compiler(self) -> Any:
        with self._setup_lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            return self._compiler

    def _make_compiler(self) -> Any:
        try:
            import xgrammar
        except ImportError as error:
            raise RequestError(
                f"structured_outputs need the package xgrammar ({error}): pip install 'gapless[serve]'"
            ) from None
        vocabulary = self._tokenizer.token_bytes()[: self._vocab_size]  # type: ignore[union-attr]
        # Rows of logits may be wider than the tokenizer: ids without text are never allowed.
        info = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=sorted(self.eos_token_ids),
        )
        self._special_ids = frozenset(i for i, text in enumerate(vocabulary) if not text)
        self._utf8 = Utf8Masks(vocabulary, self._vocab_size)
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        return xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_enabled=False)

    def _settle(self, key: tuple[GrammarKind, str], done: Future[CompiledGrammar]) -> None:
        """Forget what failed, and the oldest of what is too much."""
        with self._lock:
            if done.exception() is not None and self._cache.get(key) is done:
                del self._cache[key]
            compiled = [k for k, future in self._cache.items() if future.done() and not future.exception()]
            total = sum(self._cache[k].result().num_bytes for k in compiled)
            for oldest in compiled[:-1]:
                if total <= _CACHE_BYTES:
                    break
                total -= self._cache.pop(oldest).result().num_bytes


def _schema_grammar(schema: str) -> Any:
    import xgrammar

    grammar = xgrammar.Grammar.from_json_schema(schema, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
    printed = str(grammar)
    closed = close_gaps(printed)
    return grammar if closed == printed else xgrammar.Grammar.from_ebnf(closed)


def _reason(error: Exception) -> str:
    """The compiler's words without the place in its own source."""
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()[:500] or type(error).__name__
