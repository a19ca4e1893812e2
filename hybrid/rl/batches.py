"""How a step's trajectories become batches: which share a micro-batch, and what of them is computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybrid.data.packing import pack, pack_groups
from hybrid.models.ragged import RaggedBatch
from hybrid.parallel import ParallelMesh
from hybrid.rl.records import Trajectory


@dataclass(frozen=True, slots=True)
class Batching:
    """Micro-batches of whole trajectories, without padding.

    The samples of a prompt that share a micro-batch share its tokens: they are computed once, as they are in
    generation, and every sample's gradient flows through them. Losses and gradients are the same sums either way.
    """

    mesh: ParallelMesh
    max_tokens: int  # of a micro-batch; one trajectory may be longer
    shares_prompts: bool

    def micro_batches(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """This rank's micro-batches as indices, as many as the rank with the most has; the last ones may be empty.

        A rank that has run out still computes, on an empty batch, since the others' collectives wait for it.
        """
        lengths = [trajectory.num_tokens for trajectory in trajectories]
        if self.shares_prompts:
            prompts = [len(trajectory.prompt_ids) for trajectory in trajectories]
            packed = pack_groups(lengths, prompts, _equal_prompts(trajectories), self.max_tokens)
        else:
            packed = pack(lengths, self.max_tokens)
        (most,) = self.mesh.reduce_scalars([len(packed)], op="max")
        return packed + [[] for _ in range(int(most) - len(packed))]

    def batch(self, trajectories: Sequence[Trajectory]) -> RaggedBatch:
        """Prompts and completions end to end, every completion token scored, in the trajectories' order."""
        return RaggedBatch.from_sequences(
            [trajectory.prompt_ids + trajectory.completion_ids for trajectory in trajectories],
            [len(trajectory.completion_ids) for trajectory in trajectories],
            self.mesh.device,
            num_shared=[len(t.prompt_ids) for t in trajectories] if self.shares_prompts else None,
        )

    def spared(self, trajectories: Sequence[Trajectory]) -> list[int]:
        """Lengths of the prompts that a micro-batch of these trajectories need not compute again."""
        if not self.shares_prompts:
            return []
        prompts = Counter(tuple(trajectory.prompt_ids) for trajectory in trajectories)
        return [len(prompt) for prompt, count in prompts.items() for _ in range(count - 1)]


def concatenate(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """All tokens of some trajectories as one (R,) fp32 tensor, empty where there are none."""
    pieces = [tensor.to(device, torch.float32) for tensor in tensors]
    return torch.cat(pieces) if pieces else torch.zeros(0, device=device)


def _equal_prompts(trajectories: Sequence[Trajectory]) -> list[int]:
    """A number for each trajectory, equal for equal prompts."""
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault(tuple(trajectory.prompt_ids), len(numbers)) for trajectory in trajectories]
