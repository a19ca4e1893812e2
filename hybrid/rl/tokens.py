"""What a step made of each token of a sample, for people who want to see why a curve looks as it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid.algorithms import KLEstimator
from hybrid.rl.kl import kl_estimate
from hybrid.rl.records import Experience

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def token_record(
    experience: Experience, tokenizer: PreTrainedTokenizerBase | None, kl_estimator: KLEstimator
) -> dict[str, list[Any] | None]:
    """Lists of R entries, one a token of the completion, as JSON holds them.

    Returns:
        ``id`` and ``text``; ``mask``: 1 where the token is in the loss; ``logprob`` of generation, ``old_logprob`` of
        the trainer before the step's update and ``ref_logprob`` of the reference; ``kl``: the estimate at the token;
        ``reward``: what the token itself is given, penalties included; ``advantage``; ``value`` and ``return`` of a
        critic, and ``weight`` of a rollout correction, None where there is none.
    """
    trajectory = experience.trajectory
    ids = trajectory.completion_ids
    return {
        "id": ids,
        "text": [str(tokenizer.decode([token])) for token in ids] if tokenizer is not None else None,
        "mask": [int(experience.in_loss)] * len(ids),
        "logprob": _listed(trajectory.behaviour_logprobs),
        "old_logprob": _listed(experience.old_logprobs),
        "ref_logprob": _listed(experience.ref_logprobs),
        "kl": _listed(kl_estimate(experience.old_logprobs, experience.ref_logprobs, kl_estimator)),
        "reward": _listed(experience.rewards),
        "advantage": _listed(experience.advantages),
        "value": _listed(experience.values),
        "return": _listed(experience.returns),
        "weight": _listed(experience.weights),
    }


def _listed(values: torch.Tensor | None) -> list[float] | None:
    return None if values is None else [round(value, 6) for value in values.tolist()]
