"""When a completion ends: end-of-sequence ids, stop ids, stop strings, length."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from hybrid.inference.detokenizer import GrowingText, decode
from hybrid.inference.params import SamplingParams
from hybrid.inference.sequence import FinishReason, Sequence


class StopChecker:
    """Decides after each token whether its sequence has ended, and gives its text.

    Text is decoded token by token only for sequences that have stop strings or are followed.

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
        self._growing: dict[Sequence, GrowingText] = {}

    def require_can_check(self, params: SamplingParams) -> None:
        """Raise ValueError for stop strings without a tokenizer to see them with."""
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer and there is none; use stop_token_ids")

    def ending_ids(self, sequence: Sequence) -> list[int]:
        """The ids that would end a sequence."""
        params = sequence.params
        ids = [] if params.ignore_eos else [*self._eos]
        return [*ids, *params.stop_token_ids, *(self._special_ids[s] for s in params.stop if s in self._special_ids)]

    def follow(self, sequences: Seq[Sequence]) -> None:
        """Decode the text of sequences as it grows, for `new_text`."""
        if self._tokenizer is not None:
            self._growing |= {each: GrowingText(self._tokenizer, each.params.stop) for each in sequences}

    def check(self, sequence: Sequence) -> tuple[FinishReason, int | str | None] | None:
        """Why a sequence ends with its last token, or None if it goes on.

        Ids that end a sequence have no probability before its ``min_tokens`` (see Sampler), so only strings and
        lengths look at the count.
        """
        params, last = sequence.params, sequence.token_ids[-1]
        if (last in self._eos and not params.ignore_eos) or last in params.stop_token_ids:
            return "stop", last
        if params.stop or sequence in self._growing:
            stopped = self._check_text(sequence, last)
            if stopped is not None:
                return "stop", stopped
        return ("length", None) if sequence.num_completion_tokens >= params.max_tokens else None

    def new_text(self, sequence: Sequence) -> str:
        """What has become certain of a followed sequence's text since the last call."""
        growing = self._growing.get(sequence)
        return "" if growing is None else growing.take()

    def text(self, sequence: Sequence) -> str:
        """The text of a finished sequence, cut before a stop string; what was kept for it is dropped."""
        growing = self._growing.pop(sequence, None)
        if growing is not None:
            return growing.finish(sequence.completion_ids)
        return "" if self._tokenizer is None else decode(self._tokenizer, sequence.completion_ids)

    def reset(self) -> None:
        """Drop what was kept for sequences that never finished."""
        self._growing.clear()

    def _check_text(self, sequence: Sequence, last: int) -> str | None:
        params = sequence.params
        for string in params.stop:
            if self._special_ids.get(string) == last:
                return string
        growing = self._growing.get(sequence)
        if growing is None:
            growing = self._growing[sequence] = GrowingText(self._tokenizer, params.stop)
        may_stop = sequence.num_completion_tokens >= params.min_tokens
        return growing.push(sequence.completion_ids, may_stop=may_stop)
