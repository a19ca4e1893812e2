"""Rollouts: prompts in, scored trajectories out, each rank left with the share it trains on.

A step's prompts are dealt over the replicas (replica d takes ``prompts[d::D]``), generated there by its T tensor ranks
together, scored by them in shares, and then dealt again: in training every rank is data-parallel, so the T ranks split
their replica's trajectories between them, and those that make a rank longer than the others move on (`share_out`). A
rank may end up with none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hybrid.data.packing import balance, rebalance
from hybrid.inference.params import SamplingParams
from hybrid.monitor import Timers
from hybrid.parallel import ParallelMesh
from hybrid.rewards.protocol import RewardError
from hybrid.rl.records import Trajectory

if TYPE_CHECKING:
    from hybrid.data.prompts import Prompt
    from hybrid.engine import HybridEngine
    from hybrid.inference.sequence import Completion
    from hybrid.rewards import Reward

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """What every rank knows of every sample: enough for metrics and tables, no token ids."""

    prompt_index: int  # among the step's prompts of all replicas
    sample_index: int
    prompt: str
    completion: str
    num_prompt_tokens: int
    num_completion_tokens: int
    finish_reason: str
    reward: float | None  # None: masked
    parts: dict[str, float | None]  # by reward function


@dataclass(frozen=True, slots=True)
class Rollout:
    trajectories: list[Trajectory]  # this rank's share of those that can be trained on
    samples: list[ScoredSample]  # all samples of all replicas, by prompt and sample


class RolloutCollector:
    """Generates and scores with one actor and one reward."""

    def __init__(self, actor: HybridEngine, reward: Reward, *, timers: Timers, shares_prompts: bool = False) -> None:
        self.actor = actor
        self.reward = reward
        self.shares_prompts = shares_prompts  # whether training computes a prompt once for several of its samples
        self.mesh: ParallelMesh = actor.mesh
        self.timers = timers

    def collect(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, step: int, first_index: int = 0
    ) -> Rollout:
        """Sample ``params.n`` completions of each prompt and score them. Every rank calls it with the same arguments.

        What is sampled depends on ``seed``, ``step`` and a prompt's index, and not on the ranks. Indices count the
        step's prompts, from ``first_index`` where others of the step have been collected before. A sample whose reward
        is None, that is empty, or that was aborted is in ``samples`` and not in ``trajectories``.

        Raises:
            Exception: whatever the reward raised, on the first rank where it did.
            RuntimeError: the reward raised on another rank.
        """
        mesh = self.mesh
        indices = range(len(prompts))[mesh.dp_rank :: mesh.dp_size]
        seeded = [dataclasses.replace(params, seed=request_seed(seed, step, first_index + index)) for index in indices]
        completions = self._generate([prompts[i] for i in indices], seeded)
        with self.timers("reward"):
            shares = gather_or_raise(
                mesh, "scoring the rollout", lambda: self._score(prompts, indices, completions, first_index)
            )
        samples = sorted(
            (sample for share in shares for sample in share), key=lambda s: (s.prompt_index, s.sample_index)
        )
        rewards = {(sample.prompt_index, sample.sample_index): sample.reward for sample in samples}
        trajectories = [
            _trajectory(completion, index, rewards[index, completion.sample_index])
            for completion in completions
            for index in [first_index + indices[completion.prompt_index]]
        ]
        trainable = [trajectory for trajectory in trajectories if trajectory.is_trainable]
        mine = self._tensor_ranks_part(trainable)
        return Rollout(share_out(mesh, mine, shares_prompts=self.shares_prompts), samples)

    def _tensor_ranks_part(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """This rank's part of its replica's trajectories; prompts stay together where that spares tokens."""
        groups: dict[int, list[Trajectory]] = {}
        for number, trajectory in enumerate(trajectories):
            groups.setdefault(trajectory.prompt_index if self.shares_prompts else number, []).append(trajectory)
        units = list(groups.values())
        costs = [len(unit[0].prompt_ids) + sum(len(t.completion_ids) for t in unit) for unit in units]
        mine = balance(costs, self.mesh.tp_size)[self.mesh.tp_rank]
        return [trajectory for number in mine for trajectory in units[number]]

    def _generate(self, prompts: list[Prompt], seeded: list[SamplingParams]) -> list[Completion]:
        """This replica's completions, on each of its ranks, by prompt and sample."""
        # A replica without prompts flips all the same: the flips are collective.
        with self.timers("flip_to_generate"):
            self.actor.generate_mode()
        with self.timers("generate"):
            completions = self.actor.generate([prompt.token_ids for prompt in prompts], seeded) if prompts else []
        with self.timers("flip_to_train"):
            self.actor.train_mode()
        return completions

    def _score(
        self, prompts: Sequence[Prompt], indices: Sequence[int], completions: list[Completion], first_index: int
    ) -> list[ScoredSample]:
        """Score this rank's share of its replica's completions: all samples of every T-th prompt.

        The samples of one prompt stay together for rewards that compare them. The reward is called on a rank whose
        share is empty too, since a reward model's forward may be collective.
        """
        share = [c for c in completions if c.prompt_index % self.mesh.tp_size == self.mesh.tp_rank]
        asked = [prompts[indices[completion.prompt_index]] for completion in share]
        names = sorted({name for prompt in prompts for name in prompt.columns})
        output = self.reward.score(
            [prompt.text for prompt in asked],
            [completion.text for completion in share],
            [completion.token_ids for completion in share],
            {name: [prompt.columns.get(name) for prompt in asked] for name in names},
        )
        if len(output.rewards) != len(share):
            raise RewardError(f"the reward scored {len(output.rewards)} samples of {len(share)}; return one for each")
        for prompt, completion, reward in zip(asked, share, output.rewards, strict=True):
            if reward is not None and not math.isfinite(reward):
                raise RewardError(
                    f"the reward of {completion.text!r} for prompt {prompt.text!r} is {reward}; "
                    "a reward is a finite number, or None to mask the sample"
                )
        return [
            ScoredSample(
                prompt_index=first_index + indices[completion.prompt_index],
                sample_index=completion.sample_index,
                prompt=prompt.text,
                completion=completion.text,
                num_prompt_tokens=len(completion.prompt_token_ids),
                num_completion_tokens=len(completion.token_ids),
                finish_reason=completion.finish_reason,
                # What was cut off from outside is no sample of the policy.
                reward=None if completion.finish_reason == "abort" else reward,
                parts={name: values[i] for name, values in output.parts.items()},
            )
            for i, (completion, prompt, reward) in enumerate(zip(share, asked, output.rewards, strict=True))
        ]


