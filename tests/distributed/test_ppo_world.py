"""Contract 5: PPO takes the same trajectories and steps on any grid, also where the world does not divide a batch."""

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from hybrid.config import InferenceConfig, OptimConfig, PPOConfig, ZeroConfig
from hybrid.data.prompts import Prompt, PromptDataset
from hybrid.engine import HybridEngine
from hybrid.models.attention import ATTENTION_NAME
from hybrid.parallel import init_parallel
from hybrid.rl.trainer import PPOTrainer
from hybrid.zero.model import ShardedModel
from tests.distributed.world import WorldError, run_world
from tests.tiny import tiny_config, tiny_tokenizer

GRIDS = [(1, 1), (2, 1), (2, 2), (4, 2)]
NAMES = [
    *("reward", "kl", "entropy", "completions/mean_length", "actor/pg_loss", "actor/grad_norm"),
    *("critic/vf_loss", "critic/grad_norm"),
]


def even_bytes(completions):
    return [sum(ord(letter) % 2 == 0 for letter in text) / max(1, len(text)) for text in completions]


def fails_on_one_rank(completions):
    if init_parallel().rank == 1:
        raise ZeroDivisionError("the reward's own words")
    return [0.0] * len(completions)


def make_trainer(tp_size, reward=even_bytes, learning_rate=1e-3, **overrides):
    mesh = init_parallel(tp_size)
    zero = ZeroConfig(stage=3, persistence_threshold=0)

    def make(kind, **settings):
        torch.manual_seed(0)
        module = kind(tiny_config(**settings))
        module.set_attn_implementation(ATTENTION_NAME)
        return module

    optim = OptimConfig(learning_rate=learning_rate)
    actor = HybridEngine(
        make(LlamaForCausalLM),
        tiny_tokenizer(),
        mesh,
        zero=zero,
        optim=optim,
        inference=InferenceConfig(kv_blocks=64, block_size=4),
    )
    critic = ShardedModel(make(LlamaForSequenceClassification, num_labels=1), mesh, zero=zero, optim=optim)
    ref = ShardedModel(make(LlamaForCausalLM), mesh, zero=zero)
    rows = [Prompt([10 + i] * (1 + i % 4), f"prompt {i}", {}) for i in range(7)]
    settings = {"prompts_per_step": 5, "num_generations": 2, "num_ppo_epochs": 2, "num_minibatches": 2}
    config = PPOConfig(**{**settings, "max_completion_length": 8, "max_tokens_per_microbatch": 24, **overrides})
    return PPOTrainer(actor, critic, ref, reward, PromptDataset(rows), config)


def three_steps(tp_size, overrides):
    trainer = make_trainer(tp_size, **overrides)
    steps = []
    for _ in range(3):
        metrics = trainer.step()
        assert metrics["rollout/ratio_max"] == pytest.approx(1, abs=1e-4)
        steps.append(([s.completion for s in trainer.last_samples], [metrics[name] for name in NAMES]))
    return steps


@pytest.mark.parametrize(
    "overrides", [{}, {"prompts_per_step": 1, "num_minibatches": 1}], ids=["5 prompts", "1 prompt"]
)
def test_the_grid_changes_nothing(tmp_path, overrides):
    expected = None
    for world_size, tp_size in GRIDS:
        for steps in run_world(three_steps, world_size, tmp_path, tp_size, overrides):
            expected = expected or steps
            for (texts, values), (expected_texts, expected_values) in zip(steps, expected, strict=True):
                assert texts == expected_texts
                assert values == pytest.approx(expected_values, rel=2e-3, abs=1e-6)


def ratio_at_lr_0(tp_size):
    trainer = make_trainer(tp_size, learning_rate=0.0, temperature=0.8)
    return [trainer.step()["rollout/ratio_max"] for _ in range(2)]


@pytest.mark.parametrize(("world_size", "tp_size"), [(1, 1), (2, 2)])
def test_the_ratio_is_1_at_learning_rate_0(tmp_path, world_size, tp_size):
    for ratios in run_world(ratio_at_lr_0, world_size, tmp_path, tp_size):
        assert ratios == pytest.approx([1, 1], abs=1e-5)


def fails():
    make_trainer(2, reward=fails_on_one_rank).step()


def test_a_reward_that_fails_on_one_rank_fails_everywhere_at_once(tmp_path):
    with pytest.raises(WorldError, match="the reward's own words") as caught:
        run_world(fails, 2, tmp_path)
    assert caught.value.exit_codes == [1, 1]  # nobody hung and was killed
