"""What steps 1 and 2 can be set to, beside what they share with the others (``hybrid.config``). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from hybrid.config import OptimConfig, RunConfig, ZeroConfig
from hybrid.fields import at_least, finite, positive, require, setting


@dataclass(frozen=True, kw_only=True)
class ExamplesConfig:
    """Examples to learn from: where they come from and how they become tokens."""

    data: str | None = setting(
        None, "a JSONL, JSON, CSV or Parquet file, or a Hub dataset (default: examples of the built-in demo task)"
    )
    data_config: str | None = setting(None, "the configuration of a Hub dataset, where it has several")
    data_split: str = setting("train", "the split of a Hub dataset")
    eval_data: str | None = setting(None, "examples to evaluate on, as data is (default: eval_size of data)")
    eval_split: str = setting("test", "the split of a Hub dataset that is eval_data")
    eval_size: int = setting(0, "examples of data that are held out to evaluate on, where there is no eval_data")
    apply_chat_template: bool | None = setting(
        None, "wrap prompts and answers that are plain text in the chat template; messages always are"
    )
    max_length: int = setting(1024, "tokens an example may have, prompt and answer together")
    overlong: Literal["drop", "truncate", "error"] = setting(
        "drop", "what becomes of an example over max_length: dropped and counted, cut and counted, or an error"
    )

    def __post_init__(self) -> None:
        at_least(2, max_length=self.max_length)
        at_least(0, eval_size=self.eval_size)
        require(
            not (self.eval_data and self.eval_size),
            f"eval_data={self.eval_data!r} is what to evaluate on, and eval_size={self.eval_size} would hold out more; "
            "set one of the two",
        )


@dataclass(frozen=True, kw_only=True)
class LearnConfig:
    """Learning from examples, step by step."""

    actor: str = setting(
        "smollm2-135m", "the model that training starts from: a local directory, a Hub id, or an alias"
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = setting(
        "auto", "what the weights compute in; auto: bf16 where the device has it natively, else fp32"
    )
    num_train_epochs: float = setting(1.0, "passes over the examples, each in another order")
    examples_per_step: int = setting(16, "examples per optimizer step, over all ranks; a pair is one")
    max_tokens_per_microbatch: int = setting(
        4096, "tokens per forward and backward pass on a rank; results do not depend on it"
    )
    eval_steps: int = setting(0, "evaluate every this many steps too; 0: before the first and after the last alone")
    seed: int = setting(0, "seeds the order of the examples, and which are held out")

    def __post_init__(self) -> None:
        at_least(1, examples_per_step=self.examples_per_step, max_tokens_per_microbatch=self.max_tokens_per_microbatch)
        at_least(0, eval_steps=self.eval_steps, seed=self.seed)
        positive(num_train_epochs=self.num_train_epochs)
        finite(num_train_epochs=self.num_train_epochs)


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Supervised fine-tuning."""

    loss_on: Literal["completions", "all"] = setting(
        "completions", "the tokens whose loss counts: what the assistant says, or everything"
    )

    def __post_init__(self) -> None:
        require(
            self.loss_on in ("completions", "all"), f"loss_on={self.loss_on!r} is unknown; choose completions or all"
        )


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """What is learnt from pairs of a chosen and a rejected answer."""

    objective: Literal["reward", "dpo"] = setting("reward", "reward: a reward model; dpo: the actor itself")
    ref: str | None = setting(None, "dpo: the frozen reference (default: the actor as it starts)")
    beta: float = setting(0.1, "dpo: how dear it is to leave the reference")
    label_smoothing: float = setting(0.0, "dpo: the probability that a pair is the wrong way round")

    def __post_init__(self) -> None:
        require(self.objective in ("reward", "dpo"), f"objective={self.objective!r} is unknown; choose reward or dpo")
        positive(beta=self.beta)
        finite(beta=self.beta)
        require(
            0 <= self.label_smoothing < 0.5,
            f"label_smoothing={self.label_smoothing} is out of range; it must be in [0, 0.5)",
        )
        for name, default in (("ref", None), ("beta", 0.1), ("label_smoothing", 0.0)):
            require(
                self.objective == "dpo" or getattr(self, name) == default,
                f"{name}={getattr(self, name)} is for dpo, and objective={self.objective} has none; leave it out, or "
                "set --objective dpo",
            )


@dataclass(frozen=True, kw_only=True)
class LearnRunConfig(RunConfig):
    """The run: how long, and what it leaves behind."""

    total_steps: int | None = setting(None, "steps to train for (default: what num_train_epochs come to)")
    save_steps: int = setting(0, "write a checkpoint to resume from every this many steps; 0: none")


class SFTSettings(NamedTuple):
    """Everything that recipes/rlhf_step1_sft.py is told."""

    learn: LearnConfig
    examples: ExamplesConfig
    sft: SFTConfig
    optim: OptimConfig
    zero: ZeroConfig
    run: LearnRunConfig


class PreferenceSettings(NamedTuple):
    """Everything that recipes/rlhf_step2_reward.py is told."""

    learn: LearnConfig
    examples: ExamplesConfig
    preference: PreferenceConfig
    optim: OptimConfig
    zero: ZeroConfig
    run: LearnRunConfig
