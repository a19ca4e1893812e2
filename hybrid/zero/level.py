"""The levels a group of weights can be at, and the moves between them."""

from __future__ import annotations

from enum import Enum


class Level(Enum):
    """What a rank holds of a group of weights.

    - SHARD: its piece of its slice, 1/N of the weights. Where stage 3 rests.
    - INFLIGHT: a gather to FULL is under way; a handle waits for it.
    - SLICE: its tensor-parallel slice, 1/T. What generation computes with.
    - FULL: everything. What training computes with, and where stages 0 to 2 rest.
    """

    SHARD = "shard"
    INFLIGHT = "inflight"
    SLICE = "slice"
    FULL = "full"


_MOVES: dict[Level, frozenset[Level]] = {
    Level.SHARD: frozenset({Level.INFLIGHT, Level.SLICE, Level.FULL}),
    Level.INFLIGHT: frozenset({Level.FULL}),
    Level.SLICE: frozenset({Level.SHARD, Level.INFLIGHT, Level.FULL}),
    Level.FULL: frozenset({Level.SHARD, Level.SLICE}),
}


class LevelError(RuntimeError):
    """A group was asked for something that it cannot do at its level."""


def check_move(name: str, old: Level, new: Level) -> None:
    """Raise LevelError unless a group may go from ``old`` to ``new``."""
    if new is not old and new not in _MOVES[old]:
        allowed = ", ".join(sorted(level.name for level in _MOVES[old]))
        raise LevelError(f"{name} is at {old.name} and cannot go to {new.name} (possible: {allowed})")
