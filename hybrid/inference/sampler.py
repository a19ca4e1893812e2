"""The next token of each sequence from its row of logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybrid.inference.scheduler import Chunk, SampledToken
from hybrid.inference.sequence import Sequence
from ops.sampling import sample, uniform


class Sampler:
    """Samples under each sequence's own parameters.

    A token depends on its row of logits, the sequence's seed and its place in the completion, and on nothing else.

    Args:
        ending_ids: gives the ids that would end a sequence; they have no probability before ``min_tokens``.
    """

    def __init__(self, ending_ids: Callable[[Sequence], list[int]]) -> None:
        self._ending_ids = ending_ids

    def sample(self, chunks: list[Chunk], logits: torch.Tensor) -> list[SampledToken]:
        """One token for each chunk's sequence, and for those that start from its prompt.

        Args:
            chunks: R that reach the end of their sequence.
            logits: (R, vocabulary), each chunk's last row.
        """
        sequences, rows = [], []
        for row, chunk in enumerate(chunks):
            for sequence in (chunk.sequence, *chunk.sequence.siblings):
                sequences.append(sequence)
                rows.append(row)
        if len(rows) != len(chunks):
            logits = logits[rows]
        logits = self._mask_endings(sequences, logits)
        params = [sequence.params for sequence in sequences]
        tokens, logprobs = sample(
            logits,
            [each.temperature for each in params],
            [each.top_k for each in params],
            [each.top_p for each in params],
            [each.min_p for each in params],
            [uniform(sequence.seed, sequence.num_completion_tokens) for sequence in sequences],
        )
        return [SampledToken(*fields) for fields in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True)]

    def _mask_endings(self, sequences: list[Sequence], logits: torch.Tensor) -> torch.Tensor:
        """Give the ids that would end a sequence no probability while it is shorter than its ``min_tokens``."""
        rows, columns = [], []
        for row, sequence in enumerate(sequences):
            if sequence.num_completion_tokens < sequence.params.min_tokens:
                ids = self._ending_ids(sequence)
                rows += [row] * len(ids)
                columns += ids
        if not rows:
            return logits
        logits = logits.clone()
        logits[rows, columns] = float("-inf")
        return logits
