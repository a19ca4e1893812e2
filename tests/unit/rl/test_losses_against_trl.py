"""Losses and their gradients against TRL's ``GRPOTrainer``, whose own method is called.

TRL is no dependency. Where it is not installed (this was written for 1.16), the formulas of the papers in the tests
beside this one are what remains.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from hybrid.rl.algorithms.registry import find_algorithm
from hybrid.rl.loss import Average, policy_loss
from hybrid.rl.records import ClipRange, PolicyTokens

trl = pytest.importorskip("trl", minversion="1.16")

LENGTHS = [4, 1, 8, 3, 6]
LONGEST = 9
LOW, HIGH, KL_COEF = 0.2, 0.3, 0.05

# By ours: TRL's name of the loss, the level of its ratios, and our aggregation.
CASES = [
    ("grpo", "grpo", "token", "sequence_mean"),
    ("ppo", "bnpo", "token", "token_mean"),
    ("dr_grpo", "dr_grpo", "token", "sum_over_constant"),
    ("dapo", "dapo", "token", "token_mean"),
    ("gspo", "grpo", "sequence", "sequence_mean"),
    ("cispo", "cispo", "token", "token_mean"),
]


def _rows(values: torch.Tensor) -> torch.Tensor:
    """(R,) -> (sequences, tokens of the longest), padded with a number that must not count."""
    return pad_sequence(list(values.split(LENGTHS)), batch_first=True, padding_value=-1.7)


class _OneProcess:
    num_processes = 1

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def reduce(self, value: torch.Tensor, reduction: str) -> torch.Tensor:
        return value


def _trl_loss(
    loss_type: str, level: str, clip_high: float, logprobs: torch.Tensor, old: torch.Tensor, **inputs: torch.Tensor
) -> torch.Tensor:
    """What ``GRPOTrainer`` makes of log-probs that are given instead of computed."""
    mask = _rows(torch.ones(sum(LENGTHS))).gt(0).long()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=_OneProcess(),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=KL_COEF,
        current_gradient_accumulation_steps=1,
        epsilon_high=clip_high,
        epsilon_low=LOW,
        importance_sampling_level=level,
        loss_type=loss_type,
        max_completion_length=LONGEST,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    prompts = torch.ones(len(LENGTHS), 2, dtype=torch.int64)
    ids = {"prompt_ids": prompts, "prompt_mask": prompts, "completion_ids": mask, "completion_mask": mask}
    found = {"old_per_token_logps": old, "num_items_in_batch": mask.sum(), **inputs}
    return trl.GRPOTrainer._compute_loss(trainer, None, ids | found)


@pytest.mark.parametrize(("name", "loss_type", "level", "aggregation"), CASES, ids=[case[0] for case in CASES])
def test_loss_and_gradient_are_those_of_trl(name: str, loss_type: str, level: str, aggregation: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    count = sum(LENGTHS)
    logprobs = -draw(count).abs()
    old, ref, advantages = logprobs + 0.4 * draw(count), logprobs + 0.4 * draw(count), draw(len(LENGTHS))

    mine = logprobs.clone().requires_grad_()
    tokens = PolicyTokens(mine, old, advantages.repeat_interleave(torch.tensor(LENGTHS)), LENGTHS)
    # TRL's CISPO has no bound below, and its bound above is of the ratio itself.
    clip = ClipRange(low=1.0 if name == "cispo" else LOW, high=HIGH)
    loss, _ = policy_loss(
        tokens,
        find_algorithm(name).objective(tokens, clip),
        torch.zeros(count, dtype=torch.float64),
        Average(aggregation, count, len(LENGTHS), LONGEST),
        ref_logprobs=ref,
        kl_estimator="k3",
        kl_coef=KL_COEF,
    )
    loss.backward()

    theirs = logprobs.clone().requires_grad_()
    clip_high = 1 + HIGH if name == "cispo" else HIGH
    expected = _trl_loss(
        loss_type, level, clip_high, _rows(theirs), _rows(old), ref_per_token_logps=_rows(ref), advantages=advantages
    )
    expected.backward()

    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-9)
