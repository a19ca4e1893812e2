"""On-policy learning of language models: up to four models, one loop. `PPOTrainer.step` reads as the algorithm."""

from __future__ import annotations

import dataclasses
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hybrid.checkpoint import load_checkpoint, save_checkpoint
from hybrid.inference.params import SamplingParams
from hybrid.monitor import Timers
from hybrid.parallel import ParallelMesh
from hybrid.rewards.function import FunctionReward
from hybrid.rl.algorithms.registry import find_algorithm
from hybrid.rl.batches import Batching
from hybrid.rl.experience import ExperienceMaker
from hybrid.rl.kl import make_kl_controller
from hybrid.rl.metrics import StepMetrics
from hybrid.rl.ptx import PretrainingMix
from hybrid.rl.records import Experience
from hybrid.rl.reporting import (
    StepWarnings,
    batch_metrics,
    evaluation_metrics,
    flip_metrics,
    speed_metrics,
    utilisation,
)
from hybrid.rl.rollout import RolloutCollector, ScoredSample, request_seed
from hybrid.rl.sampling import StepSampler, StepSamples
from hybrid.rl.tokens import token_record
from hybrid.rl.updates import ModelUpdates
from hybrid.rl.work import FlopCount

if TYPE_CHECKING:
    from hybrid.config import PPOConfig
    from hybrid.data.conversations import Example, ExampleDataset
    from hybrid.data.prompts import Prompt, PromptDataset
    from hybrid.engine import HybridEngine
    from hybrid.monitor import MetricsLogger
    from hybrid.rewards import Reward
    from hybrid.zero.model import ShardedModel

