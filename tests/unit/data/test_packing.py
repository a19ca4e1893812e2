"""Micro-batches and shares: nothing lost, budgets kept, balanced, deterministic."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.data.packing import balance, pack, pack_groups, rebalance


def _random_lengths(seed: int, count: int, longest: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, longest) for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_pack_keeps_every_sequence_and_the_budget(seed):
    lengths = _random_lengths(seed, count=seed * 5, longest=60)
    budget = 50
    micro_batches = pack(lengths, budget)
    assert sorted(i for indices in micro_batches for i in indices) == list(range(len(lengths)))
    for indices in micro_batches:
        assert indices and indices == sorted(indices)
        assert sum(lengths[i] for i in indices) <= budget or len(indices) == 1


def test_pack_gives_a_sequence_over_the_budget_its_own_micro_batch():
    assert pack([3, 100, 4], 10) == [[0, 2], [1]]


def test_pack_uses_no_more_than_needed_and_balances():
    micro_batches = pack([10] * 8, 25)
    assert [len(indices) for indices in micro_batches] == [2, 2, 2, 2]
    # Four micro-batches hold 100 tokens; filling them one after the other would leave a last one of 10.
    lengths = [30, 30, 30, 10, 10, 10, 10]
    sums = [sum(lengths[i] for i in indices) for indices in pack(lengths, 50)]
    assert len(sums) == 3 and max(sums) - min(sums) <= 10


def test_pack_needs_one_micro_batch_each_for_sequences_over_half_the_budget():
    assert pack([6] * 2000, 10) == [[i] for i in range(2000)]


def test_pack_of_nothing():
    assert pack([], 10) == []


def test_pack_refuses_a_budget_of_nothing():
    with pytest.raises(ValueError, match="--max_tokens_per_microbatch"):
        pack([1], 0)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_bins", [1, 2, 3, 8])
def test_balance_is_within_the_longest_sequence(seed, num_bins):
    lengths = _random_lengths(seed, count=25, longest=40)
    bins = balance(lengths, num_bins)
    assert sorted(i for indices in bins for i in indices) == list(range(25))
    loads = [sum(lengths[i] for i in indices) for indices in bins]
    assert max(loads) - min(loads) <= max(lengths)  # the bound of greedy assignment
    assert bins == balance(lengths, num_bins)


def test_balance_leaves_bins_empty_where_sequences_run_out():
    assert balance([5], 3) == [[0], [], []]
    assert balance([], 2) == [[], []]


@st.composite
def _held(draw):
    """Token counts, who has each sequence, and how many ranks there are."""
    num_ranks = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(0, 50) | st.integers(0, 5000), max_size=60))
    few = draw(st.integers(1, num_ranks))  # the ranks that have any
    owners = draw(st.lists(st.integers(0, few - 1), min_size=len(lengths), max_size=len(lengths)))
    return lengths, owners, num_ranks


def _loads(lengths, owners, num_ranks):
    loads = [0] * num_ranks
    for length, owner in zip(lengths, owners, strict=True):
        loads[owner] += length
    return loads


@given(_held())
def test_rebalance_is_within_the_longest_sequence_and_never_worse(held):
    lengths, owners, num_ranks = held
    planned = rebalance(lengths, owners, num_ranks)
    assert len(planned) == len(lengths) and set(planned) <= set(range(num_ranks))
    before, after = _loads(lengths, owners, num_ranks), _loads(lengths, planned, num_ranks)
    assert max(after) <= sum(lengths) / num_ranks + max(lengths, default=0)
    assert max(after) <= max(before) and min(after) >= min(before)


@given(_held())
def test_rebalance_is_done_once_and_no_single_move_is_left(held):
    lengths, owners, num_ranks = held
    planned = rebalance(lengths, owners, num_ranks)
    assert rebalance(lengths, planned, num_ranks) == planned
    loads = _loads(lengths, planned, num_ranks)
    heaviest = max(range(num_ranks), key=loads.__getitem__)
    handed = [length for length, owner in zip(lengths, planned, strict=True) if owner == heaviest and length]
    assert all(min(loads) + length >= loads[heaviest] for length in handed)


def test_rebalance_moves_what_it_must_and_no_more():
    assert rebalance([10, 10, 10, 10], [0, 0, 1, 1], 2) == [0, 0, 1, 1]
    assert rebalance([8, 1, 7, 1, 1], [0, 0, 0, 0, 1], 2) == [1, 0, 0, 0, 1]
    assert rebalance([5, 4], [1, 0], 2) == [1, 0]
    assert rebalance([], [], 3) == []


def test_rebalance_of_a_skewed_batch_moves_few():
    # One replica's completions are ten times as long as the others'.
    lengths = [random.Random(i).randint(500, 1000) if i % 4 == 0 else 75 for i in range(256)]
    owners = [i % 4 for i in range(256)]
    planned = rebalance(lengths, owners, 4)
    assert max(_loads(lengths, planned, 4)) <= 1.02 * sum(lengths) / 4
    assert sum(a != b for a, b in zip(owners, planned, strict=True)) < 64


@st.composite
def _grouped(draw):
    """Token counts of sequences, how many of them are their group's, and their groups."""
    shared = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))  # by group
    groups = draw(st.lists(st.integers(0, len(shared) - 1), max_size=40))
    own = draw(st.lists(st.integers(1, 30), min_size=len(groups), max_size=len(groups)))
    return [n + shared[g] for n, g in zip(own, groups, strict=True)], [shared[g] for g in groups], groups


