"""When groups climb and drop in training: hooks around the modules that own them.

A *unit* is a module whose weights travel together in time: each decoder layer, and the root for everything else.
Layers climb just before they compute, forward and backward, with the next ones under way, and drop right after.
The root (embedding, head) is used at both ends of a pass, so it stays FULL from its first use to a backward's end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hybrid.config import ZeroConfig
from hybrid.parallel import DivergenceError
from hybrid.zero.agreement import Agreement
from hybrid.zero.group import ParamGroup
from hybrid.zero.level import Level, LevelError


class Unit:
    """A module and the groups that it owns."""

    def __init__(self, name: str, module: nn.Module, groups: Sequence[ParamGroup], agreement: Agreement) -> None:
        self.name, self.module, self.groups = name, module, tuple(groups)
        self.in_backward = False
        self.numel = sum(group.layout.full_offsets[-1] for group in groups if group.resting is Level.SHARD)
        self._agreement = agreement

    @property
    def live_numel(self) -> int:
        return sum(group.live_numel for group in self.groups)

    @property
    def numel_to_gather(self) -> int:
        return sum(group.numel_to_gather for group in self.groups)

    def start_full(self) -> None:
        if self.numel_to_gather:
            self._agreement.record(f"gathers {self.name}")
        for group in self.groups:
            group.start_full()

    def wait_full(self) -> None:
        self.start_full()
        try:
            for group in self.groups:
                group.wait_full()
        except RuntimeError as error:
            if isinstance(error, (LevelError, DivergenceError)):
                raise
            raise RuntimeError(f"the weights of {self.name} could not be gathered: {error}") from error

    def release(self) -> None:
        for group in self.groups:
            group.release()


class _AfterBackward(torch.autograd.Function):
    """Identity on a unit's inputs; runs ``callback`` once their gradients are known, which is after its weights'."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.callback = callback
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.callback()
        return None, *grads


