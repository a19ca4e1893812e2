"""Parameters of a group handed out whole, and where a parameter lies in what a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hybrid.layout import ParamLayout
from hybrid.parallel import ParallelMesh
from hybrid.zero.group import Member, ParamGroup, checksum
from hybrid.zero.level import Level

_CHECKSUM_NUMEL = 2**22  # elements at a time: a checksum takes 16 bytes for each


class Loan:
    """Parameters of one group, handed out whole; and what it takes to find and to undo changes to them.

    What can be gathered again from the shards is not copied. Making one is a collective; of the methods, `broadcast`
    alone.

    Args:
        guarded: whether changes are not allowed.
    """

    def __init__(self, group: ParamGroup, members: Sequence[Member], *, guarded: bool) -> None:
        self.group, self._members, self._guarded = group, tuple(members), guarded
        self._was_full = group.level is Level.FULL
        group.wait_full()
        self._views = [member.parameter.data for member in members]
        self._copies = [view.clone() for view in self._views] if group.resting is Level.FULL else []
        self._checksums = [self._checksum(index) for index in range(len(members))] if guarded else []
        self._tainted = False
        group.holders += 1  # last, since nobody gives back what could not be made

    def _checksum(self, index: int) -> int:
        flat = flatten(self._views[index], self._members[index].layout)
        return hash(tuple(checksum(part) for part in flat.split(_CHECKSUM_NUMEL)))

    def complaint(self) -> str | None:
        """What was done to the tensors that would be lost, if anything."""
        for index, (member, view) in enumerate(zip(self._members, self._views, strict=True)):
            if member.parameter.data_ptr() != view.data_ptr():
                return f"{member.name} was given other memory inside gathered(); change it in place (copy_)"
            if self._guarded and self._checksum(index) != self._checksums[index]:
                return f"{member.name} was changed inside gathered(), and changed back; set write=True"
        return None

    def broadcast(self, mesh: ParallelMesh) -> None:
        """Give every rank the first one's values."""
        for member, view in zip(self._members, self._views, strict=True):
            mesh.broadcast(flatten(view, member.layout))

    def undo(self) -> None:
        """Have the old weights again, without any other rank."""
        if self._guarded and self.complaint() is None:
            return
        for member, view in zip(self._members, self._views, strict=True):
            member.parameter.data = view
        for view, copy in zip(self._views, self._copies, strict=False):
            view.copy_(copy)
        self._tainted = not self._copies

    def give_back(self) -> None:
        """Drop to where the group was, or further, where what is whole is not the weights any more."""
        self.group.holders -= 1
        if self._tainted:
            self.group.rest()
        elif not self._was_full:
            self.group.release()


def flatten(tensor: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    """A whole parameter flat, in the order of a group's memory; of the group's own views, a view."""
    return (tensor.detach().transpose(0, 1) if layout.axis == 1 else tensor.detach()).reshape(-1)


def runs_of(group: ParamGroup, member: Member) -> Iterator[tuple[int, int, int]]:
    """This rank's elements of a parameter in runs: start in its shard, start in the flat parameter, and length."""
    for stretch in group.shard_stretches():
        if stretch.name == member.name:
            yield stretch.start, stretch.rows[0] * member.layout.row_numel + stretch.skip, stretch.numel


def span_of(group: ParamGroup, member: Member) -> tuple[int, int]:
    """Start and stop of a parameter in this rank's shard, where its runs lie end to end."""
    runs = list(runs_of(group, member))
    return (runs[0][0], runs[-1][0] + runs[-1][2]) if runs else (0, 0)
