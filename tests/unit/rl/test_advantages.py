"""GAE and statistics against transcriptions of their definitions, token by token."""

from __future__ import annotations

import pytest
import torch

from hybrid.rl.advantages import explained_variance, gae, rewards_to_go, whiten, whiten_groups


def _random(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator) for length in lengths]


def _gae_of_one(rewards, values, gamma, lam):
    """deepspeed-chat's get_advantages_and_returns for one row, in floats."""
    advantages = [0.0] * len(rewards)
    last = 0.0
    for t in reversed(range(len(rewards))):
        next_value = float(values[t + 1]) if t + 1 < len(rewards) else 0.0
        delta = float(rewards[t]) + gamma * next_value - float(values[t])
        last = delta + gamma * lam * last
        advantages[t] = last
    return advantages, [a + float(v) for a, v in zip(advantages, values, strict=True)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_gae_matches_the_recursion(gamma, lam):
    lengths = [5, 1, 0, 9, 2]
    rewards, values = _random(lengths, 0), _random(lengths, 1)
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    for reward, value, advantage, ret in zip(rewards, values, advantages, returns, strict=True):
        expected_advantage, expected_return = _gae_of_one(reward, value, gamma, lam)
        torch.testing.assert_close(advantage, torch.tensor(expected_advantage), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ret, torch.tensor(expected_return), rtol=1e-6, atol=1e-6)


def test_gae_with_lambda_1_is_the_reward_to_go_less_the_value():
    rewards, values = _random([6], 2), _random([6], 3)
    advantages, returns = gae(rewards, values, gamma=1.0, lam=1.0)
    to_go = rewards[0].flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(returns[0], to_go)
    torch.testing.assert_close(advantages[0], to_go - values[0])


def test_gae_does_not_depend_on_the_company():
    lengths = [4, 7, 1]
    rewards, values = _random(lengths, 4), _random(lengths, 5)
    together, _ = gae(rewards, values, gamma=0.9, lam=0.9)
    for i in range(3):
        (alone,), _ = gae(rewards[i : i + 1], values[i : i + 1], gamma=0.9, lam=0.9)
        assert torch.equal(alone, together[i])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_gae_of_no_tokens(lengths):
    empty = [torch.zeros(0) for _ in lengths]
    advantages, returns = gae(empty, empty, gamma=1.0, lam=0.95)
    assert [a.shape for a in advantages] == [r.shape for r in returns] == [torch.Size([0])] * len(lengths)


class _Ranks:
    """Plays several ranks' reductions in one process: a first pass records them, a second answers with their sums."""

    def __init__(self, calls):
        self.calls = calls  # one function for each rank, taking its reduce

    def run(self):
        answers: list[list[float]] = []
        while True:
            asked, results = [], []
            for call in self.calls:
                mine: list[list[float]] = []

                def reduce(values, mine=mine):
                    mine.append(values)
                    if len(mine) <= len(answers):
                        return answers[len(mine) - 1]
                    return values

                results.append(call(reduce))
                asked.append(mine)
            if len(answers) == len(asked[0]):
                return results
            i = len(answers)
            answers.append([sum(column) for column in zip(*(mine[i] for mine in asked), strict=True)])


def test_whiten_is_global_over_ranks_and_ragged_tensors():
    tensors = [t * 3 + 5 for t in _random([4, 7, 1, 9], 6)]
    everything = torch.cat(tensors)
    expected = (everything - everything.mean()) / everything.std()
    shares = [tensors[:1], [], tensors[1:]]
    results = _Ranks([lambda reduce, share=share: whiten(share, reduce) for share in shares]).run()
    actual = torch.cat([t for result in results for t in result])
    torch.testing.assert_close(actual, expected)
    assert actual.dtype == torch.float32


def test_whiten_of_one_token_or_equal_tokens_stays_finite():
    assert whiten([torch.tensor([3.0])], list)[0].tolist() == [0.0]
    assert whiten([torch.tensor([3.0, 3.0])], list)[0].tolist() == [0.0, 0.0]
    assert whiten([], list) == []


def test_whitening_by_group_is_whitening_each_group_wherever_its_tensors_are():
    tensors, groups = _random([4, 7, 1, 9, 2], 6), [0, 2, 0, 2, 3]
    expected = {group: torch.cat([t for t, g in zip(tensors, groups, strict=True) if g == group]) for group in groups}
    shares = [slice(0, 1), slice(0, 0), slice(1, 5)]
    results = _Ranks(
        [lambda reduce, part=part: whiten_groups(tensors[part], groups[part], 4, reduce) for part in shares]
    ).run()
    actual = [t for result in results for t in result]
    for group, members in expected.items():
        mine = torch.cat([t for t, g in zip(actual, groups, strict=True) if g == group])
        torch.testing.assert_close(mine, (members - members.mean()) / members.std(), rtol=1e-5, atol=1e-6)
    assert whiten_groups([torch.tensor([3.0])], [0], 1, list)[0].tolist() == [0.0]


def test_rewards_to_go():
    (actual,) = rewards_to_go([torch.tensor([1.0, 0.0, 4.0])], 0.5)
    assert actual.tolist() == [2.0, 2.0, 4.0]


def test_explained_variance():
    values, returns = _random([5, 3], 7), _random([5, 3], 8)
    v, r = torch.cat(values), torch.cat(returns)
    expected = 1 - float((r - v).var(unbiased=False) / r.var(unbiased=False))
    shares = [(values[:1], returns[:1]), (values[1:], returns[1:]), ([], [])]
    results = _Ranks([lambda reduce, share=share: explained_variance(*share, reduce) for share in shares]).run()
    assert results == pytest.approx([expected] * 3, rel=1e-6)
    assert explained_variance(returns, returns, list) == 1.0
    assert explained_variance(values, [torch.ones(5), torch.ones(3)], list) == 0.0
    assert explained_variance([], [], list) == 0.0
