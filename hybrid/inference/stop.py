"""When a completion ends: end-of-sequence ids, stop ids, stop strings, length."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from hybrid.inference.params import SamplingParams
from hybrid.inference.sequence import FinishReason, Sequence

_INCOMPLETE = "\ufffd"  # what a tokenizer decodes the first bytes of an unfinished character to


class _StopScan:
    """The text of one sequence as it grows, searched for stop strings."""

    def __init__(self, tokenizer: Any, stop: Seq[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._longest = max(map(len, stop))
        self._text = ""  # of the tokens before `_read`
        # A token may decode differently at the start of a text (a leading space is dropped), so new tokens are decoded
        # behind the ones before them, and the text of those alone is taken off again.
        self._context, self._read = 0, 0

    def push(self, ids: list[int], *, may_stop: bool) -> tuple[str, str] | None:
        """Take in the completion so far; ``(stop string, text before it)`` if its last token completed one."""
        known = self._decode(ids[self._context : self._read])
        grown = self._decode(ids[self._context :])
        new = grown[len(known) :]
        text = self._text + new
        # Anything that ends in what was there before has been looked for already.
        start = max(0, len(self._text) - self._longest + 1)
        found = [(place, string) for string in self._stop if (place := text.find(string, start)) >= 0]
        if found and may_stop:
            place, string = min(found, key=lambda hit: hit[0])
            return string, text[:place]
        if new and not new.endswith(_INCOMPLETE):
            self._text = text
            self._context, self._read = self._read, len(ids)
        return None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""


class StopChecker:
    """Decides after each token whether its sequence has ended, and gives its text.

    Args:
        tokenizer: transformers'; None where completions need no text and no stop strings.
        eos_token_ids: each of them ends a completion.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Seq[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = tuple(dict.fromkeys(eos_token_ids))
        # Completions are decoded without special tokens, so a stop string that is one is looked for as an id.
        self._special_ids: dict[str, int] = {}
        if tokenizer is not None:
            self._special_ids = {text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.all_special_tokens}
        self._scans: dict[Sequence, _StopScan] = {}
        self._texts: dict[Sequence, str] = {}

    def require_can_check(self, params: SamplingParams) -> None:
        """Raise ValueError for stop strings without a tokenizer to see them with."""
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer and there is none; use stop_token_ids")

    def ending_ids(self, sequence: Sequence) -> list[int]:
        """The ids that would end a sequence."""
        params = sequence.params
        ids = [] if params.ignore_eos else [*self._eos]
        return [*ids, *params.stop_token_ids, *(self._special_ids[s] for s in params.stop if s in self._special_ids)]

    def check(self, sequence: Sequence) -> tuple[FinishReason, int | str | None] | None:
        """Why a sequence ends with its last token, or None if it goes on.

        Ids that end a sequence have no probability before its ``min_tokens`` (see Sampler), so only strings and
        lengths look at the count.
        """
        params, last = sequence.params, sequence.token_ids[-1]
        if (last in self._eos and not params.ignore_eos) or last in params.stop_token_ids:
            return "stop", last
        if params.stop:
            stopped = self._check_strings(sequence, last)
            if stopped is not None:
                return "stop", stopped
        return ("length", None) if sequence.num_completion_tokens >= params.max_tokens else None

    def text(self, sequence: Sequence) -> str:
        """The text of a finished sequence, cut before a stop string; what was kept for it is dropped."""
        self._scans.pop(sequence, None)
        cut = self._texts.pop(sequence, None)
        if cut is not None:
            return cut
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(sequence.completion_ids, skip_special_tokens=True)

    def reset(self) -> None:
        """Drop what was kept for sequences that never finished."""
        self._scans.clear()
        self._texts.clear()

    def _check_strings(self, sequence: Sequence, last: int) -> str | None:
        params = sequence.params
        for string in params.stop:
            if self._special_ids.get(string) == last:
                return string
        scan = self._scans.get(sequence)
        if scan is None:
            scan = self._scans[sequence] = _StopScan(self._tokenizer, params.stop)
        may_stop = sequence.num_completion_tokens >= params.min_tokens
        found = scan.push(sequence.completion_ids, may_stop=may_stop)
        if found is None:
            return None
        string, self._texts[sequence] = found
        return string
