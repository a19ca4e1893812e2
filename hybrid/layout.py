"""The ladder's arithmetic: which range of a weight is whose, at SHARD, SLICE and FULL. Pure integers, no tensors.

A weight is stored axis-major: the dimension that tensor parallelism cuts comes first, so that the slice of every
tensor rank is one contiguous range of the weight. A group of weights (a decoder layer, say) lays its slices end to
end in one flat buffer, and a shard is an equal piece of that buffer:

    weight i   |---- slice 0 ----|---- slice 1 ----|          cut along ``axis``, never through a unit
    group      | slice t of weight 0 | slice t of weight 1 | ... | padding |
    pieces     |---- piece 0 ----|---- piece 1 ----|---- piece 2 ----|       equal, one for each replica

With one tensor rank the slice buffer is the full buffer; with one replica the shard is the slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate


def split_units(num_units: int, num_parts: int) -> tuple[int, ...]:
    """Bounds of ``num_parts`` contiguous parts of ``num_units``; the first take the remainder (3 over 2: 0, 2, 3).

    Returns:
        num_parts + 1 ascending integers, from 0 to num_units.
    """
    base, extra = divmod(num_units, num_parts)
    return (0, *accumulate(base + (part < extra) for part in range(num_parts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamLayout:
    """How tensor parallelism cuts one weight.

    ``axis`` is the dimension that is cut (0: column-parallel and vocabulary, 1: row-parallel, None: never cut), and
    ``num_units`` the number of indivisible stretches along it: KV groups, MLP neurons, vocabulary rows.
    """

    name: str
    shape: tuple[int, ...]  # as the module sees it
    axis: int | None = None
    num_units: int = 1

    def __post_init__(self) -> None:
        if self.axis is None:
            return
        if self.axis not in (0, 1) or self.axis >= len(self.shape):
            raise ValueError(f"{self.name}: axis {self.axis} of a weight of shape {self.shape}; it must be 0 or 1")
        if self.num_units < 1 or self.shape[self.axis] % self.num_units:
            raise ValueError(
                f"{self.name}: dimension {self.axis} of shape {self.shape} does not divide into {self.num_units} units"
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The shape in memory: the module's, with the cut dimension first."""
        return self._axis_major(self.shape)

    def _axis_major(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[1], shape[0], *shape[2:]) if self.axis == 1 else shape

    def rows(self, tp_rank: int, tp_size: int) -> tuple[int, int]:
        """Start and stop along ``axis`` of the slice of ``tp_rank``; the whole dimension where nothing is cut."""
        if self.axis is None:
            return 0, self.shape[0] if self.shape else 1
        bounds = split_units(self.num_units, tp_size)
        unit = self.shape[self.axis] // self.num_units
        return bounds[tp_rank] * unit, bounds[tp_rank + 1] * unit

    def slice_shape(self, tp_rank: int, tp_size: int) -> tuple[int, ...]:
        """The slice's shape in memory (axis first)."""
        if self.axis is None:
            return self.shape
        start, stop = self.rows(tp_rank, tp_size)
        return (stop - start, *self.storage_shape[1:])

    def slice_range(self, tp_rank: int, tp_size: int) -> tuple[int, int]:
        """Start and stop, in elements, of the slice inside the weight's storage."""
        if self.axis is None:
            return 0, self.numel
        start, stop = self.rows(tp_rank, tp_size)
        stride = math.prod(self.storage_shape[1:])
        return start * stride, stop * stride

    def slice_bounds(self, tp_size: int) -> list[int]:
        """Where the slices meet, in elements: tp_size + 1 entries, from 0 to the end."""
        return [self.slice_range(t, tp_size)[0] for t in range(tp_size)] + [self.numel]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """Weights that travel together: T slices of the group, each cut into D equal pieces.

    ``num_slices`` is 1 for a group that tensor parallelism leaves whole; its pieces then go to all N ranks.
    """

    params: tuple[ParamLayout, ...]
    num_slices: int
    num_pieces: int

    @property
    def full_offsets(self) -> tuple[int, ...]:
        """Where each weight starts in the full buffer; the last entry is the end."""
        return (0, *accumulate(param.numel for param in self.params))

    def slice_offsets(self, tp_rank: int) -> tuple[int, ...]:
        """Where each weight's slice starts in the slice buffer of ``tp_rank``; the last entry is the end."""
        ranges = (param.slice_range(tp_rank, self.num_slices) for param in self.params)
        return (0, *accumulate(stop - start for start, stop in ranges))

    def piece_numel(self, tp_rank: int) -> int:
        """Elements of one shard of slice ``tp_rank``, padding included."""
        return -(-self.slice_offsets(tp_rank)[-1] // self.num_pieces)

    def slice_numel(self, tp_rank: int) -> int:
        """Elements of the slice buffer of ``tp_rank``, padding included."""
        return self.piece_numel(tp_rank) * self.num_pieces

    def piece_range(self, tp_rank: int, piece: int) -> tuple[int, int]:
        """Start and stop of a shard inside the slice buffer of ``tp_rank``."""
        size = self.piece_numel(tp_rank)
        return piece * size, (piece + 1) * size

    def flip_numel(self, tp_rank: int) -> int:
        """Elements a rank receives to climb from SHARD to SLICE."""
        return self.slice_numel(tp_rank) - self.piece_numel(tp_rank)
