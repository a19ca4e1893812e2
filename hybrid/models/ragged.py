"""A batch without padding: sequences laid end to end on one flat token axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ops.prefixes import Prefixes


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Sequences laid end to end; S of them, N tokens in all, R of which are scored.

    A scored token is one whose probability (and whose state's value) the caller wants: it is predicted from the
    hidden state of the token before it in the same sequence.

    Sequences that begin alike can have their common tokens once on the axis, computed for all of them: then these are
    a sequence too, a prefix, and what is left of each is another that goes on from it. Nothing that is scored changes.
    """

    input_ids: torch.Tensor  # (N,) int64
    position_ids: torch.Tensor  # (N,) int64, from 0 in each sequence, or from the length of its prefix
    cu_seqlens: torch.Tensor  # (S + 1,) int32, where each sequence starts; the last entry is N
    max_seqlen: int
    targets: torch.Tensor  # (R,) int64, flat indices of the scored tokens, by the sequences that were given
    sources: torch.Tensor  # (R,) int64, flat indices of the tokens from which they are predicted
    prefixes: Prefixes | None = None  # which sequences go on from which; None: each stands alone

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
        *,
        num_shared: Sequence[int] | None = None,
    ) -> RaggedBatch:
        """Pack token lists; the last ``num_scored[i]`` tokens of sequence i are scored (default: all but the first).

        No sequences at all make the batch of one unscored token that a rank without work runs, so that it takes
        part in the collectives of the ranks that have some.

        Args:
            num_shared: how many tokens at each sequence's beginning are computed once for all sequences that share
                them: those with the same ``num_shared[i]`` first tokens. Default: none.

        Raises:
            ValueError: a sequence is empty, is asked to score its first token, which nothing predicts, or is to share
                all of its tokens.
        """
        lengths = [len(sequence) for sequence in sequences]
        scored = [max(0, length - 1) for length in lengths] if num_scored is None else list(num_scored)
        if len(scored) != len(lengths):
            raise ValueError(f"num_scored has {len(scored)} entries for {len(lengths)} sequences; give one for each")
        for index, (length, count) in enumerate(zip(lengths, scored, strict=True)):
            if length == 0:
                raise ValueError(f"sequence {index} is empty; a sequence needs at least one token")
            if not 0 <= count < length:
                raise ValueError(
                    f"sequence {index} has {length} tokens and is asked to score its last {count}; "
                    f"the first token is never scored, so at most {length - 1}"
                )
        positions = [range(length - count, length) for length, count in zip(lengths, scored, strict=True)]
        return cls._pack(sequences, positions, num_shared, device)

    @classmethod
    def from_marked(
        cls,
        sequences: Sequence[Sequence[int]],
        marks: Sequence[Sequence[bool]],
        device: torch.device | str = "cpu",
        *,
        num_shared: Sequence[int] | None = None,
    ) -> RaggedBatch:
        """The same with a mark for each token that says whether it is scored; the first one's must be False.

        Raises:
            ValueError: as above, or marks do not fit their sequence.
        """
        for index, (sequence, each) in enumerate(zip(sequences, marks, strict=True)):
            if len(sequence) != len(each) or not sequence or each[0]:
                raise ValueError(
                    f"sequence {index} has {len(sequence)} tokens and {len(each)} marks; give one for each token, "
                    "False for the first, which nothing predicts"
                )
        return cls._pack(sequences, [[i for i, mark in enumerate(each) if mark] for each in marks], num_shared, device)

    @classmethod
    def _pack(
        cls,
        sequences: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],  # of each sequence's scored tokens
        num_shared: Sequence[int] | None,
        device: torch.device | str,
    ) -> RaggedBatch:
        if not sequences:
            sequences, positions, num_shared = [[0]], [[]], None
        axis = _Axis()
        homes = _lay_out(axis, sequences, num_shared or [0] * len(sequences))
        targets = [home.row(i) for home, scored in zip(homes, positions, strict=True) for i in scored]
        sources = [home.row(i - 1) for home, scored in zip(homes, positions, strict=True) for i in scored]
        lengths = [stop - start for start, stop in zip(axis.bounds, axis.bounds[1:], strict=False)]

        def integers(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            input_ids=integers(axis.ids),
            position_ids=integers(axis.positions),
            cu_seqlens=integers(axis.bounds, torch.int32),
            max_seqlen=max(lengths),
            targets=integers(targets),
            sources=integers(sources),
            prefixes=Prefixes.build(lengths, axis.prefixes, device),
        )


class _Axis:
    """A flat axis as it grows."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.bounds = [0]
        self.prefixes: list[int] = []

    def add(self, ids: Sequence[int], prefix: int = -1, first_position: int = 0) -> int:
        """Returns the new sequence's number."""
        self.ids.extend(ids)
        self.positions.extend(range(first_position, first_position + len(ids)))
        self.bounds.append(len(self.ids))
        self.prefixes.append(prefix)
        return len(self.prefixes) - 1


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a sequence lies: its first ``num_shared`` tokens in one place, the others in another."""

    num_shared: int
    shared_start: int
    own_start: int

    def row(self, position: int) -> int:
        if position < self.num_shared:
            return self.shared_start + position
        return self.own_start + position - self.num_shared


def _lay_out(axis: _Axis, sequences: Sequence[Sequence[int]], num_shared: Sequence[int]) -> list[_Home]:
    """Put sequences on the axis, those that share a prefix behind it; what only one has is not set apart."""
    groups: dict[tuple[int, ...] | int, list[int]] = {}
    for index, (sequence, shared) in enumerate(zip(sequences, num_shared, strict=True)):
        if not 0 <= shared < len(sequence):
            raise ValueError(
                f"sequence {index} has {len(sequence)} tokens and is to share {shared}; one at least is its own"
            )
        groups.setdefault(tuple(sequence[:shared]) if shared else index, []).append(index)
    homes: dict[int, _Home] = {}
    for prefix, members in groups.items():
        if isinstance(prefix, int) or len(members) == 1:
            for index in members:
                homes[index] = _Home(0, 0, axis.bounds[-1])
                axis.add(sequences[index])
            continue
        start, number = axis.bounds[-1], axis.add(prefix)
        for index in members:
            homes[index] = _Home(len(prefix), start, axis.bounds[-1])
            axis.add(sequences[index][len(prefix) :], number, len(prefix))
    return [homes[index] for index in range(len(sequences))]
