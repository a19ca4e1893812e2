"""On-policy learning of language models: up to four models, one loop. `PPOTrainer.step` reads as the algorithm."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hybrid.checkpoint import load_checkpoint, save_checkpoint
from hybrid.inference.params import SamplingParams
from hybrid.monitor import Timers
from hybrid.parallel import ParallelMesh
from hybrid.rewards.function import FunctionReward
from hybrid.rl.algorithms.ppo import value_loss
from hybrid.rl.algorithms.registry import find_algorithm
from hybrid.rl.experience import ExperienceMaker, agreed_micro_batches, concatenate, ragged_batch
from hybrid.rl.kl import make_kl_controller
from hybrid.rl.loss import Average, policy_loss
from hybrid.rl.metrics import StepMetrics, sample_metrics
from hybrid.rl.records import ClipRange, Experience, PolicyTokens
from hybrid.rl.rollout import RolloutCollector, ScoredSample, request_seed
from hybrid.rl.sampling import StepSampler, StepSamples
from hybrid.zero.optimizer import StepReport

if TYPE_CHECKING:
    from hybrid.config import PPOConfig
    from hybrid.data.prompts import Prompt, PromptDataset
    from hybrid.engine import HybridEngine
    from hybrid.monitor import MetricsLogger
    from hybrid.rewards import Reward
    from hybrid.zero.model import ShardedModel

Callback = Callable[[int, dict[str, float]], None]
"""Called on every rank after each step with the number of steps done and the step's metrics; may be collective."""


