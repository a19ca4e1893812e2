"""One optimizer step of each model on a minibatch: forward, loss and backward over its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hybrid.models.ragged import RaggedBatch
from hybrid.monitor import Timers
from hybrid.parallel import ParallelMesh
from hybrid.rl.algorithms.ppo import value_loss
from hybrid.rl.algorithms.registry import find_algorithm
from hybrid.rl.batches import Batching, concatenate
from hybrid.rl.loss import Average, policy_loss
from hybrid.rl.metrics import StepMetrics
from hybrid.rl.ptx import PretrainingMix
from hybrid.rl.records import ClipRange, Experience, PolicyTokens
from hybrid.rl.work import FORWARD_AND_BACKWARD, FlopCount
from hybrid.zero.optimizer import StepReport

if TYPE_CHECKING:
    from hybrid.config import PPOConfig
    from hybrid.engine import HybridEngine
    from hybrid.zero.model import ShardedModel


class ModelUpdates:
    """Updates the actor by the algorithm's loss, and the critic by the value loss.

    Args:
        penalises: whether there is a reference, so that a KL penalty in the loss has something to compare with.
        fills_logprobs: whether the old log-probs are left to the forward of the step's only update.
        ptx: what the actor goes on learning from beside the reward; None: nothing.
    """

    def __init__(
        self,
        actor: HybridEngine,
        critic: ShardedModel | None,
        config: PPOConfig,
        *,
        batching: Batching,
        penalises: bool,
        fills_logprobs: bool,
        ptx: PretrainingMix | None,
        timers: Timers,
        work: FlopCount,
    ) -> None:
        self.actor, self.critic, self.config, self.ptx = actor, critic, config, ptx
        self.batching, self.timers, self.work = batching, timers, work
        self.mesh: ParallelMesh = actor.mesh
        self.algorithm = find_algorithm(config.algorithm)
        self._penalises, self._fills_logprobs = penalises and config.kl_in == "loss", fills_logprobs

    def update(self, experiences: Sequence[Experience], kl_coef: float, metrics: StepMetrics) -> float:
        """Step each model on this rank's part of a minibatch; not at all if it is empty everywhere.

        Returns:
            How far the policy was, over the whole minibatch, from the one at the start of the step: k1 per token. 0
            where no ``early_stop_kl`` asks for it.
        """
        trajectories = [experience.trajectory for experience in experiences]
        counts = [sum(len(t.completion_ids) for t in trajectories), len(trajectories)]
        num_tokens, num_sequences = map(int, self.mesh.reduce_scalars(counts))
        if not num_tokens:
            return 0.0
        average = Average(self.config.aggregation, num_tokens, num_sequences, self.config.max_completion_length)
        packed = self.batching.micro_batches(trajectories)
        micro_batches = [[experiences[i] for i in indices] for indices in packed]
        with self.timers("update_actor"):
            kl = self._update_actor(micro_batches, average, kl_coef, metrics)
        if self.critic is not None:
            with self.timers("update_critic"):
                self._update_critic(self.critic, micro_batches, num_tokens, metrics)
        if self.config.early_stop_kl is None:
            return 0.0
        (kl,) = self.mesh.reduce_scalars([float(kl)])
        return kl / num_tokens

    def _update_actor(
        self, micro_batches: list[list[Experience]], average: Average, kl_coef: float, metrics: StepMetrics
    ) -> torch.Tensor:
        """Returns this rank's sum of the tokens' k1 between the old policy and the present one."""
        config, device = self.config, self.mesh.device
        clip = ClipRange(low=config.cliprange_low or 0.0, high=config.cliprange_high or 0.0, dual=config.dual_clip)
        kl = torch.zeros((), device=device)
        for members in micro_batches:
            batch = self._batch(self.actor.model, members)
            scores = self.actor.logprobs(batch, temperature=config.temperature)
            lengths = [len(member.trajectory.completion_ids) for member in members]
            if self._fills_logprobs and members:
                for member, logprobs in zip(members, scores.logprobs.detach().split(lengths), strict=True):
                    member.old_logprobs.copy_(logprobs)
            weights = [member.weights for member in members if member.weights is not None]
            tokens = PolicyTokens(
                scores.logprobs,
                concatenate([member.old_logprobs for member in members], device),
                concatenate([member.advantages for member in members], device),
                lengths,
            )
            loss, sums = policy_loss(
                tokens,
                self.algorithm.objective(tokens, clip),
                scores.entropy,
                average,
                weights=concatenate(weights, device) if config.rollout_correction != "none" else None,
                ref_logprobs=concatenate([m.ref_logprobs for m in members], device) if self._penalises else None,
                kl_estimator=config.kl_estimator,
                kl_coef=kl_coef,
                entropy_coef=config.entropy_coef,
            )
            self.actor.backward(loss, reduction="sum")
            kl += sums["ppo_kl"][0]
            for name, (total, count) in sums.items():
                metrics.add_mean(f"actor/{name}", total, count)
        if self.ptx is not None:
            with self.timers("ptx"):
                self.ptx.backward(metrics, self.work)
        report = self.actor.step()
        _add_report(metrics, "actor", report)
        metrics.add_mean("actor/lr", report.lr)
        return kl

    def _update_critic(
        self, critic: ShardedModel, micro_batches: list[list[Experience]], num_tokens: int, metrics: StepMetrics
    ) -> None:
        config, device = self.config, self.mesh.device
        for members in micro_batches:
            batch = self._batch(critic, members)
            values = critic.values(batch)
            loss, sums = value_loss(
                values,
                concatenate([member.values for member in members if member.values is not None], device),
                concatenate([member.returns for member in members if member.returns is not None], device),
                cliprange_value=config.cliprange_value,
                vf_coef=config.vf_coef,
                num_tokens=num_tokens,
            )
            critic.backward(loss, reduction="sum")
            metrics.add_mean("critic/vpred_mean", values.detach().sum(), batch.num_targets)
            for name, total in sums.items():
                metrics.add_mean(f"critic/{name}", total, batch.num_targets)
        _add_report(metrics, "critic", critic.step())

    def _batch(self, model: ShardedModel, members: Sequence[Experience]) -> RaggedBatch:
        """A micro-batch, counted as work."""
        trajectories = [member.trajectory for member in members]
        self.work.add_trajectories(model, trajectories, FORWARD_AND_BACKWARD, self.batching.spared(trajectories))
        return self.batching.batch(trajectories)


def _add_report(metrics: StepMetrics, role: str, report: StepReport) -> None:
    """What an optimizer step did; in fp16 it may have been skipped, and then had no norm."""
    if not report.skipped:
        metrics.add_mean(f"{role}/grad_norm", report.grad_norm)
    if report.loss_scale != 1.0 or report.skipped:
        metrics.add_mean(f"{role}/loss_scale", report.loss_scale)
        metrics.add_mean(f"{role}/skipped_steps", float(report.skipped))
