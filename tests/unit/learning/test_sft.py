"""Supervised training against a plain transformers loop, whatever the packing, and after an interruption."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hybrid.config import OptimConfig, ZeroConfig
from hybrid.data.conversations import Example, ExampleDataset
from hybrid.learning import LearningTrainer, SFTObjective
from hybrid.learning_config import LearnConfig
from hybrid.models.attention import ATTENTION_NAME
from hybrid.parallel import init_parallel
from hybrid.zero.model import ShardedModel
from tests.tiny import tiny_config


def module(attention: str) -> Any:
    torch.manual_seed(0)
    made = LlamaForCausalLM(tiny_config())
    made.set_attn_implementation(attention)
    return made


def examples(number: int = 7) -> ExampleDataset[Example]:
    draw = random.Random(0)
    rows = []
    for length in (draw.randint(2, 14) for _ in range(number)):
        scored = [False, *(draw.random() < 0.6 for _ in range(length - 1))]
        scored[-1] = True
        rows.append(Example([draw.randrange(6, 262) for _ in range(length)], scored))
    return ExampleDataset(rows)


def make_trainer(max_tokens: int = 1000, learning_rate: float = 1e-2) -> LearningTrainer[Example]:
    optim = OptimConfig(learning_rate=learning_rate, max_grad_norm=0.0, lr_scheduler="linear")
    model = ShardedModel(module(ATTENTION_NAME), init_parallel(), zero=ZeroConfig(), optim=optim)
    config = LearnConfig(examples_per_step=4, max_tokens_per_microbatch=max_tokens)
    dataset = examples()
    return LearningTrainer(SFTObjective(model), dataset, dataset, config, num_examples=14)


def reference_losses(total_steps: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of transformers' own loss over padded batches and torch's AdamW."""
    model, dataset = module("eager"), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms = [], []
    for step in range(total_steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / total_steps)
        rows = dataset.batch(step, 4, 0, 14)
        width = max(len(row.token_ids) for row in rows)
        ids, labels, mask = (torch.full((len(rows), width), fill) for fill in (0, -100, 0))
        for number, row in enumerate(rows):
            length = len(row.token_ids)
            ids[number, :length] = torch.tensor(row.token_ids)
            mask[number, :length] = 1
            labels[number, :length] = torch.tensor(row.token_ids).where(torch.tensor(row.scored), -100)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.mark.parametrize("max_tokens", [1, 20, 1000])
def test_losses_and_gradients_are_those_of_a_plain_loop_whatever_the_packing(max_tokens: int) -> None:
    trainer = make_trainer(max_tokens)
    seen: list[dict[str, float]] = []
    trainer.callbacks = [lambda step, metrics: seen.append(metrics) if step else None]
    trainer.train(4)
    losses, norms = reference_losses(4)
    torch.testing.assert_close([line["loss"] for line in seen], losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([line["actor/grad_norm"] for line in seen], norms, rtol=1e-3, atol=1e-5)
    assert seen[-1]["training/epoch"] == 2.0


def test_perplexity_is_the_exponential_of_the_loss_and_falls() -> None:
    trainer = make_trainer()
    seen: dict[int, dict[str, float]] = {}
    trainer.callbacks = [seen.__setitem__]
    trainer.train(4)
    assert seen[0]["eval/perplexity"] == pytest.approx(torch.tensor(seen[0]["eval/loss"]).exp().item(), rel=1e-5)
    assert seen[4]["eval/perplexity"] < seen[0]["eval/perplexity"]
    assert "eval/loss" not in seen[1]


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole, first, second = make_trainer(), make_trainer(), make_trainer()
    lines: list[dict[str, float]] = []
    whole.callbacks = second.callbacks = [lambda step, metrics: lines.append(metrics)]
    whole.train(4)
    first.objective.model.set_schedule(4)
    first.step()
    first.step()
    first.save_checkpoint(tmp_path / "checkpoint-2", note="kept")
    assert second.load_checkpoint(tmp_path / "checkpoint-2") == {"note": "kept"}
    second.train(4)
    expected, resumed = lines[3:5], lines[5:]
    for name in ("loss", "actor/grad_norm", "actor/lr"):
        assert [line[name] for line in resumed] == [line[name] for line in expected]
