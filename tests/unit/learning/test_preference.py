"""Reward models and DPO against the papers' formulas and transformers, and what they learn within seconds."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from hybrid.config import OptimConfig, ZeroConfig
from hybrid.data.conversations import Example, ExampleDataset, Pair
from hybrid.learning import DPOObjective, LearningTrainer, RewardObjective
from hybrid.learning.preference import (
    describe_preferences,
    dpo_loss,
    pairwise_loss,
    preference_sums,
    with_reference,
)
from hybrid.learning_config import LearnConfig
from hybrid.models.attention import ATTENTION_NAME
from hybrid.parallel import init_parallel
from hybrid.zero.model import ShardedModel
from tests.tiny import tiny_config

LIKED, DISLIKED = 40, 41


def make_module(kind: Any, attention: str = ATTENTION_NAME, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    made = kind(tiny_config(**settings))
    made.set_attn_implementation(attention)
    return made


def make_model(kind: Any, learning_rate: float = 3e-3, **settings: Any) -> ShardedModel:
    optim = OptimConfig(learning_rate=learning_rate, max_grad_norm=0.0)
    return ShardedModel(make_module(kind, **settings), init_parallel(), zero=ZeroConfig(), optim=optim)


def answer(prompt: list[int], ids: list[int]) -> Example:
    return Example(prompt + ids, [False] * len(prompt) + [True] * len(ids))


def pairs(number: int, seed: int = 0, margin: float = 0.0) -> ExampleDataset[Pair]:
    """The chosen answer holds one token somewhere that the rejected one has another for."""
    draw, rows = random.Random(seed), []
    for _ in range(number):
        prompt = [draw.randrange(50, 100) for _ in range(draw.randint(1, 5))]
        ids = [draw.randrange(50, 100) for _ in range(draw.randint(1, 4))]
        place = draw.randrange(len(ids))
        chosen, rejected = ([*ids[:place], token, *ids[place:]] for token in (LIKED, DISLIKED))
        rows.append(Pair(answer(prompt, chosen), answer(prompt, rejected + ids[:1]), margin))
    return ExampleDataset(rows)


def logprob(module: Any, example: Example) -> float:
    """The sum of an answer's log-probs out of whole logits, a token at a time."""
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([example.token_ids])).logits[0].log_softmax(-1)
    marked = [index for index, scored in enumerate(example.scored) if scored]
    return sum(logits[index - 1, example.token_ids[index]].item() for index in marked)


def test_losses_of_pairs_are_the_likelihood_of_the_label() -> None:
    """Bradley-Terry: that the chosen answer wins is a Bernoulli variable; its log-likelihood is torch's."""
    torch.manual_seed(0)
    chosen, rejected, margins = (torch.randn(200, dtype=torch.float64).requires_grad_() for _ in range(3))
    wins = torch.distributions.Bernoulli(logits=chosen - rejected - margins)
    oracles = {
        "pairwise": (pairwise_loss(chosen, rejected, margins), -wins.log_prob(torch.ones(200, dtype=torch.float64))),
        "dpo": (
            dpo_loss(chosen - rejected - margins, label_smoothing=0.2),
            -0.8 * wins.log_prob(torch.ones(200, dtype=torch.float64))
            - 0.2 * wins.log_prob(torch.zeros(200, dtype=torch.float64)),
        ),
    }
    for actual, expected in oracles.values():
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
        gradients = [
            torch.autograd.grad(loss.sum(), (chosen, rejected, margins), retain_graph=True)
            for loss in (actual, expected)
        ]
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-9)
    far = torch.tensor([1e3, -1e3], dtype=torch.float64)
    torch.testing.assert_close(dpo_loss(far), torch.tensor([0.0, 1e3], dtype=torch.float64))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_dpo_is_the_papers_formula(label_smoothing: float) -> None:
    """Equation 7 of https://arxiv.org/abs/2305.18290, smoothed as in equation 3 of https://ericmitchell.ai/cdpo.pdf."""
    model = make_model(LlamaForCausalLM)
    reference = make_model(LlamaForCausalLM, hidden_size=24, intermediate_size=16)
    dataset = with_reference(pairs(5), reference, 30)
    objective = DPOObjective(model, beta=0.3, label_smoothing=label_smoothing)
    loss, sums = objective.loss(dataset.rows, 5)
    policy = make_module(LlamaForCausalLM, "eager")
    frozen = make_module(LlamaForCausalLM, "eager", hidden_size=24, intermediate_size=16)
    expected, margins = 0.0, []
    for pair in dataset.rows:
        chosen = 0.3 * (logprob(policy, pair.chosen) - logprob(frozen, pair.chosen))
        rejected = 0.3 * (logprob(policy, pair.rejected) - logprob(frozen, pair.rejected))
        margins.append(chosen - rejected)
        right, wrong = 1 / (1 + math.exp(-margins[-1])), 1 / (1 + math.exp(margins[-1]))
        expected -= (1 - label_smoothing) * math.log(right) + label_smoothing * math.log(wrong)
    assert loss.item() == pytest.approx(expected / 5, rel=1e-4)
    assert sums["margin"].item() == pytest.approx(sum(margins), rel=1e-3, abs=1e-4)


