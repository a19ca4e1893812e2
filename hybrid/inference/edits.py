"""What a sequence's parameters change in its logits, ready for each step, with its tokens counted as they come."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from hybrid.inference.params import SamplingParams
from ops.sampling_edits import LogitEdits, Penalties


class TokenCounts:
    """How often each token occurs in a completion; those of its prompt are in the list with the times they are not."""

    def __init__(self, prompt_ids: Iterable[int], completion_ids: Iterable[int] = ()) -> None:
        # Arrays, so that a step copies memory and does not read Python's numbers one by one.
        self._ids = array("q", dict.fromkeys(prompt_ids))
        self._counts = array("q", bytes(8 * len(self._ids)))
        self._places = {token: place for place, token in enumerate(self._ids)}
        for token in completion_ids:
            self.add(token)

    def add(self, token_id: int) -> None:
        """Count a token of the completion."""
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts[place] += 1

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(K,) int64 distinct ids and (K,) int64 times each occurs in the completion."""
        return np.array(self._ids), np.array(self._counts)


class SequenceEdits:
    """One sequence's edits, whatever part of them stays the same made once.

    Args:
        params: the sequence's.
        prompt_ids, completion_ids: what it has so far; tell what comes with `add`.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> None:
        self._params = params
        self._counts: TokenCounts | None = None
        if params.has_penalties:
            # The other two penalties say nothing about the prompt.
            self._counts = TokenCounts(prompt_ids if params.repetition_penalty != 1 else (), completion_ids)
        self._allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64)
        self._biased = self._biases = None
        if params.logit_bias:
            self._biased = np.array(list(params.logit_bias), np.int64)
            self._biases = np.array(list(params.logit_bias.values()), np.float32)
        self._always = LogitEdits(allowed=self._allowed, biased=self._biased, biases=self._biases)

    @staticmethod
    def are_needed(params: SamplingParams) -> bool:
        """Whether parameters change logits at every step."""
        return bool(params.has_penalties or params.logit_bias or params.allowed_token_ids is not None)

    def add(self, token_id: int) -> None:
        """Take in a token that was sampled."""
        if self._counts is not None:
            self._counts.add(token_id)

    def next(self, banned: Sequence[int]) -> LogitEdits:
        """The edits for the next token, which may not be one of ``banned``."""
        if self._counts is None and not banned:
            return self._always
        penalties = None
        if self._counts is not None:
            params = self._params
            penalties = Penalties(
                params.repetition_penalty, params.frequency_penalty, params.presence_penalty, *self._counts.arrays()
            )
        return LogitEdits(
            allowed=self._allowed, banned=banned, biased=self._biased, biases=self._biases, penalties=penalties
        )
