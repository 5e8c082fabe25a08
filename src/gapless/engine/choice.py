"""What a caller gets to see of one sequence: its text so far, its log-probabilities, why it ended.

Text is made only when somebody needs it: at every token for a request that streams or has stop strings, else
once at the end (decoding token by token for hundreds of sequences would cost more than a decode step on a
GPU). Invariant: the text does not depend on which of the two was chosen. A stop token, EOS included, stays in
``token_ids`` and out of the text. Read ``core.py`` next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gapless.engine.detokenizer import Detokenizer, TokenizerLike
from gapless.engine.outputs import ChoiceDelta, CompletionOutput, Logprob
from gapless.engine.request import Sequence
from gapless.engine.step import TokenLogprob
from gapless.engine.stop import Finish, StopStrings, finish_of_token
from gapless.errors import GaplessError

TokenText = Callable[[int], str | None]
"""The text of one token by itself, for log-probabilities; None without a tokenizer."""


class Choice:
    """Grows with each accepted token; ``close`` once the scheduler has finished the sequence."""

    def __init__(
        self, sequence: Sequence, *, tokenizer: TokenizerLike | None, token_text: TokenText, streams: bool
    ) -> None:
        params = sequence.params
        self.sequence, self.streams = sequence, streams
        self._token_text = token_text
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._text = StopStrings(tuple(params.stop), include_in_output=params.include_stop_str_in_output)
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt_tokens,
                skip_special_tokens=params.skip_special_tokens,
            )
        self._reads_every_token = self._detokenizer is not None and (streams or bool(params.stop))
        self._num_text_tokens = sequence.num_tokens
        self._has_stop_string = False
        # What deltas have told already: characters, tokens, and the end.
        self._num_told_chars = 0
        self._num_told_tokens = sequence.num_tokens
        self._has_told_end = False
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None and sequence.index == 0:
            self.prompt_logprobs = [None] * sequence.num_prompt_tokens
        self._has_told_prompt = self.prompt_logprobs is None
        self.embedding: list[float] | None = None
        self._is_plain = self._logprobs is None and not self._reads_every_token and sequence.matcher is None
        """Tokens are only counted and looked up among those that end the choice."""
        self._is_plain_text = (
            self._reads_every_token
            and not params.stop
            and self._logprobs is None
            and sequence.matcher is None
        )
        """The same, and become text that may be shown at once."""
        self._stop_token_ids = sequence.request.stop_token_ids
        self._max_total_tokens = sequence.request.max_total_tokens

    def accept(self, token_id: int, candidates: Iterable[TokenLogprob] | None) -> Finish | None:
        """Take the token drawn next; say whether the choice ends with it."""
        sequence = self.sequence
        sequence.append_token(token_id)
        if (self._is_plain or self._is_plain_text) and token_id not in self._stop_token_ids:
            num_tokens = len(sequence.token_ids)
            if num_tokens < self._max_total_tokens:
                self._num_text_tokens = num_tokens
                if self._detokenizer is not None and self._is_plain_text:
                    self._text.feed(self._detokenizer.advance(num_tokens))
                return None
        if self._logprobs is not None and candidates is not None:
            self._logprobs.append(self._with_text(candidates))
        finish = finish_of_token(sequence)
        if sequence.matcher is not None:
            finish = self._match(token_id) or finish
        is_stop_token = finish is not None and finish.reason == "stop"
        if not is_stop_token or sequence.params.include_stop_str_in_output:
            self._num_text_tokens = sequence.num_tokens
        if not self._reads_every_token:
            return finish
        stop = self._read(may_stop=sequence.num_output_tokens >= sequence.params.min_tokens)
        if stop is None:
            return finish
        self._has_stop_string = True
        return Finish(reason="stop", stop_reason=stop)

    def accept_prompt_logprobs(self, start: int, rows: Iterable[Iterable[TokenLogprob]]) -> None:
        """Scores of the prompt's tokens from ``start`` on; once more after a preemption."""
        assert self.prompt_logprobs is not None
        for position, row in enumerate(rows, start):
            self.prompt_logprobs[position] = self._with_text(row)

    def close(self) -> None:
        """The sequence has ended: nothing is held back any longer."""
        self.sequence.matcher = None
        if self._detokenizer is None or self._has_stop_string:
            return
        self._read(may_stop=False)
        self._text.feed(self._detokenizer.flush(), may_stop=False)
        self._text.flush()

    def snapshot(self) -> CompletionOutput:
        sequence = self.sequence
        return CompletionOutput(
            index=sequence.index,
            text=self._text.text[: self._text.num_visible],
            token_ids=tuple(sequence.output_token_ids),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            error=sequence.error,
        )

    def take_delta(self) -> ChoiceDelta | None:
        """What is new since the last call; None when nothing is. Costs as much as what is new, however long
        the answer has become."""
        sequence = self.sequence
        token_ids = sequence.token_ids[self._num_told_tokens :]
        visible = self._text.num_visible
        is_end = sequence.finish_reason is not None and not self._has_told_end
        if not (token_ids or is_end or visible > self._num_told_chars):
            return None
        text = self._text.text[self._num_told_chars : visible]
        logprobs = None
        if self._logprobs is not None:
            num_told = self._num_told_tokens - sequence.num_prompt_tokens
            logprobs = self._logprobs[num_told : num_told + len(token_ids)]
        self._num_told_tokens += len(token_ids)
        self._num_told_chars = visible
        if not is_end and self._has_told_prompt:
            return ChoiceDelta(sequence.request.request_id, sequence.index, text, token_ids, logprobs)
        self._has_told_end = is_end
        prompt_logprobs = None if self._has_told_prompt else self.prompt_logprobs
        self._has_told_prompt = True
        return ChoiceDelta(
            sequence.request.request_id,
            sequence.index,
            text,
            token_ids,
            logprobs,
            sequence.finish_reason,
            sequence.stop_reason,
            sequence.error,
            prompt_logprobs,
            self.embedding,
            sequence.num_cached_tokens if is_end else 0,
        )

    def _match(self, token_id: int) -> Finish | None:
        """Move on in the grammar. Its end is the end of the choice, whatever ``ignore_eos`` and
        ``min_tokens`` say: no further token would fit."""
        matcher, request = self.sequence.matcher, self.sequence.request
        assert matcher is not None
        if not matcher.accept(token_id):
            raise GaplessError(f"token {token_id} does not fit the grammar")
        if not matcher.is_terminated:
            return None
        is_own = token_id in request.params.stop_token_ids and token_id not in request.eos_token_ids
        return Finish(reason="stop", stop_reason=token_id if is_own else None)

    def _with_text(self, candidates: Iterable[TokenLogprob]) -> dict[int, Logprob]:
        return {
            c.token_id: Logprob(logprob=c.logprob, rank=c.rank, decoded_token=self._token_text(c.token_id))
            for c in candidates
        }

    def _read(self, *, may_stop: bool) -> str | None:
        assert self._detokenizer is not None
        return self._text.feed(self._detokenizer.advance(self._num_text_tokens), may_stop=may_stop)
