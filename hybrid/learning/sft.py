"""Supervised fine-tuning: the negative log-likelihood of the tokens that are scored, per token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from hybrid.data.conversations import Example
from hybrid.learning.objective import Sums, ragged_batch
from hybrid.zero.model import ShardedModel


class SFTObjective:
    """Cross-entropy of an actor's scored tokens: every token counts alike, whatever example it is in."""

    role = "actor"

    def __init__(self, model: ShardedModel) -> None:
        self.model = model

    def num_tokens(self, example: Example) -> int:
        return len(example.token_ids)

    def count(self, example: Example) -> int:
        return example.num_scored

    def loss(self, examples: Sequence[Example], total: float) -> tuple[torch.Tensor, Sums]:
        loss = self.model.loss(ragged_batch(examples, self.model.mesh.device), normalizer=total)
        return loss, {"loss": loss.detach() * total}

    def describe(self, sums: Mapping[str, float], total: float) -> dict[str, float]:
        """``loss`` in nats per scored token, and its exponential, ``perplexity``."""
        loss = sums["loss"] / total
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
