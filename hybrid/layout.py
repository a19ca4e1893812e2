"""The ladder's arithmetic: which range of a weight is whose, at SHARD, SLICE and FULL. Pure integers, no tensors.

A weight is stored axis-major: the dimension that tensor parallelism cuts comes first, so that what a tensor rank holds
of it is contiguous. A packed weight (query, key and value in one projection) is several *segments* along that
dimension, each cut by itself. A group of weights (a decoder layer, say) lays its slices end to end in one flat buffer,
and a shard is an equal piece of that buffer:

    weight i   |---- slice 0 ----|---- slice 1 ----|          each segment cut along ``axis``, never through a unit
    group      | slice s of weight 0 | slice s of weight 1 | ... | padding |
    pieces     |---- piece 0 ----|---- piece 1 ----|---- piece 2 ----|       equal, one for each rank that shares it

With one slice the slice buffer is the full buffer; with one piece the shard is the slice. As a rule there is a slice
for each of the T tensor ranks. Key/value heads that are fewer than T make fewer slices, each shared by several tensor
ranks, and so cut into more pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


def split_units(num_units: int, num_parts: int) -> tuple[int, ...]:
    """Bounds of ``num_parts`` contiguous parts of ``num_units``; the first take the remainder (3 over 2: 0, 2, 3).

    Returns:
        num_parts + 1 ascending integers, from 0 to num_units.
    """
    base, extra = divmod(num_units, num_parts)
    return (0, *accumulate(base + (part < extra) for part in range(num_parts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a weight's cut dimension that is cut by itself, into units that are never cut through.

    Units come in groups, which are kept together while there are enough of them: the query heads of a key/value head.
    With more parts than groups, several parts share a group. They divide its units, or, where it is a single unit,
    they all hold it: key/value heads are replicated.
    """

    size: int
    num_groups: int
    units_per_group: int = 1

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.units_per_group < 1 or self.size % (self.num_groups * self.units_per_group):
            raise ValueError(
                f"{self.size} rows do not divide into {self.num_groups} groups of {self.units_per_group} units"
            )

    def part(self, index: int, num_parts: int) -> tuple[int, int]:
        """Start and stop, in rows, of one of ``num_parts`` parts."""
        group = self.size // self.num_groups
        if num_parts <= self.num_groups:
            bounds = split_units(self.num_groups, num_parts)
            return bounds[index] * group, bounds[index + 1] * group
        sharers = split_units(num_parts, self.num_groups)  # which parts share each group
        owner = next(g for g in range(self.num_groups) if index < sharers[g + 1])
        start, stop = owner * group, (owner + 1) * group
        if self.units_per_group == 1:
            return start, stop
        unit = group // self.units_per_group
        bounds = split_units(self.units_per_group, sharers[owner + 1] - sharers[owner])
        mine = index - sharers[owner]
        return start + bounds[mine] * unit, start + bounds[mine + 1] * unit

    def tiles(self, num_parts: int) -> bool:
        """Whether the parts tile the segment, none of them held twice."""
        return num_parts <= self.num_groups or self.units_per_group > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamLayout:
    """How tensor parallelism cuts one weight.

    ``axis`` is the dimension that is cut (0: column-parallel and vocabulary, 1: row-parallel, None: never cut), and
    ``segments`` tile it.
    """

    name: str
    shape: tuple[int, ...]  # as the module sees it
    axis: int | None = None
    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        if self.axis is None:
            if self.segments:
                raise ValueError(f"{self.name}: segments of a weight that is not cut")
            return
        if self.axis not in (0, 1) or self.axis >= len(self.shape):
            raise ValueError(f"{self.name}: axis {self.axis} of a weight of shape {self.shape}; it must be 0 or 1")
        if sum(segment.size for segment in self.segments) != self.shape[self.axis]:
            raise ValueError(
                f"{self.name}: segments of {[segment.size for segment in self.segments]} rows do not make up "
                f"dimension {self.axis} of shape {self.shape}"
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The shape in memory: the module's, with the cut dimension first."""
        return (self.shape[1], self.shape[0], *self.shape[2:]) if self.axis == 1 else self.shape

    @property
    def row_numel(self) -> int:
        """Elements of one row in memory."""
        return math.prod(self.storage_shape[1:])

    def num_slices(self, tp_size: int) -> int:
        """How many different slices ``tp_size`` tensor ranks hold, such that slices tile the weight.

        ``tp_size`` as a rule; fewer where heads are replicated, each slice then shared by equally many ranks. 1 where
        no number does, or where nothing is cut: the weight rests whole, and ranks hold `part_rows` of it.
        """
        if self.axis is None:
            return 1
        if all(segment.tiles(tp_size) for segment in self.segments):
            return tp_size
        groups = {segment.num_groups for segment in self.segments if segment.units_per_group == 1}
        alike = len(groups) == 1 and all(segment.units_per_group == 1 for segment in self.segments)
        return groups.pop() if alike and tp_size % max(groups) == 0 else 1

    def part_rows(self, index: int, num_parts: int) -> tuple[tuple[int, int], ...]:
        """Start and stop, along ``axis``, of a part: one range for each segment; everything where nothing is cut."""
        if self.axis is None:
            return ((0, self.shape[0] if self.shape else 1),)
        rows, offset = [], 0
        for segment in self.segments:
            start, stop = segment.part(index, num_parts)
            rows.append((offset + start, offset + stop))
            offset += segment.size
        return tuple(rows)

    def part_shape(self, index: int, num_parts: int) -> tuple[int, ...]:
        """A part's shape in memory (axis first)."""
        if self.axis is None:
            return self.shape
        return (sum(stop - start for start, stop in self.part_rows(index, num_parts)), *self.storage_shape[1:])

    def part_numel(self, index: int, num_parts: int) -> int:
        return math.prod(self.part_shape(index, num_parts))

    def segment_bounds(self, num_slices: int) -> tuple[tuple[int, ...], ...]:
        """Where slices meet in the full weight's storage, in elements: num_slices + 1 entries for each segment."""
        if self.axis is None:
            return ((0, self.numel),)
        bounds, offset = [], 0
        for segment in self.segments:
            starts = [segment.part(index, num_slices)[0] for index in range(num_slices)]
            bounds.append(tuple((offset + row) * self.row_numel for row in (*starts, segment.size)))
            offset += segment.size
        return tuple(bounds)


class Stretch(NamedTuple):
    """Consecutive elements of a slice that come from consecutive rows of one weight."""

    start: int  # in what was asked for
    name: str
    dim: int  # of the weight as the module sees it, along which the rows are counted
    rows: tuple[int, int]
    skip: int  # elements of the first row, as it lies in memory, that are not part of it
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """Weights that travel together: ``num_slices`` slices of the group, each cut into ``num_pieces`` equal pieces."""

    params: tuple[ParamLayout, ...]
    num_slices: int
    num_pieces: int

    @property
    def full_offsets(self) -> tuple[int, ...]:
        """Where each weight starts in the full buffer; the last entry is the end."""
        return (0, *accumulate(param.numel for param in self.params))

    def slice_offsets(self, index: int) -> tuple[int, ...]:
        """Where each weight starts in the buffer of slice ``index``; the last entry is the end."""
        return (0, *accumulate(param.part_numel(index, self.num_slices) for param in self.params))

    def piece_numel(self, index: int) -> int:
        """Elements of one shard of slice ``index``, padding included."""
        return -(-self.slice_offsets(index)[-1] // self.num_pieces)

    def slice_numel(self, index: int) -> int:
        """Elements of the buffer of slice ``index``, padding included."""
        return self.piece_numel(index) * self.num_pieces

    def piece_range(self, index: int, piece: int) -> tuple[int, int]:
        """Start and stop of a shard inside the buffer of slice ``index``."""
        size = self.piece_numel(index)
        return piece * size, (piece + 1) * size

    def flip_numel(self, index: int) -> int:
        """Elements a rank receives to climb from SHARD to SLICE."""
        return self.slice_numel(index) - self.piece_numel(index)

    def stretches(self, index: int, start: int, stop: int) -> Iterator[Stretch]:
        """What elements ``start:stop`` of the buffer of slice ``index`` are made of, padding left out."""
        offset = 0
        for param in self.params:
            for first, last in param.part_rows(index, self.num_slices):
                numel = (last - first) * param.row_numel
                low, high = max(start, offset), min(stop, offset + numel)
                if low < high:
                    skipped, skip = divmod(low - offset, param.row_numel)
                    end = -(-(high - offset) // param.row_numel)
                    rows = (first + skipped, first + end)
                    yield Stretch(low - start, param.name, param.axis or 0, rows, skip, high - low)
                offset += numel
