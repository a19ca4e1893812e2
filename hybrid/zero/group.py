"""Weights that travel together, on the ladder SHARD -> SLICE -> FULL.

Three flat buffers hold a group's weights, each there only while its level needs it:

- ``shard``: this rank's piece of its slice. Always there.
- the slice buffer: the slice, whole. With one piece it *is* the shard.
- the full buffer: every weight, whole and contiguous. With one slice it *is* the slice buffer.

The module's parameters are views into the slice buffer (generation) or the full buffer (training), and empty at
SHARD, so that a forward there fails instead of reading freed memory. A full buffer that is dropped keeps its tensor
and loses its storage: what autograd saved for backward points to the same storage and is whole again once it is
refilled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hybrid.layout import ParamLayout, Stretch
from hybrid.models.source import TensorWeights, WeightSource
from hybrid.parallel import ParallelMesh, PendingSum
from hybrid.zero.level import Level, LevelError, check_move
from hybrid.zero.partition import GroupPlan
from ops.accumulate import accumulate


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter of a group. ``added_once`` marks a bias that a single rank of a tensor group contributes."""

    name: str
    parameter: nn.Parameter
    layout: ParamLayout
    added_once: bool = False


class ParamGroup:
    """A group of parameters that is gathered, released and reduced together.

    Groups of several slices rest as shards of tensor-parallel slices. Others rest as pieces of the whole group, and
    what a tensor rank shows of them in generation is ranges of the full weights.

    Args:
        weights: where the values come from; read are the ranges that this rank holds at rest, no others.
        reduce_dtype: what gradients are summed over ranks in; None: what they were computed in.
    """

    def __init__(
        self,
        plan: GroupPlan,
        members: Sequence[Member],
        mesh: ParallelMesh,
        weights: WeightSource,
        *,
        keep_slices: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.plan, self.layout, self.name, self.members = plan, plan.layout, plan.name, tuple(members)
        self.trainable, self.dtype, self.level = plan.trainable, plan.dtype, Level.SHARD
        self._mesh, self._slicing = mesh, mesh.slicing(plan.layout.num_slices)
        # With one piece and one slice there is nothing to gather or to free: the group is FULL at rest.
        self._moves = plan.layout.num_pieces > 1 or plan.layout.num_slices > 1
        self.resting = Level.FULL if plan.rests_full or not self._moves else Level.SHARD
        self._keep_slices = keep_slices and plan.layout.num_slices > 1
        self._reduce_dtype = reduce_dtype
        self.holders = 0  # who has been handed its FULL weights; until they are given back it stays FULL
        self._works: list[dist.Work] = []
        self._grads: torch.Tensor | None = None  # full gradients of a backward under way
        self._adopting = False  # the gradient that autograd makes will be `_grads`
        self._whole_sum: torch.Tensor | None = None  # full gradients of finished ones, of this rank alone
        self._reduction: PendingSum | None = None
        self.grad: torch.Tensor | None = None  # (piece,) fp32, summed over ranks and micro-batches
        self.master: nn.Parameter | None = None  # (piece,) fp32; where that is the compute dtype, the shard itself
        self._allocate_and_fill(weights)
        if self.trainable:
            for member in self.members:
                member.parameter.register_hook(self._before_accumulation)

    # -- construction --------------------------------------------------------------------------------------------

    def _allocate_and_fill(self, weights: WeightSource) -> None:
        layout, device = self.layout, self._mesh.device
        slice_numel = layout.slice_numel(self._index)
        start, stop = self._piece_bounds
        if self.resting is Level.FULL and layout.num_slices == 1:
            self._slice = self._filled(weights, 0, slice_numel, self.dtype)
            self.shard = self._slice[start:stop]
        else:
            self.shard = self._filled(weights, start, stop, self.dtype)
            self._slice = self.shard
            if layout.num_pieces > 1:
                self._slice = torch.empty(slice_numel, dtype=self.dtype, device=device)
        self._full = self._slice
        if layout.num_slices > 1:
            self._full = torch.empty(layout.full_offsets[-1], dtype=self.dtype, device=device)
        if self.trainable:
            # The checkpoint may be wider than the compute dtype: the master has all of it.
            wide = self.dtype == torch.float32
            master = self.shard if wide else self._filled(weights, start, stop, torch.float32)
            self.master = nn.Parameter(master, requires_grad=True)
        self._full_views = self._views(self._full, layout.full_offsets, full=True)
        self._cached_slice_views: list[torch.Tensor] | None = None
        self._empty = torch.empty(0, dtype=self.dtype, device=device)
        self.level = Level.FULL
        self.rest()

    def _filled(self, weights: WeightSource, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer with the elements ``start:stop`` of this rank's slice."""
        buffer = torch.empty(stop - start, dtype=dtype, device=self._mesh.device)
        end = self.layout.slice_offsets(self._index)[-1]
        if stop > end:
            buffer[max(0, end - start) :].zero_()  # padding
        for stretch in self.layout.stretches(self._index, start, stop):
            rows = weights.read(stretch.name, stretch.dim, *stretch.rows)
            flat = (rows.transpose(0, 1) if stretch.dim == 1 else rows).reshape(-1)
            target = buffer[stretch.start : stretch.start + stretch.numel]
            target.copy_(flat[stretch.skip : stretch.skip + stretch.numel])
        return buffer

    @property
    def _index(self) -> int:
        return self._slicing.index

    @property
    def _piece_bounds(self) -> tuple[int, int]:
        """Where this rank's shard lies in its slice buffer."""
        piece = 0 if self.plan.replicated else self._mesh.index(self._slicing.pieces)
        return self.layout.piece_range(self._index, piece)

    def _views(self, buffer: torch.Tensor, offsets: Sequence[int], full: bool) -> list[torch.Tensor]:
        views = []
        for member, offset in zip(self.members, offsets, strict=False):
            layout = member.layout
            shape = layout.storage_shape if full else layout.part_shape(self._index, self.layout.num_slices)
            view = buffer[offset : offset + torch.Size(shape).numel()].view(shape)
            views.append(view.transpose(0, 1) if layout.axis == 1 else view)
        return views

    def _slice_views(self) -> list[torch.Tensor]:
        """What the module sees in generation: views of the slice buffer, or ranges of full weights."""
        if self._cached_slice_views is not None:
            return self._cached_slice_views
        mesh, copied = self._mesh, False
        if self.layout.num_slices > 1:
            views = self._views(self._slice, self.layout.slice_offsets(self._index), full=False)
        else:
            views = []
            for member, view in zip(self.members, self._full_views, strict=True):
                dim = member.layout.axis
                if dim is not None:
                    ranges = member.layout.part_rows(mesh.tp_rank, mesh.tp_size)
                    parts = [view.narrow(dim, start, stop - start) for start, stop in ranges]
                    copied |= len(parts) > 1
                    view = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
                views.append(view)
        if mesh.tp_rank > 0:
            for index, member in enumerate(self.members):
                if member.added_once:
                    views[index] = torch.zeros_like(views[index])
        if not copied:  # copies are of these weights, and go when the level does
            self._cached_slice_views = views
        return views

    # -- levels --------------------------------------------------------------------------------------------------

    @property
    def live_numel(self) -> int:
        """Elements gathered beyond the resting level: whole, or on their way to it."""
        gathered = self.resting is Level.SHARD and self.level in (Level.FULL, Level.INFLIGHT)
        return self.layout.full_offsets[-1] if gathered else 0

    @property
    def numel_to_gather(self) -> int:
        """Elements that `start_full` would add to those that are live."""
        needed = self.resting is Level.SHARD and self.level not in (Level.FULL, Level.INFLIGHT)
        return self.layout.full_offsets[-1] if needed else 0

    def _settle(self, level: Level, shown: Sequence[torch.Tensor] | None) -> None:
        """Arrive at a level: free the buffers that it does not hold, and show the module ``shown`` (None: nothing)."""
        check_move(self.name, self.level, level)
        self.level = level
        holds_slice = level is Level.SLICE or (level is Level.FULL and self._keep_slices)
        if self._slice is not self.shard and self._slice is not self._full and not holds_slice:
            _free(self._slice)
        holds_full = level is Level.FULL or (level is Level.SLICE and self._full is self._slice)
        if self._full is not self.shard and not holds_full:
            _free(self._full)
        for index, member in enumerate(self.members):
            member.parameter.data = self._empty if shown is None else shown[index]

    def start_full(self) -> None:
        """Begin the climb to FULL; no-op if it is under way or done."""
        if self.level in (Level.FULL, Level.INFLIGHT):
            return
        if self.layout.num_slices == 1:
            if self.level is Level.SHARD:
                self._works += self._fill_slice()
        else:
            if self.level is Level.SHARD:
                self._mesh.wait(self._fill_slice())
            _allocate(self._full)
            self._spread_slices(self._slice, self._full, self._works)
        check_move(self.name, self.level, Level.INFLIGHT)
        self.level = Level.INFLIGHT

    def wait_full(self) -> None:
        """Block until the weights are FULL and show them to the module."""
        self.start_full()
        if self.level is Level.INFLIGHT:
            self._mesh.wait(self._works)
            self._works.clear()
            self._settle(Level.FULL, self._full_views)

    def _fill_slice(self) -> list[dist.Work]:
        """SHARD -> SLICE: the pieces of the slice are on their way into its buffer."""
        if self.layout.num_pieces == 1:
            return []
        _allocate(self._slice)
        return self._mesh.all_gather(self._slice, self._slicing.pieces, piece=self.shard, async_op=True)

    def _spread_slices(self, slice_: torch.Tensor, full: torch.Tensor, works: list[dist.Work]) -> None:
        """SLICE -> FULL: the slices of every weight are on their way into its contiguous range of the full buffer."""
        for low, high, weight, bounds in self._segments(full):
            works += self._mesh.all_gather(
                weight, self._slicing.slices, piece=slice_[low:high], bounds=bounds, async_op=True
            )

    def _segments(self, full: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor, list[int]]]:
        """For each segment of each weight: where ours lies in the slice, all of it in the full buffer, and where the
        slices meet in that."""
        start, num_slices = 0, self.layout.num_slices
        for offset, param in zip(self.layout.full_offsets, self.layout.params, strict=False):
            for bounds in param.segment_bounds(num_slices):
                stop = start + bounds[self._index + 1] - bounds[self._index]
                whole = full[offset + bounds[0] : offset + bounds[-1]]
                yield start, stop, whole, [bound - bounds[0] for bound in bounds]
                start = stop

    def release(self) -> None:
        """Drop back from FULL to where the group waits between uses in training."""
        if self.holders or self.resting is Level.FULL or self.level in (Level.SHARD, Level.SLICE):
            return
        self.wait_full()
        self._settle(Level.SLICE if self._keep_slices else Level.SHARD, None)

    def rest(self) -> None:
        """Drop whatever the resting level does not hold, from any level; nothing moves between ranks."""
        if self.level is Level.INFLIGHT:
            self.wait_full()
        if self.holders:
            return
        self._settle(self.resting, self._full_views if self.resting is Level.FULL else None)

    def abandon(self) -> None:
        """`rest` after a failure: what is under way is waited for, since it writes into our memory, and forgotten."""
        if self._mesh.parted and self._works:
            return  # it will never end, and the memory stays its
        for work in self._works:
            with contextlib.suppress(RuntimeError):
                work.wait()
        self._works.clear()
        if self.level is Level.INFLIGHT:
            self.level = Level.FULL
        self.rest()

    def enter_slice(self) -> None:
        """Climb to SLICE for generation and show the slices to the module."""
        if self.holders:
            raise LevelError(f"{self.name} is held whole by gathered() or resident(); leave that block first")
        if self.layout.num_slices == 1:
            if self.level is not Level.SLICE:
                self.wait_full()
        elif self.level is not Level.SLICE:
            self.rest()
            self._mesh.wait(self._fill_slice())
        self._settle(Level.SLICE, self._slice_views())

    @property
    def flip_bytes(self) -> int:
        """Bytes that the layout has this rank receive to climb to SLICE from where the group rests."""
        if self.resting is Level.FULL:
            return 0
        return self.layout.flip_numel(self._index) * self.shard.element_size()

    # -- gradients -----------------------------------------------------------------------------------------------

    def _before_accumulation(self, grad: torch.Tensor) -> None:
        """Autograd is about to add the first gradient of this backward to a parameter."""
        self.begin_backward()

    def begin_backward(self) -> None:
        """Give every parameter a gradient to add to: a view into one zeroed buffer. No-op if they have one.

        A parameter that is its whole group, such as an embedding, is left the gradient that autograd makes: that is the
        buffer then.
        """
        if self._grads is not None or self._adopting:
            return
        if self.level is not Level.FULL:
            raise LevelError(f"{self.name} takes part in a backward at {self.level.name}; its weights must be FULL")
        if self._adopts:
            self._adopting = True
            return
        # One rank in fp32 sums straight into what the optimizer reads.
        self._grads = self._sum_buffer() if self._grad_is_sum else torch.zeros_like(self._full)
        views = self._views(self._grads, self.layout.full_offsets, full=True)
        for member, view in zip(self.members, views, strict=True):
            member.parameter.grad = view

    @property
    def _adopts(self) -> bool:
        """Whether autograd's gradient has the very elements of the group's buffer, in the same order."""
        alone = len(self.members) == 1 and self.members[0].layout.axis != 1
        return alone and not self._grad_is_sum and self._full.numel() == self.members[0].layout.numel

    @property
    def _grad_is_sum(self) -> bool:
        return self._mesh.world_size == 1 and self.dtype == torch.float32

    def _sum_buffer(self) -> torch.Tensor:
        if self.grad is None:
            self.grad = torch.zeros(self.shard.numel(), dtype=torch.float32, device=self.shard.device)
        return self.grad

    def end_backward(self, reduce: bool) -> int:
        """Take the gradients of a backward: summed over the ranks from now on, or kept whole in fp32 until the step.

        Returns:
            the elements whose reduction was started; `finish_reduction` ends it.
        """
        if self._adopting:
            self._adopting, grad = False, self.members[0].parameter.grad
            self._grads = None if grad is None else grad.contiguous().view(-1)
            del grad
        if self._grads is None:
            if any(member.parameter.grad is not None for member in self.members):
                raise LevelError(f"{self.name} has gradients from outside; call backward(loss) of the engine or model")
            return 0
        grads, self._grads = self._grads, None
        for member in self.members:
            member.parameter.grad = None
        if self._grad_is_sum:
            return 0
        numel = grads.numel()
        if self._whole_sum is not None:
            accumulate(self._whole_sum, grads)
        else:
            self._whole_sum = grads if reduce else grads.float()
        del grads  # or they would live beside what the reduction makes of them
        if reduce:
            self.start_reduction()
        return numel if reduce else 0

    def start_reduction(self) -> None:
        """Begin to sum the gradients that are kept whole over all ranks into this rank's shard of them."""
        if self._whole_sum is None:
            return
        self.finish_reduction()
        grads, self._whole_sum = self._whole_sum, None
        if self._reduce_dtype is not None:
            grads = grads.to(self._reduce_dtype)
        mesh, layout = self._mesh, self.layout
        if self.plan.replicated:
            self._reduction = PendingSum(mesh.start_all_reduce(grads), [grads], self._sum_buffer())
            return
        if layout.num_slices > 1:
            grads = self._reduce_to_slice(grads)
        self._reduction = mesh.reduce_scatter(grads, self._slicing.pieces, self._sum_buffer(), async_op=True)

    def _reduce_to_slice(self, grads: torch.Tensor) -> torch.Tensor:
        """FULL -> SLICE for gradients: every weight's is summed over the tensor group, each slice where it belongs."""
        slice_grads = torch.zeros(self.layout.slice_numel(self._index), dtype=grads.dtype, device=grads.device)
        pending = [
            self._mesh.reduce_scatter(weight, self._slicing.slices, slice_grads[low:high], bounds=bounds, async_op=True)
            for low, high, weight, bounds in self._segments(grads)
        ]
        for part in pending:
            part.wait(self._mesh)
        return slice_grads

    def finish_reduction(self) -> None:
        """Wait for the reduction under way, if any, and free the whole gradients."""
        if self._reduction is not None:
            reduction, self._reduction = self._reduction, None
            reduction.wait(self._mesh)

    def zero_grad(self) -> None:
        if not self._mesh.parted:
            with contextlib.suppress(RuntimeError):  # of a rank that is gone
                self.finish_reduction()
        self._reduction = None
        self.grad = self._grads = self._whole_sum = None
        self._adopting = False
        for member in self.members:
            member.parameter.grad = None

    def write_back(self) -> None:
        """After an optimizer step: master -> compute shard in place, and -> FULL where the group rests there."""
        if self.master is None:
            return
        if self.master.data_ptr() != self.shard.data_ptr():
            self.shard.copy_(self.master.data)
        if self.resting is Level.FULL and self._moves and not self.plan.replicated:
            self._mesh.wait(self._mesh.all_gather(self._full, self._slicing.pieces, async_op=True))

    def expect_gradients(self) -> None:
        """Take part in a reduction that other ranks have gradients for, and this one has none."""
        if not self.has_unreduced:
            self._whole_sum = torch.zeros_like(self._full, dtype=torch.float32)

    @property
    def has_unreduced(self) -> bool:
        """Whether there are gradients of this rank alone, which `reduce_gradients` would sum."""
        return self._whole_sum is not None or self._reduction is not None

    def take_shown(self) -> None:
        """Make what the module shows at FULL the weights: the compute shard and, where its bits are new, the master.

        A master in a wider dtype keeps the digits of every element that still rounds to what is shown.
        """
        shown = self.cut_shard({member.name: member.parameter.data for member in self.members})
        if self.master is not None and self.master.data_ptr() != self.shard.data_ptr():
            changed = _bits(shown.to(self.dtype)) != _bits(self.master.data.to(self.dtype))
            self.master.data.copy_(torch.where(changed, shown, self.master.data))
        self.shard.copy_(shown)

    # -- state ---------------------------------------------------------------------------------------------------

    def gather_whole(self, shard: torch.Tensor) -> dict[str, torch.Tensor]:
        """Whole tensors by parameter name, in the module's order, of what is sharded as the weights are: masters,
        moments. A collective; the group's own buffers are left alone."""
        layout = self.layout
        buffer = shard.new_empty(layout.slice_numel(self._index))
        if layout.num_pieces > 1:
            self._mesh.wait(self._mesh.all_gather(buffer, self._slicing.pieces, piece=shard, async_op=True))
        else:
            buffer.copy_(shard)
        if layout.num_slices > 1:
            full = shard.new_empty(layout.full_offsets[-1])
            works: list[dist.Work] = []
            self._spread_slices(buffer, full, works)
            self._mesh.wait(works)
            buffer = full
        views = self._views(buffer, layout.full_offsets, full=True)
        return {member.name: view for member, view in zip(self.members, views, strict=True)}

    def cut_shard(self, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This rank's fp32 shard of whole tensors: the inverse of `gather_whole`, and not a collective."""
        return self._filled(TensorWeights(whole), *self._piece_bounds, torch.float32)

    def shard_stretches(self) -> Iterator[Stretch]:
        """What this rank's shard is made of."""
        return self.layout.stretches(self._index, *self._piece_bounds)

    # -- looking in ----------------------------------------------------------------------------------------------

    def find_member(self, predicate: Callable[[torch.Tensor], bool]) -> str | None:
        """Name of the first parameter for whose part of this rank's gradient shard ``predicate`` holds."""
        if self.grad is not None:
            for stretch in self.shard_stretches():
                if predicate(self.grad[stretch.start : stretch.start + stretch.numel]):
                    return stretch.name
        return None

    def shard_matches_slice(self) -> bool:
        """Whether this rank's shard has the very bits of its piece of the slice that is held now."""
        if self.layout.num_pieces == 1:
            return True
        start, stop = self._piece_bounds
        return torch.equal(_bits(self._slice[start:stop]), _bits(self.shard))

    def held_checksum(self) -> int:
        """Checksum of what the rank holds at SLICE or FULL, order included; equal bits give equal sums."""
        if self.level is Level.FULL:
            buffer = self._full[: self.layout.full_offsets[-1]]
        elif self.level is Level.SLICE:
            buffer = self._slice[: self.layout.slice_offsets(self._index)[-1]]
        else:
            raise LevelError(f"{self.name} is at {self.level.name}: there is nothing whole to take a checksum of")
        return checksum(buffer)


def reduce_gradients(groups: Sequence[ParamGroup], mesh: ParallelMesh) -> None:
    """Leave no gradients of one rank alone: sum those that are still whole, as stages 0 and 1 keep them until the step.

    A collective, for the same groups on every rank. A module that ran on some ranks only has gradients there; the
    others take part with zeros.
    """
    groups = [group for group in groups if group.trainable]
    if not groups:
        return
    expected = mesh.reduce_scalars([group.has_unreduced for group in groups], op="max")
    waiting = [group for group, some in zip(groups, expected, strict=True) if some]
    for group in waiting:
        group.expect_gradients()
    for group, following in zip(waiting, (*waiting[1:], None), strict=False):
        group.start_reduction()
        if following is not None:  # under way while this one is waited for
            following.start_reduction()
        group.finish_reduction()


def checksum(buffer: torch.Tensor) -> int:
    """Order-sensitive sum over the bits of a tensor, modulo 2**61 or so."""
    words = _bits(buffer.contiguous().view(-1)).to(torch.int64)
    weights = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=words.device) & 0xFFFF
    return int((words * weights).sum()) ^ int(words.sum())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def _allocate(tensor: torch.Tensor) -> None:
    storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if storage.size() != size:
        storage.resize_(size)
