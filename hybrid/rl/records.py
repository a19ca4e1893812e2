"""The records that travel between the stages of a step. A sample's token ids stay those that were generated."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    old_logprobs: torch.Tensor  # (R,) fp32, the trainer's own, before the step's first update
    ref_logprobs: torch.Tensor  # (R,) fp32, the frozen reference's; the old ones where there is no reference
    values: torch.Tensor  # (R,) fp32, the critic's of the state before each token
    rewards: torch.Tensor  # (R,) fp32, KL penalty and, on the last token, the clipped reward
    advantages: torch.Tensor  # (R,) fp32
    returns: torch.Tensor  # (R,) fp32, what the values are fitted to
