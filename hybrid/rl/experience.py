"""From trajectories to experiences: what actor, reference and critic say of each token, then rewards and advantages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hybrid.models.ragged import RaggedBatch
from hybrid.monitor import Timers
from hybrid.parallel import ParallelMesh
from hybrid.rl.advantages import explained_variance, token_rewards, whiten, whiten_groups
from hybrid.rl.algorithms.dapo import overlong_punishment
from hybrid.rl.algorithms.registry import find_algorithm
from hybrid.rl.batches import Batching, concatenate
from hybrid.rl.correction import rollout_weights
from hybrid.rl.kl import kl_estimate
from hybrid.rl.metrics import StepMetrics
from hybrid.rl.records import AdvantageInputs, Advantages, Experience, Trajectory
from hybrid.rl.work import FORWARD, FlopCount

if TYPE_CHECKING:
    from hybrid.config import PPOConfig
    from hybrid.engine import HybridEngine
    from hybrid.zero.model import ShardedModel


class ExperienceMaker:
    """Looks at trajectories with the models of a step, before the step's first update.

    Attributes:
        leaves_logprobs: the actor's log-probs are left to the forward of the step's only update, and its experiences
            have NaN until then.
        reuses_logprobs: generation's log-probs serve, as long as they are the trainer's bits.
    """

    def __init__(
        self,
        actor: HybridEngine,
        critic: ShardedModel | None,
        ref: ShardedModel | None,
        config: PPOConfig,
        *,
        batching: Batching,
        timers: Timers,
        work: FlopCount,
    ) -> None:
        self.actor, self.critic, self.ref = actor, critic, ref
        self.batching = batching
        self.config = config
        self.algorithm = find_algorithm(config.algorithm)
        self.mesh: ParallelMesh = actor.mesh
        self.timers, self.work = timers, work
        # With one update a step it starts from the old policy itself, and its forward says what the log-probs were;
        # unless something asks for them before, or for those of samples that are not in the loss.
        asked_before = config.rollout_correction != "none" or (ref is not None and config.kl_in == "reward")
        self.leaves_logprobs = (
            config.num_ppo_epochs * config.num_minibatches == 1
            and not asked_before
            and not config.mask_truncated_completions
        )
        # Of a truncated distribution generation has other log-probs than the loss.
        self.reuses_logprobs = actor.inference.exact and not config.top_k and config.top_p == 1

    def make(self, trajectories: Sequence[Trajectory], kl_coef: float, metrics: StepMetrics) -> list[Experience]:
        """One experience for each of this rank's trajectories. Every rank calls it, with none at all if need be."""
        config = self.config
        micro_batches = self.batching.micro_batches(trajectories)

        if self.leaves_logprobs:
            old = [torch.full((len(t.completion_ids),), torch.nan, device=self.mesh.device) for t in trajectories]
        else:
            with self.timers("old_logprob"):
                old = self._old_logprobs(trajectories, micro_batches, metrics)
        ref = old
        if (frozen := self.ref) is not None:
            with self.timers("ref"), frozen.resident():
                ref = self._score(
                    frozen,
                    trajectories,
                    micro_batches,
                    lambda batch: frozen.logprobs(batch, temperature=config.temperature).logprobs,
                )
        values: list[torch.Tensor] = []
        if self.critic is not None:
            with self.timers("values"):
                values = self._score(self.critic, trajectories, micro_batches, self.critic.values)

        penalty = kl_coef if config.kl_in == "reward" and self.ref is not None else 0.0
        rewards = [self._token_rewards(*fields, penalty) for fields in zip(trajectories, old, ref, strict=True)]
        made = self._advantages(trajectories, rewards, values)
        nothing = [None] * len(trajectories)
        weights = [
            rollout_weights(logprobs, t.behaviour_logprobs, config.rollout_correction, config.rollout_correction_cap)
            for logprobs, t in zip(old, trajectories, strict=True)
        ]
        in_loss = [
            not (config.mask_truncated_completions and trajectory.finish_reason == "length")
            for trajectory in trajectories
        ]
        return [
            Experience(*fields)
            for fields in zip(
                *(trajectories, old, ref, rewards, made.advantages),
                *(nothing if self.critic is None else values, made.returns or nothing, weights, in_loss),
                strict=True,
            )
        ]

    def _old_logprobs(
        self, trajectories: Sequence[Trajectory], micro_batches: list[list[int]], metrics: StepMetrics
    ) -> list[torch.Tensor]:
        """The trainer's log-probs before the step's first update: generation's own, where they are the same bits.

        With ``exact`` the engine promises that. One trajectory of each rank is computed all the same, and if a bit of
        any of them differs, all are, from then on.
        """

        def forward(batch: RaggedBatch) -> torch.Tensor:
            return self.actor.logprobs(batch, temperature=self.config.temperature).logprobs

        def forward_all(batch: RaggedBatch) -> torch.Tensor:
            scores = self.actor.logprobs(batch, temperature=self.config.temperature)
            metrics.add_mean("entropy", scores.entropy.sum(), batch.num_targets)
            return scores.logprobs

        if not self.reuses_logprobs:
            return self._score(self.actor.model, trajectories, micro_batches, forward_all)
        probe = trajectories[:1]
        found = self._score(self.actor.model, probe, [list(range(len(probe)))], forward)
        differ = any(
            not torch.equal(mine, sampled.behaviour_logprobs.to(mine.device))
            for mine, sampled in zip(found, probe, strict=True)
        )
        (num_differ,) = self.mesh.reduce_scalars([float(differ)])
        if not num_differ:
            device = self.mesh.device
            return [trajectory.behaviour_logprobs.to(device, torch.float32) for trajectory in trajectories]
        self.reuses_logprobs = False
        if self.mesh.is_main:
            warnings.warn(
                "exact_logprobs: a log-prob of generation is not the trainer's on this machine, so the trainer's are "
                "computed from here on",
                stacklevel=6,
            )
        return self._score(self.actor.model, trajectories, micro_batches, forward_all)

    def _token_rewards(
        self, trajectory: Trajectory, old: torch.Tensor, ref: torch.Tensor, kl_coef: float
    ) -> torch.Tensor:
        config = self.config
        kl = kl_estimate(old, ref, config.kl_estimator) if kl_coef else torch.zeros_like(ref)
        punishment = overlong_punishment(
            len(trajectory.completion_ids),
            max_tokens=config.max_completion_length,
            buffer=config.overlong_buffer,
            penalty=config.overlong_penalty,
        )
        return token_rewards(
            kl,
            _reward(trajectory) + punishment,
            kl_coef=kl_coef,
            reward_clip=config.reward_clip,
        )

    def _advantages(
        self, trajectories: Sequence[Trajectory], rewards: list[torch.Tensor], values: list[torch.Tensor]
    ) -> Advantages:
        config, reduce = self.config, self.mesh.reduce_scalars
        groups = [trajectory.prompt_index for trajectory in trajectories]
        made = self.algorithm.advantages(
            AdvantageInputs(
                rewards, values, groups, config.prompts_per_step, reduce, gamma=config.gamma, lam=config.lam
            )
        )
        if not config.whiten_advantages:
            return made
        if config.whiten_by == "group":
            white = whiten_groups(made.advantages, groups, config.prompts_per_step, reduce)
        else:
            white = whiten(made.advantages, reduce)
        return Advantages(white, made.returns)

    def _score(
        self,
        model: ShardedModel,
        trajectories: Sequence[Trajectory],
        micro_batches: list[list[int]],
        forward: Callable[[RaggedBatch], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Run ``forward`` of a model over the micro-batches without gradient; (R_i,) for each trajectory."""
        scores = [torch.empty(0)] * len(trajectories)
        with torch.no_grad():
            for indices in micro_batches:
                members = [trajectories[i] for i in indices]
                self.work.add_trajectories(model, members, FORWARD, self.batching.spared(members))
                tokens = forward(self.batching.batch(members))  # (R,)
                pieces = tokens.split([len(member.completion_ids) for member in members]) if members else ()
                for index, piece in zip(indices, pieces, strict=True):
                    scores[index] = piece
        return scores

    def describe(self, experiences: Sequence[Experience], metrics: StepMetrics) -> None:
        """Add what is to be said of a step's experiences once the step is done; every rank calls it."""
        device, config = self.mesh.device, self.config

        def tokens(pieces: Sequence[torch.Tensor | None]) -> torch.Tensor:
            return concatenate([piece for piece in pieces if piece is not None], device)

        gap = tokens([e.old_logprobs for e in experiences]) - tokens(
            [e.trajectory.behaviour_logprobs for e in experiences]
        )
        gap = gap.abs()
        metrics.add_mean("rollout/logprob_gap_mean", gap.sum(), gap.numel())
        metrics.add_max("rollout/logprob_gap_max", gap)
        metrics.add_max("rollout/ratio_max", gap.exp())
        if config.rollout_correction != "none":
            weights = tokens([e.weights for e in experiences])
            metrics.add_mean("rollout/correction_mean", weights.sum(), weights.numel())
            beyond = (weights == 0) | (weights >= config.rollout_correction_cap)
            metrics.add_mean("rollout/correction_capped_ratio", beyond.sum(), weights.numel())
        token_kl = tokens([kl_estimate(e.old_logprobs, e.ref_logprobs, config.kl_estimator) for e in experiences])
        metrics.add_mean("kl", token_kl.sum(), token_kl.numel())
        metrics.add_spread("critic/rewards", tokens([e.rewards.sum()[None] for e in experiences]))
        metrics.add_spread("critic/advantages", tokens([e.advantages for e in experiences]))
        if self.critic is None:
            return
        returns, values = [e.returns for e in experiences], [e.values for e in experiences]
        metrics.add_spread("critic/returns", tokens(returns))
        metrics.add_spread("critic/values", tokens(values))
        explained = explained_variance([tokens(values)], [tokens(returns)], self.mesh.reduce_scalars)
        metrics.add_mean("critic/vf_explained_var", explained)


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise ValueError(
            f"sample {trajectory.sample_index} of prompt {trajectory.prompt_index} is masked; leave it out "
            "(Trajectory.is_trainable)"
        )
    return trajectory.reward
