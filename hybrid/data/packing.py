"""Which sequences share a micro-batch, and which rank trains on which: a function of token counts alone."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
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


def rebalance(lengths: Sequence[int], owners: Sequence[int], num_ranks: int) -> list[int]:
    """Even out the ranks' token counts by moving few sequences.

    As long as it helps, the rank with the most tokens hands one sequence to the rank with the fewest: the one that
    leaves the two of them most alike. No rank then has more than the average and the longest sequence together, nor
    more than the longest rank had before.

    Args:
        owners: the rank in [0, num_ranks) that each sequence is with.

    Returns:
        The rank that each sequence is to be with.
    """
    planned = list(owners)
    held: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]  # (tokens, sequence), ascending
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        held[owners[index]].append((lengths[index], index))
    loads = sorted((sum(length for length, _ in members), rank) for rank, members in enumerate(held))
    while True:
        (fewest, receiver), (most, giver) = loads[0], loads[-1]
        gap, members = most - fewest, held[giver]
        middle = bisect_left(members, (gap / 2,))
        nearest = min(members[max(0, middle - 1) : middle + 1], key=lambda each: abs(2 * each[0] - gap), default=None)
        if nearest is None or abs(2 * nearest[0] - gap) >= gap:  # any move would leave the two as far apart, or farther
            return planned
        members.remove(nearest)
        insort(held[receiver], nearest)
        planned[nearest[1]] = receiver
        loads = loads[1:-1]
        insort(loads, (fewest + nearest[0], receiver))
        insort(loads, (most - nearest[0], giver))
