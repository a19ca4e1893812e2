"""Trajectories are evened out over all ranks: the longest rank falls to the average, and nothing is lost or changed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from hybrid.parallel import init_parallel
from hybrid.rl.records import Trajectory
from hybrid.rl.rollout import share_out
from tests.distributed.world import run_world


def made_up(prompt: int, sample: int, length: int) -> Trajectory:
    """All that is in it follows from its key, so that any rank can tell whether it is the one that was made."""
    rng = random.Random(1000 * prompt + sample)
    num_prompt = rng.randint(1, length - 1)
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    return Trajectory(
        prompt_index=prompt,
        sample_index=sample,
        prompt_ids=[rng.randrange(150_000) for _ in range(num_prompt)],
        completion_ids=[rng.randrange(150_000) for _ in range(length - num_prompt)],
        behaviour_logprobs=-torch.rand(length - num_prompt, generator=generator),
        finish_reason=rng.choice(["stop", "length"]),
        weights_version=rng.randrange(9),
        reward=rng.random(),
    )


def the_same(one: Trajectory, other: Trajectory) -> bool:
    names = [name for name in Trajectory.__slots__ if name != "behaviour_logprobs"]
    logprobs, others = one.behaviour_logprobs, other.behaviour_logprobs
    return (
        all(getattr(one, name) == getattr(other, name) for name in names)
        and logprobs.dtype == others.dtype
        and torch.equal(logprobs, others)
    )


def lengths_of(rank: int) -> list[int]:
    """Rank 0 has long ones, the last none at all, the others short ones."""
    rng = random.Random(rank)
    if rank == init_parallel().world_size - 1:
        return []
    return [rng.randint(200, 400) if rank == 0 else rng.randint(2, 20) for _ in range(24)]


def skewed(shuffled: bool):
    mesh = init_parallel()
    held = [made_up(mesh.rank * 10 + i // 4, i % 4, length) for i, length in enumerate(lengths_of(mesh.rank))]
    if shuffled:
        random.Random(mesh.rank).shuffle(held)
    received = mesh.bytes_received
    shared = share_out(mesh, held)
    keys = [(t.prompt_index, t.sample_index) for t in shared]
    assert keys == sorted(keys)
    assert all(the_same(t, made_up(t.prompt_index, t.sample_index, t.num_tokens)) for t in shared)
    kept = sum(any(t is mine for mine in held) for t in shared)
    again = mesh.bytes_received
    assert [id(t) for t in share_out(mesh, shared)] == [id(t) for t in shared]
    assert mesh.bytes_received == again  # in balance already: nothing is sent
    return {
        "keys": keys,
        "before": sum(t.num_tokens for t in held),
        "held": [(t.prompt_index, t.sample_index) for t in held],
        "after": sum(t.num_tokens for t in shared),
        "longest": max(t.num_tokens for t in shared),
        "arrived": len(shared) - kept,
        "bytes": again - received,
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_longest_rank_falls_to_about_the_average(tmp_path: Path, world_size: int) -> None:
    ranks = run_world(skewed, world_size, tmp_path, False)
    tokens = [rank["after"] for rank in ranks]
    average, longest = sum(tokens) / world_size, max(rank["longest"] for rank in ranks)
    assert sum(tokens) == sum(rank["before"] for rank in ranks)
    assert max(rank["before"] for rank in ranks) > 0.9 * world_size * average
    assert max(tokens) <= average + longest / 4
    arrived = sorted(key for rank in ranks for key in rank["keys"])
    assert arrived == sorted(key for rank in ranks for key in rank["held"])
    # What is on the ranks that had little stays, and so does rank 0's share of its own.
    assert ranks[0]["arrived"] == 0 and ranks[0]["bytes"] == 0
    assert ranks[-1]["arrived"] == len(ranks[-1]["keys"])
    moved = sum(rank["arrived"] for rank in ranks)
    assert moved <= 24 * (world_size - 1) / world_size + 1
    assert all(0 < rank["bytes"] < 40 * rank["after"] + 2000 * rank["arrived"] for rank in ranks[1:])


def test_the_shares_do_not_depend_on_the_order_at_hand(tmp_path: Path) -> None:
    one, other = (run_world(skewed, 2, tmp_path, shuffled) for shuffled in (False, True))
    tokens = [[rank["after"] for rank in ranks] for ranks in (one, other)]
    assert tokens[0] == tokens[1]


def nothing_or_one(count: int) -> int:
    mesh = init_parallel()
    held = [made_up(0, i, 5) for i in range(count)] if mesh.rank == 1 else []
    return len(share_out(mesh, held))


def test_a_batch_of_nothing_and_of_one(tmp_path: Path) -> None:
    assert run_world(nothing_or_one, 2, tmp_path, 0) == [0, 0]
    assert run_world(nothing_or_one, 2, tmp_path, 1) == [0, 1]
    assert run_world(nothing_or_one, 2, tmp_path, 2) == [1, 1]
