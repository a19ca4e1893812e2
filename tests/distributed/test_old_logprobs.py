"""Old log-probs that need no forward of their own: generation's where they are the same bits, or the only update's."""

from __future__ import annotations

import warnings

import pytest
import torch

from hybrid.config import InferenceConfig, OptimConfig, PPOConfig, ZeroConfig
from hybrid.data.prompts import Prompt, PromptDataset
from hybrid.engine import HybridEngine
from hybrid.parallel import init_parallel
from hybrid.rl.trainer import PPOTrainer
from ops import attention_cpu
from tests.distributed.test_ptx import make_module
from tests.distributed.world import run_world
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.skipif(not attention_cpu.is_available(), reason="there is no C++ compiler")


def even_tokens(completions, completion_ids):
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def make_trainer(top_k, num_minibatches):
    actor = HybridEngine(
        make_module(),
        tiny_tokenizer(),
        init_parallel(),
        zero=ZeroConfig(stage=3, persistence_threshold=0),
        optim=OptimConfig(learning_rate=1e-3),
        inference=InferenceConfig(kv_blocks=64, block_size=16, exact=True),
    )
    prompts = PromptDataset([Prompt([10 + i] * (1 + i % 4), f"prompt {i}", {}) for i in range(7)])
    config = PPOConfig(
        algorithm="grpo",
        prompts_per_step=5,
        num_generations=3,
        kl_coef=0.0,
        max_completion_length=8,
        max_tokens_per_microbatch=24,
        num_minibatches=num_minibatches,
        top_k=top_k,
    )
    return PPOTrainer(actor, None, None, even_tokens, prompts, config)


def run(spoilt=False, top_k=0, num_minibatches=2, leaves=None):
    """Metrics of two steps, the tokens that each forward without gradient scored, weights, and what was warned of."""
    trainer = make_trainer(top_k, num_minibatches)
    if leaves is not None:
        trainer.maker.leaves_logprobs = trainer.updates._fills_logprobs = leaves
    actor, scored = trainer.actor, []
    logprobs, generate = actor.logprobs, actor.generate

    def counted(batch, **kwargs):
        scores = logprobs(batch, **kwargs)
        if not torch.is_grad_enabled():
            scored.append(batch.num_targets)
        return scores

    def off_by_a_bit(*args, **kwargs):
        completions = generate(*args, **kwargs)
        for completion in completions:
            completion.logprobs.view(torch.int32).add_(1)
        return completions

    actor.logprobs = counted
    if spoilt:
        actor.generate = off_by_a_bit
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics = [trainer.step() for _ in range(2)]
    said = [str(warning.message) for warning in caught if "exact_logprobs" in str(warning.message)]
    weights = dict(actor.model.state.stream("master"))
    return metrics, scored, weights, said


@pytest.mark.parametrize("world_size", [1, 2])
def test_they_are_reused_after_one_trajectory_has_been_compared(tmp_path, world_size):
    for metrics, scored, _, said in run_world(run, world_size, tmp_path):
        assert len(scored) == 2 and max(scored) <= 8 and not said
        for step in metrics:
            assert step["rollout/logprob_gap_max"] == 0
            assert step["rollout/ratio_max"] == 1
            assert step["entropy"] == step["actor/entropy"] > 0
            assert step["kl"] == 0  # there is no reference


def test_the_step_is_that_of_log_probs_computed_anew(tmp_path):
    (tmp_path / "spoilt").mkdir()
    ((_, _, weights, _),) = run_world(run, 1, tmp_path)
    ((_, scored, spoilt, said),) = run_world(run, 1, tmp_path / "spoilt", True)
    for name, weight in weights.items():
        assert torch.equal(weight, spoilt[name]), name
    # What differs by a bit is noticed, said once, and computed from then on.
    assert len(said) == 1 and "computed from here on" in said[0]
    assert sum(scored) > 2 * 15


def test_a_truncated_distribution_is_never_reused(tmp_path):
    ((metrics, scored, _, said),) = run_world(run, 1, tmp_path, False, 5)
    assert sum(scored) > 2 * 15 and not said
    assert metrics[0]["rollout/logprob_gap_max"] > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_only_update_takes_them_from_its_own_forward(tmp_path, world_size):
    (tmp_path / "anew").mkdir()
    left = run_world(run, world_size, tmp_path, False, 0, 1)
    computed = run_world(run, world_size, tmp_path / "anew", True, 0, 1, False)
    for (metrics, scored, weights, _), (_, scored_anew, weights_anew, _) in zip(left, computed, strict=True):
        assert not scored and scored_anew
        assert all(torch.equal(weight, weights_anew[name]) for name, weight in weights.items())
        for step in metrics:
            assert step["rollout/logprob_gap_max"] == step["actor/ppo_kl"] == 0
            assert step["entropy"] == step["actor/entropy"] > 0
            assert "timing_s/old_logprob" not in step
