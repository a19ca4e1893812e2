"""Rollouts: who generates, scores and trains what, and what happens when scoring fails on one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rl_fakes import FakeActor, FakePrompts, FakeReward, run_world
from torch.distributed import DistNetworkError

from hybrid.inference.params import SamplingParams
from hybrid.monitor import Timers
from hybrid.parallel import _is_lost_peer
from hybrid.rewards import RewardError
from hybrid.rl.rollout import RolloutCollector, gather_or_raise, request_seed

PARAMS = SamplingParams(n=2, max_tokens=5)


def _collect(mesh, num_prompts=5, reward=lambda prompt, ids, index: float(len(ids)), actor=FakeActor, params=PARAMS):
    actor, reward = actor(mesh, seed=1), FakeReward(reward)
    collector = RolloutCollector(actor, reward, timers=Timers())
    rollout = collector.collect(FakePrompts(num_prompts).rows, params, seed=4, step=9)
    return rollout, actor, reward


def _keys(records):
    return [(record.prompt_index, record.sample_index) for record in records]


def _run(size, tp_size, **kwargs):
    results = run_world(size, tp_size, lambda mesh: _collect(mesh, **kwargs))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


ALL = [(prompt, sample) for prompt in range(5) for sample in range(2)]


@pytest.mark.parametrize(("size", "tp_size"), [(1, 1), (2, 1), (2, 2), (4, 2), (3, 3), (8, 2)])
def test_same_samples_at_any_world_size(size, tp_size):
    ((expected, _, _),) = _run(1, 1)
    results = _run(size, tp_size)
    by_key = dict(zip(_keys(expected.trajectories), expected.trajectories, strict=True))
    trained = []
    for rollout, _, _ in results:
        assert rollout.samples == expected.samples and _keys(rollout.samples) == ALL
        for trajectory in rollout.trajectories:
            same = by_key[trajectory.prompt_index, trajectory.sample_index]
            assert trajectory.completion_ids == same.completion_ids and trajectory.reward == same.reward
            assert trajectory.behaviour_logprobs.equal(same.behaviour_logprobs)
        trained += _keys(rollout.trajectories)
    assert sorted(trained) == ALL


def test_prompts_are_dealt_over_replicas_and_scored_once():
    results = _run(4, 2)
    rows = FakePrompts(5).rows
    for rank, (_, actor, _) in enumerate(results):
        assert actor.generated == [row.token_ids for row in rows[rank // 2 :: 2]]
    # Replica 0 has prompts 0, 2, 4 and replica 1 has 1, 3; tensor ranks score every other one, its samples together.
    assert [reward.asked for _, _, reward in results] == [[0, 0, 4, 4], [2, 2], [1, 1], [3, 3]]


@pytest.mark.parametrize(("size", "tp_size"), [(2, 2), (3, 1), (4, 2)])
def test_all_ranks_train_about_as_many_tokens_each(size, tp_size):
    results = _run(size, tp_size, num_prompts=31)
    tokens = [sum(t.num_tokens for t in rollout.trajectories) for rollout, _, _ in results]
    assert max(tokens) - min(tokens) <= 7  # at most one sequence


def test_replica_without_prompts_flips_all_the_same():
    results = _run(4, 1, num_prompts=2)
    for rank, (rollout, actor, _) in enumerate(results):
        assert [flip.direction for flip in actor.flips] == ["generate", "train"]
        assert bool(actor.generated) == (rank < 2) and len(rollout.samples) == 4
        assert len(rollout.trajectories) == 1  # a rank that generates nothing trains all the same


def test_masked_empty_and_aborted_samples_are_seen_but_not_trained_on():
    class Actor(FakeActor):
        def generate(self, prompts, params):
            completions = super().generate(prompts, params)
            completions[0].token_ids, completions[0].logprobs = [], completions[0].logprobs[:0]
            completions[1].finish_reason = "abort"
            return completions

    reward = lambda prompt, ids, index: None if index == 3 else 1.0  # noqa: E731
    ((rollout, _, _),) = _run(1, 1, reward=reward, actor=Actor)
    assert _keys(rollout.samples) == ALL
    assert _keys(rollout.trajectories) == [key for key in ALL if key[0] not in (0, 3)]
    assert [sample.reward for sample in rollout.samples[:2]] == [1.0, None]


@pytest.mark.parametrize(("size", "tp_size"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_a_reward_that_fails_on_one_rank_fails_on_all(size, tp_size):
    def broken(prompt, ids, index):
        if index == 1:
            raise KeyError("no such answer")
        return 0.0

    results = run_world(size, tp_size, lambda mesh: _collect(mesh, reward=broken))
    own = [result for result in results if isinstance(result, KeyError)]
    others = [result for result in results if isinstance(result, RuntimeError)]
    assert len(own) == 1 and len(others) == size - 1
    assert own[0].__traceback__ is not None
    culprit = results.index(own[0])
    for error in others:
        assert f"scoring the rollout failed on rank {culprit}" in str(error) and "no such answer" in str(error)
        assert "in broken" in str(error)  # the culprit's traceback


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_an_error_on_every_rank(bad):
    results = run_world(2, 1, lambda mesh: _collect(mesh, reward=lambda prompt, ids, index: bad if index == 3 else 0.0))
    assert [type(result) for result in results] == [RuntimeError, RewardError]
    assert all(f"for prompt 'prompt 3' is {bad}" in str(result) for result in results)


def test_the_first_rank_of_several_that_fail_speaks_for_all():
    def main(mesh):
        def call():
            if mesh.rank:
                raise SystemExit(f"exit {mesh.rank}") if mesh.rank == 1 else KeyError(mesh.rank)

        try:
            return gather_or_raise(mesh, "work", call)
        except SystemExit as stop:
            return stop

    results = run_world(3, 1, main)
    assert [type(result) for result in results] == [RuntimeError, SystemExit, RuntimeError]
    assert all("work failed on rank 1" in str(results[rank]) for rank in (0, 2))
    assert isinstance(results[2].__cause__, KeyError)


def test_a_rewards_own_timeout_is_not_taken_for_a_lost_peer():
    (own, other) = run_world(2, 1, lambda mesh: _collect(mesh, reward=_times_out if mesh.rank == 0 else _length))
    assert not _is_lost_peer(own) and _is_lost_peer(other)
    assert _is_lost_peer(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed"))
    assert _is_lost_peer(DistNetworkError("Broken pipe"))


def _length(prompt, ids, index):
    return float(len(ids))


def _times_out(prompt, ids, index):
    raise RuntimeError("request timed out")


def test_a_reward_object_with_the_wrong_count_is_named():
    class Reward:
        def score(self, prompts, completions, completion_ids, columns):
            return SimpleNamespace(rewards=[1.0], parts={})

    def main(mesh):
        collector = RolloutCollector(FakeActor(mesh), Reward(), timers=Timers())
        return collector.collect(FakePrompts(2).rows, PARAMS, seed=0, step=0)

    (error,) = run_world(1, 1, main)
    assert isinstance(error, RewardError) and "scored 1 samples of 4; return one for each" in str(error)


def test_gather_or_raise_gathers_by_rank():
    assert run_world(3, 1, lambda mesh: gather_or_raise(mesh, "work", lambda: mesh.rank * 2)) == [[0, 2, 4]] * 3


def test_columns_reach_the_reward_by_name_with_none_where_a_row_lacks_one():
    rows = [
        SimpleNamespace(token_ids=[3], text="a", columns={"answer": 1}),
        SimpleNamespace(token_ids=[4], text="b", columns={"hint": "x"}),
    ]
    seen = {}

    class Reward:
        def score(self, prompts, completions, completion_ids, columns):
            seen.update(prompts=prompts, columns=columns, ids=completion_ids, completions=completions)
            return SimpleNamespace(rewards=[0.0] * len(prompts), parts={})

    def main(mesh):
        collector = RolloutCollector(FakeActor(mesh), Reward(), timers=Timers())
        return collector.collect(rows, PARAMS, seed=0, step=0)

    (rollout,) = run_world(1, 1, main)
    assert seen["prompts"] == ["a", "a", "b", "b"]
    assert seen["columns"] == {"answer": [1, 1, None, None], "hint": [None, None, "x", "x"]}
    assert seen["ids"] == [t.completion_ids for t in rollout.trajectories]
    assert seen["completions"] == [s.completion for s in rollout.samples]


def test_request_seeds_are_distinct_pure_and_fit_an_int64():
    seeds = {request_seed(seed, step, prompt) for seed in range(5) for step in range(20) for prompt in range(50)}
    assert len(seeds) == 5 * 20 * 50 and all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(0, 1, 2) == request_seed(0, 1, 2)
