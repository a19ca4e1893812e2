"""Every algorithm on real models: the same on any grid, interrupted or not, and it learns what can be learnt."""

import dataclasses

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from hybrid.algorithms import ALGORITHMS
from hybrid.config import InferenceConfig, OptimConfig, PPOConfig, ZeroConfig
from hybrid.data.prompts import Prompt, PromptDataset
from hybrid.engine import HybridEngine
from hybrid.models.attention import ATTENTION_NAME
from hybrid.parallel import init_parallel
from hybrid.rl.trainer import PPOTrainer
from hybrid.zero.model import ShardedModel
from tests.distributed.world import run_world
from tests.tiny import tiny_config, tiny_tokenizer

CRITIC_LESS = [name for name in ALGORITHMS if name != "ppo"]
NAMES = ["reward", "kl", "entropy", "completions/mean_length", "actor/pg_loss", "actor/grad_norm"]


def make_module(kind, seed=0, **settings):
    torch.manual_seed(seed)
    module = kind(tiny_config(**settings))
    module.set_attn_implementation(ATTENTION_NAME)
    return module


def make_trainer(tp_size, reward, config, *, learning_rate=1e-3, seed=0, ref_seed=None, prompts=7, **model):
    mesh = init_parallel(tp_size)
    zero = ZeroConfig(stage=3, persistence_threshold=0)
    optim = OptimConfig(learning_rate=learning_rate)
    actor = HybridEngine(
        make_module(LlamaForCausalLM, seed, **model),
        tiny_tokenizer(),
        mesh,
        zero=zero,
        optim=optim,
        inference=InferenceConfig(kv_blocks=128, block_size=4),
    )
    critic = ref = None
    if config.traits.has_critic:
        module = make_module(LlamaForSequenceClassification, seed, num_labels=1, **model)
        critic = ShardedModel(module, mesh, zero=zero, optim=optim)
    if config.kl_coef:
        module = make_module(LlamaForCausalLM, seed if ref_seed is None else ref_seed, **model)
        ref = ShardedModel(module, mesh, zero=zero)
    vocab = model.get("vocab_size", 263)
    rows = [Prompt([3 + (7 + i) % (vocab - 3)] * (1 + i % 4), f"prompt {i}", {}) for i in range(prompts)]
    return PPOTrainer(actor, critic, ref, reward, PromptDataset(rows), config)


def even_ids(completion_ids):
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def small(name, **changes):
    settings = {"prompts_per_step": 5, "num_generations": 3, "num_minibatches": 2, "max_completion_length": 6}
    return PPOConfig(algorithm=name, **{**settings, "max_tokens_per_microbatch": 24, **changes})


def two_steps_of_each(tp_size, names):
    found = {}
    for name in names:
        trainer = make_trainer(tp_size, even_ids, small(name))
        steps = []
        for _ in range(2):
            metrics = trainer.step()
            assert metrics["rollout/ratio_max"] == pytest.approx(1, abs=1e-4)
            steps.append(([s.completion for s in trainer.last_samples], [metrics[key] for key in NAMES]))
        found[name] = steps
    return found


def test_the_grid_changes_nothing(tmp_path):
    (expected,) = run_world(two_steps_of_each, 1, tmp_path, 1, CRITIC_LESS)
    for world_size, tp_size in ((2, 1), (4, 2)):
        for found in run_world(two_steps_of_each, world_size, tmp_path, tp_size, CRITIC_LESS):
            for name, steps in found.items():
                for (texts, values), (expected_texts, expected_values) in zip(steps, expected[name], strict=True):
                    assert texts == expected_texts, name
                    assert values == pytest.approx(expected_values, rel=2e-3, abs=1e-6), name


def a_step_with_prompts_shared_and_not(name):
    found = []
    for shares in (True, False):
        config = small(name, share_prompts=shares, num_minibatches=1, kl_coef=0.1, max_tokens_per_microbatch=200)
        trainer = make_trainer(1, even_ids, config, ref_seed=3)
        metrics = trainer.step()
        with trainer.actor.model.gathered() as weights:
            found.append(([metrics[key] for key in NAMES], {key: weight.clone() for key, weight in weights.items()}))
    return found


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_prompt_computed_once_for_its_samples_changes_nothing(tmp_path, name):
    for shared, apart in run_world(a_step_with_prompts_shared_and_not, 2, tmp_path, name):
        assert shared[0] == pytest.approx(apart[0], rel=1e-4, abs=1e-6)
        torch.testing.assert_close(shared[1], apart[1], rtol=1e-4, atol=1e-4)  # of a learning rate of 1e-3


def interrupted_and_not(directory, name):
    whole = make_trainer(1, even_ids, small(name))
    whole.train(1)
    whole.save_checkpoint(directory, note="kept")
    last = [whole.step() for _ in range(2)]
    resumed = make_trainer(1, even_ids, small(name), seed=1, ref_seed=0)
    assert resumed.load_checkpoint(directory) == {"note": "kept"}
    resumed.actor.set_schedule(2)
    again = [resumed.step() for _ in range(2)]
    return [[metrics[key] for key in NAMES] for metrics in last], [[m[key] for key in NAMES] for m in again]


@pytest.mark.parametrize(("name", "world_size"), [("grpo", 2), ("dapo", 1)])
def test_without_a_critic_resumed_equals_uninterrupted(tmp_path, name, world_size):
    for last, again in run_world(interrupted_and_not, world_size, tmp_path, str(tmp_path / "checkpoint-1"), name):
        for mine, theirs in zip(again, last, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


# -- learning ----------------------------------------------------------------------------------------------------

SEEDS = (0, 1, 2)
VOCAB = 8
BEST = [6, 3]


def pays_one(completion_ids):
    return [float(ids[0] == BEST[0]) for ids in completion_ids]


def pays_two(completion_ids):
    """Half for the right first token; the right second one pays the other half after it, and nothing after another."""
    return [0.5 * (ids[0] == BEST[0]) + 0.5 * (ids == BEST) for ids in completion_ids]


def steps_to_learn(names, seeds, length, most):
    """How many steps until 90% of the samples' rewards are in, by algorithm; ``most`` + 1 if never."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        config = PPOConfig(
            algorithm=name,
            prompts_per_step=1,
            num_generations=64,
            max_completion_length=length,
            entropy_coef=0.05,  # or a policy may settle on the first thing that pays
            whiten_advantages=name == "ppo",  # the others scale theirs
            overlong_buffer=0,  # every completion here is as long as it may be
            dynamic_sampling=False,  # or the end, where all groups agree, would never come
        )
        for seed in seeds:
            trainer = make_trainer(
                1,
                pays_one if length == 1 else pays_two,
                dataclasses.replace(config, seed=seed),
                learning_rate=1e-2,
                seed=seed,
                prompts=1,
                num_hidden_layers=1,
                hidden_size=32,
                intermediate_size=32,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                vocab_size=VOCAB,
                eos_token_id=None,
                initializer_range=0.02,
            )
            step = 0
            while step <= most:
                step += 1
                if trainer.step()["reward"] >= 0.9:
                    break
            found[name, seed] = step
    return found


@pytest.mark.parametrize(("length", "most"), [(1, 15), (2, 40)], ids=["bandit", "two steps"])
def test_each_algorithm_learns_which_tokens_pay(tmp_path, length, most):
    (found,) = run_world(steps_to_learn, 1, tmp_path, list(ALGORITHMS), SEEDS, length, most)
    assert {key: steps for key, steps in found.items() if steps > most} == {}