class TrainingSchedule:
    """Moves units along the ladder as the module computes.

    Args:
        root: the unit of everything outside the layers.
        root_modules: where it is hooked: the model, and the base model, which is called on its own where the LM head
            is fused with the loss.
        layers: units in the order of their registration. The order in which they run is recorded in every forward, and
            prefetching follows the last one; a flip does not touch it.
    """

    def __init__(
        self,
        root: Unit,
        root_modules: Sequence[nn.Module],
        layers: Sequence[Unit],
        zero: ZeroConfig,
        agreement: Agreement,
    ) -> None:
        self.generating = False  # hooks then check levels, and move nothing
        self.weights_epoch = 0  # a graph remembers under which it was built
        self._root, self._layers, self._zero, self._agreement = root, tuple(layers), zero, agreement
        self._order = list(layers)  # as they ran in the last forward
        self._running: list[Unit] = []  # as they have run in the forward under way
        self._in_backward = False
        self._holds = 0  # blocks of `root_held`
        self._entered: list[nn.Module] = []  # root modules whose forward is under way
        self._graph_alive = False  # a forward has built a graph, so a backward will want the root soon
        self._reducing: deque[tuple[int, Sequence[ParamGroup]]] = deque()  # elements under way, oldest first
        for module in root_modules:
            module.register_forward_pre_hook(self._enter_root)
            # Also after a forward that raised, or the root would stay FULL.
            module.register_forward_hook(self._leave_root, always_call=True)
        for unit in layers:
            unit.module.register_forward_pre_hook(self._before_forward(unit), with_kwargs=True)
            unit.module.register_forward_hook(self._after_forward(unit))

    # -- root ----------------------------------------------------------------------------------------------------

    @contextmanager
    def root_held(self) -> Iterator[None]:
        """Keep the root FULL beyond the end of a forward, for a head that is applied from outside."""
        if not self._holds:
            self._entered.clear()  # left over from a forward that was interrupted, after which no hook runs
        self._hold_root()
        self._holds += 1
        try:
            yield
        finally:
            self._holds = max(0, self._holds - 1)  # an interrupted backward or step has reset it
            self._let_go_root()

    def watch_root(self, *outputs: Any) -> None:
        """Tell the schedule of outputs that were computed with the root's weights outside a hooked forward."""
        self._watch(self._root, outputs)

    def require_training(self) -> None:
        if self.generating:
            raise LevelError("training's forwards and weights are not to be had in GENERATE mode; flip to TRAIN first")

    @property
    def computing(self) -> bool:
        """Whether a forward or a backward is under way, or the root is held."""
        return bool(self._holds or self._entered or self._in_backward)

    def _hold_root(self) -> None:
        self.require_training()
        if not (self._holds or self._entered):
            self._running.clear()
            if self._zero.stage == 3:
                self._agreement.check("a forward")
        self._root.wait_full()

    def _let_go_root(self) -> None:
        if not (self._holds or self._entered):
            if len(self._running) == len(self._layers):
                self._order = list(self._running)
            if not self._graph_alive:
                self._root.release()

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        if self.generating:
            self._check_generating(self._root)
            return
        if module in self._entered:  # its last forward was interrupted
            del self._entered[self._entered.index(module) :]
        self._hold_root()
        self._entered.append(module)

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.generating and module in self._entered:
            self._watch(self._root, output)
            del self._entered[self._entered.index(module) :]
            self._let_go_root()

    # -- layers --------------------------------------------------------------------------------------------------

    @property
    def live_numel(self) -> int:
        """Elements gathered beyond their resting level at present."""
        return sum(unit.live_numel for unit in (self._root, *self._layers))

    def _following(self, unit: Unit, step: int) -> list[Unit]:
        """The units that will run after this one, in the forward's direction (1) or the backward's (-1)."""
        if unit is self._root:
            return self._order[::step]
        at = self._order.index(unit) if unit in self._order else -1
        return [] if at < 0 else self._order[at + 1 :] if step > 0 else self._order[:at][::-1]

    def _elements_after(self, unit: Unit, step: int) -> float:
        """Elements of the layers that will run after this one; infinitely many where that is not known."""
        if unit is not self._root and unit not in self._order:
            return math.inf
        return sum(other.numel for other in self._following(unit, step))

    def _climb(self, unit: Unit, step: int) -> None:
        """Bring a unit to FULL, and start on those that come next as far as the settings allow."""
        following = self._following(unit, step)
        self._make_room(unit, following)
        unit.wait_full()
        ahead, live = 0, self.live_numel
        for number, neighbour in enumerate(following):
            ahead += neighbour.numel
            live += neighbour.numel_to_gather
            beyond = number > 0 and ahead > self._zero.prefetch_bucket_size
            if beyond or not self._zero.prefetch_bucket_size or live > self._zero.max_live_parameters:
                break
            neighbour.start_full()

    def _make_room(self, unit: Unit, following: Sequence[Unit]) -> None:
        """Let go of layers that were kept for reuse, the latest to be used first, until this one fits."""
        if not self._zero.max_reuse_distance:
            return
        candidates = [other for other in self._layers if other is not unit and not other.in_backward]
        candidates.sort(key=lambda other: following.index(other) if other in following else len(self._layers))
        while candidates and self.live_numel + unit.numel_to_gather > self._zero.max_live_parameters:
            candidates.pop().release()

    def _release(self, unit: Unit, elements_until_reuse: float) -> None:
        keeps = unit is not self._root and elements_until_reuse <= self._zero.max_reuse_distance
        if not keeps or self.live_numel > self._zero.max_live_parameters:
            unit.release()

    def _before_forward(self, unit: Unit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.generating:
                self._check_generating(unit)
                return None
            if unit.in_backward:  # an activation checkpoint recomputes, and the order is the backward's
                unit.wait_full()
            else:
                self._running.append(unit)
                self._climb(unit, +1)
            if not torch.is_grad_enabled():
                return None
            leaves, spec = tree_flatten((args, kwargs))
            chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if not chosen:
                return None
            passed = _AfterBackward.apply(lambda: self._finish_unit(unit), *(leaves[i] for i in chosen))
            for i, tensor in zip(chosen, passed, strict=True):
                leaves[i] = tensor
            return tree_unflatten(leaves, spec)

        return hook

    def _after_forward(self, unit: Unit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.generating or unit.in_backward:
                return
            self._watch(unit, output)
            after = self._elements_after(unit, +1)
            if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(output)):
                until_reuse = 2 * after  # the later layers' forward and backward
            else:
                until_reuse = sum(other.numel for other in self._layers) - unit.numel
            self._release(unit, until_reuse)

        return hook

    # -- backward ------------------------------------------------------------------------------------------------

    def _watch(self, unit: Unit, outputs: Any) -> None:
        """Have the unit climb when a backward reaches one of its outputs."""
        epoch = self.weights_epoch

        def before_backward(grad: torch.Tensor) -> None:
            if not self._in_backward:
                raise LevelError("call backward(loss) of the engine or model instead of loss.backward()")
            if epoch != self.weights_epoch:
                raise LevelError("a step has changed the weights since this loss was computed; compute it again")
            if not unit.in_backward:
                unit.in_backward = True
                self._climb(unit, -1)

        for tensor in _tensors(outputs):
            if tensor.requires_grad:
                self._graph_alive = True
                tensor.register_hook(before_backward)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around autograd's backward; at its end every unit is settled that autograd left open."""
        if self.generating:
            raise LevelError("there is no backward in GENERATE mode; flip to TRAIN first")
        if self._zero.stage >= 2:
            self._agreement.check("a backward")
        self._in_backward = True
        try:
            yield
            self._graph_alive = False
            for unit in (*self._layers, self._root):  # such as a first layer whose input needs no gradient
                self._finish_unit(unit)
            self._wait_reductions(0)
        finally:
            self._in_backward = False

    def _finish_unit(self, unit: Unit) -> None:
        unit.in_backward = False
        reduced = 0
        for group in unit.groups:
            numel = group.end_backward(self._zero.stage >= 2)
            if numel:
                self._agreement.record(f"reduces {group.name}")
            reduced += numel
        if reduced:
            self._reducing.append((reduced, unit.groups))
            self._wait_reductions(1 if self._zero.overlap_comm else 0)
        self._release(unit, 2 * self._elements_after(unit, -1))

    def _wait_reductions(self, keep: int) -> None:
        """Finish reductions, oldest first, down to the bucket's size, but not the newest ``keep``."""
        bucket = self._zero.reduce_bucket_size if keep else 0
        while len(self._reducing) > keep and sum(numel for numel, _ in self._reducing) > bucket:
            for group in self._reducing.popleft()[1]:
                group.finish_reduction()

    def forget(self) -> None:
        """Forwards and backwards so far are over, however they ended."""
        self._graph_alive, self._holds = False, 0
        self._entered.clear()
        self._reducing.clear()
        for unit in (*self._layers, self._root):
            unit.in_backward = False

    # -- generation ----------------------------------------------------------------------------------------------

    def _check_generating(self, unit: Unit) -> None:
        for group in unit.groups:
            if group.level is not Level.SLICE:
                raise LevelError(
                    f"{group.members[0].name} is at {group.level.name} in GENERATE mode, where a forward needs SLICE; "
                    "enter the mode with engine.generate_mode()"
                )


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in a forward's output, transformers' ModelOutput included."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return [tensor for item in output for tensor in _tensors(item)]
    return []