def _cost(indices, lengths, num_shared, groups):
    """Tokens of some sequences together, a group's common ones once."""
    prefixes = {groups[i]: num_shared[i] for i in indices}
    return sum(lengths[i] - num_shared[i] for i in indices) + sum(prefixes.values())


@given(_grouped(), st.integers(1, 200))
def test_pack_groups_keeps_to_the_budget_and_groups_together(sequences, max_tokens):
    lengths, num_shared, groups = sequences
    packed = pack_groups(lengths, num_shared, groups, max_tokens)
    assert sorted(i for indices in packed for i in indices) == list(range(len(lengths)))
    for indices in packed:
        assert indices == sorted(indices)
        assert len(indices) == 1 or _cost(indices, lengths, num_shared, groups) <= max_tokens
    for group in {each for each, shared in zip(groups, num_shared, strict=True) if shared}:
        members = [i for i, each in enumerate(groups) if each == group]
        homes = sum(any(i in indices for i in members) for indices in packed)
        assert homes == 1 or _cost(members, lengths, num_shared, groups) > max_tokens


def test_pack_groups_without_anything_shared_is_pack():
    lengths = [random.Random(i).randint(1, 50) for i in range(60)]
    assert pack_groups(lengths, [0] * 60, [0] * 60, 128) == pack(lengths, 128)


@given(_grouped(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_rebalance_counts_what_a_rank_has_of_a_group_once(sequences, num_ranks, draw):
    lengths, num_shared, groups = sequences
    owners = [draw.randrange(num_ranks) for _ in lengths]
    planned = rebalance(lengths, owners, num_ranks, num_shared=num_shared, groups=groups)

    def loads(where):
        held = [[i for i, owner in enumerate(where) if owner == rank] for rank in range(num_ranks)]
        return [_cost(indices, lengths, num_shared, groups) for indices in held]

    assert max(loads(planned)) <= max(loads(owners))
    assert rebalance(lengths, planned, num_ranks, num_shared=num_shared, groups=groups) == planned


def test_rebalance_moves_no_sample_whose_prompt_would_cost_more_than_it_evens_out():
    # Ten samples of 100 tokens after a prompt of 1000 on one rank, four after another on the other.
    lengths, num_shared, groups = [1100] * 14, [1000] * 14, [0] * 10 + [1] * 4
    owners = [0] * 10 + [1] * 4
    assert rebalance(lengths, owners, 2, num_shared=num_shared, groups=groups) == owners
    # Of the same prompt they are moved for what they are.
    assert sum(rebalance(lengths, owners, 2, num_shared=num_shared, groups=[0] * 14)) == 7
