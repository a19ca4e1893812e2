"""What belongs to which token, on real models: log-probs, KL, values and rewards against transformers, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from hybrid.config import InferenceConfig, PPOConfig, ZeroConfig
from hybrid.engine import HybridEngine
from hybrid.models.attention import ATTENTION_NAME
from hybrid.monitor import Timers
from hybrid.parallel import init_parallel
from hybrid.rl.batches import Batching
from hybrid.rl.experience import ExperienceMaker
from hybrid.rl.metrics import StepMetrics
from hybrid.rl.records import Trajectory
from hybrid.rl.work import FlopCount
from hybrid.zero.model import ShardedModel
from tests.tiny import tiny_config, tiny_tokenizer

EOS = 2
COEF, TEMPERATURE = 0.3, 0.7

# Prompt, completion, reward. Pad is EOS, and both occur inside of prompts and completions as well.
SAMPLES = [
    ([10, 11, 12], [20, 21, EOS], 1.0),  # stopped
    ([13], [EOS], -1.0),  # stopped at once
    ([EOS, 14], [22, 23, 24, 25], 2.0),  # cut off, after a prompt that begins with padding's id
    ([15, EOS], [26], 0.5),  # cut off after one token
    ([16, 17, 18, 19], [27, EOS, 28, EOS], 9.0),  # an EOS inside, as where another id ends a completion
    ([10, 11, 12], [20, 21, 30], 0.25),  # a prompt again, and the completion's beginning too
    ([13], [31, EOS], -0.5),  # a prompt of one token again
    ([10, 11, 12], [29, EOS], -0.75),
]


def _module(kind: Any, seed: int, attention: str = ATTENTION_NAME, **settings: Any) -> Any:
    torch.manual_seed(seed)
    module = kind(tiny_config(pad_token_id=EOS, **settings))
    module.set_attn_implementation(attention)
    return module.eval()


def _logprobs(module: Any, prompt: list[int], completion: list[int]) -> list[float]:
    logits = module(input_ids=torch.tensor([prompt + completion])).logits[0]
    found = []
    for place, token in enumerate(completion, len(prompt)):
        distribution = torch.distributions.Categorical(logits=logits[place - 1] / TEMPERATURE)
        found.append(float(distribution.log_prob(torch.tensor(token))))
    return found


def _values(module: Any, prompt: list[int], completion: list[int]) -> list[float]:
    """Of the state before each token: what the score head says where the token before it has been read."""
    scores = [
        module.score(module.model(input_ids=torch.tensor([prompt + completion[:count]])).last_hidden_state[0, -1])
        for count in range(len(completion))
    ]
    return [float(score) for score in scores]


@pytest.mark.parametrize("shares_prompts", [False, True])
@pytest.mark.parametrize("budget", [1, 12, 1000])
@torch.no_grad()
def test_log_probs_kl_values_and_rewards_are_those_of_their_tokens(budget: int, shares_prompts: bool) -> None:
    mesh, zero = init_parallel(), ZeroConfig()
    inference = InferenceConfig(kv_blocks=16, block_size=4)
    actor = HybridEngine(
        _module(LlamaForCausalLM, 0), tiny_tokenizer(pad_token="<|end|>"), mesh, zero=zero, inference=inference
    )
    critic = ShardedModel(_module(LlamaForSequenceClassification, 1, num_labels=1), mesh, zero=zero)
    ref = ShardedModel(_module(LlamaForCausalLM, 2), mesh, zero=zero)
    config = PPOConfig(
        prompts_per_step=len(SAMPLES),
        max_completion_length=4,
        kl_coef=COEF,
        temperature=TEMPERATURE,
        max_tokens_per_microbatch=budget,
        gamma=0.9,
        lam=0.8,
    )
    trajectories = [
        Trajectory(i, 0, prompt, ids, torch.zeros(len(ids)), "stop" if ids[-1] == EOS else "length", 0, reward)
        for i, (prompt, ids, reward) in enumerate(SAMPLES)
    ]
    batching = Batching(mesh, budget, shares_prompts)
    maker = ExperienceMaker(actor, critic, ref, config, batching=batching, timers=Timers(), work=FlopCount())
    experiences = maker.make(trajectories, COEF, StepMetrics())
    policy, reference = (_module(LlamaForCausalLM, seed, "eager") for seed in (0, 2))
    judge = _module(LlamaForSequenceClassification, 1, "eager", num_labels=1)
    assert [e.trajectory.prompt_index for e in experiences] == list(range(len(SAMPLES)))
    for experience, (prompt, ids, reward) in zip(experiences, SAMPLES, strict=True):
        old, frozen = _logprobs(policy, prompt, ids), _logprobs(reference, prompt, ids)
        values = _values(judge, prompt, ids)
        rewards = [-COEF * (a - b) for a, b in zip(old, frozen, strict=True)]
        rewards[-1] += min(reward, 5.0)
        advantages, following = [0.0] * len(ids), 0.0
        for t in reversed(range(len(ids))):
            value_after = values[t + 1] if t + 1 < len(ids) else 0.0
            following = rewards[t] + 0.9 * value_after - values[t] + 0.9 * 0.8 * following
            advantages[t] = following
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        made = (experience.old_logprobs, experience.ref_logprobs, experience.values, experience.rewards)
        for actual, expected in zip(
            (*made, experience.advantages, experience.returns),
            (old, frozen, values, rewards, advantages, returns),
            strict=True,
        ):
            assert actual is not None
            assert actual.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
