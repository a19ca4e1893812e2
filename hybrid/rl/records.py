"""The records that travel between the stages of a step. A sample's token ids stay those that were generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Reduce = Callable[[list[float]], list[float]]
"""Adds up a few numbers over all ranks."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled completion of one prompt; R tokens long, where R may be 0."""

    prompt_index: int  # among the step's prompts of all replicas
    sample_index: int  # among the prompt's samples
    prompt_ids: list[int]
    completion_ids: list[int]  # (R,), a sampled EOS included
    behaviour_logprobs: torch.Tensor  # (R,) fp32, under the distribution that was sampled from
    finish_reason: str  # "stop", "length" or "abort"
    weights_version: int  # of the actor that sampled it
    reward: float | None = None  # None: not scored, takes no part in the loss

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion, what a forward over the trajectory costs."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def is_trainable(self) -> bool:
        return self.reward is not None and len(self.completion_ids) > 0


@dataclass(frozen=True, slots=True)
class Experience:
    """A trajectory with all that the losses need; R tokens, at least 1."""

    trajectory: Trajectory
    # (R,) fp32, the trainer's own, before the step's first update; where that is the only one, NaN until its forward
    # has filled them in (`ExperienceMaker.leaves_logprobs`)
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor  # (R,) fp32, the frozen reference's; the old ones where there is no reference
    rewards: torch.Tensor  # (R,) fp32: on the last token the clipped reward; the KL penalty, if it goes there
    advantages: torch.Tensor  # (R,) fp32
    values: torch.Tensor | None  # (R,) fp32, the critic's of the state before each token; None without a critic
    returns: torch.Tensor | None  # (R,) fp32, what the values are fitted to
    weights: torch.Tensor | None  # (R,) fp32, for the generator's being another function than the trainer; None: all 1
    in_loss: bool = True  # False: it counts in its group's baseline alone


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What advantages are made from: this rank's share of a step's sequences, S of them, R_i tokens each."""

    rewards: Sequence[torch.Tensor]  # S tensors (R_i,)
    values: Sequence[torch.Tensor]  # S tensors (R_i,); none at all without a critic
    groups: Sequence[int]  # (S,) which prompt each answers, in [0, num_groups)
    num_groups: int  # over all ranks, which may share a group
    reduce: Reduce
    gamma: float
    lam: float


@dataclass(frozen=True, slots=True)
class Advantages:
    """S tensors (R_i,) fp32 each."""

    advantages: list[torch.Tensor]
    returns: list[torch.Tensor] | None = None  # what a critic is fitted to; None without one


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The tokens of a micro-batch, sequences end to end; there may be none."""

    logprobs: torch.Tensor  # (R,) under the policy that is trained, with gradient
    old_logprobs: torch.Tensor  # (R,) under the policy at the start of the step
    advantages: torch.Tensor  # (R,)
    lengths: Sequence[int]  # (S,) adding up to R


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """How far the probability ratio counts: in [1 - low, 1 + high]."""

    low: float
    high: float
    dual: float | None = None  # bounds the loss of a token of negative advantage to this times the advantage


@dataclass(frozen=True, slots=True)
class Surrogate:
    """What an algorithm's objective says of each token."""

    loss: torch.Tensor  # (R,) with gradient
    clipped: torch.Tensor  # (R,) bool, where the clip range decided
