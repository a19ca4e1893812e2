"""How much a step computes, for the share of the hardware's peak that it reaches (model FLOPs utilisation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybrid.rl.records import Trajectory

if TYPE_CHECKING:
    from hybrid.zero.model import ShardedModel

FORWARD, FORWARD_AND_BACKWARD = 1, 3


class FlopCount:
    """Floating-point operations of this rank's forwards and backwards, as the models need them: no recomputation."""

    def __init__(self) -> None:
        self._flops = 0

    def add(
        self,
        model: ShardedModel,
        lengths: Sequence[int],
        num_scored: int,
        passes: int,
        spared: Sequence[int] = (),
    ) -> None:
        """``passes``: `FORWARD` or `FORWARD_AND_BACKWARD` over sequences of these lengths.

        ``spared``: lengths of their beginnings that others have in common with them and that are not computed again.
        """
        cost = model.forward_cost
        self._flops += passes * (cost.flops(lengths, num_scored) - cost.flops(spared, 0))

    def add_trajectories(
        self, model: ShardedModel, trajectories: Sequence[Trajectory], passes: int, spared: Sequence[int] = ()
    ) -> None:
        """The same over prompts and completions whose completion tokens are scored."""
        scored = sum(len(trajectory.completion_ids) for trajectory in trajectories)
        self.add(model, [trajectory.num_tokens for trajectory in trajectories], scored, passes, spared)

    def drain(self) -> int:
        """What was counted since the last call."""
        flops, self._flops = self._flops, 0
        return flops
