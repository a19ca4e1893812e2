"""How much memory training takes, found by going through its motions: the schedule moves groups that hold nothing.

All sizes are bytes unless their name says otherwise. What `ParamGroup` allocates and frees, `_CountedGroup` adds and
subtracts; which groups are whole at once is the schedule's own decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

import torch
from torch import nn

from hybrid.config import ZeroConfig
from hybrid.models.plans import ModelPlan
from hybrid.parallel import ParallelMesh
from hybrid.zero.agreement import Agreement
from hybrid.zero.group import ParamGroup
from hybrid.zero.level import Level
from hybrid.zero.partition import ROOT, GroupPlan
from hybrid.zero.schedule import TrainingSchedule, Unit

_FP32 = torch.float32.itemsize
_MICRO_BATCHES = 2  # the second adds to the gradients that the first left


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """The buffers of one group on one tensor rank, in elements; what `ParamGroup` allocates."""

    plan: GroupPlan
    piece: int
    slice: int
    full: int
    copies: int  # what generation shows of the group that is no view of its buffers

    @classmethod
    def of(cls, plan: GroupPlan, model: ModelPlan, tp_rank: int, tp_size: int) -> GroupSizes:
        layout = plan.layout
        index = tp_rank * layout.num_slices // tp_size  # neighbours share a slice
        slice_numel = layout.slice_numel(index)
        copies = 0
        for param in layout.params:
            if tp_rank > 0 and param.name in model.row_biases:  # another rank adds it, this one has zeros
                copies += param.numel
            elif layout.num_slices == 1 and len(param.segments) > 1:  # ranges of a whole weight, joined
                copies += param.part_numel(tp_rank, tp_size)
        full = slice_numel if layout.num_slices == 1 else layout.full_offsets[-1]
        return cls(plan=plan, piece=layout.piece_numel(index), slice=slice_numel, full=full, copies=copies)

    @property
    def rests_full(self) -> bool:
        layout = self.plan.layout
        return self.plan.rests_full or layout.num_pieces * layout.num_slices == 1

    @property
    def slice_beyond_shard(self) -> int:
        """Elements of the slice buffer, where it is not the shard itself."""
        return 0 if self.rests_full or self.plan.layout.num_pieces == 1 else self.slice


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBytes:
    """The most that a rank holds in training beyond what rests; each field at its own worst moment."""

    gathered_numel: int  # elements that are gathered at once, to compare with max_live_parameters
    gathered: int  # weights beyond their resting level
    gradients: int  # fp32 shards, and whole gradients of the layers in flight (stages 0 and 1: of all layers)
    together: int  # gathered weights and gradients at one moment


class _Ledger:
    """Adds up what the groups of a rehearsal hold, and remembers the most."""

    def __init__(self) -> None:
        self.in_backward = False
        self.live_numel = self.gathered = self.gradients = 0
        self.most = PeakBytes(gathered_numel=0, gathered=0, gradients=0, together=0)

    def add(self, *, live_numel: int = 0, gathered: int = 0, gradients: int = 0) -> None:
        self.live_numel += live_numel
        self.gathered += gathered
        self.gradients += gradients
        self.most = PeakBytes(
            gathered_numel=max(self.most.gathered_numel, self.live_numel),
            gathered=max(self.most.gathered, self.gathered),
            gradients=max(self.most.gradients, self.gradients),
            together=max(self.most.together, self.gathered + self.gradients),
        )


class _Buffer(Enum):
    """Where a group's gradients are."""

    WHOLE = "of the backward under way, in the compute dtype"
    KEPT = "whole, in fp32, until the step"
    REDUCING = "on their way to other ranks"
    SHARD = "this rank's piece of the sum, in fp32"


