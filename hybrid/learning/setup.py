"""From settings to the parts of a run: first everything is found and checked, then weights are loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from hybrid.data.conversations import Example, ExampleDataset, Pair, read_examples, read_pairs
from hybrid.data.prompts import Row, read_rows
from hybrid.data.tasks import LargerNumberTask
from hybrid.learning.preference import DPOObjective, RewardObjective, with_reference
from hybrid.learning.sft import SFTObjective
from hybrid.learning_config import ExamplesConfig, LearnConfig, PreferenceSettings, SFTSettings
from hybrid.models.loading import (
    ResolvedModel,
    check_value_model,
    load_tokenizer,
    open_causal_lm,
    open_value_model,
    require_vocabulary,
    resolve_model,
)
from hybrid.parallel import ParallelMesh
from hybrid.runs import check_resume
from hybrid.zero.model import ShardedModel

T = TypeVar("T")
_DEMO_EVAL_SIZE = 128


@dataclass(frozen=True, slots=True)
class LearningInputs(Generic[T]):
    """What the settings name, found and checked. No weight has been read."""

    model: ResolvedModel
    ref: ResolvedModel | None
    tokenizer: PreTrainedTokenizerBase
    train: ExampleDataset[T]
    held_out: ExampleDataset[T] | None
    checkpoint: Path | None  # to go on from
    total_steps: int
    num_examples: int | None  # to draw in all; None: whole steps


def find_sft_inputs(settings: SFTSettings, *, checkpoint: Path | None = None) -> LearningInputs[Example]:
    """Find what the settings of supervised training name, and check that it fits together.

    ``checkpoint`` is what `runs.check_run` found.

    Raises:
        ValueError: something is missing or does not fit; the message says what to set.
    """
    model = resolve_model(settings.learn.actor)
    tokenizer = load_tokenizer(model)

    def read(rows: Sequence[Row], source: str, template: bool | None) -> ExampleDataset[Example]:
        return read_examples(
            rows,
            tokenizer,
            max_length=settings.examples.max_length,
            loss_on=settings.sft.loss_on,
            apply_chat_template=template,
            overlong=settings.examples.overlong,
            source=source,
        )

    train, held_out = _find_examples(settings.examples, settings.learn.seed, read, _demo_answer)
    longest = max(len(example.token_ids) for example in (*train.rows, *(held_out.rows if held_out else ())))
    _check_positions(model, longest)
    return _inputs(settings, model, None, tokenizer, train, held_out, checkpoint)


def find_preference_inputs(settings: PreferenceSettings, *, checkpoint: Path | None = None) -> LearningInputs[Pair]:
    """As `find_sft_inputs`, for a reward model or for DPO."""
    for_reward = settings.preference.objective == "reward"
    model = resolve_model(settings.learn.actor)
    if for_reward:
        check_value_model(model, new_head=True)
    ref = resolve_model(settings.preference.ref) if settings.preference.ref else None
    tokenizer = load_tokenizer(model)
    if ref is not None:
        require_vocabulary("ref", ref, model, tokenizer)

    def read(rows: Sequence[Row], source: str, template: bool | None) -> ExampleDataset[Pair]:
        return read_pairs(
            rows,
            tokenizer,
            max_length=settings.examples.max_length,
            for_reward=for_reward,
            apply_chat_template=template,
            overlong=settings.examples.overlong,
            source=source,
        )

    train, held_out = _find_examples(settings.examples, settings.learn.seed, read, _demo_pair)
    pairs = (*train.rows, *(held_out.rows if held_out is not None else ()))
    longest = max(len(example.token_ids) for pair in pairs for example in (pair.chosen, pair.rejected))
    for role in (model, ref) if ref else (model,):
        _check_positions(role, longest + for_reward)  # a reward model reads one token more than it scores
    return _inputs(settings, model, ref, tokenizer, train, held_out, checkpoint)


def load_sft(inputs: LearningInputs[Example], settings: SFTSettings, mesh: ParallelMesh) -> SFTObjective:
    """Load the actor's weights and lay them out over the ranks; every rank calls this."""
    opened = open_causal_lm(inputs.model, settings.learn.dtype)
    return SFTObjective(ShardedModel.load(opened, mesh, zero=settings.zero, optim=settings.optim))


