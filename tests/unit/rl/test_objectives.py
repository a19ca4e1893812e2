"""Each algorithm's loss and advantages against its paper's formula, written out as loops over sequences and tokens."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from hybrid.algorithms import ALGORITHMS
from hybrid.rl.algorithms.dapo import overlong_punishment
from hybrid.rl.algorithms.ppo import value_loss
from hybrid.rl.algorithms.registry import find_algorithm
from hybrid.rl.correction import rollout_weights
from hybrid.rl.records import AdvantageInputs, ClipRange, PolicyTokens

LENGTHS = [5, 1, 7, 3, 9, 2, 4, 6]
GROUPS = [0, 0, 2, 2, 2, 0, 1, 1]
NAMES = ["ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo", "gspo", "cispo"]


def _random(count, seed, scale=1.0):
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _tokens(spread=0.4) -> PolicyTokens:
    count = sum(LENGTHS)
    logprobs = -_random(count, 0).abs()
    return PolicyTokens(
        logprobs.clone().requires_grad_(), logprobs + _random(count, 1, spread), _random(count, 2), LENGTHS
    )


def _sequences(tensor):
    return [part.tolist() for part in tensor.detach().split(LENGTHS)]


def _clipped(ratio, advantage, low, high):
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def _ppo(new, old, advantage, low, high):
    """Equation 7 of Schulman et al. 2017 at one token; with another range above it is equation 8 of DAPO."""
    return _clipped(math.exp(new - old), advantage, low, high)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("ppo", 0.2, 0.2), ("grpo", 0.2, 0.2), ("dr_grpo", 0.2, 0.2), ("reinforce_pp", 0.2, 0.2), ("dapo", 0.2, 0.28)],
)
def test_clipped_surrogate(name, low, high):
    tokens = _tokens()
    surrogate = find_algorithm(name).objective(tokens, ClipRange(low=low, high=high))
    triples = list(zip(tokens.logprobs.tolist(), tokens.old_logprobs.tolist(), tokens.advantages.tolist(), strict=True))
    assert surrogate.loss.tolist() == pytest.approx([_ppo(*triple, low, high) for triple in triples], abs=1e-6)
    clipped = [
        (a > 0 and math.exp(new - old) > 1 + high) or (a < 0 and math.exp(new - old) < 1 - low)
        for new, old, a in triples
    ]
    assert surrogate.clipped.tolist() == clipped and 0 < sum(clipped) < len(clipped)
    surrogate.loss.sum().backward()
    expected = [0.0 if c else -a * math.exp(new - old) for c, (new, old, a) in zip(clipped, triples, strict=True)]
    assert tokens.logprobs.grad.tolist() == pytest.approx(expected, abs=1e-6)


def test_dual_clip():
    """Equation 5 of Ye et al. 2019: max(min(r A, clip(r) A), c A) where A is negative."""
    tokens = _tokens(spread=1.5)
    surrogate = find_algorithm("ppo").objective(tokens, ClipRange(low=0.2, high=0.2, dual=3.0))
    expected, bounded = [], 0
    for new, old, a in zip(
        tokens.logprobs.tolist(), tokens.old_logprobs.tolist(), tokens.advantages.tolist(), strict=True
    ):
        gain = -_ppo(new, old, a, 0.2, 0.2)
        bounded += a < 0 and gain < 3 * a
        expected.append(-max(gain, 3 * a) if a < 0 else -gain)
    assert surrogate.loss.tolist() == pytest.approx(expected, abs=1e-6)
    assert bounded > 0
    surrogate.loss.sum().backward()
    assert tokens.logprobs.grad[tokens.advantages.lt(0) & (surrogate.loss >= -3 * tokens.advantages)].eq(0).all()


def test_rloo_is_reinforce():
    """Equation 6 of Ahmadian et al. 2024: A * grad log pi of the whole completion, which is the sum over its tokens."""
    tokens = _tokens()
    find_algorithm("rloo").objective(tokens, ClipRange(low=0, high=0)).loss.sum().backward()
    torch.testing.assert_close(tokens.logprobs.grad, -tokens.advantages)


def test_gspo_is_clipped_by_the_sequence():
    """Equations 5 and 7 of Zheng et al. 2025, averaged over sequences, with the gradient autograd finds."""
    low, high = 0.05, 0.1
    per_sequence = _random(len(LENGTHS), 3)
    tokens = _tokens()
    tokens = PolicyTokens(
        tokens.logprobs, tokens.old_logprobs, per_sequence.repeat_interleave(torch.tensor(LENGTHS)), LENGTHS
    )
    loss = find_algorithm("gspo").objective(tokens, ClipRange(low=low, high=high)).loss
    mean = sum(part.mean() for part in loss.split(LENGTHS)) / len(LENGTHS)
    mean.backward()

    leaf = tokens.logprobs.detach().clone().requires_grad_()
    total, inside = torch.zeros((), dtype=torch.float64), 0
    for new, old, advantage in zip(
        leaf.split(LENGTHS), tokens.old_logprobs.split(LENGTHS), per_sequence.tolist(), strict=True
    ):
        ratio = ((new - old).sum() / len(new)).exp()
        value = float(ratio.detach())
        clipped = min(max(value, 1 - low), 1 + high)
        if clipped * advantage < value * advantage:
            total = total - clipped * advantage
        else:
            total, inside = total - ratio * advantage, inside + 1
    expected = total / len(LENGTHS)
    expected.backward()
    assert 0 < inside < len(LENGTHS)
    torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tokens.logprobs.grad, leaf.grad, rtol=1e-6, atol=1e-6)


def test_cispo_weighs_every_token():
    """Equations 4 and 5 of MiniMax-M1: -sg(clip(r, 1 - low, 1 + high)) A log pi."""
    tokens = _tokens(spread=1.0)
    surrogate = find_algorithm("cispo").objective(tokens, ClipRange(low=1.0, high=0.5))
    surrogate.loss.sum().backward()
    for new, old, a, loss, gradient in zip(
        tokens.logprobs.tolist(),
        tokens.old_logprobs.tolist(),
        tokens.advantages.tolist(),
        surrogate.loss.tolist(),
        tokens.logprobs.grad.tolist(),
        strict=True,
    ):
        weight = min(max(math.exp(new - old), 0.0), 1.5)
        assert loss == pytest.approx(-weight * a * new, abs=1e-6)
        assert gradient == pytest.approx(-weight * a, abs=1e-6)
    assert 0 < surrogate.clipped.sum() < len(surrogate.clipped)


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_are_no_loss_with_a_gradient(name):
    empty = torch.zeros(0)
    tokens = PolicyTokens(empty.clone().requires_grad_(), empty, empty, [])
    loss = find_algorithm(name).objective(tokens, ClipRange(low=0.2, high=0.2)).loss.sum()
    loss.backward()
    assert loss == 0 and tokens.logprobs.grad is not None


def test_value_loss():
    """DeepSpeed-Chat's: half the larger of the squared errors of the value and of the clipped one."""
    count = 200
    values = _random(count, 4).requires_grad_()
    old, returns = _random(count, 5), _random(count, 6)
    loss, sums = value_loss(values, old, returns, cliprange_value=0.2, vf_coef=0.5, num_tokens=400)
    loss.backward()
    leaf = values.detach().clone().requires_grad_()
    total, clipped_tokens = torch.zeros((), dtype=torch.float64), 0
    for value, before, ret in zip(leaf, old.tolist(), returns.tolist(), strict=True):
        bounded = min(max(float(value.detach()), before - 0.2), before + 0.2)
        plain, clipped = (value - ret) ** 2, (bounded - ret) ** 2  # the clipped one is a constant where it is larger
        clipped_tokens += clipped > plain
        total = total + 0.5 * (clipped if clipped > plain else plain)
    (0.5 * total / 400).backward()
    assert float(loss.detach()) == pytest.approx(0.5 * float(total.detach()) / 400, rel=1e-6)
    torch.testing.assert_close(values.grad, leaf.grad, rtol=1e-6, atol=1e-9)
    assert float(sums["vf_loss"]) == pytest.approx(float(total.detach()), rel=1e-6)
    assert int(sums["vf_clipfrac"]) == clipped_tokens > 0


