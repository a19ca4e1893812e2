"""The text of completions, whole or as their tokens come in."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

_INCOMPLETE = "\ufffd"  # what a tokenizer decodes the first bytes of an unfinished character to


def decode(tokenizer: Any, token_ids: Seq[int]) -> str:
    """What the tokens spell, without special ones, every space where it was."""
    if not token_ids:
        return ""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class GrowingText:
    """The text of one completion, token by token: searched for stop strings, and handed out in pieces.

    A piece holds nothing that a later token could change: no unfinished character, and no beginning of a stop string.

    Args:
        tokenizer: transformers'.
        stop: the strings to look for.
    """

    def __init__(self, tokenizer: Any, stop: Seq[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._text = ""  # no later token changes it
        self._unfinished = ""  # what is behind it
        self._num_taken = 0
        self._whole: str | None = None  # once it has ended
        # A token may decode differently at the start of a text (a leading space is dropped), so new tokens are decoded
        # behind the ones before them, and the text of those alone is taken off again.
        self._context, self._read = 0, 0
        self._text_of_read = ""

    def push(self, token_ids: Seq[int], *, may_stop: bool) -> str | None:
        """Take in the completion so far; a stop string if its last token completed one, and then the text is cut.

        Args:
            token_ids: all of them; those of the last call lead.
            may_stop: False lets a string that is complete by now pass.
        """
        num_searched = len(self._text)
        known = decode(self._tokenizer, token_ids[self._context : self._read])
        grown = decode(self._tokenizer, token_ids[self._context :])
        new = grown[len(known) :]
        finished = new.rstrip(_INCOMPLETE)
        self._text = self._text_of_read + finished
        self._unfinished = new[len(finished) :]
        if new and not self._unfinished:
            self._text_of_read = self._text
            self._context, self._read = self._read, len(token_ids)
        return self._search(num_searched) if may_stop else None

    def take(self) -> str:
        """The text that has become certain since the last call."""
        end = len(self._text) - self._num_withheld()
        piece = self._text[self._num_taken : end]
        self._num_taken += len(piece)
        return piece

    def finish(self, token_ids: Seq[int]) -> str:
        """The whole text, which begins with all that was taken; cut before a stop string that was found."""
        if self._whole is None:
            whole = decode(self._tokenizer, token_ids)
            # Some tokenizers judge bytes by what follows: where a completion ends within a character, the whole of it
            # may then decode to other text than its tokens did one after another.
            self._whole = whole if whole.startswith(self._text) else self._text + self._unfinished[:1]
        return self._whole

    def _search(self, start: int) -> str | None:
        """The first stop string to end behind ``start``; those that ended before have been looked for."""
        found = [
            (place, string)
            for string in self._stop
            if (place := self._text.find(string, max(0, start - len(string) + 1))) >= 0
        ]
        if not found:
            return None
        place, string = min(found, key=lambda hit: hit[0])
        self._whole = self._text[:place]
        return string

    def _num_withheld(self) -> int:
        """How much of the text's end could be the beginning of a stop string."""
        for length in range(max(map(len, self._stop), default=0) - 1, 0, -1):
            tail = self._text[-length:]
            if len(tail) == length and any(string.startswith(tail) for string in self._stop if len(string) > length):
                return length
        return 0
