"""What can be set: frozen dataclasses, validated when they are made. Imports no torch, so `--help` is instant.

Each field carries its help text and, where the command line calls it something else, its flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from hybrid.algorithms import PPOConfig
from hybrid.fields import at_least, finite, in_range, positive, require, setting

# Those of transformers' get_scheduler that go by the step alone.
Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]

# Those that cannot do without arguments of their own, and an example.
SCHEDULE_EXAMPLES = {
    "cosine_with_min_lr": "min_lr_rate=0.1",
    "cosine_warmup_with_min_lr": "min_lr_rate=0.1",
    "warmup_stable_decay": "num_decay_steps=100",
}

# torch's optimizers that treat each element of a weight by itself, so that a shard steps as the whole weight would.
Optimizer = Literal[
    "adamw", "adam", "sgd", "rmsprop", "adagrad", "adadelta", "adamax", "nadam", "radam", "asgd", "rprop"
]


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if not value else (value,) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Models: a local directory, a Hub id, or an alias such as llama-2-7b."""

    actor: str = setting("smollm2-135m", "the model that is trained and generates")
    critic: str | None = setting(None, "the value model (default: the reward model if there is one, else the actor)")
    ref: str | None = setting(None, "the frozen reference of the KL penalty (default: the actor as it starts)")
    reward: str | tuple[str, ...] | None = setting(
        None,
        "a reward model, a Python function as file.py:function, a server as http://host:port/path, or several of these",
    )
    reward_weights: tuple[float, ...] = setting((), "what each of several rewards counts in their sum (default: 1)")
    reward_timeout: float = setting(
        60.0,
        "seconds for each call of a reward function or server: a sample that hangs is masked, a batch is an error; 0: "
        "no limit",
    )
    reward_workers: int | Literal["auto"] = setting(
        "auto",
        "processes of a rank that share the samples of a reward function that is called for each; auto: its part of "
        "the cores, at most 8; 1 where the function holds a model, or state from call to call",
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = setting(
        "auto", "what the weights compute in; auto: bf16 where the device has it natively, else fp32"
    )

    def __post_init__(self) -> None:
        at_least(0, reward_timeout=self.reward_timeout)
        if self.reward_workers != "auto":
            at_least(1, reward_workers=self.reward_workers)
        finite(**{f"reward_weights[{i}]": weight for i, weight in enumerate(self.reward_weights)})
        num_rewards = len(self.rewards)
        require(
            not self.reward_weights or len(self.reward_weights) == num_rewards,
            f"reward_weights={self.reward_weights} are not one for each reward, of which there are {num_rewards}; set "
            "--reward_weights to as many numbers as --reward has names",
        )

    @property
    def rewards(self) -> tuple[str, ...]:
        """The names of all rewards; none: the demo's."""
        return _names(self.reward)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts: where they come from and how they become tokens."""

    prompts: str | tuple[str, ...] | None = setting(
        None,
        "a JSONL, JSON, CSV or Parquet file, a Hub dataset, or several of these; or a YAML file that lists them, each "
        "as prompts, weight, prompts_config, prompts_split, prompt_column (default: the built-in demo task)",
    )
    prompt_weights: tuple[float, ...] = setting(
        (), "how often each of several sources is drawn from, beside the others (default: each prompt once an epoch)"
    )
    prompts_config: str | None = setting(None, "the configuration of a Hub dataset, where it has several")
    prompts_split: str = setting("train", "the split of a Hub dataset")
    prompt_column: str | None = setting(None, "the column that holds the prompt (default: found by its name)")
    apply_chat_template: bool | None = setting(
        None, "wrap prompts that are plain text in the chat template, as a user's message; messages always are"
    )
    overlong_prompts: Literal["drop", "truncate", "error"] = setting(
        "drop", "what becomes of a prompt over max_prompt_length: dropped and counted, cut on the left, or an error"
    )
    eval_prompts: str | tuple[str, ...] | None = setting(
        None, "held-out prompts to evaluate on, as prompts are (default: eval_size of prompts)"
    )
    eval_split: str = setting("test", "the split of a Hub dataset that is eval_prompts")
    eval_size: int = setting(0, "prompts that are held out to evaluate on, where there are no eval_prompts")
    ptx_data: str | None = setting(
        None, "texts or conversations to go on learning from beside the reward (ptx_coef): a file or a Hub dataset"
    )
    ptx_split: str = setting("train", "the split of a Hub dataset that is ptx_data")

    def __post_init__(self) -> None:
        at_least(0, eval_size=self.eval_size)
        require(
            not (self.eval_prompts and self.eval_size),
            f"eval_prompts={self.eval_prompts!r} are what to evaluate on, and eval_size={self.eval_size} would hold "
            "out more; set one of the two",
        )
        for name, other in (("eval_split", "eval_prompts"), ("ptx_split", "ptx_data")):
            require(
                getattr(self, other) is not None
                or getattr(self, name) == type(self).__dataclass_fields__[name].default,
                f"{name}={getattr(self, name)!r} is the split of {other}, which is not set; set --{other} too",
            )
        for number, weight in enumerate(self.prompt_weights):
            finite(**{f"prompt_weights[{number}]": weight})
            positive(**{f"prompt_weights[{number}]": weight})
        num_sources = len(self.sources)
        require(
            not self.prompt_weights or len(self.prompt_weights) == num_sources,
            f"prompt_weights={self.prompt_weights} are not one for each source of prompts, of which there are "
            f"{num_sources}; set --prompt_weights to as many numbers as --prompts has names",
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of all sources of prompts; none: the demo's."""
        return _names(self.prompts)

    @property
    def eval_sources(self) -> tuple[str, ...]:
        """The names of all sources of held-out prompts."""
        return _names(self.eval_prompts)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The grid of ranks: world size = replicas x tp_size."""

    tp_size: int = setting(1, "how many ranks cut each layer between them while generating")

    def __post_init__(self) -> None:
        at_least(1, tp_size=self.tp_size)

    def check_world(self, world_size: int) -> None:
        """Raise ValueError if ``tp_size`` does not divide ``world_size``."""
        if world_size % self.tp_size:
            divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            fitting = "1" if world_size == 1 else f"to one of {divisors}"
            raise ValueError(
                f"tp_size={self.tp_size} does not divide the world of {world_size} rank{'s' * (world_size > 1)}; "
                f"set --tp_size {fitting}, or start another number of ranks (torchrun --nproc-per-node)"
            )


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """ZeRO: what rests as shards between uses."""

    stage: Literal[0, 1, 2, 3] = setting(
        3, "1 shards the optimizer's state, 2 gradients too, 3 weights too, 0 nothing", flag="zero_stage"
    )
    persistence_threshold: int = setting(
        100_000, "parameters of at most this many elements are kept whole", flag="zero_persistence_threshold"
    )
    prefetch_bucket_size: int = setting(
        5_000_000,
        "elements that may be gathered ahead of use, the next layer in any case; 0: gather in time only",
        flag="zero_prefetch_bucket_size",
    )
    max_live_parameters: int = setting(
        3_000_000_000,
        "elements that may be gathered at once: prefetching stops before it, and layers waiting for reuse are let go",
        flag="zero_max_live_parameters",
    )
    max_reuse_distance: int = setting(
        0,
        "a layer stays gathered if it is used again before this many elements of other layers are",
        flag="zero_max_reuse_distance",
    )
    reduce_bucket_size: int = setting(
        5_000_000,
        "elements of gradients that may wait for their reduction, the newest layer's in any case",
        flag="zero_reduce_bucket_size",
    )
    overlap_comm: bool = setting(True, "reduce gradients while the backward goes on", flag="zero_overlap_comm")
    reduce_dtype: Literal["auto", "fp32"] = setting(
        "auto", "what gradients are summed over ranks in; auto: what they were computed in", flag="zero_reduce_dtype"
    )
    sub_group_size: int = setting(
        1_000_000_000, "elements of a rank that one call of the optimizer steps at most", flag="zero_sub_group_size"
    )
    keep_slices: bool = setting(
        False, "keep slices between forward and backward: more memory, less traffic", flag="zero_keep_slices"
    )
    gradient_checkpointing: Literal["none", "selective", "full"] = setting(
        "none",
        "what the backward computes again instead of keeping it: selective: all but products and attention; full: all "
        "of a layer from its inputs",
    )

    def __post_init__(self) -> None:
        require(self.stage in (0, 1, 2, 3), f"stage={self.stage} is no ZeRO stage; choose 0, 1, 2 or 3")
        require(
            self.reduce_dtype in ("auto", "fp32"), f"reduce_dtype={self.reduce_dtype!r} is unknown; choose auto or fp32"
        )
        require(
            self.gradient_checkpointing in ("none", "selective", "full"),
            f"gradient_checkpointing={self.gradient_checkpointing!r} is unknown; choose none, selective or full",
        )
        at_least(
            0,
            persistence_threshold=self.persistence_threshold,
            prefetch_bucket_size=self.prefetch_bucket_size,
            max_live_parameters=self.max_live_parameters,
            max_reuse_distance=self.max_reuse_distance,
            reduce_bucket_size=self.reduce_bucket_size,
        )
        at_least(1, sub_group_size=self.sub_group_size)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its schedule and, where weights compute in fp16, the loss scale."""

    optimizer: Optimizer = setting("adamw", "one of torch's optimizers whose state is per element")
    optim_args: str | None = setting(
        None, "more of the optimizer's arguments, as name=value,name=value (momentum=0.9,nesterov=True)"
    )
    learning_rate: float = setting(1e-5, "the actor's peak learning rate")
    betas: tuple[float, float] = setting((0.9, 0.95), "Adam's averaging coefficients", flag="adam_betas")
    eps: float = setting(1e-8, "Adam's epsilon", flag="adam_eps")
    weight_decay: float = setting(0.0, "weight decay of matrices; vectors have none")
    max_grad_norm: float = setting(1.0, "gradients are clipped to this global norm; 0 turns it off")
    warmup_steps: int = setting(0, "steps over which the learning rate rises from 0")
    lr_scheduler: Schedule = setting("constant_with_warmup", "how the learning rate goes, by transformers' names")
    lr_scheduler_kwargs: str | None = setting(
        None, "more of the schedule's arguments, as name=value,name=value (num_cycles=3, or min_lr_rate=0.1)"
    )
    loss_scale: float = setting(0.0, "fp16: the loss is multiplied by this; 0: found and kept up dynamically")
    initial_scale_power: int = setting(16, "fp16: the dynamic loss scale starts at 2 to this power")
    loss_scale_window: int = setting(1000, "fp16: the dynamic loss scale doubles after this many steps that all worked")
    hysteresis: int = setting(2, "fp16: overflows in a row of steps until the dynamic loss scale is halved")
    min_loss_scale: float = setting(1.0, "fp16: the dynamic loss scale goes no lower; an overflow there is an error")

    def __post_init__(self) -> None:
        require(
            self.optimizer in get_args(Optimizer),
            f"optimizer={self.optimizer!r} is unknown; choose one of {', '.join(get_args(Optimizer))}",
        )
        at_least(1, loss_scale_window=self.loss_scale_window, hysteresis=self.hysteresis)
        at_least(0, loss_scale=self.loss_scale, initial_scale_power=self.initial_scale_power)
        positive(min_loss_scale=self.min_loss_scale)
        finite(loss_scale=self.loss_scale, min_loss_scale=self.min_loss_scale)
        at_least(
            0,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            warmup_steps=self.warmup_steps,
        )
        positive(eps=self.eps)
        finite(learning_rate=self.learning_rate, weight_decay=self.weight_decay, eps=self.eps)
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"betas={self.betas} must be two numbers in [0, 1)",
        )
        require(
            self.lr_scheduler in get_args(Schedule),
            f"lr_scheduler={self.lr_scheduler!r} is unknown; choose one of {', '.join(get_args(Schedule))}",
        )
        example = SCHEDULE_EXAMPLES.get(self.lr_scheduler)
        require(
            example is None or self.lr_scheduler_kwargs is not None,
            f"lr_scheduler={self.lr_scheduler!r} needs arguments of its own; set lr_scheduler_kwargs, to {example} say",
        )


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """What the critic does not share with the actor."""

    critic_learning_rate: float = setting(1e-5, "the critic's peak learning rate")

    def __post_init__(self) -> None:
        at_least(0, critic_learning_rate=self.critic_learning_rate)
        finite(critic_learning_rate=self.critic_learning_rate)


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Generation: the paged KV cache and its scheduler."""

    block_size: int = setting(16, "tokens per KV block", flag="kv_block_size")
    kv_blocks: int | Literal["auto"] = setting("auto", "KV blocks per rank; auto: from the memory that is free")
    kv_cache_gb: float = setting(1.0, "the most that auto takes on a CPU, in GB per rank")
    kv_memory_fraction: float = setting(0.9, "the part of the free memory that auto takes on a GPU")
    max_tokens_per_step: int = setting(2048, "tokens a step computes at most, prompts and samples together")
    max_num_seqs: int = setting(256, "sequences that run at once at most")
    prepack_weights: bool = setting(
        True, "CPU: generate with weights laid out anew for oneDNN, which is faster and takes their memory again"
    )
    cuda_graphs: bool = setting(
        True, "record decode steps, and launch their kernels at a stroke; on a CPU with tp_size 1, as a tape"
    )
    exact: bool = setting(
        False,
        "CPU, tp_size 1: log-probs of generation and training are equal bit for bit, at some cost in speed",
        flag="exact_logprobs",
    )

    def __post_init__(self) -> None:
        at_least(
            1,
            block_size=self.block_size,
            max_tokens_per_step=self.max_tokens_per_step,
            max_num_seqs=self.max_num_seqs,
        )
        positive(kv_cache_gb=self.kv_cache_gb)
        in_range(0, 1, open_low=True, kv_memory_fraction=self.kv_memory_fraction)
        if self.kv_blocks != "auto":
            at_least(1, kv_blocks=self.kv_blocks)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run: how long, and what it leaves behind."""

    total_steps: int | None = setting(None, "steps to train for (default: one pass over the prompts)")
    output_dir: str | None = setting(None, "where the run's files go (default: a new directory under runs/)")
    overwrite_output_dir: bool = setting(
        False, "allow output_dir to hold a run already; its files and checkpoints are removed"
    )
    report_to: tuple[str, ...] = setting((), "trackers besides metrics.jsonl: tensorboard, wandb, mlflow, ...")
    logging_steps: int = setting(1, "write metrics and samples every this many steps")
    save_steps: int = setting(
        0, "write a checkpoint to resume from, with the actor as a model, every this many steps; 0: none"
    )
    save_total_limit: int = setting(0, "keep this many of the newest checkpoints; 0: all")
    resume_from_checkpoint: str | None = setting(
        None,
        "go on from a checkpoint-N directory; auto: from the newest in output_dir, or from the start if it has none",
    )

    def __post_init__(self) -> None:
        if self.total_steps is not None:
            at_least(1, total_steps=self.total_steps)
        at_least(1, logging_steps=self.logging_steps)
        at_least(0, save_steps=self.save_steps, save_total_limit=self.save_total_limit)
        require(
            self.resume_from_checkpoint != "auto" or self.output_dir is not None,
            "resume_from_checkpoint=auto looks in output_dir, which is not set; set --output_dir to the run's",
        )


