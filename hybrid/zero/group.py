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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hybrid.layout import GroupLayout, ParamLayout
from hybrid.parallel import Axis, ParallelMesh
from hybrid.zero.level import Level, LevelError, check_move


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter of a group. ``added_once`` marks a bias that a single rank of a tensor group contributes."""

    name: str
    parameter: nn.Parameter
    layout: ParamLayout
    added_once: bool = False


class ParamGroup:
    """A group of parameters of one dtype that is gathered, released and reduced together.

    ``sliced`` groups rest as shards of tensor-parallel slices. Others rest as pieces of the whole group, and their
    slices are ranges of the full weights. ``resting`` is SHARD (stage 3) or FULL (stages 0 to 2 and persistent
    weights); ``replicated`` is stage 0, where a rank's shard is the whole group.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        mesh: ParallelMesh,
        *,
        sliced: bool,
        resting: Level,
        replicated: bool = False,
        decay: bool = True,
        keep_slices: bool = False,
    ) -> None:
        self.name, self.members, self.decay, self.resting = name, tuple(members), decay, resting
        self.trainable = members[0].parameter.requires_grad
        self.dtype = members[0].parameter.dtype
        self.level = Level.SHARD
        self._mesh, self._sliced, self._replicated = mesh, sliced, replicated
        self._keep_slices = keep_slices and sliced
        self._piece_axis: Axis = "slice" if sliced else "world"
        self.layout = GroupLayout(
            params=tuple(member.layout for member in members),
            num_slices=mesh.tp_size if sliced else 1,
            num_pieces=1 if replicated else mesh.size(self._piece_axis),
        )
        self._tp_rank = mesh.tp_rank if sliced else 0  # which slice of the layout is ours
        self._works: list[dist.Work] = []
        self._grads: torch.Tensor | None = None  # full gradients of a backward under way
        self._whole_sum: torch.Tensor | None = None  # full gradients of finished ones, of this rank alone
        self._allocate_and_fill()
        self.grad: torch.Tensor | None = None  # (piece,) fp32, summed over ranks and micro-batches
        # Where the compute dtype is fp32 already, the master is the shard.
        self.master = nn.Parameter(self.shard.float(), requires_grad=True) if self.trainable else None

    # -- construction --------------------------------------------------------------------------------------------

    def _allocate_and_fill(self) -> None:
        """Take the module's full parameters into the shard and leave the group at its resting level."""
        layout, device = self.layout, self._mesh.device
        buffer = self._cut_slice([member.parameter.data for member in self.members], self.dtype)
        start, stop = self._piece_bounds
        rests_whole = self.resting is Level.FULL
        self.shard = buffer if layout.num_pieces == 1 else buffer[start:stop]
        if not rests_whole and layout.num_pieces > 1:
            self.shard = self.shard.clone()  # lets go of the buffer
        self._slice = self.shard if layout.num_pieces == 1 else buffer
        self._full = (
            self._slice
            if layout.num_slices == 1
            else torch.empty(layout.full_offsets[-1], dtype=self.dtype, device=device)
        )
        self._full_views = self._views(self._full, layout.full_offsets, full=True)
        self._slice_views = self._make_slice_views()
        self._empty = torch.empty(0, dtype=self.dtype, device=device)
        # With one piece and one slice there is nothing to gather or to free: the group is FULL at rest.
        if not self._moves:
            self.resting = Level.FULL
        self.level = Level.FULL
        self.rest()

    def _cut_slice(self, weights: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """This rank's slice buffer, cut out of full weights (or what is shaped like them) in the module's order."""
        layout = self.layout
        buffer = torch.zeros(layout.slice_numel(self._tp_rank), dtype=dtype, device=self._mesh.device)
        offsets = layout.slice_offsets(self._tp_rank)
        for member, weight, offset in zip(self.members, weights, offsets, strict=False):
            start, stop = member.layout.rows(self._tp_rank, layout.num_slices)
            source = _axis_major(weight, member.layout)
            shape = member.layout.slice_shape(self._tp_rank, layout.num_slices)
            target = buffer[offset : offset + _numel(shape)].view(shape)
            target.copy_(source[start:stop] if source.dim() else source)
        return buffer

    @property
    def _piece_bounds(self) -> tuple[int, int]:
        """Where this rank's shard lies in its slice buffer."""
        piece = 0 if self._replicated else self._mesh.index(self._piece_axis)
        return self.layout.piece_range(self._tp_rank, piece)

    def _views(self, buffer: torch.Tensor, offsets: Sequence[int], full: bool) -> list[torch.Tensor]:
        views = []
        for member, offset in zip(self.members, offsets, strict=False):
            layout = member.layout
            shape = layout.storage_shape if full else layout.slice_shape(self._tp_rank, self.layout.num_slices)
            views.append(_module_order(buffer[offset : offset + _numel(shape)].view(shape), layout))
        return views

    def _make_slice_views(self) -> list[torch.Tensor]:
        """What the module sees in generation: views of the slice buffer, or ranges of full weights."""
        mesh = self._mesh
        if self._sliced:
            views = self._views(self._slice, self.layout.slice_offsets(self._tp_rank), full=False)
        else:
            views = []
            for member, view in zip(self.members, self._full_views, strict=True):
                start, stop = member.layout.rows(mesh.tp_rank, mesh.tp_size)
                views.append(
                    view if member.layout.axis is None else view.narrow(member.layout.axis, start, stop - start)
                )
        for index, member in enumerate(self.members):
            if member.added_once and mesh.tp_rank > 0:
                views[index] = torch.zeros_like(views[index])
        return views

    # -- levels --------------------------------------------------------------------------------------------------

    @property
    def _moves(self) -> bool:
        """Whether the levels differ at all; one rank alone holds the shard, the slice and the full weights in one."""
        return self.layout.num_pieces > 1 or self.layout.num_slices > 1

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
        """Begin the climb to FULL; `wait_full` ends it. No-op on the way or there."""
        if self.level in (Level.FULL, Level.INFLIGHT):
            return
        if self.layout.num_slices == 1:
            self._fill_slice(async_op=True)
        else:
            if self.level is Level.SHARD:
                self._fill_slice(async_op=False)
            _allocate(self._full)
            self._works += self._spread_slices(self._slice, self._full)
        check_move(self.name, self.level, Level.INFLIGHT)
        self.level = Level.INFLIGHT

    def wait_full(self) -> None:
        """Block until the weights are FULL and show them to the module."""
        self.start_full()
        if self.level is Level.INFLIGHT:
            for work in self._works:
                work.wait()
            self._works.clear()
            self._settle(Level.FULL, self._full_views)

    def _fill_slice(self, async_op: bool) -> None:
        """SHARD -> SLICE: gather the pieces of the slice in place."""
        if self.layout.num_pieces == 1:
            return
        _allocate(self._slice)
        self._my_piece.copy_(self.shard)
        work = self._mesh.all_gather(self._slice, self._piece_axis, async_op)
        if work is not None:
            self._works.append(work)

    def _spread_slices(self, slice_: torch.Tensor, full: torch.Tensor) -> list[dist.Work]:
        """SLICE -> FULL: every weight's slices meet in its contiguous range of the full buffer."""
        layout, works = self.layout, []
        mine = layout.slice_offsets(self._tp_rank)
        for index, param in enumerate(layout.params):
            bounds = param.slice_bounds(layout.num_slices)
            weight = full[layout.full_offsets[index] : layout.full_offsets[index + 1]]
            weight[bounds[self._tp_rank] : bounds[self._tp_rank + 1]].copy_(slice_[mine[index] : mine[index + 1]])
            works += self._mesh.all_gather_ranges(weight, bounds, "tensor", async_op=True)
        return works

    @property
    def _my_piece(self) -> torch.Tensor:
        start, stop = self._piece_bounds
        return self._slice[start:stop]

    def release(self) -> None:
        """Drop back from FULL to where the group waits between uses in training."""
        if self.resting is Level.FULL or self.level in (Level.SHARD, Level.SLICE):
            return
        self.wait_full()
        self._settle(Level.SLICE if self._keep_slices else Level.SHARD, None)

    def rest(self) -> None:
        """Drop whatever the resting level does not hold, from any level; nothing moves between ranks."""
        if self.level is Level.INFLIGHT:
            self.wait_full()
        self._settle(self.resting, self._full_views if self.resting is Level.FULL else None)

    def abandon(self) -> None:
        """`rest` after a failure: a gather under way is waited for, since it writes into our memory, and forgotten."""
        for work in self._works:
            with contextlib.suppress(RuntimeError):
                work.wait()
        self._works.clear()
        if self.level is Level.INFLIGHT:
            self.level = Level.FULL
        self.rest()

    def enter_slice(self) -> None:
        """Climb to SLICE for generation and show the slices to the module."""
        if not self._sliced:
            if self.level is not Level.SLICE:
                self.wait_full()
        elif self.level is not Level.SLICE:
            self.rest()
            self._fill_slice(async_op=False)
        self._settle(Level.SLICE, self._slice_views)

    @property
    def flip_bytes(self) -> int:
        """Bytes that the layout has this rank receive to climb from SHARD to SLICE."""
        return self.layout.flip_numel(self._tp_rank) * self.shard.element_size()

    # -- gradients -----------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Give every parameter a gradient to add to: a view into one zeroed buffer. No-op if they have one."""
        if not self.trainable or self._grads is not None:
            return
        if self.level is not Level.FULL:
            raise LevelError(f"{self.name} takes part in a backward at {self.level.name}; its weights must be FULL")
        # One rank in fp32 sums straight into what the optimizer reads.
        self._grads = self._sum_buffer() if self._grad_is_sum else torch.zeros_like(self._full)
        for member, view in zip(
            self.members, self._views(self._grads, self.layout.full_offsets, full=True), strict=True
        ):
            member.parameter.grad = view

    @property
    def _grad_is_sum(self) -> bool:
        return self._mesh.world_size == 1 and self.dtype == torch.float32

    def _sum_buffer(self) -> torch.Tensor:
        if self.grad is None:
            self.grad = torch.zeros(self.shard.numel(), dtype=torch.float32, device=self.shard.device)
        return self.grad

    def end_backward(self, reduce: bool) -> None:
        """Take the gradients of a backward: summed over the ranks at once, or kept whole in fp32 until the step."""
        if self._grads is None:
            if any(member.parameter.grad is not None for member in self.members):
                raise LevelError(f"{self.name} has gradients from outside; call backward(loss) of the engine or model")
            return
        grads, self._grads = self._grads, None
        for member in self.members:
            member.parameter.grad = None
        if self._grad_is_sum:
            return
        if self._whole_sum is not None:
            self._whole_sum.add_(grads)
        else:
            self._whole_sum = grads if reduce else grads.float()
        if reduce:
            self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """Sum the gradients that are kept whole over all ranks into this rank's shard of them, and free the rest."""
        if self._whole_sum is None:
            return
        grads, self._whole_sum = self._whole_sum, None
        if self._replicated:
            piece = self._mesh.all_reduce(grads)
        elif self._sliced:
            piece = self._mesh.reduce_scatter(self._reduce_to_slice(grads), self._piece_axis)
        else:
            piece = self._mesh.reduce_scatter(grads, self._piece_axis)
        self._sum_buffer().add_(piece)

    def _reduce_to_slice(self, grads: torch.Tensor) -> torch.Tensor:
        """FULL -> SLICE for gradients: every weight's is summed over the tensor group, each slice where it belongs."""
        layout = self.layout
        mine = layout.slice_offsets(self._tp_rank)
        slice_grads = torch.zeros(layout.slice_numel(self._tp_rank), dtype=grads.dtype, device=grads.device)
        for index, param in enumerate(layout.params):
            weight = grads[layout.full_offsets[index] : layout.full_offsets[index + 1]]
            summed = self._mesh.reduce_scatter_ranges(weight, param.slice_bounds(layout.num_slices), "tensor")
            slice_grads[mine[index] : mine[index + 1]].copy_(summed)
        return slice_grads

    def zero_grad(self) -> None:
        self.grad = self._grads = self._whole_sum = None
        for member in self.members:
            member.parameter.grad = None

    def write_back(self) -> None:
        """After an optimizer step: master -> compute shard in place, and -> FULL where the group rests there."""
        if self.master is None:
            return
        if self.master.data_ptr() != self.shard.data_ptr():
            self.shard.copy_(self.master.data)
        if self.resting is Level.FULL and self._moves:
            work = self._mesh.all_gather(self._full, self._piece_axis)
            if work is not None:
                work.wait()

    # -- state ---------------------------------------------------------------------------------------------------

    def gather_whole(self, shard: torch.Tensor) -> dict[str, torch.Tensor]:
        """Whole tensors by parameter name, in the module's order, of what is sharded as the weights are: masters,
        moments. A collective; the group's own buffers are left alone."""
        layout = self.layout
        start, stop = self._piece_bounds
        buffer = shard.new_empty(layout.slice_numel(self._tp_rank))
        buffer[start:stop].copy_(shard)
        if layout.num_pieces > 1:
            self._mesh.all_gather(buffer, self._piece_axis)
        if layout.num_slices > 1:
            full = shard.new_empty(layout.full_offsets[-1])
            for work in self._spread_slices(buffer, full):
                work.wait()
            buffer = full
        views = self._views(buffer, layout.full_offsets, full=True)
        return {member.name: view for member, view in zip(self.members, views, strict=True)}

    def cut_shard(self, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This rank's fp32 shard of whole tensors: the inverse of `gather_whole`, and not a collective."""
        start, stop = self._piece_bounds
        return self._cut_slice([whole[member.name] for member in self.members], torch.float32)[start:stop].clone()

    # -- looking in ----------------------------------------------------------------------------------------------

    def find_member(self, predicate: Callable[[torch.Tensor], bool]) -> str | None:
        """Name of the first parameter for whose part of this rank's gradient shard ``predicate`` holds."""
        if self.grad is None:
            return None
        start, stop = self._piece_bounds
        offsets = self.layout.slice_offsets(self._tp_rank)
        for member, low, high in zip(self.members, offsets[:-1], offsets[1:], strict=True):
            low, high = max(low, start), min(high, stop)
            if low < high and predicate(self.grad[low - start : high - start]):
                return member.name
        return None

    def shard_matches_slice(self) -> bool:
        """Whether this rank's shard has the very bits of its piece of the slice that is held now."""
        if self.layout.num_pieces == 1:
            return True
        return torch.equal(_bits(self._my_piece), _bits(self.shard))

    def held_checksum(self) -> int:
        """Checksum of what the rank holds at SLICE or FULL, order included; equal bits give equal sums."""
        if self.level is Level.FULL:
            buffer = self._full[: self.layout.full_offsets[-1]]
        elif self.level is Level.SLICE:
            buffer = self._slice[: self.layout.slice_offsets(self._tp_rank)[-1]]
        else:
            raise LevelError(f"{self.name} is at {self.level.name}: there is nothing whole to take a checksum of")
        return checksum(buffer)


def checksum(buffer: torch.Tensor) -> int:
    """Order-sensitive sum over the bits of a tensor, modulo 2**61 or so."""
    words = _bits(buffer.contiguous().view(-1)).to(torch.int64)
    weights = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=words.device) & 0xFFFF
    return int((words * weights).sum()) ^ int(words.sum())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _axis_major(tensor: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    """A module's weight as it lies in memory."""
    return tensor.transpose(0, 1) if layout.axis == 1 else tensor


_module_order = _axis_major  # a transposition undoes itself


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def _allocate(tensor: torch.Tensor) -> None:
    storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if storage.size() != size:
        storage.resize_(size)
