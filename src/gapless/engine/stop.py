"""When a choice ends, and how much of its text may be shown before that is known.

Two questions, kept apart: ``finish_of_token`` looks at token ids and counts (EOS, stop ids, length);
``StopStrings`` looks at text. A stop string may begin in one token and end in a later one, so text that could
still turn out to be the beginning of one is withheld. Invariant: what is found depends on the text alone,
never on how it was cut into tokens: the match that *completes* first wins, and of several that end there the
longest. Read ``core.py`` next.
"""

from __future__ import annotations

from dataclasses import dataclass

from gapless.engine.outputs import FinishReason
from gapless.engine.request import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """``stop_reason``: the stop string or the stop token id; None for EOS and for length."""

    reason: FinishReason
    stop_reason: str | int | None = None


_EOS = Finish(reason="stop")
_LENGTH = Finish(reason="length")


def finish_of_token(sequence: Sequence) -> Finish | None:
    """Does the token that was appended last end the choice?"""
    request = sequence.request
    token_id = sequence.token_ids[-1]
    if token_id in request.stop_token_ids and sequence.num_output_tokens > request.params.min_tokens:
        return _EOS if token_id in request.eos_token_ids else Finish(reason="stop", stop_reason=token_id)
    if sequence.num_tokens >= request.max_total_tokens:
        return _LENGTH
    return None


class StopStrings:
    """Searches a growing text for stop strings; feed it each new piece once."""

    def __init__(self, stops: tuple[str, ...], *, include_in_output: bool) -> None:
        self._stops = stops
        self._include_in_output = include_in_output
        self.text = ""
        """Everything fed so far; after a match, cut where the output ends."""
        self.num_visible = 0
        """How much of ``text`` may be shown."""

    def feed(self, piece: str, *, may_stop: bool = True) -> str | None:
        """Append ``piece``; return the stop string that now ends the text, or None.

        With ``may_stop`` false (before ``min_tokens``) matches that end inside ``piece`` are passed over.
        """
        start = len(self.text)
        self.text += piece
        if not self._stops:
            self.num_visible = len(self.text)
            return None
        stop = self._cut_at_first_match(start) if may_stop and piece else None
        if stop is None:
            withheld = 0 if self._include_in_output else self._num_withheld()
            self.num_visible = len(self.text) - withheld
        return stop

    def flush(self) -> None:
        """The text has ended without a match: nothing needs to be withheld any more."""
        self.num_visible = len(self.text)

    def _cut_at_first_match(self, start: int) -> str | None:
        """The earliest end past ``start``; with equal ends the earliest begin."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            begin = self.text.find(stop, max(0, start - len(stop) + 1))
            if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
                best = (begin + len(stop), begin, stop)
        if best is None:
            return None
        end, begin, stop = best
        self.text = self.text[: end if self._include_in_output else begin]
        self.num_visible = len(self.text)
        return stop

    def _num_withheld(self) -> int:
        """Length of the longest end of the text that is a proper beginning of a stop string."""
        return max(map(self._num_begun, self._stops))

    def _num_begun(self, stop: str) -> int:
        """Looks only where its first character stands: most texts have none near their end."""
        begin = self.text.find(stop[0], max(0, len(self.text) - len(stop) + 1))
        while begin >= 0:
            if stop.startswith(self.text[begin:]):
                return len(self.text) - begin
            begin = self.text.find(stop[0], begin + 1)
        return 0