class PPOTrainer:
    """Optimises an actor against a reward by ``config.algorithm``: PPO, or one of those that do without a critic.

    Every rank makes one with the same arguments and calls the same methods. The result does not depend on the number
    of ranks, on how they are arranged, or on ``max_tokens_per_microbatch``, up to rounding.

    With ``top_k`` or ``top_p`` the generator samples from a truncated distribution, while the losses, the reference
    and `rollout/logprob_gap_*` use the whole one at the same temperature: the ratio stays consistent (old and new
    log-probs are both the trainer's) but the samples are slightly off-policy and the gap no longer tends to 0. That
    is allowed, and said once.

    Args:
        actor: generates and is trained; its tokenizer made the prompts.
        critic: one score per token, over the actor's vocabulary; None for an algorithm without a critic.
        ref: the KL penalty's reference; None for no penalty.
        reward: scores completions: a `Reward`, or a function
            ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``.
        prompts: what is sampled from.
        logger: gets each step's metrics, on the main rank.
        timers: measure the stages; callbacks may add to them (``trainer.timers("save")``), which the next step reports.
        callbacks: called in order after each step of `train`.

    Raises:
        ValueError: the algorithm needs a critic and there is none, or the other way round.
    """

    def __init__(
        self,
        actor: HybridEngine,
        critic: ShardedModel | None,
        ref: ShardedModel | None,
        reward: Reward | Callable[..., Any],
        prompts: PromptDataset,
        config: PPOConfig,
        *,
        logger: MetricsLogger | None = None,
        timers: Timers | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.algorithm = find_algorithm(config.algorithm)
        if self.algorithm.traits.has_critic != (critic is not None):
            needs = "needs a critic" if critic is None else "has no critic; pass None"
            raise ValueError(f"algorithm={config.algorithm!r} {needs}")
        self.actor, self.critic = actor, critic
        self.prompts, self.config = prompts, config
        self.logger, self.callbacks = logger, callbacks
        self.mesh: ParallelMesh = actor.mesh
        self.timers = timers or Timers(self.mesh.synchronize)
        self.global_step = 0
        self.last_samples: Sequence[ScoredSample] = ()  # all samples of the last step, for callbacks
        self._said: set[str] = set()
        self.kl_controller = make_kl_controller(config.kl_coef, config.kl_target, config.kl_horizon)
        if not hasattr(reward, "score"):
            reward = FunctionReward(cast("Callable[..., Any]", reward))
        self.collector = RolloutCollector(actor, cast("Reward", reward), timers=self.timers)
        self.sampler = StepSampler(self.collector, prompts, config)
        self.maker = ExperienceMaker(actor, critic, ref, config, timers=self.timers)
        if (config.top_k or config.top_p < 1) and self.mesh.is_main:
            warnings.warn(
                f"top_k={config.top_k}, top_p={config.top_p} truncate what is sampled but not the loss's log-probs: "
                "expect a log-prob gap; set --top_k 0 --top_p 1 to train on exactly what is sampled",
                stacklevel=2,
            )

    # -- the loop ------------------------------------------------------------------------------------------------

    def train(self, total_steps: int) -> None:
        """Run until ``total_steps`` steps have been done, those before a resume included."""
        updates = total_steps * self.config.num_ppo_epochs * self.config.num_minibatches
        self.actor.set_schedule(updates)
        if self.critic is not None:
            self.critic.set_schedule(updates)
        while self.global_step < total_steps:
            metrics = self.step()
            if self.logger is not None and self.mesh.is_main:
                self.logger.log(self.global_step, metrics)
            for callback in self.callbacks:
                callback(self.global_step, metrics)

    def step(self) -> dict[str, float]:
        """Sample a batch, score it, and update the models on it. Returns the step's metrics."""
        metrics, num_flips = StepMetrics(), len(self.actor.flips)
        with self.timers("step"):
            batch = self.sampler.sample(self.global_step)
            experiences = self.maker.make(batch.trajectories, self.kl_controller.coef, metrics)
            self.learn(experiences, metrics)
        self.global_step += 1
        self.last_samples = batch.samples
        return self._summarise(metrics, batch, num_flips)

    def learn(self, experiences: Sequence[Experience], metrics: StepMetrics) -> None:
        """All epochs over a step's experiences, or until the policy is ``early_stop_kl`` from where it started."""
        config, limit = self.config, self.config.early_stop_kl
        for epoch in range(config.num_ppo_epochs):
            for minibatch in self.minibatches(experiences, epoch):
                kl = self.update(minibatch, metrics)
                if limit is not None and kl > limit:
                    metrics.add_mean("actor/early_stopped", 1)
                    return
        if limit is not None:
            metrics.add_mean("actor/early_stopped", 0)

    def minibatches(self, experiences: Sequence[Experience], epoch: int) -> Iterator[list[Experience]]:
        """This rank's part of each of the step's minibatches, which may be none of it.

        Samples of all ranks are shuffled and cut into ``num_minibatches`` of equal size; where a sample lands depends
        on its place in the batch and not on its rank.
        """
        config = self.config
        order = list(range(config.prompts_per_step * config.num_generations))
        random.Random(request_seed(config.seed, self.global_step, epoch)).shuffle(order)
        place = {sample: i for i, sample in enumerate(order)}
        for number in range(config.num_minibatches):
            low, high = (len(order) * k // config.num_minibatches for k in (number, number + 1))
            yield [
                experience
                for experience in experiences
                for t in [experience.trajectory]
                if low <= place[t.prompt_index * config.num_generations + t.sample_index] < high
            ]

    def update(self, experiences: Sequence[Experience], metrics: StepMetrics) -> float:
        """One optimizer step of each model on this rank's part of a minibatch; none if it is empty everywhere.

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
        packed = agreed_micro_batches(self.mesh, trajectories, self.config.max_tokens_per_microbatch)
        micro_batches = [[experiences[i] for i in indices] for indices in packed]
        with self.timers("update_actor"):
            kl = self._update_actor(micro_batches, average, metrics)
        if self.critic is not None:
            with self.timers("update_critic"):
                self._update_critic(self.critic, micro_batches, num_tokens, metrics)
        if self.config.early_stop_kl is None:
            return 0.0
        (kl,) = self.mesh.reduce_scalars([float(kl)])
        return kl / num_tokens

    def _update_actor(
        self, micro_batches: list[list[Experience]], average: Average, metrics: StepMetrics
    ) -> torch.Tensor:
        """Returns this rank's sum of the tokens' k1 between the old policy and the present one."""
        config, device = self.config, self.mesh.device
        clip = ClipRange(low=config.cliprange_low or 0.0, high=config.cliprange_high or 0.0, dual=config.dual_clip)
        penalises = config.kl_in == "loss" and self.maker.ref is not None
        kl = torch.zeros((), device=device)
        for members in micro_batches:
            batch = ragged_batch([member.trajectory for member in members], device)
            scores = self.actor.logprobs(batch, temperature=config.temperature)
            weights = [member.weights for member in members if member.weights is not None]
            tokens = PolicyTokens(
                scores.logprobs,
                concatenate([member.old_logprobs for member in members], device),
                concatenate([member.advantages for member in members], device),
                [len(member.trajectory.completion_ids) for member in members],
            )
            loss, sums = policy_loss(
                tokens,
                self.algorithm.objective(tokens, clip),
                scores.entropy,
                average,
                weights=concatenate(weights, device) if config.rollout_correction != "none" else None,
                ref_logprobs=concatenate([m.ref_logprobs for m in members], device) if penalises else None,
                kl_estimator=config.kl_estimator,
                kl_coef=self.kl_controller.coef,
                entropy_coef=config.entropy_coef,
            )
            self.actor.backward(loss, reduction="sum")
            kl += sums["ppo_kl"][0]
            for name, (total, count) in sums.items():
                metrics.add_mean(f"actor/{name}", total, count)
        report = self.actor.step()
        _add_report(metrics, "actor", report)
        metrics.add_mean("actor/lr", report.lr)
        return kl

    def _update_critic(
        self, critic: ShardedModel, micro_batches: list[list[Experience]], num_tokens: int, metrics: StepMetrics
    ) -> None:
        config, device = self.config, self.mesh.device
        for members in micro_batches:
            batch = ragged_batch([member.trajectory for member in members], device)
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

    # -- looking at it -------------------------------------------------------------------------------------------

    def evaluate(self, prompts: Sequence[Prompt]) -> list[ScoredSample]:
        """Greedy completions of some prompts and their rewards, in the prompts' order, the same on every rank.

        Two calls around `train` make the table of samples (``dataclasses.asdict`` of each).
        """
        params = SamplingParams(temperature=0.0, max_tokens=self.config.max_completion_length)
        # Timers of its own: the next step's report is about that step.
        collector = RolloutCollector(self.actor, self.collector.reward, timers=Timers())
        return collector.collect(prompts, params, seed=self.config.seed, step=self.global_step).samples

    def _summarise(self, metrics: StepMetrics, batch: StepSamples, num_flips: int) -> dict[str, float]:
        """Reduce the step's metrics over the ranks, add what is known of it as a whole, and adapt the KL penalty."""
        samples, trained = batch.samples, batch.trained
        reduced = metrics.reduce(self.mesh) | sample_metrics(samples)
        reduced["actor/kl_coef"] = self.kl_controller.coef
        if batch.kept is not None:
            reduced["rollout/resampled_groups"] = float(batch.num_drawn - self.config.prompts_per_step)
            reduced["rollout/missing_groups"] = float(self.config.prompts_per_step - len(batch.kept))
        if trained:
            tokens = sum(sample.num_completion_tokens for sample in trained)
            self.kl_controller.update(reduced["kl"] * tokens / len(trained), len(trained))
        self._warn_of(batch, len(trained))
        clipped = [s for s in trained if abs(s.reward or 0.0) > self.config.reward_clip]
        reduced["completions/reward_clipped_ratio"] = len(clipped) / len(samples)
        seconds = self.timers.drain()
        reduced |= {f"timing_s/{name}": value for name, value in seconds.items()}
        generated = sum(sample.num_completion_tokens for sample in samples)
        processed = generated + sum(sample.num_prompt_tokens for sample in samples)
        reduced["perf/tokens_per_s"] = processed / max(seconds["step"], 1e-9)
        reduced["perf/generated_tokens_per_s"] = generated / max(seconds["generate"], 1e-9)
        reduced["perf/max_memory_gb"] = self.mesh.peak_memory() / 1e9
        flips = self.actor.flips[num_flips:]
        if flips:
            reduced["flip/bytes_received"] = float(sum(flip.bytes_received for flip in flips))
            reduced["flip/kv_blocks"] = float(max(flip.kv_blocks for flip in flips))
            reduced["flip/peak_bytes"] = float(max(flip.peak_bytes for flip in flips))
        reduced["training/global_step"] = float(self.global_step)
        reduced["training/epoch"] = self.sampler.position / len(self.prompts.rows)
        reduced["training/weights_version"] = float(self.actor.weights_version)
        return reduced

    def _warn_of(self, batch: StepSamples, num_trained: int) -> None:
        """Say, the first time it happens, that a step taught nothing or less than its rewards said."""
        samples = batch.samples
        if batch.kept is not None and len(batch.kept) < self.config.prompts_per_step:
            self._say(
                "no spread",
                f"{batch.num_drawn} prompts of step {self.global_step} gave {len(batch.kept)} groups with spread in "
                f"reward, of {self.config.prompts_per_step} wanted; raise --max_resamplings or --num_generations, or "
                "take a reward with more values",
            )
        elif not num_trained:
            self._say("masked", f"all {len(samples)} samples of step {self.global_step} are masked: no update was made")
        largest = max((s.reward for s in samples if s.reward is not None), key=abs, default=0.0)
        if abs(largest) > self.config.reward_clip:
            self._say(
                "clipped",
                f"a reward of {largest:g} is beyond reward_clip={self.config.reward_clip:g}, so it is clipped; "
                "scale the reward or raise --reward_clip",
            )

    def _say(self, what: str, message: str) -> None:
        if self.mesh.is_main and what not in self._said:
            self._said.add(what)
            warnings.warn(message, stacklevel=4)

    # -- resuming ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, directory: str | Path, **extra: Any) -> None:
        """Write everything that a resumed run needs, and ``extra`` (JSON); every rank calls this."""
        save_checkpoint(directory, self._models(), self.state_dict() | {"extra": extra}, self.mesh)

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint of any world size, stage and tensor-parallel size; returns its ``extra``.

        Raises:
            ValueError: it is no checkpoint, or one of other models.
        """
        state = load_checkpoint(directory, self._models())
        self.load_state_dict(state)
        return state["extra"]

    def _models(self) -> dict[str, ShardedModel]:
        trained = {"actor": self.actor.model}
        return trained if self.critic is None else {**trained, "critic": self.critic}

    def state_dict(self) -> dict[str, Any]:
        """What the trainer itself must remember: step and place among the prompts, from which data and seeds follow."""
        return {
            "global_step": self.global_step,
            "prompts_drawn": self.sampler.position,
            "kl_controller": self.kl_controller.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.global_step = state["global_step"]
        # Where nothing is resampled the place follows from the step.
        self.sampler.position = state.get("prompts_drawn", self.global_step * self.config.prompts_per_step)
        self.kl_controller.load_state_dict(state["kl_controller"])


def _add_report(metrics: StepMetrics, role: str, report: StepReport) -> None:
    """What an optimizer step did; in fp16 it may have been skipped, and then had no norm."""
    if not report.skipped:
        metrics.add_mean(f"{role}/grad_norm", report.grad_norm)
    if report.loss_scale != 1.0 or report.skipped:
        metrics.add_mean(f"{role}/loss_scale", report.loss_scale)
        metrics.add_mean(f"{role}/skipped_steps", float(report.skipped))
