"""Which sequences share a micro-batch, and which rank trains on which: a function of token counts alone."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most ``max_tokens`` tokens, of about equal size.

    A sequence longer than the budget gets a micro-batch of its own. The number of micro-batches is the smallest that
    balanced filling (longest sequence first, into the emptiest micro-batch) finds, within 5%.

    Returns:
        The sequences' indices, ascending in each micro-batch; micro-batches by their first index.
    """
    if max_tokens < 1:
        raise ValueError(f"a micro-batch's budget is {max_tokens} tokens; set --max_tokens_per_microbatch to 1 or more")
    oversize = [[index] for index, length in enumerate(lengths) if length > max_tokens]
    rest = [index for index, length in enumerate(lengths) if length <= max_tokens]
    if not rest:
        return oversize
    rest_lengths = [lengths[index] for index in rest]
    # No two sequences of more than half the budget fit together.
    num_bins = max(1, -(-sum(rest_lengths) // max_tokens), sum(2 * length > max_tokens for length in rest_lengths))
    bins = balance(rest_lengths, num_bins)
    while any(sum(rest_lengths[i] for i in members) > max_tokens for members in bins):
        # A bin for each sequence always fits, so this ends.
        num_bins += max(1, num_bins // 20)
        bins = balance(rest_lengths, num_bins)
    return sorted(oversize + [[rest[i] for i in members] for members in bins if members])


def pack_groups(
    lengths: Sequence[int], num_shared: Sequence[int], groups: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """`pack` for sequences of which those of a group begin alike, with tokens that a micro-batch computes once.

    A group stays together where it fits the budget; otherwise it is split, and its common tokens are computed again.
    Sequences that share nothing are no group.

    Args:
        num_shared: how many of each sequence's tokens are its group's, the same in all of a group.
        groups: the group that each is of.

    Returns:
        As `pack` does.
    """
    members_of: dict[tuple[int, ...], list[int]] = {}
    for index, group in enumerate(groups):
        members_of.setdefault((group,) if num_shared[index] else (group, index), []).append(index)
    pieces: list[list[int]] = []
    for members in members_of.values():
        own = [lengths[i] - num_shared[i] for i in members]
        room = max(1, max_tokens - num_shared[members[0]])
        parts = [range(len(members))] if sum(own) <= room else pack(own, room)
        pieces += [[members[i] for i in part] for part in parts]
    costs = [num_shared[piece[0]] + sum(lengths[i] - num_shared[i] for i in piece) for piece in pieces]
    return sorted(sorted(i for number in numbers for i in pieces[number]) for numbers in pack(costs, max_tokens))


def balance(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Distribute sequences over ``num_bins`` bins of about equal token counts; bins may stay empty.

    Longest first, each into the bin with the fewest tokens, then the fewest sequences, then the lowest number.

    Returns:
        For each bin, the sequences' indices, ascending.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, 0, number) for number in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        tokens, count, number = loads[0]
        bins[number].append(index)
        heapq.heapreplace(loads, (tokens + lengths[index], count + 1, number))
    return [sorted(members) for members in bins]


def rebalance(
    lengths: Sequence[int],
    owners: Sequence[int],
    num_ranks: int,
    *,
    num_shared: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
) -> list[int]:
    """Even out the ranks' token counts by moving few sequences.

    As long as it helps, the rank with the most tokens hands one sequence to the rank with the fewest: the one that
    leaves the longer of the two shortest. No rank then has more than the longest rank had before; nor, where nothing is
    shared, more than the average and the longest sequence together.

    Args:
        owners: the rank in [0, num_ranks) that each sequence is with.
        num_shared, groups: as in `pack_groups`: a rank has a group's common tokens once. Default: nothing is shared.

    Returns:
        The rank that each sequence is to be with.
    """
    num_shared, groups = num_shared or [0] * len(lengths), groups or range(len(lengths))
    planned = list(owners)
    ranks = [_Load() for _ in range(num_ranks)]
    for index in range(len(lengths)):
        ranks[owners[index]].add(index, lengths[index], num_shared[index], groups[index])
    while True:
        fewest, most = (choose(range(num_ranks), key=lambda rank: (ranks[rank].tokens, rank)) for choose in (min, max))
        giver, receiver = ranks[most], ranks[fewest]
        best, longer = None, giver.tokens
        for index in giver.members:
            move = lengths[index], num_shared[index], groups[index]
            after = max(giver.without(*move), receiver.with_one(*move))
            if after < longer:
                best, longer = index, after
        if best is None:
            return planned
        giver.remove(best, lengths[best], num_shared[best], groups[best])
        receiver.add(best, lengths[best], num_shared[best], groups[best])
        planned[best] = fewest


class _Load:
    """The sequences that a rank has, and what they come to."""

    def __init__(self) -> None:
        self.tokens = 0
        self.members: dict[int, None] = {}  # a set that keeps its order
        self._sizes: Counter[int] = Counter()  # of its groups

    def with_one(self, length: int, num_shared: int, group: int) -> int:
        return self.tokens + length - (num_shared if self._sizes[group] else 0)

    def without(self, length: int, num_shared: int, group: int) -> int:
        return self.tokens - length + (num_shared if self._sizes[group] > 1 else 0)

    def add(self, index: int, length: int, num_shared: int, group: int) -> None:
        self.tokens = self.with_one(length, num_shared, group)
        self.members[index] = None
        self._sizes[group] += 1

    def remove(self, index: int, length: int, num_shared: int, group: int) -> None:
        self.tokens = self.without(length, num_shared, group)
        del self.members[index]
        self._sizes[group] -= 1
