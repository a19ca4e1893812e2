"""Sequences that go on from another one's tokens, as the completions of a prompt do: who they go on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True, slots=True)
class Prefixes:
    """For S sequences laid end to end on a flat axis, whose tokens each one sees before its own; K keys in all.

    A prefix is itself a sequence of the axis, and has none.
    """

    indices: torch.Tensor  # (S,) int32, the sequence that each goes on from; -1: it stands alone
    key_rows: torch.Tensor  # (K,) int64, rows of the axis: of each sequence its prefix, then its own, end to end
    cu_seqlens_k: torch.Tensor  # (S + 1,) int32, where each sequence's keys start in them; the last entry is K
    max_seqlen_k: int

    @classmethod
    def build(
        cls, lengths: Sequence[int], indices: Sequence[int], device: torch.device | str = "cpu"
    ) -> Prefixes | None:
        """Of sequences of ``lengths`` own tokens; None where all stand alone.

        Raises:
            ValueError: a prefix is no sequence, or has a prefix itself.
        """
        if all(index == -1 for index in indices):
            return None
        starts = [0, *accumulate(lengths)]
        rows: list[int] = []
        bounds = [0]
        for number, index in enumerate(indices):
            if index != -1:
                if not 0 <= index < len(lengths) or indices[index] != -1:
                    raise ValueError(
                        f"sequence {number} goes on from {index}, which is no sequence of {len(lengths)} or goes on "
                        "from another itself; a prefix is a sequence that stands alone"
                    )
                rows.extend(range(starts[index], starts[index + 1]))
            rows.extend(range(starts[number], starts[number + 1]))
            bounds.append(len(rows))
        return cls(
            indices=torch.tensor(indices, dtype=torch.int32, device=device),
            key_rows=torch.tensor(rows, dtype=torch.int64, device=device),
            cu_seqlens_k=torch.tensor(bounds, dtype=torch.int32, device=device),
            max_seqlen_k=max(stop - start for start, stop in zip(bounds, bounds[1:], strict=False)),
        )

    def with_one_more(self, length: int) -> Prefixes:
        """With a sequence behind the others that stands alone."""
        device = self.indices.device
        start = int(self.key_rows.max()) + 1  # every row is a key, of its own sequence
        return Prefixes(
            indices=torch.cat((self.indices, self.indices.new_tensor([-1]))),
            key_rows=torch.cat((self.key_rows, torch.arange(start, start + length, device=device))),
            cu_seqlens_k=torch.cat((self.cu_seqlens_k, self.cu_seqlens_k[-1:] + length)),
            max_seqlen_k=max(self.max_seqlen_k, length),
        )
