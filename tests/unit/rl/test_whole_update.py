"""A whole step of each algorithm on small models against a plain loop: samples in, weights out, papers' formulas."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from typing import Any

import pytest
import torch
from rl_fakes import FakeActor, FakeModel, FakePrompts, FakeReward, run_world

from hybrid.algorithms import ALGORITHMS
from hybrid.config import PPOConfig
from hybrid.rl.trainer import PPOTrainer

make_trainer: Any = PPOTrainer  # of stand-ins

LR = 6.0

# What stands for itself in a loss, and combinations in which one might be applied at the place of another.
VARIANTS: list[dict[str, Any]] = [
    *({"algorithm": name} for name in ALGORITHMS),
    {"algorithm": "ppo", "gamma": 0.9, "lam": 0.7, "whiten_advantages": True, "entropy_coef": 0.05, "vf_coef": 0.5},
    {"algorithm": "ppo", "kl_in": "loss", "kl_estimator": "k3", "dual_clip": 1.1, "aggregation": "sequence_mean"},
    {"algorithm": "ppo", "mask_truncated_completions": True, "reward_clip": 1.0},
    {"algorithm": "grpo", "mask_truncated_completions": True, "overlong_buffer": 3, "overlong_penalty": 0.5},
    {"algorithm": "grpo", "kl_in": "reward", "kl_estimator": "k1", "aggregation": "token_mean"},
    {"algorithm": "dr_grpo", "whiten_advantages": True, "whiten_by": "group", "kl_coef": 0.2, "kl_estimator": "k2"},
    {"algorithm": "rloo", "rollout_correction": "token_tis", "entropy_coef": 0.05},
    {"algorithm": "reinforce_pp", "gamma": 0.8, "aggregation": "sequence_mean", "rollout_correction": "mask"},
    {"algorithm": "gspo", "cliprange": 0.02, "rollout_correction": "sequence_tis"},
    {"algorithm": "cispo", "cliprange_high": 0.1, "mask_truncated_completions": True},
]


def _config(changes: dict[str, Any]) -> PPOConfig:
    settings = {"prompts_per_step": 5, "num_generations": 4, "max_completion_length": 6, "temperature": 3.0, "seed": 1}
    epochs = {"num_ppo_epochs": 1 if changes["algorithm"] == "rloo" else 2}
    return PPOConfig(**settings, **epochs, max_tokens_per_microbatch=16, **changes)


def _reward(prompt: str, ids: list[int], index: int) -> float | None:
    return None if index == 2 and len(ids) < 3 else sum(ids) / 8 - 2.0


def _by_product(config: PPOConfig) -> tuple[Any, list[Any], list[Any], dict[str, float]]:
    """A trainer after one step, its models as they were before, its trajectories, its metrics."""

    def main(mesh: Any) -> Any:
        trainer = make_trainer(
            FakeActor(mesh, lr=LR, seed=1),
            FakeModel(mesh, lr=LR, valued=True, seed=2) if config.traits.has_critic else None,
            FakeModel(mesh, seed=3) if config.kl_coef else None,
            FakeReward(_reward),
            FakePrompts(11),
            config,
        )
        models = [trainer.actor, trainer.critic, trainer.maker.ref]
        before = [m and [m.embedding.detach().clone(), m.head.detach().clone()] for m in models]
        batch = trainer.sampler.sample(0)
        # As of a generator that is not quite the trainer.
        noise = torch.Generator().manual_seed(0)
        batch.trajectories[:] = [
            dataclasses.replace(
                t, behaviour_logprobs=t.behaviour_logprobs + torch.randn(len(t.completion_ids), generator=noise)
            )
            for t in batch.trajectories
        ]
        trainer.sampler.sample = lambda step: batch
        metrics = trainer.step()
        return trainer, before, batch.trajectories, metrics

    (result,) = run_world(1, 1, main)
    if isinstance(result, Exception):
        raise result
    return result


def _logprobs(model: list[torch.Tensor], t: Any, temperature: float) -> tuple[list[Any], list[Any]]:
    """Log-prob and entropy of each token of a completion, a token at a time."""
    logprobs, entropies, last = [], [], t.prompt_ids[-1]
    for token in t.completion_ids:
        distribution = torch.distributions.Categorical(logits=model[1] @ model[0][last] / temperature)
        logprobs.append(distribution.log_prob(torch.tensor(token)))
        entropies.append(distribution.entropy())
        last = token
    return logprobs, entropies


def _values(model: list[torch.Tensor], t: Any) -> list[Any]:
    return [(model[1] @ model[0][last]).squeeze() for last in (t.prompt_ids[-1], *t.completion_ids[:-1])]


def _kl(new: Any, ref: float, estimator: str) -> Any:
    new = torch.as_tensor(new)
    return {"k1": new - ref, "k2": (new - ref) ** 2 / 2, "k3": (ref - new).exp() - 1 - (ref - new)}[estimator]


def _token_rewards(config: PPOConfig, t: Any, old: list[float], ref: list[float]) -> list[float]:
    length, longest, buffer = len(t.completion_ids), config.max_completion_length, config.overlong_buffer
    reward = t.reward
    if buffer and length > longest - buffer:  # DAPO, equation 13
        reward += config.overlong_penalty * ((longest - buffer) - length) / buffer
    coef = config.kl_coef if config.kl_in == "reward" else 0.0
    rewards = [-coef * float(_kl(a, b, config.kl_estimator)) for a, b in zip(old, ref, strict=True)]
    rewards[-1] += max(-config.reward_clip, min(config.reward_clip, reward))
    return rewards


def _normalised(tokens: list[list[float]]) -> list[list[float]]:
    flat = [value for sequence in tokens for value in sequence]
    return [[(v - statistics.fmean(flat)) / statistics.stdev(flat) for v in sequence] for sequence in tokens]


def _advantages(config: PPOConfig, groups: list[int], rewards: list[list[float]], values: Any) -> list[list[float]]:
    name, gamma = config.algorithm, config.gamma
    scores = [sum(tokens) for tokens in rewards]
    members = {g: [s for s, other in zip(scores, groups, strict=True) if other == g] for g in groups}
    made: list[list[float]] = []
    for i, (tokens, group) in enumerate(zip(rewards, groups, strict=True)):
        mean, count = statistics.fmean(members[group]), len(members[group])
        if name == "ppo":  # Schulman et al. 2015, equation 16, as a sum
            v = [*values[i], 0.0]
            deltas = [r + gamma * v[t + 1] - v[t] for t, r in enumerate(tokens)]
            made.append(
                [
                    sum((gamma * config.lam) ** (k - t) * deltas[k] for k in range(t, len(tokens)))
                    for t in range(len(tokens))
                ]
            )
        elif name == "reinforce_pp":
            made.append([sum(gamma ** (k - t) * tokens[k] for k in range(t, len(tokens))) for t in range(len(tokens))])
        else:
            advantage = scores[i] - mean
            if name == "rloo":
                others = (sum(members[group]) - scores[i]) / (count - 1)
                advantage = scores[i] - others
            elif name not in ("dr_grpo", "reinforce_pp_baseline"):
                advantage /= statistics.stdev(members[group]) + 1e-6
            made.append([advantage] * len(tokens))
    if name.startswith("reinforce_pp"):
        made = _normalised(made)
    if config.whiten_advantages and config.whiten_by == "batch":
        return _normalised(made)
    if config.whiten_advantages:
        for group in set(groups):
            mine = [i for i, other in enumerate(groups) if other == group]
            for i, sequence in zip(mine, _normalised([made[i] for i in mine]), strict=True):
                made[i] = sequence
    return made


def _gain(config: PPOConfig, ratio: Any, logprob: Any, advantage: float) -> Any:
    if config.algorithm == "rloo":
        return advantage * logprob
    low, high = 1 - (config.cliprange_low or 0), 1 + (config.cliprange_high or 0)
    bounded = min(max(float(ratio), low), high)
    if config.algorithm == "cispo":
        return bounded * advantage * logprob
    gain = ratio * advantage if float(ratio) * advantage <= bounded * advantage else bounded * advantage
    if config.dual_clip is not None and advantage < 0 and float(gain) < config.dual_clip * advantage:
        return config.dual_clip * advantage
    return gain


def _weights(config: PPOConfig, old: list[float], behaviour: list[float]) -> list[float]:
    ratios, cap = [math.exp(a - b) for a, b in zip(old, behaviour, strict=True)], config.rollout_correction_cap
    return {
        "none": [1.0] * len(old),
        "token_tis": [min(r, cap) for r in ratios],
        "sequence_tis": [min(math.prod(ratios), cap)] * len(old),
        "mask": [r if 1 / cap <= r <= cap else 0.0 for r in ratios],
    }[config.rollout_correction]


def _by_loop(config: PPOConfig, models: list[Any], trajectories: list[Any]) -> list[list[torch.Tensor] | None]:
    actor, critic, ref = copy.deepcopy(models)
    old = [[float(x) for x in _logprobs(actor, t, config.temperature)[0]] for t in trajectories]
    refs = old if ref is None else [[float(x) for x in _logprobs(ref, t, config.temperature)[0]] for t in trajectories]
    values = None if critic is None else [[float(v) for v in _values(critic, t)] for t in trajectories]
    rewards = [_token_rewards(config, *each) for each in zip(trajectories, old, refs, strict=True)]
    advantages = _advantages(config, [t.prompt_index for t in trajectories], rewards, values)
    kept = [
        i for i, t in enumerate(trajectories) if not (config.mask_truncated_completions and t.finish_reason == "length")
    ]
    num_tokens = sum(len(old[i]) for i in kept)
    for _ in range(config.num_ppo_epochs):
        losses: list[Any] = []
        for parameter in (*actor, *(critic or ())):
            parameter.requires_grad_().grad = None
        for i in kept:
            t, length = trajectories[i], len(old[i])
            new, entropies = _logprobs(actor, t, config.temperature)
            ratios = [(a - b).exp() for a, b in zip(new, old[i], strict=True)]
            if config.algorithm == "gspo":
                mean = torch.stack([a - b for a, b in zip(new, old[i], strict=True)]).mean()
                ratios = [mean.exp()] * length
            share = {
                "token_mean": 1 / num_tokens,
                "sequence_mean": 1 / (len(kept) * length),
                "sum_over_constant": 1 / (len(kept) * config.max_completion_length),
            }[config.aggregation]
            weights = _weights(config, old[i], t.behaviour_logprobs.tolist())
            for k in range(length):
                loss = -weights[k] * _gain(config, ratios[k], new[k], advantages[i][k])
                if config.kl_in == "loss" and config.kl_coef:
                    loss = loss + config.kl_coef * _kl(new[k], refs[i][k], config.kl_estimator)
                losses.append(share * (loss - config.entropy_coef * entropies[k]))
        torch.stack(losses).sum().backward()
        if critic is not None and values is not None:
            _value_loss(config, critic, [trajectories[i] for i in kept], values, kept, rewards).backward()
        for parameter in (*actor, *(critic or ())):
            parameter.detach_().sub_(LR * parameter.grad)
    return [actor, critic]


def _value_loss(config: PPOConfig, critic: Any, kept: Any, values: Any, indices: list[int], rewards: Any) -> Any:
    losses = []
    for t, i in zip(kept, indices, strict=True):
        v = [*values[i], 0.0]
        deltas = [r + config.gamma * v[k + 1] - v[k] for k, r in enumerate(rewards[i])]
        for k, value in enumerate(_values(critic, t)):
            decay = config.gamma * config.lam
            target = v[k] + sum(decay ** (j - k) * deltas[j] for j in range(k, len(deltas)))
            near = value.clamp(v[k] - config.cliprange_value, v[k] + config.cliprange_value)
            losses.append(0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2))
    return config.vf_coef * sum(losses) / len(losses)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: " ".join(map(str, changes.values())))
def test_a_step_moves_the_weights_where_a_plain_loop_moves_them(changes: dict[str, Any]) -> None:
    config = _config(changes)
    trainer, before, trajectories, metrics = _by_product(config)
    assert len({t.finish_reason for t in trajectories}) == 2 and min(len(t.completion_ids) for t in trajectories) == 1
    assert metrics["actor/pg_clipfrac"] > 0 or config.algorithm in ("rloo", "cispo")
    expected = _by_loop(config, before, trajectories)
    for model, weights, start in zip((trainer.actor, trainer.critic), expected, before[:2], strict=True):
        if model is None or weights is None:
            continue
        for actual, wanted, old in zip((model.embedding, model.head), weights, start, strict=True):
            moved = wanted - old
            torch.testing.assert_close(actual.detach() - old, moved, rtol=1e-4, atol=1e-6 * float(moved.abs().max()))
