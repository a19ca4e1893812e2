"""A batch without padding: sequences laid end to end on one flat token axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Sequences laid end to end; S of them, N tokens in all, R of which are scored.

    A scored token is one whose probability (and whose state's value) the caller wants: it is predicted from the
    hidden state of the token before it in the same sequence, row ``targets - 1``.
    """

    input_ids: torch.Tensor  # (N,) int64
    position_ids: torch.Tensor  # (N,) int64, from 0 in each sequence
    cu_seqlens: torch.Tensor  # (S + 1,) int32, where each sequence starts; the last entry is N
    max_seqlen: int
    targets: torch.Tensor  # (R,) int64, flat indices of the scored tokens, ascending

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def num_targets(self) -> int:
        return self.targets.numel()

    @property
    def target_ids(self) -> torch.Tensor:
        """(R,) ids of the scored tokens."""
        return self.input_ids[self.targets]

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Sequence[int]],
        num_scored: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> RaggedBatch:
        """Pack token lists; the last ``num_scored[i]`` tokens of sequence i are scored (default: all but the first).

        No sequences at all make the batch of one unscored token that a rank without work runs, so that it takes
        part in the collectives of the ranks that have some.

        Raises:
            ValueError: a sequence is empty, or is asked to score its first token, which nothing predicts.
        """
        if not sequences:
            sequences, num_scored = [[0]], [0]
        lengths = [len(sequence) for sequence in sequences]
        scored = [length - 1 for length in lengths] if num_scored is None else list(num_scored)
        if len(scored) != len(lengths):
            raise ValueError(f"num_scored has {len(scored)} entries for {len(lengths)} sequences; give one for each")
        bounds, ids, positions, targets = [0], [], [], []
        for index, (sequence, length, count) in enumerate(zip(sequences, lengths, scored, strict=True)):
            if length == 0:
                raise ValueError(f"sequence {index} is empty; a sequence needs at least one token")
            if not 0 <= count < length:
                raise ValueError(
                    f"sequence {index} has {length} tokens and is asked to score its last {count}; "
                    f"the first token is never scored, so at most {length - 1}"
                )
            ids.extend(sequence)
            positions.extend(range(length))
            bounds.append(bounds[-1] + length)
            targets.extend(range(bounds[-1] - count, bounds[-1]))
        return cls(
            input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
            position_ids=torch.tensor(positions, dtype=torch.int64, device=device),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device),
            max_seqlen=max(lengths),
            targets=torch.tensor(targets, dtype=torch.int64, device=device),
        )
