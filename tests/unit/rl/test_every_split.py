"""Every algorithm under every aggregation: who holds a sample, in which order and micro-batch, changes nothing."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from rl_fakes import FakeActor, FakeModel, FakePrompts, FakeReward, run_world

from hybrid.algorithms import ALGORITHMS
from hybrid.config import PPOConfig
from hybrid.rl.trainer import PPOTrainer

make_trainer: Any = PPOTrainer  # of stand-ins

COMBINATIONS = list(itertools.product(ALGORITHMS, ("token_mean", "sequence_mean", "sum_over_constant")))
COMPARED = ("actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac", "kl", "critic/advantages/mean")


def _reward(prompt: str, ids: list[int], index: int) -> float | None:
    return None if index == 2 and len(ids) < 3 else sum(ids) / 8 - 2.0


def _step(mesh: Any, name: Any, aggregation: Any, budget: int, shuffle: int | None) -> dict[str, Any]:
    """The gradients and metrics of a step whose samples are dealt out anew, by ``shuffle``, over the ranks."""
    config = PPOConfig(
        algorithm=name,
        aggregation=aggregation,
        prompts_per_step=4,
        num_generations=3,
        num_ppo_epochs=1 if name == "rloo" else 2,
        max_completion_length=5,
        max_tokens_per_microbatch=budget,
        entropy_coef=0.01,
        temperature=3.0,
        seed=1,
    )
    trainer = make_trainer(
        FakeActor(mesh, lr=6.0, seed=1),
        FakeModel(mesh, lr=6.0, valued=True, seed=2) if config.traits.has_critic else None,
        FakeModel(mesh, seed=3) if config.kl_coef else None,
        FakeReward(_reward),
        FakePrompts(11),
        config,
    )
    sample = trainer.sampler.sample

    def dealt(step: int) -> Any:
        batch = sample(step)
        every = [t for share in mesh.all_gather_object(batch.trajectories) for t in share]
        draw = random.Random(shuffle)
        draw.shuffle(every)
        owners = [draw.randrange(mesh.world_size) for _ in every]
        mine = [t for t, owner in zip(every, owners, strict=True) if owner == mesh.rank]
        return dataclasses.replace(batch, trajectories=mine)

    if shuffle is not None:
        trainer.sampler.sample = dealt
    metrics = trainer.step()
    models = [model for model in (trainer.actor, trainer.critic) if model is not None]
    found = {f"gradient {number}": model.gradient for number, model in enumerate(models)}
    return found | {key: torch.tensor(metrics[key]) for key in COMPARED}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_depends_on_ranks_order_or_micro_batches() -> None:
    (alone,) = run_world(1, 1, lambda mesh: [_step(mesh, *each, 16, None) for each in COMBINATIONS])
    for size, budget in ((1, 10_000), (2, 9), (4, 1)):
        for found in run_world(
            size, 1, lambda mesh, b=budget: [_step(mesh, *each, b, i) for i, each in enumerate(COMBINATIONS)]
        ):
            if isinstance(found, Exception):
                raise found
            for combination, mine, theirs in zip(COMBINATIONS, found, alone, strict=True):
                torch.testing.assert_close(
                    mine, theirs, rtol=1e-5, atol=1e-6, msg=lambda text, c=combination: f"{c}: {text}"
                )
    assert all(
        found["actor/pg_clipfrac"] > 0
        for (name, _), found in zip(COMBINATIONS, alone, strict=True)
        if name not in ("rloo", "cispo")
    )