def request_seed(seed: int, step: int, prompt_index: int) -> int:
    """The seed of all samples of one prompt; the generator derives each sample's from it and the sample's index."""
    digest = hashlib.blake2b(f"{seed}/{step}/{prompt_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # fits an int64


def share_out(
    mesh: ParallelMesh, trajectories: Sequence[Trajectory], *, shares_prompts: bool = False
) -> list[Trajectory]:
    """Even out the tokens of trajectories over all ranks, moving few of them; a collective.

    Args:
        trajectories: those that this rank has. No two of all ranks' are the same sample.
        shares_prompts: whether a rank computes a prompt once for all of its samples there.

    Returns:
        Those that it has afterwards, by prompt and sample.
    """
    if mesh.world_size == 1:
        return list(trajectories)
    described = mesh.all_gather_object([(t.num_tokens, len(t.prompt_ids), t.prompt_index) for t in trajectories])
    owners = [rank for rank, each in enumerate(described) for _ in each]
    lengths, num_shared, groups = zip(*itertools.chain.from_iterable(described), strict=True) if owners else ((),) * 3
    sharing = {"num_shared": num_shared, "groups": groups} if shares_prompts else {}
    planned = rebalance(lengths, owners, mesh.world_size, **sharing)
    shares: list[list[Trajectory]] = [[] for _ in range(mesh.world_size)]
    first = owners.index(mesh.rank) if trajectories else 0
    for trajectory, owner in zip(trajectories, planned[first:], strict=False):
        shares[owner].append(trajectory)
    # All ranks have made the same plan, so that they agree on whether there is anything to send.
    mine = shares[mesh.rank] if planned == owners else mesh.exchange_objects(shares)
    return sorted(mine, key=lambda trajectory: (trajectory.prompt_index, trajectory.sample_index))


def gather_or_raise(mesh: ParallelMesh, what: str, call: Callable[[], T]) -> list[T]:
    """Run ``call`` on every rank and return all results, by rank; if it fails on any rank, raise on every rank.

    Without this a rank whose call fails leaves the others waiting in their next collective.

    Raises:
        Exception: this rank's own, unchanged, if no rank before it failed.
        RuntimeError: another rank's, with its traceback in the message; this rank's own is its cause.
    """
    result, failure, text = None, None, None
    try:
        result = call()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is raised again once the other ranks know
        failure, text = error, traceback.format_exc()
    outcomes = mesh.all_gather_object((result, text))
    for rank, (_, text) in enumerate(outcomes):
        if text is not None and rank == mesh.rank and failure is not None:
            raise failure
        if text is not None:
            raise RuntimeError(f"{what} failed on rank {rank}:\n{text}") from failure
    return [result for result, _ in outcomes]


def _trajectory(completion: Completion, prompt_index: int, reward: float | None) -> Trajectory:
    return Trajectory(
        prompt_index=prompt_index,
        sample_index=completion.sample_index,
        prompt_ids=completion.prompt_token_ids,
        completion_ids=completion.token_ids,
        behaviour_logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        weights_version=completion.weights_version,
        reward=reward,
    )
