"""PTX: an update's gradient gains ``ptx_coef`` times that of the examples' mean loss, whoever holds them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import LlamaForCausalLM

from hybrid.config import InferenceConfig, OptimConfig, PPOConfig, ZeroConfig
from hybrid.data.conversations import Example, ExampleDataset
from hybrid.data.prompts import Prompt, PromptDataset
from hybrid.engine import HybridEngine
from hybrid.models.attention import ATTENTION_NAME
from hybrid.parallel import init_parallel
from hybrid.rl.trainer import PPOTrainer
from tests.distributed.world import run_world
from tests.tiny import tiny_config, tiny_tokenizer

RATE, COEF = 0.1, 3.0


def examples():
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in (9, 4, 17, 2, 12)]
    return ExampleDataset([Example(ids, [False, *[True] * (len(ids) - 1)]) for ids in rows])


def make_module():
    torch.manual_seed(0)
    module = LlamaForCausalLM(tiny_config())
    module.set_attn_implementation(ATTENTION_NAME)
    return module


def config(**changes):
    settings = {"algorithm": "grpo", "prompts_per_step": 3, "num_generations": 2, "kl_coef": 0.0, "ptx_batch_size": 4}
    settings |= {"ptx_coef": COEF, "max_completion_length": 4, "max_tokens_per_microbatch": 20}
    return PPOConfig(**(settings | changes))


def make_trainer(tp_size, **changes):
    optim = OptimConfig(optimizer="sgd", learning_rate=RATE, max_grad_norm=0.0)
    actor = HybridEngine(
        make_module(),
        tiny_tokenizer(),
        init_parallel(tp_size),
        zero=ZeroConfig(stage=3, persistence_threshold=0),
        optim=optim,
        inference=InferenceConfig(kv_blocks=64, block_size=4),
    )
    prompts = PromptDataset([Prompt([10 + i] * (1 + i % 4), f"prompt {i}", {}) for i in range(7)])
    # Rewards without spread have no advantages: all of the gradient is the examples'.
    return PPOTrainer(
        actor, None, None, lambda completions: [1.0] * len(completions), prompts, config(**changes), ptx=examples()
    )


def weights_of(trainer):
    return dict(trainer.actor.model.state.stream("master"))


def two_steps(tp_size):
    trainer = make_trainer(tp_size, num_minibatches=2)
    losses = [trainer.step()["actor/ptx_loss"] for _ in range(2)]
    return losses, weights_of(trainer)


def plain_loop(num_updates):
    """The same in plain PyTorch: SGD on COEF times the mean cross-entropy of each batch's tokens."""
    torch.manual_seed(0)
    module = LlamaForCausalLM(tiny_config())
    losses, settings = [], config()
    for number in range(num_updates):
        batch = examples().batch(number, settings.ptx_batch_size, settings.seed)
        total = sum(example.num_scored for example in batch)
        loss = torch.zeros(())
        for example in batch:
            ids = torch.tensor([example.token_ids])
            logits = module(ids).logits[0, :-1]
            loss = loss + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / total
        (COEF * loss).backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= RATE * parameter.grad
                parameter.grad = None
    return losses, dict(module.named_parameters())


@pytest.mark.parametrize(("world_size", "tp_size"), [(1, 1), (2, 2), (4, 2)])
def test_equals_a_plain_loop(tmp_path, world_size, tp_size):
    expected_losses, expected = plain_loop(4)
    for losses, weights in run_world(two_steps, world_size, tmp_path, tp_size):
        # Two updates a step, each on its own examples, logged as their mean per token.
        for step, loss in enumerate(losses):
            pair = expected_losses[2 * step : 2 * step + 2]
            assert min(pair) - 1e-4 <= loss <= max(pair) + 1e-4
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-4, atol=2e-5)


def resumed(directory):
    straight = make_trainer(1)
    for _ in range(3):
        straight.step()
    first = make_trainer(1)
    first.step()
    first.save_checkpoint(directory)
    second = make_trainer(1)
    second.load_checkpoint(directory)
    for _ in range(2):
        second.step()
    return weights_of(straight), weights_of(second)


def test_a_resumed_run_goes_on_with_the_next_examples(tmp_path):
    (tmp_path / "world").mkdir()
    ((straight, second),) = run_world(resumed, 1, tmp_path / "world", tmp_path / "checkpoint-1")
    for name, weight in straight.items():
        assert torch.equal(weight, second[name]), name


def refusals():
    trainer = make_trainer(1)
    parts = (trainer.actor, None, None, trainer.collector.reward, trainer.prompts)
    with pytest.raises(ValueError, match="ptx_coef=3 needs examples: pass ptx"):
        PPOTrainer(*parts, trainer.config)
    with pytest.raises(ValueError, match="ptx_coef=0 has no use for them; leave ptx out"):
        PPOTrainer(*parts, dataclasses.replace(trainer.config, ptx_coef=0.0, ptx_batch_size=0), ptx=examples())
    return True


def test_a_weight_without_examples_and_examples_without_a_weight_are_refused(tmp_path):
    assert run_world(refusals, 1, tmp_path) == [True]
