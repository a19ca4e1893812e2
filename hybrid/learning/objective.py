"""What a trainer asks of an objective, and how examples become batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from hybrid.data.conversations import Example
from hybrid.data.packing import balance, pack
from hybrid.models.ragged import RaggedBatch
from hybrid.parallel import ParallelMesh
from hybrid.zero.model import ShardedModel

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

Sums = dict[str, torch.Tensor]
"""Scalars without gradient that add up over micro-batches and ranks, the same names whatever the examples."""


class Objective(Protocol[T_contra]):
    """A loss that is a sum over examples divided by a count over all of them, whichever rank holds them."""

    role: str  # what the trained model is: the prefix of its metrics, and the directory that it is saved in
    model: ShardedModel

    def num_tokens(self, example: T_contra) -> int:
        """Tokens that the model reads."""
        ...

    def count(self, example: T_contra) -> int:
        """What an example adds to the count that the loss is divided by."""
        ...

    def loss(self, examples: Sequence[T_contra], total: float) -> tuple[torch.Tensor, Sums]:
        """The examples' loss divided by ``total``, connected to the model also where there are none, and sums."""
        ...

    def describe(self, sums: Mapping[str, float], total: float) -> dict[str, float]:
        """Metrics out of sums over all ranks and micro-batches, whose examples' counts add up to ``total``."""
        ...


def ragged_batch(
    examples: Sequence[Example], device: torch.device, num_shared: Sequence[int] | None = None
) -> RaggedBatch:
    """Examples end to end, each token scored that is marked so; ``num_shared`` as in `RaggedBatch.from_sequences`."""
    return RaggedBatch.from_marked(
        [e.token_ids for e in examples], [e.scored for e in examples], device, num_shared=num_shared
    )


def shared_out(
    mesh: ParallelMesh, objective: Objective[T], examples: Sequence[T], max_tokens: int
) -> Iterator[list[int]]:
    """This rank's micro-batches of some examples that every rank knows, as indices.

    There are as many as the rank with the most has, and one at least, since collectives wait for every rank; those of
    a rank that has run out are empty.
    """
    lengths = [objective.num_tokens(example) for example in examples]
    packed = [
        [[members[i] for i in group] for group in pack([lengths[m] for m in members], max_tokens)]
        for members in balance(lengths, mesh.world_size)
    ]
    rounds = max(1, *map(len, packed), 0)
    mine = packed[mesh.rank]
    yield from mine
    yield from ([] for _ in range(rounds - len(mine)))
