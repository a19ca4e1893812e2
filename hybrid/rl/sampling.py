"""A step's samples: the prompts that are due, and with dynamic sampling others in place of those that teach nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid.inference.params import SamplingParams
from hybrid.rl.records import Trajectory
from hybrid.rl.rollout import RolloutCollector, ScoredSample, share_out

if TYPE_CHECKING:
    from hybrid.config import PPOConfig
    from hybrid.data.prompts import Prompt, PromptDataset


@dataclass(frozen=True, slots=True)
class StepSamples:
    trajectories: list[Trajectory]  # this rank's share of those that are trained on; prompts counted from 0 on
    samples: list[ScoredSample]  # all that were drawn, by all replicas
    kept: list[int] | None  # which prompts of ``samples`` are trained on, with dynamic sampling; None: all
    num_drawn: int  # prompts

    @property
    def trained(self) -> list[ScoredSample]:
        """Those of ``samples`` that take part in the update."""
        return [
            sample
            for sample in self.samples
            if sample.reward is not None and sample.num_completion_tokens
            if self.kept is None or sample.prompt_index in self.kept
        ]

    def place_of(self, trajectory: Trajectory) -> tuple[int, int]:
        """Prompt and sample of a trajectory as ``samples`` count them."""
        index = trajectory.prompt_index
        return (index if self.kept is None else self.kept[index]), trajectory.sample_index


class StepSampler:
    """Draws prompts in the data set's order and collects their completions.

    Dynamic sampling is DAPO's (Yu et al. 2025, section 3.2, https://arxiv.org/abs/2503.14476): where all completions of
    a prompt have one reward their advantages are 0, so the next prompts in order are drawn until a step is full, for
    ``max_resamplings`` rounds at most.
    """

    def __init__(self, collector: RolloutCollector, prompts: PromptDataset, config: PPOConfig) -> None:
        self.collector, self.prompts, self.config = collector, prompts, config
        self.position = 0  # prompts drawn so far, by all steps
        self.params = SamplingParams(
            n=config.num_generations,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            max_tokens=config.max_completion_length,
        )

    def sample(self, step: int) -> StepSamples:
        """The samples of a step, counted from 0. Every rank calls it."""
        config, wanted = self.config, self.config.prompts_per_step
        if not config.dynamic_sampling:
            rollout = self._collect(self._draw(wanted), step, 0)
            return StepSamples(rollout.trajectories, rollout.samples, None, wanted)
        trajectories: list[Trajectory] = []
        samples: list[ScoredSample] = []
        kept: list[int] = []
        num_drawn = 0
        for _ in range(1 + config.max_resamplings):
            missing = wanted - len(kept)
            rollout = self._collect(self._draw(missing), step, num_drawn)
            trajectories += rollout.trajectories
            samples += rollout.samples
            kept += groups_with_spread(rollout.samples)
            num_drawn += missing
            if len(kept) == wanted:
                break
        places = {index: place for place, index in enumerate(kept)}
        trajectories = [
            dataclasses.replace(trajectory, prompt_index=places[trajectory.prompt_index])
            for trajectory in trajectories
            if trajectory.prompt_index in places
        ]
        # Each round was shared out by itself, groups that are left out included.
        collector = self.collector
        mine = share_out(collector.mesh, trajectories, shares_prompts=collector.shares_prompts)
        return StepSamples(mine, samples, kept, num_drawn)

    def _draw(self, count: int) -> list[Prompt]:
        places = range(self.position, self.position + count)
        self.position += count
        return [prompt for place in places for prompt in self.prompts.batch(place, 1, self.config.seed)]

    def _collect(self, prompts: list[Prompt], step: int, first_index: int):
        return self.collector.collect(prompts, self.params, seed=self.config.seed, step=step, first_index=first_index)


def groups_with_spread(samples: Sequence[ScoredSample]) -> list[int]:
    """The prompts, in order, whose completions did not all get the same reward; masked ones do not count."""
    groups: dict[int, set[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            groups.setdefault(sample.prompt_index, set()).add(sample.reward)
    return sorted(index for index, rewards in groups.items() if len(rewards) > 1)