def load_preference(
    inputs: LearningInputs[Pair], settings: PreferenceSettings, mesh: ParallelMesh
) -> tuple[RewardObjective | DPOObjective, ExampleDataset[Pair], ExampleDataset[Pair] | None]:
    """Load the model's weights; returns the objective, and the pairs as it needs them. Every rank calls this.

    DPO's pairs get the log-probs of the reference here, once, before anything is trained or resumed.
    """
    preference, dtype, zero = settings.preference, settings.learn.dtype, settings.zero
    if preference.objective == "reward":
        opened = open_value_model(inputs.model, dtype)
        # transformers finds the last token of each of several sequences by it: a token early, where it ends them too.
        if inputs.tokenizer.pad_token_id != inputs.tokenizer.eos_token_id:
            opened.module.config.pad_token_id = inputs.tokenizer.pad_token_id
        model = ShardedModel.load(opened, mesh, zero=zero, optim=settings.optim)
        return RewardObjective(model), inputs.train, inputs.held_out
    budget = settings.learn.max_tokens_per_microbatch
    optim = settings.optim if inputs.ref is None else None
    model = ShardedModel.load(open_causal_lm(inputs.ref or inputs.model, dtype), mesh, zero=zero, optim=optim)
    train = with_reference(inputs.train, model, budget)
    held_out = with_reference(inputs.held_out, model, budget) if inputs.held_out is not None else None
    if inputs.ref is not None:
        del model  # before the actor is loaded
        model = ShardedModel.load(open_causal_lm(inputs.model, dtype), mesh, zero=zero, optim=settings.optim)
    objective = DPOObjective(model, beta=preference.beta, label_smoothing=preference.label_smoothing)
    return objective, train, held_out


def settings_to_compare(learn: LearnConfig) -> dict[str, Any]:
    """What a resumed run should share with the one that it goes on from; kept in its checkpoints."""
    return {"actor": learn.actor, "seed": learn.seed, "examples_per_step": learn.examples_per_step}


def _find_examples(
    config: ExamplesConfig,
    seed: int,
    read: Callable[[Sequence[Row], str, bool | None], ExampleDataset[T]],
    demo: Callable[[Row], Row],
) -> tuple[ExampleDataset[T], ExampleDataset[T] | None]:
    """What to train on, and what to evaluate on if anything."""
    if config.data is None:
        task, template = LargerNumberTask(), bool(config.apply_chat_template)
        test = task.rows("test", size=config.eval_size or _DEMO_EVAL_SIZE)
        train = read([demo(row) for row in task.rows("train")], "the demo task", template)
        return train, read([demo(row) for row in test], "the demo task", template)
    rows = read_rows(config.data, config_name=config.data_config, split=config.data_split)
    train = read(rows, config.data, config.apply_chat_template)
    if config.eval_size:
        return train.hold_out(config.eval_size, seed)
    if config.eval_data is None:
        return train, None
    rows = read_rows(config.eval_data, config_name=config.data_config, split=config.eval_split)
    return train, read(rows, config.eval_data, config.apply_chat_template)


def _demo_answer(row: Row) -> Row:
    return {"prompt": row["prompt"], "completion": f" {row['answer']}"}


def _demo_pair(row: Row) -> Row:
    return {"prompt": row["prompt"], "chosen": f" {max(row['numbers'])}", "rejected": f" {min(row['numbers'])}"}


def _check_positions(model: ResolvedModel, longest: int) -> None:
    if model.num_positions is not None and longest > model.num_positions:
        raise ValueError(
            f"the model {model.name!r} has {model.num_positions} positions, too few for the longest example's "
            f"{longest} tokens; set --max_length to {model.num_positions - 1} or less"
        )


def _inputs(
    settings: SFTSettings | PreferenceSettings,
    model: ResolvedModel,
    ref: ResolvedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    train: ExampleDataset[T],
    held_out: ExampleDataset[T] | None,
    checkpoint: Path | None,
) -> LearningInputs[T]:
    """With the run's length worked out, and its checkpoint checked."""
    learn, total_steps, num_examples = settings.learn, settings.run.total_steps, None
    if total_steps is not None and learn.num_train_epochs != LearnConfig().num_train_epochs:
        warnings.warn(
            f"num_train_epochs={learn.num_train_epochs} changes nothing: total_steps={total_steps} is set", stacklevel=3
        )
    if learn.eval_steps and held_out is None:
        warnings.warn(
            f"eval_steps={learn.eval_steps} changes nothing: there is nothing to evaluate on; set --eval_data or "
            "--eval_size",
            stacklevel=3,
        )
    if total_steps is None:
        num_examples = max(1, round(len(train) * learn.num_train_epochs))
        total_steps = -(-num_examples // learn.examples_per_step)
    if checkpoint is not None:
        check_resume(checkpoint, total_steps, settings_to_compare(learn))
    return LearningInputs(model, ref, tokenizer, train, held_out, checkpoint, total_steps, num_examples)
