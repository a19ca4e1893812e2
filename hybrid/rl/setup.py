"""From settings to the parts of a PPO run: first everything is found and checked, then weights are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybrid.config import DataConfig, PPOConfig, PPOSettings
from hybrid.data.prompts import Prompt, PromptDataset, load_prompts
from hybrid.data.tasks import LargerNumberTask, larger_number
from hybrid.engine import HybridEngine
from hybrid.models.loading import (
    ResolvedModel,
    check_value_model,
    load_causal_lm,
    load_tokenizer,
    load_value_model,
    resolve_model,
    skeleton,
)
from hybrid.models.plans import tensor_parallel_plan
from hybrid.monitor import check_output_dir, check_trackers
from hybrid.parallel import ParallelMesh
from hybrid.rewards import FunctionReward, ModelReward, Reward, load_reward
from hybrid.rewards.function import is_function_path
from hybrid.zero.model import ShardedModel

_NUM_SHOWN = 6


@dataclass(frozen=True, slots=True)
class PPOInputs:
    """What the settings name, found and checked. No weight has been read."""

    actor: ResolvedModel
    critic: ResolvedModel
    ref: ResolvedModel
    reward: ResolvedModel | FunctionReward
    tokenizer: PreTrainedTokenizerBase  # the actor's
    prompts: PromptDataset
    shown: Sequence[Prompt]  # for samples before and after: held out where the task has a test split


@dataclass(frozen=True, slots=True)
class PPOParts:
    """What a ``PPOTrainer`` is made from, in its order."""

    actor: HybridEngine
    critic: ShardedModel
    ref: ShardedModel
    reward: Reward


def find_inputs(settings: PPOSettings, world_size: int = 1) -> PPOInputs:
    """Find what the settings name and check that it fits together, in order of cost.

    Raises:
        ValueError: something is missing or does not fit; the message says what to set.
    """
    settings.parallel.check_world(world_size)
    check_output_dir(settings.run.output_dir, overwrite=settings.run.overwrite_output_dir)
    check_trackers(settings.run.report_to)
    reward = _find_reward(settings)
    actor = resolve_model(settings.model.actor)
    critic = _find_critic(settings, reward, actor)
    ref = resolve_model(settings.model.ref) if settings.model.ref else actor
    tokenizer = load_tokenizer(actor)
    for role, model in (("critic", critic), ("ref", ref)):
        _check_vocabulary(role, model, actor, tokenizer)
    if settings.parallel.tp_size > 1:
        tensor_parallel_plan(skeleton(actor), settings.parallel.tp_size)
    prompts, shown = _find_prompts(settings.data, settings.ppo, tokenizer)
    if isinstance(reward, FunctionReward):
        reward.check_columns(sorted(prompts.rows[0].columns))
    return PPOInputs(actor, critic, ref, reward, tokenizer, prompts, shown)


def load_parts(inputs: PPOInputs, settings: PPOSettings, mesh: ParallelMesh) -> PPOParts:
    """Load every model's weights and lay them out over the ranks; every rank calls this."""
    dtype, zero = settings.model.dtype, settings.zero
    actor = HybridEngine(
        load_causal_lm(inputs.actor, dtype),
        inputs.tokenizer,
        mesh,
        zero=zero,
        optim=settings.optim,
        inference=settings.inference,
    )
    critic_optim = dataclasses.replace(settings.optim, learning_rate=settings.critic.critic_learning_rate)
    critic = ShardedModel(load_value_model(inputs.critic, dtype), mesh, zero=zero, optim=critic_optim)
    ref = ShardedModel(load_causal_lm(inputs.ref, dtype), mesh, zero=zero)
    if isinstance(inputs.reward, FunctionReward):
        return PPOParts(actor, critic, ref, inputs.reward)
    reward = ModelReward(
        ShardedModel(load_value_model(inputs.reward, dtype, new_head=False), mesh, zero=zero),
        load_tokenizer(inputs.reward),
        max_tokens_per_microbatch=settings.ppo.max_tokens_per_microbatch,
    )
    return PPOParts(actor, critic, ref, reward)


def _find_reward(settings: PPOSettings) -> ResolvedModel | FunctionReward:
    name = settings.model.reward
    if name is None:
        if settings.data.prompts is not None:
            raise ValueError(
                f"prompts {settings.data.prompts!r} need a reward; set --reward to file.py:function or a reward model"
            )
        return FunctionReward(larger_number)
    if is_function_path(name):
        return load_reward(name)
    reward = resolve_model(name)
    check_value_model(reward, new_head=False)
    return reward


def _find_critic(settings: PPOSettings, reward: ResolvedModel | FunctionReward, actor: ResolvedModel) -> ResolvedModel:
    if settings.model.critic is not None:
        critic = resolve_model(settings.model.critic)
    else:
        critic = reward if isinstance(reward, ResolvedModel) else actor
    check_value_model(critic, new_head=True)
    return critic


def _check_vocabulary(
    role: str, model: ResolvedModel, actor: ResolvedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The critic and the reference read the actor's token ids, so they must share its vocabulary."""
    if model.source == actor.source:
        return
    size = model.config.get_text_config(decoder=True).vocab_size
    if size < len(tokenizer) or load_tokenizer(model).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the {role} {model.name!r} has another vocabulary than the actor {actor.name!r}, whose token ids it "
            f"reads; set --{role} to a model of the actor's family"
        )


def _find_prompts(
    data: DataConfig, ppo: PPOConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PromptDataset, Sequence[Prompt]]:
    if data.prompts is not None:
        prompts = load_prompts(
            data.prompts,
            tokenizer,
            max_prompt_length=ppo.max_prompt_length,
            config_name=data.prompts_config,
            split=data.prompts_split,
            prompt_column=data.prompt_column,
            apply_chat_template=data.apply_chat_template,
            overlong=data.overlong_prompts,
        )
        return prompts, prompts.rows[:_NUM_SHOWN]
    task = LargerNumberTask()
    train, test = (
        PromptDataset.from_rows(
            rows,
            tokenizer,
            max_prompt_length=ppo.max_prompt_length,
            source="the demo task",
            apply_chat_template=bool(data.apply_chat_template),
            overlong=data.overlong_prompts,
        )
        for rows in (task.rows("train"), task.rows("test", size=_NUM_SHOWN))
    )
    return train, test.rows
