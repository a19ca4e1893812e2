"""From settings to the parts of an on-policy run: first everything is found and checked, then weights are loaded."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from transformers import PreTrainedTokenizerBase

from hybrid.config import (
    CriticConfig,
    DataConfig,
    InferenceConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PPOConfig,
    PPORunConfig,
    PPOSettings,
    ZeroConfig,
)
from hybrid.data.conversations import Example, ExampleDataset, read_examples
from hybrid.data.prompts import Prompt, PromptDataset, Row, load_prompts, read_rows
from hybrid.data.tasks import LargerNumberTask, larger_number
from hybrid.engine import HybridEngine
from hybrid.models.empty import skeleton
from hybrid.models.loading import (
    ResolvedModel,
    check_value_model,
    load_tokenizer,
    open_causal_lm,
    open_value_model,
    require_vocabulary,
    resolve_model,
)
from hybrid.models.plans import tensor_parallel_plan
from hybrid.monitor import find_traces
from hybrid.parallel import ParallelMesh, init_parallel
from hybrid.rewards import FunctionReward, ModelReward, Reward, combine_rewards, load_reward
from hybrid.rewards.function import is_function_path
from hybrid.rl.trainer import PPOTrainer
from hybrid.runs import check_resume, resumes_in_place, run_directory
from hybrid.zero.model import ShardedModel

_NUM_SHOWN = 6
_DEMO_EVAL_SIZE = 64


@dataclass(frozen=True, slots=True)
class PPOInputs:
    """What the settings name, found and checked. No weight has been read."""

    actor: ResolvedModel
    critic: ResolvedModel | None  # of an algorithm that has one
    ref: ResolvedModel | None  # where there is a KL penalty
    rewards: Sequence[ResolvedModel | Reward]  # at least one
    tokenizer: PreTrainedTokenizerBase  # the actor's
    prompts: PromptDataset
    held_out: Sequence[Prompt]  # to evaluate; there may be none
    ptx: ExampleDataset[Example] | None  # to go on learning from beside the reward
    checkpoint: Path | None  # to go on from
    total_steps: int

    @property
    def shown(self) -> Sequence[Prompt]:
        """For the table of samples before and after: of what is held out, or else of all sources of prompts."""
        if self.held_out:
            return self.held_out[:_NUM_SHOWN]
        return self.prompts.batch(0, min(_NUM_SHOWN, len(self.prompts)), seed=0)

    @property
    def reward(self) -> ResolvedModel | Reward:
        """The first reward."""
        return self.rewards[0]


@dataclass(frozen=True, slots=True)
class PPOParts:
    """What a ``PPOTrainer`` is made from, in its order."""

    actor: HybridEngine
    critic: ShardedModel | None
    ref: ShardedModel | None
    reward: Reward

    def close(self) -> None:
        """End what a reward has started: a process for its function."""
        if (close := getattr(self.reward, "close", None)) is not None:
            close()


def find_inputs(
    settings: PPOSettings,
    world_size: int = 1,
    *,
    checkpoint: Path | None = None,
    reward: Reward | None = None,
    rows: Sequence[Row] | None = None,
    eval_rows: Sequence[Row] | None = None,
) -> PPOInputs:
    """Find what the settings name and check that it fits together, in order of cost.

    ``checkpoint`` is what `runs.check_run` found. ``reward``, ``rows`` (of prompts) and ``eval_rows`` are used as
    they are, in place of what the settings name.

    Raises:
        ValueError: something is missing or does not fit; the message says what to set.
    """
    settings.parallel.check_world(world_size)
    rewards = [reward] if reward is not None else _find_rewards(settings)
    actor = resolve_model(settings.model.actor)
    critic = _find_critic(settings, rewards, actor)
    ref = _find_ref(settings, actor)
    tokenizer = load_tokenizer(actor)
    others = {role: model for role, model in (("critic", critic), ("ref", ref)) if model is not None}
    for role, model in others.items():
        require_vocabulary(role, model, actor, tokenizer)
    if settings.parallel.tp_size > 1:
        tensor_parallel_plan(skeleton(actor.config), settings.parallel.tp_size)
    prompts, held_out = _find_prompts(settings.data, settings.ppo, tokenizer, rows, eval_rows)
    ptx = _find_ptx(settings.data, settings.ppo, tokenizer)
    for found in rewards:
        if (check_columns := getattr(found, "check_columns", None)) is not None:
            check_columns(sorted(prompts.rows[0].columns))
    longest = max(len(prompt.token_ids) for prompt in (*prompts.rows, *held_out))
    _check_room(settings, {"actor": actor, **others}, longest)
    total_steps = settings.run.total_steps or -(-len(prompts) // settings.ppo.prompts_per_step)
    if checkpoint is not None:
        check_resume(checkpoint, total_steps, settings_to_compare(settings))
    if settings.run.overwrite_output_dir and not resumes_in_place(settings.run, checkpoint):
        _check_nothing_read_is_replaced(settings)
    return PPOInputs(actor, critic, ref, rewards, tokenizer, prompts, held_out, ptx, checkpoint, total_steps)


def settings_to_compare(settings: PPOSettings) -> dict[str, Any]:
    """What a resumed run should share with the one that it goes on from; kept in its checkpoints."""
    ppo = settings.ppo
    return {
        "actor": settings.model.actor,
        "algorithm": ppo.algorithm,
        "seed": ppo.seed,
        "prompts_per_step": ppo.prompts_per_step,
        "num_generations": ppo.num_generations,
    }


def load_parts(inputs: PPOInputs, settings: PPOSettings, mesh: ParallelMesh) -> PPOParts:
    """Load every model's weights and lay them out over the ranks; every rank calls this."""
    zero, dtype = settings.zero, settings.model.dtype
    with closing(open_causal_lm(inputs.actor, dtype)) as opened:
        actor = HybridEngine(
            opened.module,
            inputs.tokenizer,
            mesh,
            zero=zero,
            optim=settings.optim,
            inference=settings.inference,
            weights=opened.weights,
        )
    critic = ref = None
    if inputs.critic is not None:
        critic_optim = dataclasses.replace(settings.optim, learning_rate=settings.critic.critic_learning_rate)
        critic = ShardedModel.load(open_value_model(inputs.critic, dtype), mesh, zero=zero, optim=critic_optim)
    if inputs.ref is not None:
        ref = ShardedModel.load(open_causal_lm(inputs.ref, dtype), mesh, zero=zero)

    def loaded(reward: ResolvedModel | Reward) -> Reward:
        if not isinstance(reward, ResolvedModel):
            return reward
        return ModelReward(
            ShardedModel.load(open_value_model(reward, dtype, new_head=False), mesh, zero=zero),
            load_tokenizer(reward),
            max_tokens_per_microbatch=settings.ppo.max_tokens_per_microbatch,
            # It reads one token more than it scores.
            max_length=positions - 1 if (positions := reward.num_positions) else None,
            end_ids=actor.eos_token_ids,
        )

    rewards = [loaded(reward) for reward in inputs.rewards]
    return PPOParts(actor, critic, ref, combine_rewards(rewards, settings.model.reward_weights))


