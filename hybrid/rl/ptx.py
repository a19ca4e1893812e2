"""PTX: the loss of plain language modelling mixed into the actor's updates, so that it does not forget the rest.

Ouyang et al. 2022, equation 2, https://arxiv.org/abs/2203.02155, where gamma, here ``ptx_coef``, is 27.8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid.learning.objective import shared_out
from hybrid.learning.sft import SFTObjective
from hybrid.rl.metrics import StepMetrics
from hybrid.rl.work import FORWARD_AND_BACKWARD, FlopCount

if TYPE_CHECKING:
    from hybrid.config import PPOConfig
    from hybrid.data.conversations import Example, ExampleDataset
    from hybrid.engine import HybridEngine


class PretrainingMix:
    """Draws the next examples for each update and adds their gradient to the actor's."""

    def __init__(self, actor: HybridEngine, examples: ExampleDataset[Example], config: PPOConfig) -> None:
        self.mesh, self.actor, self.examples, self.config = actor.mesh, actor, examples, config
        self.objective = SFTObjective(actor.model)
        self.batch_size = config.ptx_batch_size or -(-config.samples_per_step // config.num_minibatches)
        self.num_batches = 0  # drawn so far

    def backward(self, metrics: StepMetrics, work: FlopCount) -> None:
        """Back-propagate ``ptx_coef`` times the mean loss of the next examples' scored tokens; a collective.

        Adds ``actor/ptx_loss``, in nats per token and before its weight.
        """
        config = self.config
        batch = self.examples.batch(self.num_batches, self.batch_size, config.seed)
        total = sum(self.objective.count(example) for example in batch)
        for members in shared_out(self.mesh, self.objective, batch, config.max_tokens_per_microbatch):
            loss, _ = self.objective.loss([batch[i] for i in members], total)
            self.actor.backward(config.ptx_coef * loss, reduction="sum")
            count = sum(self.objective.count(batch[i]) for i in members)
            lengths = [self.objective.num_tokens(batch[i]) for i in members]
            work.add(self.actor.model, lengths, count, FORWARD_AND_BACKWARD)
            metrics.add_mean("actor/ptx_loss", loss.detach() * total, count)
        self.num_batches += 1
