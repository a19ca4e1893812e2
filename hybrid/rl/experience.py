"""From trajectories to experiences: what actor, reference and critic say of each token, then rewards and advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hybrid.data.packing import pack
from hybrid.models.ragged import RaggedBatch
from hybrid.monitor import Timers
from hybrid.parallel import ParallelMesh
from hybrid.rl.advantages import explained_variance, gae, whiten
from hybrid.rl.kl import kl_estimate
from hybrid.rl.metrics import StepMetrics
from hybrid.rl.ppo import token_rewards
from hybrid.rl.records import Experience, Trajectory

if TYPE_CHECKING:
    from hybrid.config import PPOConfig
    from hybrid.engine import HybridEngine
    from hybrid.zero.model import ShardedModel


class ExperienceMaker:
    """Looks at trajectories with the models of a step, before the step's first update."""

    def __init__(
        self,
        actor: HybridEngine,
        critic: ShardedModel,
        ref: ShardedModel | None,
        config: PPOConfig,
        *,
        timers: Timers,
    ) -> None:
        self.actor, self.critic, self.ref = actor, critic, ref
        self.config = config
        self.mesh: ParallelMesh = actor.mesh
        self.timers = timers

    def make(self, trajectories: Sequence[Trajectory], kl_coef: float, metrics: StepMetrics) -> list[Experience]:
        """One experience for each of this rank's trajectories. Every rank calls it, with none at all if need be."""
        config = self.config
        micro_batches = agreed_micro_batches(self.mesh, trajectories, config.max_tokens_per_microbatch)

        def old_logprobs(batch: RaggedBatch) -> torch.Tensor:
            scores = self.actor.logprobs(batch, temperature=config.temperature)
            metrics.add_mean("entropy", scores.entropy.sum(), batch.num_targets)
            return scores.logprobs

        with self.timers("old_logprob"):
            old = ref = self._score(trajectories, micro_batches, old_logprobs)
        if (frozen := self.ref) is not None:
            with self.timers("ref"):
                ref = self._score(
                    trajectories,
                    micro_batches,
                    lambda batch: frozen.logprobs(batch, temperature=config.temperature).logprobs,
                )
        with self.timers("values"):
            values = self._score(trajectories, micro_batches, self.critic.values)

        kl = [kl_estimate(a, b, config.kl_estimator) for a, b in zip(old, ref, strict=True)]
        rewards = [
            token_rewards(token_kl, _reward(trajectory), kl_coef=kl_coef, reward_clip=config.reward_clip)
            for trajectory, token_kl in zip(trajectories, kl, strict=True)
        ]
        advantages, returns = gae(rewards, values, gamma=config.gamma, lam=config.lam)
        if config.whiten_advantages:
            advantages = whiten(advantages, self.mesh.reduce_scalars)
        self._describe(trajectories, old, kl, rewards, advantages, returns, values, metrics)
        return [
            Experience(*fields)
            for fields in zip(trajectories, old, ref, values, rewards, advantages, returns, strict=True)
        ]

    def _score(
        self,
        trajectories: Sequence[Trajectory],
        micro_batches: list[list[int]],
        forward: Callable[[RaggedBatch], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Run ``forward`` over the micro-batches without gradient; (R_i,) for each trajectory."""
        scores = [torch.empty(0)] * len(trajectories)
        with torch.no_grad():
            for indices in micro_batches:
                members = [trajectories[i] for i in indices]
                tokens = forward(ragged_batch(members, self.mesh.device))  # (R,)
                pieces = tokens.split([len(member.completion_ids) for member in members]) if members else ()
                for index, piece in zip(indices, pieces, strict=True):
                    scores[index] = piece
        return scores

    def _describe(
        self,
        trajectories: Sequence[Trajectory],
        old: list[torch.Tensor],
        kl: list[torch.Tensor],
        rewards: list[torch.Tensor],
        advantages: list[torch.Tensor],
        returns: list[torch.Tensor],
        values: list[torch.Tensor],
        metrics: StepMetrics,
    ) -> None:
        device = self.mesh.device
        behaviour = concatenate([trajectory.behaviour_logprobs for trajectory in trajectories], device)
        gap = (concatenate(old, device) - behaviour).abs()
        metrics.add_mean("rollout/logprob_gap_mean", gap.sum(), gap.numel())
        metrics.add_max("rollout/logprob_gap_max", gap)
        metrics.add_max("rollout/ratio_max", gap.exp())
        token_kl = concatenate(kl, device)
        metrics.add_mean("kl", token_kl.sum(), token_kl.numel())
        per_sequence = [reward.sum()[None] for reward in rewards]
        metrics.add_spread("critic/rewards", concatenate(per_sequence, device))
        metrics.add_spread("critic/advantages", concatenate(advantages, device))
        metrics.add_spread("critic/returns", concatenate(returns, device))
        metrics.add_spread("critic/values", concatenate(values, device))
        explained = explained_variance(values, returns, self.mesh.reduce_scalars)
        metrics.add_mean("critic/vf_explained_var", explained)


def agreed_micro_batches(mesh: ParallelMesh, trajectories: Sequence[Trajectory], max_tokens: int) -> list[list[int]]:
    """This rank's micro-batches as indices, as many as the rank with the most has; the last ones may be empty.

    A rank that has run out still computes, on an empty batch, since the others' collectives wait for it.
    """
    packed = pack([trajectory.num_tokens for trajectory in trajectories], max_tokens)
    (most,) = mesh.reduce_scalars([len(packed)], op="max")
    return packed + [[] for _ in range(int(most) - len(packed))]


def ragged_batch(trajectories: Sequence[Trajectory], device: torch.device) -> RaggedBatch:
    """Prompts and completions end to end, every completion token scored."""
    return RaggedBatch.from_sequences(
        [trajectory.prompt_ids + trajectory.completion_ids for trajectory in trajectories],
        [len(trajectory.completion_ids) for trajectory in trajectories],
        device,
    )


def concatenate(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """All tokens of some trajectories as one (R,) fp32 tensor, empty where there are none."""
    pieces = [tensor.to(device, torch.float32) for tensor in tensors]
    return torch.cat(pieces) if pieces else torch.zeros(0, device=device)


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise ValueError(
            f"sample {trajectory.sample_index} of prompt {trajectory.prompt_index} is masked; leave it out "
            "(Trajectory.is_trainable)"
        )
    return trajectory.reward