def make_ppo_trainer(
    actor: str | Path,
    *,
    reward: str | tuple[str, ...] | Reward | Callable[..., Any],
    prompts: str | Sequence[Any],
    critic: str | None = None,
    ref: str | None = None,
    ppo: PPOConfig | None = None,
    optim: OptimConfig | None = None,
    critic_learning_rate: float = 1e-5,
    zero: ZeroConfig | None = None,
    inference: InferenceConfig | None = None,
    tp_size: int = 1,
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
    apply_chat_template: bool | None = None,
    eval_prompts: str | Sequence[Any] | None = None,
    ptx_data: str | None = None,
    **trainer_options: Any,
) -> PPOTrainer:
    """Load the models and make a trainer, on one process or on every rank of a launched world.

    Args:
        actor, critic, ref: directories, Hub ids or aliases; the critic defaults to the reward model if there is one,
            else to the actor, and the reference to the actor. Neither is loaded where ``ppo`` has no use for it.
        reward: a function ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, a `Reward`,
            ``file.py:function``, a server's address, or a reward model's name; or several names, whose sum counts.
        prompts: a file or Hub dataset, or a list of prompts (text or messages) or of rows with a prompt column.
        eval_prompts: the same, held out: `PPOTrainer.train` evaluates them.
        ptx_data: a file or Hub dataset for ``ppo.ptx_coef``.
        trainer_options: ``logger``, ``timers``, ``callbacks`` of `PPOTrainer`.

    Raises:
        ValueError: something is missing or does not fit; the message says what to set.
    """
    by_name = isinstance(reward, (str, tuple))
    settings = PPOSettings(
        ModelConfig(actor=str(actor), critic=critic, ref=ref, reward=reward if by_name else None, dtype=dtype),
        DataConfig(
            prompts=prompts if isinstance(prompts, str) else None,
            eval_prompts=eval_prompts if isinstance(eval_prompts, str) else None,
            apply_chat_template=apply_chat_template,
            ptx_data=ptx_data,
        ),
        ppo or PPOConfig(),
        optim or OptimConfig(),
        CriticConfig(critic_learning_rate=critic_learning_rate),
        zero or ZeroConfig(),
        inference or InferenceConfig(),
        ParallelConfig(tp_size=tp_size),
        PPORunConfig(),
    )
    mesh = init_parallel(tp_size)
    if not by_name and not hasattr(reward, "score"):
        reward = FunctionReward(cast("Callable[..., Any]", reward))
    inputs = find_inputs(
        settings,
        mesh.world_size,
        reward=None if by_name else cast("Reward", reward),
        rows=_rows(prompts),
        eval_rows=_rows(eval_prompts),
    )
    return make_trainer(load_parts(inputs, settings, mesh), inputs, settings, **trainer_options)