def test_dpo_without_its_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="give the dataset them by with_reference"):
        DPOObjective(make_model(LlamaForCausalLM)).loss(pairs(1).rows, 1)


def test_a_reward_models_scores_are_those_of_transformers_and_its_loss_the_papers() -> None:
    """Equation 1 of https://arxiv.org/abs/2203.02155, margin as in equation 2 of https://arxiv.org/abs/2307.09288."""
    model = make_model(LlamaForSequenceClassification, num_labels=1)
    dataset = pairs(6, margin=0.25)
    loss, sums = RewardObjective(model).loss(dataset.rows, 6)
    oracle = make_module(LlamaForSequenceClassification, "eager", num_labels=1)

    def score(example: Example) -> float:
        with torch.no_grad():
            return oracle(input_ids=torch.tensor([example.token_ids])).logits.item()

    scores = [(score(pair.chosen), score(pair.rejected)) for pair in dataset.rows]
    expected = sum(math.log1p(math.exp(-(good - bad - 0.25))) for good, bad in scores) / 6
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    metrics = describe_preferences({name: value.item() for name, value in sums.items()}, 6)
    assert metrics["chosen"] == pytest.approx(sum(good for good, _ in scores) / 6, rel=1e-4, abs=1e-5)
    assert metrics["accuracy"] == pytest.approx(sum(good > bad for good, bad in scores) / 6)


def test_calibration_is_what_its_definition_says() -> None:
    torch.manual_seed(0)
    chosen, rejected = torch.randn(50) * 2, torch.randn(50)
    sums = preference_sums(torch.zeros(50), chosen, rejected)
    metrics = describe_preferences({name: value.item() for name, value in sums.items()}, 50)
    bins: dict[int, list[tuple[float, bool]]] = {}
    brier = 0.0
    for good, bad in zip(chosen.tolist(), rejected.tolist(), strict=True):
        probability = 1 / (1 + math.exp(bad - good))
        brier += (1 - probability) ** 2 / 50
        confidence = max(probability, 1 - probability)
        bins.setdefault(min(9, int((confidence - 0.5) / 0.05)), []).append((confidence, good > bad))
    ece = sum(
        len(held) / 50 * abs(sum(c for c, _ in held) / len(held) - sum(r for _, r in held) / len(held))
        for held in bins.values()
    )
    assert metrics["ece"] == pytest.approx(ece, abs=1e-5)
    assert metrics["brier"] == pytest.approx(brier, abs=1e-5)


def test_a_tie_is_half_right_and_well_calibrated() -> None:
    sums = preference_sums(torch.zeros(4), torch.ones(4), torch.ones(4))
    metrics = describe_preferences({name: value.item() for name, value in sums.items()}, 4)
    assert (metrics["accuracy"], metrics["ece"], metrics["brier"]) == (0.5, 0.0, 0.25)


def learn(objective: Any, train: Any, held_out: Any, steps: int, max_tokens: int = 4096) -> dict[int, dict[str, float]]:
    seen: dict[int, dict[str, float]] = {}
    config = LearnConfig(examples_per_step=16, max_tokens_per_microbatch=max_tokens)
    LearningTrainer(objective, train, held_out, config, callbacks=[seen.__setitem__]).train(steps)
    return seen


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_reward_model_separates_what_is_liked_from_what_is_not(seed: int) -> None:
    model = make_model(LlamaForSequenceClassification, num_labels=1, seed=seed)
    seen = learn(RewardObjective(model), pairs(200, seed=seed), pairs(100, seed=seed + 10), 40)
    assert seen[40]["eval/accuracy"] > 0.95
    assert seen[40]["eval/brier"] < 0.1 < seen[0]["eval/brier"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dpo_starts_at_the_reference_and_moves_to_the_chosen(seed: int) -> None:
    model = make_model(LlamaForCausalLM, learning_rate=1e-3, seed=seed)
    data = (pairs(100, seed), pairs(50, seed + 10))
    train, held_out = (with_reference(each, model, 500) for each in data)
    seen = learn(DPOObjective(model), train, held_out, 20)
    assert seen[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert seen[0]["eval/margin"] == pytest.approx(0, abs=1e-5)
    assert seen[20]["eval/margin"] > 0.5 and seen[20]["eval/accuracy"] > 0.95


@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_packing_changes_nothing(kind: str) -> None:
    runs = []
    for max_tokens in (1, 60, 4096):
        if kind == "reward":
            objective, train = RewardObjective(make_model(LlamaForSequenceClassification, num_labels=1)), pairs(20)
        else:
            model = make_model(LlamaForCausalLM)
            objective, train = DPOObjective(model), with_reference(pairs(20), model, max_tokens)
        seen = learn(objective, train, None, 3, max_tokens)
        runs.append([(line["loss"], line[f"{objective.role}/grad_norm"]) for line in seen.values()])
    torch.testing.assert_close(runs[1], runs[0], rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(runs[2], runs[0], rtol=2e-3, atol=1e-5)
