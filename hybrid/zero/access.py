"""Looking at weights, masters, gradients and optimizer state by parameter, and changing them.

Whole tensors have the module's shape. A rank's own elements of a parameter are one stretch of its shard, flat, in the
order of memory: a row-parallel weight's are those of its transpose. What a call returns is a copy, the caller's to
keep; weights change through `gathered` with ``write=True``, `set_full` and `set_local`, and in no other way.

A parameter goes under any of its names: tied weights have several, and are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import MappingProxyType

import torch
from torch import nn

from hybrid.parallel import ParallelMesh
from hybrid.zero.agreement import Agreement
from hybrid.zero.ema import AVERAGE
from hybrid.zero.group import Member, ParamGroup, reduce_gradients
from hybrid.zero.level import Level, LevelError
from hybrid.zero.loan import Loan, flatten, runs_of, span_of
from hybrid.zero.optimizer import ShardedOptimizer
from hybrid.zero.schedule import TrainingSchedule


class StateAccess:
    """What a `ShardedModel` holds, by parameter.

    ``what`` is "master" (the fp32 weights that the optimizer steps), "grad" (what the next step will apply: summed over
    micro-batches and, by `backward`'s reduction, over ranks; not clipped, and free of fp16's loss scale), "average"
    (of the masters, where `ShardedModel.keep_average` was called) or a key of the torch optimizer's state, such as
    "exp_avg".

    All methods but `local` and `local_ranges` are collectives: every rank calls them, with the same names, or
    DivergenceError says which rank did not. Those that write are refused in GENERATE mode, inside a forward or backward
    and inside `gathered`. Changed masters or weights make a loss that was computed before them stale, as a step does:
    its backward raises. They leave ``weights_version`` alone, which counts steps, and moments and the average, which go
    on from what they were.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        mesh: ParallelMesh,
        schedule: TrainingSchedule,
        agreement: Agreement,
        optimizer: ShardedOptimizer | None,
    ) -> None:
        self._groups, self._mesh, self._schedule = tuple(groups), mesh, schedule
        self._agreement, self._optimizer = agreement, optimizer
        self._is_resident = False  # inside the outermost block of `resident`
        owners = {member.parameter: (group, member) for group in groups for member in group.members}
        self._members = {name: owners[p] for name, p in module.named_parameters(remove_duplicate=False)}

    # -- whole weights -------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(
        self, names: str | Sequence[str] | None = None, *, write: bool = False
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """Chosen parameters whole, by name, in the module's shape and the compute dtype; a collective at both ends.

        The tensors are those that the module computes with, so that inside the block its own parameters are whole too
        and may be changed in place as well. They are emptied when the block ends.

        With ``write``, the first rank's values become every rank's weights at the end, masters included; of a weight
        that is narrower than its master, elements with unchanged bits keep the master's further digits. Without it, a
        change is undone and raises. After an exception in the block nothing is written.

        A rank holds the groups of the chosen parameters whole (a layer's weights are one or two groups). Of what rests
        whole anyhow (ZeRO stages 0 to 2, small parameters) it keeps a copy to undo changes with. ``names=None`` takes
        all parameters, the size of the model: `stream` does not.

        Args:
            names: parameters, or modules that stand for all of theirs ("model.layers.0").

        Raises:
            ValueError: a name is unknown, or a tensor was changed without ``write``, or replaced.
            LevelError: in GENERATE mode or inside `resident`; or ``write`` inside a forward, a backward or another such
                block.
        """
        asked = [names] if isinstance(names, str) else None if names is None else sorted(names)
        chosen = self._select(asked)
        self._schedule.require_training()
        if self._is_resident:  # a change that is to be undone would be computed with to the end of that block
            raise LevelError("gathered() inside resident(); leave that block first")
        if write:
            self._require_idle("gathered(write=True)")
        self._agreement.check(f"gathered({asked}, {write=})")
        wanted = {member.name for _, member in chosen.values()}
        loans: list[Loan] = []
        tensors: dict[str, torch.Tensor] = {}
        try:
            for group in self._groups:
                members = [member for member in group.members if member.name in wanted]
                if members:
                    loans.append(Loan(group, members, guarded=not write))
            tensors.update((name, member.parameter.data) for name, (_, member) in chosen.items())
            yield MappingProxyType(tensors)
            complaint = next(filter(None, (loan.complaint() for loan in loans)), None)
            if complaint is not None:
                raise ValueError(complaint)
            if write:
                self._agreement.check("the end of gathered(write=True)")
                for loan in loans:
                    loan.broadcast(self._mesh)
                for loan in loans:
                    loan.group.take_shown()
        except BaseException:
            for loan in loans:  # no other rank need know of the exception
                loan.undo()
            raise
        finally:
            for tensor in tensors.values():
                tensor.data = tensor.new_empty(0)  # or it would point to memory that is freed
            for loan in loans:
                loan.give_back()
        if write:
            self._weights_changed()

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Keep every group FULL from its first use to the end of the block; a collective, where the block begins.

        Layers climb and are prefetched as ever, and stay. All come to rest at the end, also after an exception, which
        no other rank need know of. A block inside another changes nothing.

        Raises:
            LevelError: in GENERATE mode, or inside a forward or a backward.
        """
        self._schedule.require_training()
        if self._is_resident:
            yield
            return
        self._require_not_computing("resident()")
        self._agreement.check("resident()")
        self._is_resident = True
        for group in self._groups:
            group.holders += 1
        try:
            yield
        finally:
            self._is_resident = False
            for group in self._groups:
                group.holders -= 1
            self._settle()

    def stream(
        self, what: str = "weights", *, cpu: bool = True, rank0_only: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's tensor whole, one at a time, tied weights once; a collective that every rank exhausts.

        Each tensor is a copy, the caller's to keep. A rank holds one group (a layer's weights) beside them. Any mode.

        Args:
            what: "weights" in the compute dtype; "master" or "average" in fp32, where a frozen parameter is its weights
                in fp32; or as in `full`, where frozen parameters are left out.
            cpu: whether the copies are in host memory.
            rank0_only: other ranks take part and are given nothing.
        """
        self._require_not_computing("state.stream")
        if what == AVERAGE:
            self.require_average()
        self._agreement.check(f"state.stream({what!r})")
        for group in self._groups:
            frozen = group.master is None
            if frozen and what not in ("weights", "master", AVERAGE):
                continue
            if what == "grad":
                reduce_gradients([group], self._mesh)
            shard = group.shard
            if what != "weights" and not frozen:
                shard = self._require_sharded(group, group.members[0].name, what)
            if shard is group.shard and group.resting is group.level is Level.FULL:
                whole = {member.name: member.parameter.data for member in group.members}
            else:
                whole = group.gather_whole(shard)
            device, dtype = "cpu" if cpu else self._mesh.device, group.dtype if what == "weights" else torch.float32
            for name in whole if self._mesh.is_main or not rank0_only else ():
                copy = whole[name].to(device, dtype, copy=True)
                yield name, copy.div_(self._scale(what)) if what == "grad" else copy

    # -- one parameter -------------------------------------------------------------------------------------------

    def full(self, name: str, what: str = "master") -> torch.Tensor:
        """A parameter's ``what``, whole, in fp32 on the device; the optimizer's count of steps is a scalar.

        Only the parameter's own elements travel. A gradient that is this rank's alone (ZeRO stages 0 and 1, until the
        step) is summed over ranks first, which changes neither later accumulation nor the step.

        Raises:
            ValueError: the name or ``what`` is unknown, or there is no such thing now; the message says why.
        """
        group, member = self._find(name)
        self._agreement.check(f"state.full({name!r}, {what!r})")
        if what == "grad":
            self._require_not_computing("state.full of a gradient")
            reduce_gradients([group], self._mesh)
        shard = self._shard(group, name, what)
        if shard.shape != group.shard.shape:
            return shard.clone()
        whole = self._assemble(group, member, shard)
        if what == "grad":
            whole.div_(self._scale(what))
        shape = member.layout.storage_shape
        return whole.view(shape).transpose(0, 1) if member.layout.axis == 1 else whole.view(shape)

    def set_full(self, name: str, value: torch.Tensor, what: str = "master") -> None:
        """Replace a parameter's ``what`` by the first rank's ``value``, in the module's shape, cast to fp32.

        A new master changes the weights, rounded to the compute dtype, at once.

        Raises:
            ValueError: as `full`, or ``value`` has another shape.
            LevelError: in GENERATE mode, or inside a forward, a backward or `gathered`.
        """
        group, member = self._find(name)
        _require_shape(name, value, member.layout.shape)
        shard = self._begin_write(group, name, what, "state.set_full")
        flat = flatten(value, member.layout).to(self._mesh.device, torch.float32, copy=True)
        if what == "grad":
            flat.mul_(self._scale(what))
        self._mesh.broadcast(flat)
        for at, start, numel in runs_of(group, member):
            shard[at : at + numel].copy_(flat[start : start + numel])
        if what == "master":
            self._publish(group, member, flat)

    def local(self, name: str, what: str = "master") -> torch.Tensor:
        """This rank's elements of a parameter's ``what``: a flat fp32 copy, empty where it holds none. No collective.

        `local_ranges` says which they are. At ZeRO stage 0 every rank holds all of them.

        Raises:
            ValueError: as `full`; or the gradient is not summed over ranks yet, which `reduce_gradients` does.
        """
        group, member = self._find(name)
        if what == "grad":
            self._require_not_computing("state.local of a gradient")
            if group.has_unreduced:
                raise ValueError(
                    f"the gradient of {name} is not summed over ranks before the step at this ZeRO stage; call "
                    "state.reduce_gradients() on every rank first"
                )
        shard = self._require_sharded(group, name, what)
        start, stop = span_of(group, member)
        mine = shard[start:stop].clone()
        return mine.div_(self._scale(what)) if what == "grad" else mine

    def set_local(self, name: str, value: torch.Tensor, what: str = "master") -> None:
        """Replace this rank's elements of a parameter's ``what`` by ``value``, flat, as `local` gives them.

        A collective, so that what rests whole on every rank is changed on every rank: a rank that holds no element
        passes an empty tensor. At ZeRO stage 0 the first rank's values count.

        Raises:
            ValueError: as `set_full`.
            LevelError: as `set_full`.
        """
        group, member = self._find(name)
        start, stop = span_of(group, member)
        _require_shape(f"this rank's part of {name}", value, (stop - start,))
        shard = self._begin_write(group, name, what, "state.set_local")
        mine = value.detach().to(self._mesh.device, torch.float32, copy=True)
        if what == "grad":
            mine.mul_(self._scale(what))
        if group.plan.replicated:
            self._mesh.broadcast(mine)
        shard[start:stop].copy_(mine)
        if what == "master":
            rests_full = group.resting is Level.FULL
            self._publish(group, member, self._assemble(group, member, shard) if rests_full else None)

    def local_ranges(self, name: str) -> list[tuple[int, int]]:
        """Start and stop, in the flattened parameter as it lies in memory, of what `local` gives. No collective.

        A row-parallel weight lies transposed: the ranges are of ``weight.T.reshape(-1)``.
        """
        group, member = self._find(name)
        return [(start, start + numel) for _, start, numel in runs_of(group, member)]

    def reduce_gradients(self) -> None:
        """Sum all gradients over ranks that would otherwise wait for the step."""
        self._require_not_computing("state.reduce_gradients")
        self._agreement.check("state.reduce_gradients")
        reduce_gradients(self._groups, self._mesh)

    # -- what a call needs ---------------------------------------------------------------------------------------

    def require_given_back(self, action: str) -> None:
        """Raise LevelError inside `gathered` or `resident`, whose tensors ``action`` would make stale."""
        held = next((group for group in self._groups if group.holders), None)
        if held is not None:
            holder = "resident()" if self._is_resident else "gathered()"
            raise LevelError(f"{action} while {holder} holds {held.name} whole; leave that block first")

    def require_average(self) -> None:
        """Raise ValueError where no average of the weights is kept."""
        if self._optimizer is None or self._optimizer.average is None:
            raise ValueError("no average of the weights is kept; call keep_average(decay) before training")

    def _require_not_computing(self, action: str) -> None:
        if self._schedule.computing:
            raise LevelError(f"{action} inside a forward or a backward; call it between them")

    def _require_idle(self, action: str) -> None:
        self._schedule.require_training()
        self._require_not_computing(action)
        self.require_given_back(action)

    def _begin_write(self, group: ParamGroup, name: str, what: str, action: str) -> torch.Tensor:
        self._require_idle(action)
        self._agreement.check(f"{action}({name!r}, {what!r})")
        if what == "grad":
            reduce_gradients([group], self._mesh)
        return self._require_sharded(group, name, what)

    def _find(self, name: str) -> tuple[ParamGroup, Member]:
        if name not in self._members:
            raise ValueError(f"there is no parameter {name!r}; {_suggest(name, self._members)}")
        return self._members[name]

    def _select(self, names: Sequence[str] | None) -> dict[str, tuple[ParamGroup, Member]]:
        """Parameters by the names they were asked for under; all, each under its first name, for None."""
        if names is None:
            return {name: found for name, found in self._members.items() if name == found[1].name}
        chosen: dict[str, tuple[ParamGroup, Member]] = {}
        for name in names:
            found = {key: value for key, value in self._members.items() if key == name or key.startswith(f"{name}.")}
            if not found:
                parts = [key.split(".") for key in self._members]
                known = {".".join(path[: i + 1]) for path in parts for i in range(len(path))}
                raise ValueError(f"there is no parameter or module with parameters {name!r}; {_suggest(name, known)}")
            chosen |= found
        return chosen

    def _shard(self, group: ParamGroup, name: str, what: str) -> torch.Tensor:
        """This rank's shard of a group's ``what``, or a scalar of its state."""
        if self._optimizer is None:
            raise ValueError(f"this model was built without an optimizer (optim=None), so {name} has no {what}")
        if group.master is None:
            raise ValueError(f"{name} is frozen and has no {what}; read its weights with gathered()")
        if what == "master":
            return group.master.data
        if what == "grad":
            if group.grad is None:
                raise ValueError(f"{name} has no gradient: there was no backward through it since the last step")
            return group.grad
        if what == AVERAGE:
            self.require_average()
        state = self._optimizer.state(group)
        if what in state:
            return state[what]
        if not state.keys() - {AVERAGE}:
            raise ValueError(f"the optimizer has no {what} of {name} before the first step that applies its gradient")
        raise ValueError(f"{what!r} of {name} is unknown; choose master, grad, {', '.join(state)}")

    def _require_sharded(self, group: ParamGroup, name: str, what: str) -> torch.Tensor:
        shard = self._shard(group, name, what)
        if shard.shape != group.shard.shape:
            raise ValueError(f"{what!r} of {name} is one number for several parameters; only full() reads it")
        return shard

    def _scale(self, what: str) -> float:
        """What gradients are multiplied by at present."""
        loss_scale = self._optimizer.loss_scale if self._optimizer is not None else None
        return loss_scale.value if what == "grad" and loss_scale is not None else 1.0

    # -- moving --------------------------------------------------------------------------------------------------

    def _assemble(self, group: ParamGroup, member: Member, shard: torch.Tensor) -> torch.Tensor:
        """One parameter of what is sharded in fp32, whole and flat, as it lies in memory."""
        whole = shard.new_zeros(member.layout.numel)
        for at, start, numel in runs_of(group, member):
            whole[start : start + numel] = shard[at : at + numel]
        if not group.plan.replicated:
            # Every element is one rank's, and 0 on others. Summed as integers its bits survive: -0.0 would not.
            self._mesh.all_reduce(whole.view(torch.int32))
        return whole

    def _publish(self, group: ParamGroup, member: Member, whole: torch.Tensor | None) -> None:
        """A new master's way to the compute weights; ``whole``: flat, needed where the group rests FULL."""
        if group.master is None:
            raise ValueError(f"{member.name} is frozen and has no master")
        start, stop = span_of(group, member)
        group.shard[start:stop].copy_(group.master.data[start:stop])
        if whole is not None and group.resting is Level.FULL:
            flatten(member.parameter.data, member.layout).copy_(whole)
        self._weights_changed()

    def _weights_changed(self) -> None:
        """Make graphs stale and let go of gathered weights, which are the old ones."""
        self._schedule.weights_epoch += 1
        self._settle()

    def _settle(self) -> None:
        """Let go of every weight gathered beyond its resting level, unless it is held."""
        self._schedule.forget()
        for group in self._groups:
            group.abandon()


def _require_shape(name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(f"the value for {name} has shape {tuple(value.shape)}; it must have {shape}")


def _suggest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else "names are those of module.named_parameters()"