def make_trainer(parts: PPOParts, inputs: PPOInputs, settings: PPOSettings, **trainer_options: Any) -> PPOTrainer:
    """The trainer of what was found and loaded."""
    return PPOTrainer(
        parts.actor,
        parts.critic,
        parts.ref,
        parts.reward,
        inputs.prompts,
        settings.ppo,
        held_out=inputs.held_out,
        ptx=inputs.ptx,
        **trainer_options,
    )


def _rows(prompts: str | Sequence[Any] | None) -> list[Row] | None:
    """Prompts in memory as rows; None for what has a name or is not there."""
    if prompts is None or isinstance(prompts, str):
        return None
    return [prompt if isinstance(prompt, Mapping) else {"prompt": prompt} for prompt in prompts]


def _check_nothing_read_is_replaced(settings: PPOSettings) -> None:
    output_dir = settings.run.output_dir
    if output_dir is None:
        return
    traces = [path.resolve() for path in find_traces(run_directory(settings.run))]
    model = settings.model
    inputs = [("actor", model.actor), ("critic", model.critic), ("ref", model.ref)]
    inputs += [("reward", name) for name in model.rewards] + [("prompts", name) for name in settings.data.sources]
    for role, name in inputs:
        path = Path(name or "").expanduser().resolve()
        if name and any(path.is_relative_to(trace) for trace in traces):
            raise ValueError(
                f"{role} {name!r} is in output_dir={output_dir}, whose run --overwrite_output_dir "
                "removes; set --output_dir to another directory"
            )


def _check_room(settings: PPOSettings, models: Mapping[str, ResolvedModel], longest: int) -> None:
    """The longest prompt and a completion must fit the models' positions, and the KV cache if its size is set."""
    completion = settings.ppo.max_completion_length
    text = f"the longest prompt's {longest} tokens and max_completion_length={completion}"
    cure = "--max_completion_length or --max_prompt_length to less"
    for role, model in models.items():
        if model.num_positions is not None and longest + completion > model.num_positions:
            raise ValueError(
                f"the {role} {model.name!r} has {model.num_positions} positions, too few for {text}; set {cure}"
            )
    inference = settings.inference
    if inference.kv_blocks != "auto" and longest + completion > inference.kv_blocks * inference.block_size:
        raise ValueError(
            f"kv_blocks={inference.kv_blocks} of {inference.block_size} tokens are too few for {text}; "
            f"set --kv_blocks to {-(-(longest + completion) // inference.block_size)} or more, or {cure}"
        )


def _find_rewards(settings: PPOSettings) -> list[ResolvedModel | Reward]:
    workers = settings.model.reward_workers
    if workers not in ("auto", 1) and not any(map(is_function_path, settings.model.rewards)):
        warnings.warn(
            f"reward_workers={workers} has no effect: there is no reward function; set --reward to file.py:function",
            stacklevel=3,
        )
    if not settings.model.rewards:
        if settings.data.prompts is not None:
            raise ValueError(
                f"prompts {settings.data.prompts!r} need a reward; set --reward to file.py:function or a reward model"
            )
        return [FunctionReward(larger_number)]
    return [_find_reward(name, settings.model) for name in settings.model.rewards]


