"""The on-policy algorithms by name, the settings of their papers, and the configuration that chooses. Imports no torch.

What they compute is in ``hybrid.rl.algorithms``. Sizes of a run (prompts, lengths, learning rates) are not an
algorithm's to set; the size of a group is, since advantages are made from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from hybrid.fields import at_least, by_algorithm, finite, in_range, positive, require, setting

AlgorithmName = Literal[
    "ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo", "gspo", "cispo"
]
Aggregation = Literal["token_mean", "sequence_mean", "sum_over_constant"]
KLEstimator = Literal["k1", "k2", "k3"]
KLPlace = Literal["reward", "loss"]
PolicyObjective = Literal["clipped", "log_prob", "clipped_sequence", "clipped_weight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmTraits:
    """What an algorithm is, and the settings that it has unless they are given."""

    paper: str
    has_critic: bool = False
    compares_group: bool = True  # its advantages compare the completions of one prompt
    discounts: bool = False  # its advantages know of gamma
    objective: PolicyObjective = "clipped"
    num_generations: int = 8
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_in: KLPlace = "loss"
    cliprange_low: float = 0.2
    cliprange_high: float = 0.2
    aggregation: Aggregation = "token_mean"
    reward_clip: float = math.inf
    dynamic_sampling: bool = False
    overlong_buffer_fraction: float = 0.0  # of max_completion_length

    @property
    def has_ratio(self) -> bool:
        """Whether its loss weighs samples by how much likelier the policy has made them since they were drawn."""
        return self.objective != "log_prob"


ALGORITHMS: dict[str, AlgorithmTraits] = {
    # As InstructGPT and DeepSpeed-Chat (https://arxiv.org/abs/2308.01320) have it for language models.
    "ppo": AlgorithmTraits(
        paper="https://arxiv.org/abs/1707.06347",
        has_critic=True,
        compares_group=False,
        discounts=True,
        num_generations=2,
        kl_coef=0.1,
        kl_estimator="k1",
        kl_in="reward",
        reward_clip=5.0,
    ),
    # The paper samples groups of 64, which is a cluster's size; 8 is what later papers use.
    "grpo": AlgorithmTraits(paper="https://arxiv.org/abs/2402.03300", kl_coef=0.04, aggregation="sequence_mean"),
    "dr_grpo": AlgorithmTraits(paper="https://arxiv.org/abs/2503.20783", aggregation="sum_over_constant"),
    # The whole completion is one action, so its tokens' log-probs are added up; dividing all of them by one constant
    # leaves the direction and keeps gradients in the range of the others'.
    "rloo": AlgorithmTraits(
        paper="https://arxiv.org/abs/2402.14740",
        objective="log_prob",
        num_generations=4,
        kl_coef=0.03,
        kl_estimator="k1",
        kl_in="reward",
        aggregation="sum_over_constant",
    ),
    "reinforce_pp": AlgorithmTraits(
        paper="https://arxiv.org/abs/2501.03262",
        compares_group=False,
        discounts=True,
        num_generations=1,
        kl_coef=0.01,
        kl_estimator="k1",
        kl_in="reward",
        reward_clip=10.0,
    ),
    "reinforce_pp_baseline": AlgorithmTraits(
        paper="https://arxiv.org/abs/2501.03262", kl_coef=0.001, kl_estimator="k2", reward_clip=10.0
    ),
    # Of the 20,480 tokens that the paper allows, the last 4,096 are punished.
    "dapo": AlgorithmTraits(
        paper="https://arxiv.org/abs/2503.14476",
        num_generations=16,
        cliprange_high=0.28,
        dynamic_sampling=True,
        overlong_buffer_fraction=0.2,
    ),
    # The ratio of a sequence is a geometric mean over its tokens, so it stays far closer to 1 than a token's.
    "gspo": AlgorithmTraits(
        paper="https://arxiv.org/abs/2507.18071",
        objective="clipped_sequence",
        cliprange_low=3e-4,
        cliprange_high=4e-4,
        aggregation="sequence_mean",
    ),
    # No bound below, as in the paper; the one above, which it does not print, is 5 in https://arxiv.org/abs/2510.13786.
    "cispo": AlgorithmTraits(
        paper="https://arxiv.org/abs/2506.13585",
        objective="clipped_weight",
        num_generations=16,
        cliprange_low=1.0,
        cliprange_high=4.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """On-policy learning: PPO as DeepSpeed-Chat has it, or another algorithm with its paper's settings."""

    algorithm: AlgorithmName = setting("ppo", "what makes advantages and the policy's loss")
    prompts_per_step: int = setting(16, "prompts per step, over all ranks")
    num_generations: int = by_algorithm("completions sampled for each prompt")
    num_ppo_epochs: int = setting(1, "passes over each step's samples")
    num_minibatches: int = setting(1, "optimizer steps per pass")
    early_stop_kl: float | None = setting(
        None, "a step makes no more updates once the policy is this far, in nats per token, from the one that sampled"
    )
    kl_coef: float = by_algorithm("weight of the per-token KL penalty against the reference; 0: none is loaded")
    kl_estimator: KLEstimator = by_algorithm(
        "how the KL is estimated from samples (http://joschu.net/blog/kl-approx.html)"
    )
    kl_in: KLPlace = by_algorithm("where the KL penalty goes")
    kl_target: float | None = setting(None, "adapt kl_coef towards this KL per sequence (default: kl_coef is constant)")
    kl_horizon: int = setting(10_000, "samples over which the adaptive kl_coef moves")
    cliprange: float | None = setting(None, "both cliprange_low and cliprange_high")
    cliprange_low: float | None = setting(
        None, "the policy's probability ratio is clipped to 1 - this (default: the algorithm's)"
    )
    cliprange_high: float | None = setting(None, "and to 1 + this (default: the algorithm's)")
    dual_clip: float | None = setting(
        None, "bound the loss of a token of negative advantage to this times the advantage, 3 say (default: no bound)"
    )
    aggregation: Aggregation = by_algorithm(
        "tokens' losses are averaged over all tokens, over each sequence's and then over sequences, or over sequences "
        "after a division by max_completion_length"
    )
    rollout_correction: Literal["none", "token_tis", "sequence_tis", "mask"] = setting(
        "none",
        "weigh tokens by trainer over generator probability: a token's ratio or its sequence's, both at most the cap, "
        "or a token's where it is within the cap either way and 0 elsewhere",
    )
    rollout_correction_cap: float = setting(2.0, "the most that a correction's weight may be")
    mask_truncated_completions: bool = setting(
        False, "completions that reach max_completion_length count in their group's baseline and not in the loss"
    )
    overlong_buffer: int = by_algorithm("the last tokens up to max_completion_length, over which a punishment grows")
    overlong_penalty: float = setting(1.0, "the punishment, taken from the reward, at max_completion_length")
    dynamic_sampling: bool = by_algorithm("groups without spread in reward are replaced by those of other prompts")
    max_resamplings: int = setting(10, "rounds of sampling such replacements; what is missing then stays out")
    cliprange_value: float = setting(0.2, "a value's change is clipped to +- this")
    vf_coef: float = setting(1.0, "weight of the value loss")
    gamma: float = setting(1.0, "discount per token")
    lam: float = setting(0.95, "lambda of generalised advantage estimation")
    reward_clip: float = by_algorithm("a sequence's reward is clipped to +- this")
    whiten_advantages: bool = setting(False, "shift and scale a step's advantages to mean 0 and variance 1")
    whiten_by: Literal["batch", "group"] = setting("batch", "whether whitening goes by the step or by the prompt")
    entropy_coef: float = setting(0.0, "weight of the entropy bonus")
    temperature: float = setting(1.0, "sampling temperature, in the loss as in generation")
    top_k: int = setting(0, "sample among the k likeliest tokens; 0: all")
    top_p: float = setting(1.0, "sample among the likeliest tokens that together have this probability")
    max_prompt_length: int = setting(256, "tokens a prompt may have")
    max_completion_length: int = setting(256, "tokens a completion may have")
    max_tokens_per_microbatch: int = setting(
        2048, "tokens per forward and backward pass on a rank; results do not depend on it"
    )
    share_prompts: bool = setting(
        True, "compute a prompt once for all its samples in a micro-batch; results do not depend on it"
    )
    seed: int = setting(0, "seeds the order of the prompts and every sample")
    eval_steps: int = setting(
        0, "evaluate held-out prompts every this many steps too; 0: before the first and after the last alone"
    )
    eval_temperature: float = setting(0.0, "temperature of evaluation; 0 takes the likeliest token")
    eval_num_generations: int = setting(1, "completions for each held-out prompt, whose rewards are averaged")
    enable_ema: bool = setting(False, "keep an exponential moving average of the actor's weights, saved beside it")
    ema_decay: float = setting(0.992, "what part of the average stays at each update of the actor")
    ptx_coef: float = setting(
        0.0,
        "weight of the language-modelling loss on ptx_data in the actor's updates, against forgetting "
        "(https://arxiv.org/abs/2203.02155); 0: none",
    )
    ptx_batch_size: int = setting(
        0, "examples of ptx_data per update, over all ranks; 0: as many as a minibatch has samples"
    )

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.num_generations

    @property
    def traits(self) -> AlgorithmTraits:
        return ALGORITHMS[self.algorithm]

    def __post_init__(self) -> None:
        for name in ("algorithm", "rollout_correction", "whiten_by"):
            self._one_of(name)
        self._check_ratio()
        self._fill_in()
        self._check_ranges()
        for name in ("kl_estimator", "kl_in", "aggregation"):
            self._one_of(name)
        self._check_algorithm()
        self._check_companions()

    def _one_of(self, name: str) -> None:
        choices, value = get_args(get_type_hints(type(self))[name]), getattr(self, name)
        listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
        require(value in choices, f"{name}={value!r} is unknown; choose {listed}")

    def _fill_in(self) -> None:
        """Settings that were left to the algorithm get its values, before anyone has seen this object."""
        traits = self.traits
        values: dict[str, Any] = {
            name: getattr(traits, name)
            for name in (
                *("num_generations", "kl_coef", "kl_estimator", "kl_in", "aggregation", "reward_clip"),
                "dynamic_sampling",
            )
        }
        values["overlong_buffer"] = int(traits.overlong_buffer_fraction * self.max_completion_length)
        if traits.has_ratio:
            for name in ("cliprange_low", "cliprange_high"):
                values[name] = getattr(traits, name) if self.cliprange is None else self.cliprange
        for name, value in values.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _check_ratio(self) -> None:
        if self.traits.has_ratio:
            return
        for name in ("cliprange", "cliprange_low", "cliprange_high", "dual_clip"):
            require(
                getattr(self, name) is None,
                f"{name}={getattr(self, name)}, and {self.algorithm} has no probability ratio to clip; "
                f"leave --{name} out, or set --algorithm to one that has",
            )
        require(
            self.num_ppo_epochs == 1,
            f"num_ppo_epochs={self.num_ppo_epochs}, and {self.algorithm} has no probability ratio that would account "
            "for samples of an older policy; set --num_ppo_epochs 1",
        )

    def _check_ranges(self) -> None:
        at_least(
            1,
            prompts_per_step=self.prompts_per_step,
            num_generations=self.num_generations,
            num_ppo_epochs=self.num_ppo_epochs,
            num_minibatches=self.num_minibatches,
            kl_horizon=self.kl_horizon,
            max_prompt_length=self.max_prompt_length,
            max_completion_length=self.max_completion_length,
            max_tokens_per_microbatch=self.max_tokens_per_microbatch,
            rollout_correction_cap=self.rollout_correction_cap,
            eval_num_generations=self.eval_num_generations,
        )
        at_least(
            0,
            eval_steps=self.eval_steps,
            eval_temperature=self.eval_temperature,
            ptx_coef=self.ptx_coef,
            ptx_batch_size=self.ptx_batch_size,
            kl_coef=self.kl_coef,
            vf_coef=self.vf_coef,
            entropy_coef=self.entropy_coef,
            top_k=self.top_k,
            seed=self.seed,
            overlong_buffer=self.overlong_buffer,
            overlong_penalty=self.overlong_penalty,
            max_resamplings=self.max_resamplings,
        )
        positive(cliprange_value=self.cliprange_value, reward_clip=self.reward_clip, temperature=self.temperature)
        finite(
            kl_coef=self.kl_coef,
            vf_coef=self.vf_coef,
            entropy_coef=self.entropy_coef,
            temperature=self.temperature,
            eval_temperature=self.eval_temperature,
            ptx_coef=self.ptx_coef,
        )
        require(0 <= self.ema_decay < 1, f"ema_decay={self.ema_decay} is out of range; it must be in [0, 1)")
        in_range(0, 1, gamma=self.gamma, lam=self.lam)
        in_range(0, 1, open_low=True, top_p=self.top_p)
        for name in ("cliprange", "cliprange_low", "cliprange_high", "kl_target", "early_stop_kl"):
            if getattr(self, name) is not None:
                positive(**{name: getattr(self, name)})
        if self.cliprange_low is not None:
            in_range(0, 1, open_low=True, cliprange_low=self.cliprange_low)
        require(
            self.dual_clip is None or self.dual_clip > 1,
            f"dual_clip={self.dual_clip} would bound what no ratio has moved; set it to more than 1",
        )
        samples = self.samples_per_step
        require(
            self.num_minibatches <= samples,
            f"num_minibatches={self.num_minibatches} is more than the {samples} samples of a step "
            f"(prompts_per_step x num_generations); set it to {samples} or less",
        )
        require(
            self.overlong_buffer <= self.max_completion_length,
            f"overlong_buffer={self.overlong_buffer} is more than max_completion_length={self.max_completion_length}; "
            "set it to that or less",
        )

    def _check_algorithm(self) -> None:
        """What the algorithm has no use for is refused, unless it is what everyone has."""
        traits, name = self.traits, self.algorithm
        unused = () if traits.has_critic else ("lam", "vf_coef", "cliprange_value")
        if not traits.discounts:
            unused = (*unused, "gamma")
        for field_name in unused:
            value = getattr(self, field_name)
            require(
                value == type(self).__dataclass_fields__[field_name].default,
                f"{field_name}={value}, and {name} has no "
                + ("discounted rewards" if field_name == "gamma" else "critic")
                + f"; leave --{field_name} out, or set --algorithm ppo",
            )
        for what, holds in ((name, traits.compares_group), ("dynamic_sampling", self.dynamic_sampling)):
            require(
                not holds or self.num_generations > 1,
                f"num_generations={self.num_generations} leaves {what} nothing to compare a completion with; "
                "set it to 2 or more",
            )
        require(
            self.dual_clip is None or traits.objective != "clipped_weight",
            f"dual_clip={self.dual_clip}, and {name} bounds the ratio itself; leave --dual_clip out",
        )
        require(
            self.kl_in == "reward" or self.kl_estimator != "k1" or self.kl_coef == 0,
            "kl_estimator='k1' in the loss has a gradient that is 0 on average, so it would penalise nothing; "
            "set --kl_estimator to k2 or k3, or --kl_in reward",
        )

    def _check_companions(self) -> None:
        """Settings that do nothing without another one."""
        require(
            self.kl_target is None or self.kl_coef > 0,
            f"kl_target={self.kl_target} adapts kl_coef, which is 0 and would stay so; set --kl_coef too",
        )
        require(
            self.early_stop_kl is None or self.num_ppo_epochs * self.num_minibatches > 1,
            f"early_stop_kl={self.early_stop_kl} stops further updates, and a step has but one; "
            "set --num_ppo_epochs or --num_minibatches to more",
        )
        require(
            self.whiten_by == "batch" or self.whiten_advantages,
            f"whiten_by={self.whiten_by!r} says how advantages are whitened, and they are not; set --whiten_advantages",
        )
        require(
            self.eval_num_generations == 1 or self.eval_temperature > 0,
            f"eval_num_generations={self.eval_num_generations} would all be alike at eval_temperature=0; set "
            "--eval_temperature too",
        )
        for name, other, is_used in (
            ("rollout_correction_cap", "rollout_correction", self.rollout_correction != "none"),
            ("max_resamplings", "dynamic_sampling", self.dynamic_sampling),
            ("overlong_penalty", "overlong_buffer", self.overlong_buffer > 0),
            ("ema_decay", "enable_ema", self.enable_ema),
            ("ptx_batch_size", "ptx_coef", self.ptx_coef > 0),
        ):
            require(
                is_used or getattr(self, name) == type(self).__dataclass_fields__[name].default,
                f"{name}={getattr(self, name)} has no effect without {other}; set --{other} too",
            )