@dataclass(frozen=True, kw_only=True)
class PPORunConfig(RunConfig):
    """The run: how long, and what it leaves behind."""

    log_tokens: int = setting(
        2,
        "samples a step whose tokens are written too, each with its log-probs, mask, KL, advantage and value; -1: all",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(-1, log_tokens=self.log_tokens)


class PPOSettings(NamedTuple):
    """Everything that a PPO run is made of."""

    model: ModelConfig
    data: DataConfig
    ppo: PPOConfig
    optim: OptimConfig
    critic: CriticConfig
    zero: ZeroConfig
    inference: InferenceConfig
    parallel: ParallelConfig
    run: PPORunConfig


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Text from a model: what it is asked, and where its answers go."""

    model: str = setting("smollm2-135m", "a local directory, a Hub id, or an alias such as llama-2-7b")
    prompt: tuple[str, ...] = setting((), "a prompt, or several (default: read from standard input)", is_text=True)
    prompts: str | None = setting(None, "a JSONL, JSON, CSV, Parquet or TXT file of prompts, or a Hub dataset")
    prompts_config: str | None = setting(None, "the configuration of a Hub dataset, where it has several")
    prompts_split: str = setting("train", "the split of a Hub dataset")
    prompt_column: str | None = setting(None, "the column that holds the prompt (default: found by its name)")
    apply_chat_template: bool = setting(
        True, "wrap prompts that are plain text in the chat template, if there is one, as a user's message"
    )
    system: str | None = setting(None, "a system message that goes before every prompt that has none")
    output: str | None = setting(
        None, "a JSONL file for the rows and their completions, in order (default: text on standard output)"
    )
    resume: bool = setting(False, "go on behind the rows that output holds already")
    prompts_per_step: int = setting(128, "prompts that are answered, and then written, at a time, over all ranks")
    replicas: int | Literal["auto"] = setting(
        "auto",
        "without torchrun, on a CPU: processes that share the prompts out, each with the weights; auto: one for each "
        "core that a file of prompts keeps busy, while there is memory",
    )
    dtype: Literal["auto", "bf16", "fp32"] = setting(
        "auto", "what the weights compute in; auto: bf16 where the device has it natively, else fp32"
    )
    seed: int = setting(0, "seeds every sample; the same seed gives the same text on any number of ranks")

    def __post_init__(self) -> None:
        at_least(1, prompts_per_step=self.prompts_per_step)
        at_least(0, seed=self.seed)
        if self.replicas != "auto":
            at_least(1, replicas=self.replicas)
        require(
            not (self.prompt and self.prompts),
            f"prompts={self.prompts!r} is a file and prompt={self.prompt[:1]} is given too; set one of the two",
        )
        require(
            self.output is None or bool(self.prompt or self.prompts),
            f"output={self.output!r} is for prompts that are known; set --prompts to a file, or --prompt",
        )
        require(
            self.system is None or self.apply_chat_template,
            "system is a message of the chat template, which apply_chat_template=False leaves out; set one of the two",
        )
        require(not self.resume or self.output is not None, "resume goes on with output; set --output too")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling, by the names and with the meanings of `SamplingParams`, which checks the values."""

    n: int = setting(1, "completions for each prompt; torchrun needs it spelt --num_generations")
    temperature: float = setting(1.0, "divides the logits; 0 takes the likeliest token")
    top_k: int = setting(0, "sample among the k likeliest tokens; 0: all")
    top_p: float = setting(1.0, "sample among the likeliest tokens that together have this probability")
    min_p: float = setting(0.0, "sample among tokens at least this fraction as likely as the likeliest")
    repetition_penalty: float = setting(1.0, "makes tokens of the prompt and the completion less likely; 1: none")
    presence_penalty: float = setting(0.0, "taken from the logits of tokens in the completion")
    frequency_penalty: float = setting(0.0, "taken from them for each time they are in it")
    max_tokens: int = setting(256, "new tokens at most")
    min_tokens: int = setting(0, "new tokens before anything but max_tokens may end a completion")
    stop: tuple[str, ...] = setting((), "strings that end a completion and are cut off its text", is_text=True)
    stop_token_ids: tuple[int, ...] = setting((), "ids that end a completion, besides the model's own")
    ignore_eos: bool = setting(False, "sample past end-of-sequence ids")
    logprobs: int | None = setting(
        None, "write each token's log-probability to output, and those of this many of the likeliest at its place"
    )


class GenerateSettings(NamedTuple):
    """Everything that recipes/generate.py is told."""

    generate: GenerateConfig
    sampling: SamplingConfig
    inference: InferenceConfig
    parallel: ParallelConfig
