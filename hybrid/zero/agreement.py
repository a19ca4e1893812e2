"""Ranks that are about to do different things find out before they wait for one another."""

from __future__ import annotations

import zlib

from hybrid.parallel import DivergenceError, ParallelMesh


class Agreement:
    """What this rank does with the others, compared at the beginning of every forward, backward and step.

    A rank that has a micro-batch more, or that looks at its model alone, would otherwise wait for ever in a gather that
    no one joins. Modules that run in another order on another rank would gather one another's weights: what a rank
    gathered since the last comparison is compared with it, as a checksum.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._moves: list[str] = []  # the units that moved since the last comparison
        self._checksum = 0

    def record(self, move: str) -> None:
        """A collective for a unit is about to be started."""
        if self._mesh.world_size > 1:
            self._moves.append(move)
            self._mesh.position = f"move {len(self._moves)}, which {move}"
            self._checksum = zlib.crc32(move.encode(), self._checksum)

    def check(self, action: str) -> None:
        """Raise DivergenceError unless every rank is here, for the same action and after the same moves."""
        if self._mesh.world_size == 1:
            return
        moves, self._moves = self._moves, []
        self._mesh.position = action
        checksums = self._mesh.all_gather_int(zlib.crc32(action.encode(), self._checksum))
        self._checksum = 0
        if len(set(checksums)) == 1:
            return
        everyone = self._mesh.all_gather_object((action, moves))
        actions = [theirs for theirs, _ in everyone]
        if len(set(actions)) > 1:
            said = ", ".join(f"rank {rank} in {theirs}" for rank, theirs in enumerate(actions))
            raise DivergenceError(
                f"ranks have parted: {said}. Every rank must call forward, backward and step equally often; give a "
                "rank that has no more data a micro-batch of loss 0"
            )
        lengths = min(len(theirs) for _, theirs in everyone)
        at = next((i for i in range(lengths) if len({theirs[i] for _, theirs in everyone}) > 1), lengths)
        said = ", ".join(
            f"rank {rank} {theirs[at] if at < len(theirs) else 'nothing more'}"
            for rank, (_, theirs) in enumerate(everyone)
        )
        raise DivergenceError(
            f"modules ran in different orders on different ranks, and gathered one another's weights; the first "
            f"difference before {action}: {said}. Gradients since the last step are void; make every rank run the same "
            "modules in the same order"
        )