Callback = Callable[[int, dict[str, float]], None]
"""Called on every rank with the number of steps done and metrics; may be collective."""


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
        held_out: prompts that `train` evaluates; none: no evaluation.
        ptx: what the actor goes on learning from beside the reward, with weight ``config.ptx_coef``.
        logger: gets each step's metrics, on the main rank.
        timers: measure the stages; callbacks may add to them (``trainer.timers("save")``), which the next step reports.
        callbacks: called in order after each step of `train`, and before the first if something is held out.

    Raises:
        ValueError: the algorithm needs a critic and there is none, or the other way round; so with ``ptx``.
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
        held_out: Sequence[Prompt] = (),
        ptx: ExampleDataset[Example] | None = None,
        logger: MetricsLogger | None = None,
        timers: Timers | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.algorithm = find_algorithm(config.algorithm)
        if self.algorithm.traits.has_critic != (critic is not None):
            needs = "needs a critic" if critic is None else "has no critic; pass None"
            raise ValueError(f"algorithm={config.algorithm!r} {needs}")
        if (config.ptx_coef > 0) != (ptx is not None):
            needs = "needs examples: pass ptx" if ptx is None else "has no use for them; leave ptx out"
            raise ValueError(f"ptx_coef={config.ptx_coef:g} {needs}")
        self.actor, self.critic = actor, critic
        self.prompts, self.held_out, self.config = prompts, held_out, config
        self.logger, self.callbacks = logger, callbacks
        self.mesh: ParallelMesh = actor.mesh
        self.timers = timers or Timers(self.mesh.synchronize)
        self.global_step = 0
        # For callbacks: the last step's samples, this rank's experiences of them, and the last evaluation's samples.
        self.last_batch: StepSamples | None = None
        self.last_experiences: Sequence[Experience] = ()
        self.last_evaluation: Sequence[ScoredSample] = ()
        self.warnings = StepWarnings(self.mesh, config)
        self.kl_controller = make_kl_controller(config.kl_coef, config.kl_target, config.kl_horizon)
        if not hasattr(reward, "score"):
            reward = FunctionReward(cast("Callable[..., Any]", reward))
        shares_prompts = config.share_prompts and all(
            model.can_share_prefixes for model in (actor.model, critic, ref) if model is not None
        )
        batching = Batching(self.mesh, config.max_tokens_per_microbatch, shares_prompts)
        self.collector = RolloutCollector(
            actor, cast("Reward", reward), shares_prompts=shares_prompts, timers=self.timers
        )
        self.sampler = StepSampler(self.collector, prompts, config)
        self.work = FlopCount()
        self.maker = ExperienceMaker(actor, critic, ref, config, batching=batching, timers=self.timers, work=self.work)
        self.ptx = PretrainingMix(actor, ptx, config) if ptx is not None else None
        self.updates = ModelUpdates(
            actor,
            critic,
            config,
            batching=batching,
            penalises=ref is not None,
            fills_logprobs=self.maker.leaves_logprobs,
            ptx=self.ptx,
            timers=self.timers,
            work=self.work,
        )
        if config.enable_ema:
            actor.keep_average(config.ema_decay)
        if (config.top_k or config.top_p < 1) and self.mesh.is_main:
            warnings.warn(
                f"top_k={config.top_k}, top_p={config.top_p} truncate what is sampled but not the loss's log-probs: "
                "expect a log-prob gap; set --top_k 0 --top_p 1 to train on exactly what is sampled",
                stacklevel=2,
            )

    # -- the loop ------------------------------------------------------------------------------------------------

    def train(self, total_steps: int) -> None:
        """Run until ``total_steps`` steps have been done, those before a resume included.

        What is held out is evaluated before the first step, every ``eval_steps`` and after the last.
        """
        updates = total_steps * self.config.num_ppo_epochs * self.config.num_minibatches
        self.actor.set_schedule(updates)
        if self.critic is not None:
            self.critic.set_schedule(updates)
        if self.held_out and self.global_step == 0:
            self._report(self._evaluate_held_out())
        while self.global_step < total_steps:
            metrics = self.step()
            is_due = self.config.eval_steps and self.global_step % self.config.eval_steps == 0
            if self.held_out and (is_due or self.global_step == total_steps):
                metrics |= self._evaluate_held_out()
            self._report(metrics)

    def _report(self, metrics: dict[str, float]) -> None:
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
            self.learn([experience for experience in experiences if experience.in_loss], metrics)
            self.maker.describe(experiences, metrics)
        self.global_step += 1
        self.last_batch, self.last_experiences = batch, experiences
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
        order = list(range(config.samples_per_step))
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
        """One optimizer step of each model on this rank's part of a minibatch; see `ModelUpdates.update`."""
        return self.updates.update(experiences, self.kl_controller.coef, metrics)

    # -- looking at it -------------------------------------------------------------------------------------------

    def evaluate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[ScoredSample]:
        """Completions of some prompts and their rewards, in the prompts' order, the same on every rank.

        Two calls around `train` make the table of samples (``dataclasses.asdict`` of each). The same seeds each time,
        so that what differs is the policy.

        Args:
            params: how to sample (default: greedily).
        """
        params = params or SamplingParams(temperature=0.0, max_tokens=self.config.max_completion_length)
        # Timers of its own: the next step's report is about that step.
        collector = RolloutCollector(self.actor, self.collector.reward, timers=Timers())
        return collector.collect(prompts, params, seed=self.config.seed, step=-1).samples

    def _evaluate_held_out(self) -> dict[str, float]:
        config = self.config
        params = SamplingParams(
            n=config.eval_num_generations,
            temperature=config.eval_temperature,
            max_tokens=config.max_completion_length,
        )
        started = time.perf_counter()
        self.last_evaluation = self.evaluate(self.held_out, params)
        return evaluation_metrics(self.last_evaluation) | {"timing_s/eval": time.perf_counter() - started}

    @property
    def last_samples(self) -> Sequence[ScoredSample]:
        """All samples of the last step."""
        return () if self.last_batch is None else self.last_batch.samples

    def sample_records(self, num_with_tokens: int = 0) -> list[dict[str, Any]]:
        """The last step's samples as JSON, the first of those trained on with what was made of each of their tokens.

        Every rank calls this. ``tokens`` is a `token_record`, and None for the other samples.

        Args:
            num_with_tokens: how many have their tokens; -1: all.
        """
        batch = self.last_batch
        if batch is None:
            return []
        chosen = {
            (sample.prompt_index, sample.sample_index)
            for sample in (batch.trained if num_with_tokens < 0 else batch.trained[:num_with_tokens])
        }
        mine = {
            key: token_record(experience, self.actor.tokenizer, self.config.kl_estimator)
            for experience in self.last_experiences
            if (key := batch.place_of(experience.trajectory)) in chosen
        }
        parts = self.mesh.all_gather_object(mine) if chosen else []
        records = {key: record for part in parts for key, record in part.items()}
        return [
            dataclasses.asdict(sample) | {"tokens": records.get((sample.prompt_index, sample.sample_index))}
            for sample in batch.samples
        ]

    def _summarise(self, metrics: StepMetrics, batch: StepSamples, num_flips: int) -> dict[str, float]:
        """Reduce the step's metrics over the ranks, add what is known of it as a whole, and adapt the KL penalty."""
        reduced = metrics.reduce(self.mesh) | batch_metrics(batch, self.config)
        # Where no log-probs were computed before the update, its look at the distributions is the first.
        if "entropy" not in reduced and "actor/entropy" in reduced:
            reduced["entropy"] = reduced["actor/entropy"]
        reduced["actor/kl_coef"] = self.kl_controller.coef
        trained = batch.trained
        if trained:
            tokens = sum(sample.num_completion_tokens for sample in trained)
            self.kl_controller.update(reduced["kl"] * tokens / len(trained), len(trained))
        self.warnings.look_at(batch, self.global_step)
        seconds = self.timers.drain()
        reduced |= speed_metrics(batch.samples, seconds)
        reduced["perf/mfu"] = utilisation(self.mesh, self.work.drain(), seconds, self.actor.dtype)
        reduced["perf/max_memory_gb"] = self.mesh.peak_memory() / 1e9
        reduced |= flip_metrics(self.actor.flips[num_flips:])
        reduced["training/global_step"] = float(self.global_step)
        reduced["training/epoch"] = self.sampler.position / len(self.prompts.rows)
        reduced["training/weights_version"] = float(self.actor.weights_version)
        return reduced

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
            "ptx_batches_drawn": self.ptx.num_batches if self.ptx is not None else 0,
            "kl_controller": self.kl_controller.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.global_step = state["global_step"]
        # Where nothing is resampled the place follows from the step.
        self.sampler.position = state.get("prompts_drawn", self.global_step * self.config.prompts_per_step)
        if self.ptx is not None:
            self.ptx.num_batches = state.get("ptx_batches_drawn", 0)
        self.kl_controller.load_state_dict(state["kl_controller"])