class _CountedGroup:
    """What the schedule needs of a `ParamGroup`, with sizes in place of buffers."""

    def __init__(self, sizes: GroupSizes, zero: ZeroConfig, world_size: int, ledger: _Ledger) -> None:
        self.plan, self.layout, self._sizes, self._ledger = sizes.plan, sizes.plan.layout, sizes, ledger
        self.name = sizes.plan.name
        self.resting = self.level = Level.FULL if sizes.rests_full else Level.SHARD
        self._keep_slices = zero.keep_slices and self.layout.num_slices > 1
        self._numel = self.layout.full_offsets[-1]
        self._reduces_in_fp32, self._world_size = zero.reduce_dtype == "fp32", world_size
        self._gradients = dict.fromkeys(_Buffer, 0)  # bytes

    @property
    def live_numel(self) -> int:
        return self._numel if self.resting is Level.SHARD and self.level in (Level.FULL, Level.INFLIGHT) else 0

    @property
    def numel_to_gather(self) -> int:
        return self._numel if self.resting is Level.SHARD and not self.live_numel else 0

    def _held(self) -> int:
        """Bytes of the slice and full buffers at this level."""
        sizes, level = self._sizes, self.level
        if self.resting is Level.FULL:
            return 0
        if self.layout.num_slices == 1:
            return (level is not Level.SHARD) * sizes.slice * self.plan.dtype.itemsize
        # A gather spreads the slice over the full buffer, and needs both.
        with_slice = level in (Level.INFLIGHT, Level.SLICE) or (level is Level.FULL and self._keep_slices)
        with_full = level in (Level.INFLIGHT, Level.FULL)
        return (with_slice * sizes.slice_beyond_shard + with_full * sizes.full) * self.plan.dtype.itemsize

    def _move(self, level: Level) -> None:
        live, held = self.live_numel, self._held()
        self.level = level
        self._ledger.add(live_numel=self.live_numel - live, gathered=self._held() - held)

    def start_full(self) -> None:
        if self.level not in (Level.FULL, Level.INFLIGHT):
            self._move(Level.INFLIGHT)

    def wait_full(self) -> None:
        self.start_full()
        self._move(Level.FULL)
        if self._ledger.in_backward and self.plan.trainable:
            self._begin_backward()

    def release(self) -> None:
        if self.resting is Level.SHARD and self.level in (Level.FULL, Level.INFLIGHT):
            self._move(Level.SLICE if self._keep_slices else Level.SHARD)

    # -- gradients -----------------------------------------------------------------------------------------------

    def _hold(self, buffer: _Buffer, size: int) -> None:
        self._ledger.add(gradients=size - self._gradients[buffer])
        self._gradients[buffer] = size

    def _pass_on(self, buffer: _Buffer, other: _Buffer) -> None:
        """The very memory serves as another buffer."""
        self._gradients[other], self._gradients[buffer] = self._gradients[buffer], 0

    def _begin_backward(self) -> None:
        if self._world_size == 1 and self.plan.dtype == torch.float32:
            self._hold(_Buffer.SHARD, self._sizes.piece * _FP32)  # summed straight into it
        else:
            self._hold(_Buffer.WHOLE, self._sizes.full * self.plan.dtype.itemsize)

    def end_backward(self, reduce: bool) -> int:
        if not self._gradients[_Buffer.WHOLE]:
            return 0
        if reduce:
            self._start_reduction()
        elif self.plan.dtype == torch.float32 and not self._gradients[_Buffer.KEPT]:
            self._pass_on(_Buffer.WHOLE, _Buffer.KEPT)
        else:
            self._hold(_Buffer.KEPT, self._sizes.full * _FP32)
            self._hold(_Buffer.WHOLE, 0)
        return self._sizes.full if reduce else 0

    def _start_reduction(self) -> None:
        """Whole gradients are on their way into the shard, by way of a slice where there are several."""
        itemsize = _FP32 if self._reduces_in_fp32 else self.plan.dtype.itemsize
        cast = self._sizes.full * itemsize if itemsize != self.plan.dtype.itemsize else 0
        if self.layout.num_slices > 1:
            self._ledger.add(gradients=cast)
            self._hold(_Buffer.REDUCING, self._sizes.slice * itemsize)
            self._ledger.add(gradients=-cast)
        elif cast:
            self._hold(_Buffer.REDUCING, cast)
        else:
            self._pass_on(_Buffer.WHOLE, _Buffer.REDUCING)
        self._hold(_Buffer.SHARD, self._sizes.piece * _FP32)
        self._hold(_Buffer.WHOLE, 0)

    def reduce_kept(self) -> None:
        """The reduction of gradients that were kept whole until the step."""
        if self._gradients[_Buffer.KEPT]:
            self._hold(_Buffer.SHARD, self._sizes.piece * _FP32)
            self._pass_on(_Buffer.KEPT, _Buffer.REDUCING)

    def finish_reduction(self) -> None:
        self._hold(_Buffer.REDUCING, 0)


class _Scale(nn.Module):
    """Stands for a unit's module: one number, so that there is a graph to go forward and backward through."""

    def __init__(self, layers: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), device="cpu"))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


def rehearse_training(
    layer_names: Iterable[str], sizes: Sequence[GroupSizes], zero: ZeroConfig, world_size: int
) -> PeakBytes:
    """Have the schedule move counted groups through forwards and, where they are trained, backwards and a step.

    Args:
        layer_names: of the units beside the root, in the order in which they run.
        sizes: of all groups of one rank.
    """
    ledger = _Ledger()
    groups = [_CountedGroup(size, zero, world_size, ledger) for size in sizes]
    layers = {name: _Scale() for name in layer_names}
    model = _Scale(list(layers.values()))
    alone = ParallelMesh(rank=0, world_size=1, tp_size=1, local_rank=0, local_size=1)
    agreement = Agreement(alone, "the rehearsal")
    units = {
        name: Unit(name, owner, [cast("ParamGroup", g) for g in groups if g.plan.unit == name], agreement)
        for name, owner in {ROOT: model, **layers}.items()
    }
    schedule = TrainingSchedule(units.pop(ROOT), [model], list(units.values()), zero, agreement)
    trains = any(group.plan.trainable for group in groups)
    for _ in range(_MICRO_BATCHES):
        with torch.set_grad_enabled(trains):
            loss = model(torch.ones((), device="cpu"))
        if trains:
            ledger.in_backward = True
            with schedule.backward():
                loss.backward()
            ledger.in_backward = False
    for group, next_group in zip(groups, (*groups[1:], None), strict=True):  # as `ShardedModel.step` does
        group.reduce_kept()
        if next_group is not None:
            next_group.reduce_kept()
        group.finish_reduction()
    return ledger.most