def _find_reward(name: str, model: ModelConfig) -> ResolvedModel | Reward:
    if is_function_path(name):
        return load_reward(name, timeout=model.reward_timeout, workers=model.reward_workers)
    reward = resolve_model(name)
    check_value_model(reward, new_head=False)
    return reward


def _find_critic(
    settings: PPOSettings, rewards: Sequence[ResolvedModel | Reward], actor: ResolvedModel
) -> ResolvedModel | None:
    ppo, name, rate = settings.ppo, settings.model.critic, settings.critic.critic_learning_rate
    if not ppo.traits.has_critic:
        if name is not None:
            raise ValueError(f"critic {name!r}, and {ppo.algorithm} has none; leave --critic out")
        if rate != CriticConfig().critic_learning_rate:
            raise ValueError(
                f"critic_learning_rate={rate}, and {ppo.algorithm} has no critic; leave --critic_learning_rate out"
            )
        return None
    if name is not None:
        critic = resolve_model(name)
    else:
        critic = next((reward for reward in rewards if isinstance(reward, ResolvedModel)), actor)
    check_value_model(critic, new_head=True)
    return critic


def _find_ref(settings: PPOSettings, actor: ResolvedModel) -> ResolvedModel | None:
    name = settings.model.ref
    if settings.ppo.kl_coef == 0:
        if name is not None:
            warnings.warn(f"ref {name!r} is not loaded, since kl_coef=0; set --kl_coef to use it", stacklevel=3)
        return None
    return actor if name is None else resolve_model(name)


def _find_prompts(
    data: DataConfig,
    ppo: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row] | None,
    eval_rows: Sequence[Row] | None,
) -> tuple[PromptDataset, Sequence[Prompt]]:
    """What is sampled from, and what is held out of it or beside it."""
    how: dict[str, Any] = {
        "max_prompt_length": ppo.max_prompt_length,
        "prompt_column": data.prompt_column,
        "apply_chat_template": data.apply_chat_template,
        "overlong": data.overlong_prompts,
    }
    if data.prompts is None and rows is None:
        task, how = LargerNumberTask(), how | {"apply_chat_template": bool(data.apply_chat_template)}
        parts = (task.rows("train"), task.rows("test", size=data.eval_size or _DEMO_EVAL_SIZE))
        train, test = (PromptDataset.from_rows(part, tokenizer, source="the demo task", **how) for part in parts)
        return train, test.rows
    where = {"config_name": data.prompts_config}
    if rows is not None:
        prompts = PromptDataset.from_rows(rows, tokenizer, source="the prompts given", **how)
    else:
        where["split"] = data.prompts_split
        prompts = load_prompts(data.sources, tokenizer, weights=data.prompt_weights, **where, **how)
    if eval_rows is not None:
        return prompts, PromptDataset.from_rows(eval_rows, tokenizer, source="the eval_prompts given", **how).rows
    if data.eval_sources:
        where["split"] = data.eval_split
        return prompts, load_prompts(data.eval_sources, tokenizer, **where, **how).rows
    if data.eval_size:
        prompts, held_out = prompts.hold_out(data.eval_size, ppo.seed)
        return prompts, held_out.rows
    if ppo.eval_steps:
        warnings.warn(
            f"eval_steps={ppo.eval_steps} changes nothing: there is nothing to evaluate on; set --eval_prompts or "
            "--eval_size",
            stacklevel=3,
        )
    return prompts, ()


def _find_ptx(data: DataConfig, ppo: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> ExampleDataset[Example] | None:
    if (data.ptx_data is not None) != (ppo.ptx_coef > 0):
        here, missing = ("ptx_coef", "ptx_data") if ppo.ptx_coef else ("ptx_data", "ptx_coef")
        value = ppo.ptx_coef if ppo.ptx_coef else data.ptx_data
        raise ValueError(f"{here}={value!r} does nothing without {missing}; set --{missing} too")
    if data.ptx_data is None:
        return None
    return read_examples(
        read_rows(data.ptx_data, split=data.ptx_split),
        tokenizer,
        max_length=ppo.max_prompt_length + ppo.max_completion_length,
        loss_on="all",
        overlong="truncate",
        source=data.ptx_data,
    )