# -- advantages --------------------------------------------------------------------------------------------------


def _inputs(groups=GROUPS, lengths=LENGTHS, reduce=list, gamma=0.9, with_values=False) -> AdvantageInputs:
    rewards = [part.float() for part in _random(sum(lengths), 7).split(lengths)]
    values = [part.float() for part in _random(sum(lengths), 8).split(lengths)] if with_values else []
    return AdvantageInputs(rewards, values, groups, 4, reduce, gamma=gamma, lam=0.8)


def _by_formula(name, rewards, groups, gamma):
    """One list of advantages a sequence."""
    scores = [sum(tokens) for tokens in rewards]
    members = {g: [s for s, other in zip(scores, groups, strict=True) if other == g] for g in groups}
    mean = {g: sum(group) / len(group) for g, group in members.items()}
    std = {g: statistics.stdev(group) if len(group) > 1 else 0.0 for g, group in members.items()}
    if name in ("grpo", "dapo", "gspo", "cispo"):  # DeepSeekMath, section 4.1.2
        each = [(s - mean[g]) / (std[g] + 1e-6) for s, g in zip(scores, groups, strict=True)]
    elif name in ("dr_grpo", "reinforce_pp_baseline"):  # Liu et al. 2025, figure 1
        each = [s - mean[g] for s, g in zip(scores, groups, strict=True)]
    elif name == "rloo":  # Ahmadian et al. 2024, section 3.2
        each = []
        for i, (s, g) in enumerate(zip(scores, groups, strict=True)):
            others = [scores[j] for j in range(len(scores)) if j != i and groups[j] == g]
            each.append(s - sum(others) / len(others) if others else 0.0)
    else:
        each = [0.0] * len(scores)
    tokens = [[a] * len(r) for a, r in zip(each, rewards, strict=True)]
    if name == "reinforce_pp":  # Hu et al. 2025, section 3: the rewards from each token on
        tokens = [[sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))] for r in rewards]
    if name.startswith("reinforce_pp"):
        flat = [a for sequence in tokens for a in sequence]
        center, scale = statistics.fmean(flat), statistics.stdev(flat)
        tokens = [[(a - center) / scale for a in sequence] for sequence in tokens]
    return tokens


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ppo"])
def test_advantages(name):
    inputs = _inputs()
    made = find_algorithm(name).advantages(inputs)
    expected = _by_formula(name, [r.double().tolist() for r in inputs.rewards], GROUPS, 0.9)
    assert made.returns is None
    for actual, wanted in zip(made.advantages, expected, strict=True):
        assert actual.dtype == torch.float32
        assert actual.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_a_critics_advantages_come_with_returns():
    inputs = _inputs(with_values=True)
    made = find_algorithm("ppo").advantages(inputs)
    for rewards, values, advantages, returns in zip(
        inputs.rewards, inputs.values, made.advantages, made.returns or [], strict=True
    ):
        last, v = 0.0, [*values.tolist(), 0.0]
        for t in reversed(range(len(rewards))):
            last = float(rewards[t]) + 0.9 * v[t + 1] - v[t] + 0.9 * 0.8 * last
            assert float(advantages[t]) == pytest.approx(last, rel=1e-6, abs=1e-6)
            assert float(returns[t]) == pytest.approx(last + v[t], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_group_of_equal_rewards_and_one_that_lost_the_others_teach_nothing(name):
    rewards = [torch.tensor([0.0, r]) for r in (0.1, 0.1, 0.1, 5.0)]
    inputs = AdvantageInputs(rewards, [], [0, 0, 0, 1], 2, list, gamma=1.0, lam=1.0)
    for advantages in find_algorithm(name).advantages(inputs).advantages:
        assert advantages.tolist() == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_no_sequences_have_no_advantages(name):
    inputs = AdvantageInputs([], [], [], 2, list, gamma=1.0, lam=1.0)
    assert find_algorithm(name).advantages(inputs).advantages == []


def test_overlong_punishment():
    """Equation 13 of DAPO, with L_max 10 and L_cache 4."""
    expected = [0, 0, 0, 0, 0, 0, 0, -0.25, -0.5, -0.75, -1, -1]
    actual = [overlong_punishment(n, max_tokens=10, buffer=4, penalty=1.0) for n in range(12)]
    assert actual == pytest.approx(expected)
    assert overlong_punishment(10, max_tokens=10, buffer=0, penalty=1.0) == 0
    assert overlong_punishment(10, max_tokens=10, buffer=10, penalty=0.5) == -0.5


def test_unknown_algorithm_lists_the_known_ones():
    with pytest.raises(ValueError, match="algorithm='trpo' is unknown; choose one of ppo, grpo, dr_grpo, "):
        find_algorithm("trpo")


# -- correction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["token_tis", "sequence_tis", "mask"])
def test_rollout_weights(kind):
    old, behaviour = _random(50, 9, 0.6), _random(50, 10, 0.6)
    ratios = [math.exp(a - b) for a, b in zip(old.tolist(), behaviour.tolist(), strict=True)]
    if kind == "token_tis":
        expected = [min(r, 2.0) for r in ratios]
    elif kind == "sequence_tis":
        expected = [min(math.prod(ratios), 2.0)] * 50
    else:
        expected = [r if 0.5 <= r <= 2.0 else 0.0 for r in ratios]
        assert 0 < sum(w == 0 for w in expected) < 50
    weights = rollout_weights(old, behaviour, kind, 2.0)
    assert weights is not None and weights.tolist() == pytest.approx(expected, rel=1e-5)


def test_rollout_weights_of_equal_functions_are_1_and_far_ones_finite():
    logprobs = _random(5, 11)
    assert rollout_weights(logprobs, logprobs, "none", 2.0) is None
    for kind in ("token_tis", "sequence_tis", "mask"):
        weights = rollout_weights(logprobs, logprobs, kind, 2.0)
        assert weights is not None and weights.tolist() == [1.0] * 5
        far = rollout_weights(logprobs, logprobs - 1e4, kind, 2.0)
        assert far is not None and far.isfinite().all()


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_what_a_float_holds_leaves_gradients_finite(name: str, advantage: float) -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = PolicyTokens(logprobs, torch.tensor([-300.0, -2.0]), torch.tensor([advantage, 1.0]), [2])
    surrogate = find_algorithm(name).objective(tokens, ClipRange(low=0.2, high=0.2))
    surrogate.loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()
    if advantage > 0 and ALGORITHMS[name].objective == "clipped":
        assert logprobs.grad[0] == 0  # the clip range decides
