"""Ranks that are about to do different things find out before they wait for one another."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from hybrid.parallel import DivergenceError, ParallelMesh


class Agreement:
    """What this rank does with the others for one model, compared at the beginning of every forward, backward and step.

    A rank that has a micro-batch more, or that looks at its model alone, would otherwise wait for ever in a gather that
    no one joins. Modules that run in another order on another rank would gather one another's weights: what a rank
    gathered since the last comparison is compared with it, as a checksum.

    ``name`` tells the model from others on the mesh. ``on_divergence`` is called before ranks are told that they
    gathered one another's weights, to drop what was computed from them.
    """

    def __init__(self, mesh: ParallelMesh, name: str) -> None:
        self._mesh, self._name = mesh, f"{name}#{mesh.count_model()}"
        self._moves: list[str] = []  # the units that moved since the last comparison
        self._checksum = 0
        self.on_divergence: Callable[[], None] | None = None

    def record(self, move: str) -> None:
        """A collective for a unit is about to be started."""
        if self._mesh.world_size > 1:
            self._moves.append(move)
            self._checksum = zlib.crc32(move.encode(), self._checksum)
            self._mesh.position = f"move {len(self._moves)}, which {move} of {self._name}"

    def check(self, action: str) -> None:
        """Raise DivergenceError unless every rank is here, for the same action and after the same moves."""
        if self._mesh.world_size == 1:
            return
        action = f"{action} of {self._name}"
        self._mesh.position = f"{action} after {len(self._moves)} moves ({self._checksum:08x})"
        checksums = self._mesh.all_gather_int(zlib.crc32(action.encode(), self._checksum))
        moves, self._moves, self._checksum = self._moves, [], 0
        if len(set(checksums)) == 1:
            return
        everyone = self._mesh.all_gather_object((action, moves))
        if self.on_divergence is not None:
            self.on_divergence()
        actions = [theirs for theirs, _ in everyone]
        if len(set(actions)) > 1:
            said = ", ".join(f"rank {rank} in {theirs}" for rank, theirs in enumerate(actions))
            raise DivergenceError(
                f"ranks have parted: {said}. Every rank must make the same calls in the same order, and forward, "
                "backward and step equally often; give a rank that has no more data a micro-batch of loss 0. Gradients "
                "since the last step are dropped"
            )
        shortest = min(len(theirs) for _, theirs in everyone)
        at = next((i for i in range(shortest) if len({theirs[i] for _, theirs in everyone}) > 1), shortest)
        said = ", ".join(
            f"rank {rank} {theirs[at] if at < len(theirs) else 'nothing more'}"
            for rank, (_, theirs) in enumerate(everyone)
        )
        raise DivergenceError(
            f"modules ran in different orders on different ranks, and gathered one another's weights; the first "
            f"difference before {action}: {said}. Gradients since the last step are dropped; make every rank run the "
            "same modules in the same order"
        )
