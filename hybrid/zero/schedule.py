"""When groups climb and drop in training: hooks around the modules that own them.

A *unit* is a module whose weights travel together in time: each decoder layer, and the root for everything else.
Layers climb just before they compute, forward and backward, with the next ones under way, and drop right after.
The root (embedding, head) is used at both ends of a pass, so it stays FULL from its first use to a backward's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hybrid.zero.group import ParamGroup
from hybrid.zero.level import Level, LevelError


class Unit:
    """A module and the groups that it owns."""

    def __init__(self, name: str, module: nn.Module, groups: Sequence[ParamGroup]) -> None:
        self.name, self.module, self.groups = name, module, tuple(groups)
        self.in_backward = False

    def start_full(self) -> None:
        for group in self.groups:
            group.start_full()

    def wait_full(self) -> None:
        for group in self.groups:
            group.wait_full()

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
        layers: units in the order of their forward.
        prefetch: how many units ahead a gather is started.
        reduce_in_backward: reduce a unit's gradients as soon as its backward is done (stages 2 and 3).
    """

    def __init__(
        self,
        root: Unit,
        root_modules: Sequence[nn.Module],
        layers: Sequence[Unit],
        prefetch: int,
        reduce_in_backward: bool,
    ) -> None:
        self.generating = False  # hooks then check levels, and move nothing
        self.weights_epoch = 0  # a graph remembers under which it was built
        self._root, self._layers, self._prefetch = root, tuple(layers), prefetch
        self._reduce_in_backward = reduce_in_backward
        self._in_backward = False
        self._depth = 0  # forwards and holds that are using the root now
        self._graph_alive = False  # a forward has built a graph, so a backward will want the root soon
        for module in root_modules:
            module.register_forward_pre_hook(self._enter_root)
            # Also after a forward that raised, or the root would stay FULL.
            module.register_forward_hook(self._leave_root, always_call=True)
        for index, unit in enumerate(layers):
            unit.module.register_forward_pre_hook(self._before_forward(index, unit), with_kwargs=True)
            unit.module.register_forward_hook(self._after_forward(index, unit))

    # -- root ----------------------------------------------------------------------------------------------------

    @contextmanager
    def root_held(self) -> Iterator[None]:
        """Keep the root FULL beyond the end of a forward, for a head that is applied from outside."""
        self._hold_root()
        try:
            yield
        finally:
            self._let_go_root()

    def watch_root(self, *outputs: Any) -> None:
        """Tell the schedule of outputs that were computed with the root's weights outside a hooked forward."""
        self._watch(self._root, len(self._layers), outputs)

    def _hold_root(self) -> None:
        if self.generating:
            raise LevelError("training's forwards and weights are not to be had in GENERATE mode; flip to TRAIN first")
        self._depth += 1
        self._root.wait_full()

    def _let_go_root(self) -> None:
        self._depth = max(0, self._depth - 1)  # an interrupted backward or step has reset it
        if self._depth == 0 and not self._graph_alive:
            self._root.release()

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        if self.generating:
            self._check_generating(self._root)
        else:
            self._hold_root()

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.generating:
            self._watch(self._root, len(self._layers), output)
            self._let_go_root()

    # -- layers --------------------------------------------------------------------------------------------------

    def _start_ahead(self, index: int, step: int) -> None:
        for ahead in range(1, self._prefetch + 1):
            neighbour = index + step * ahead
            if 0 <= neighbour < len(self._layers):
                self._layers[neighbour].start_full()

    def _before_forward(self, index: int, unit: Unit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.generating:
                self._check_generating(unit)
                return None
            unit.wait_full()
            if not unit.in_backward:  # else an activation checkpoint recomputes, and the order is the backward's
                self._start_ahead(index, +1)
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

    def _after_forward(self, index: int, unit: Unit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self.generating and not unit.in_backward:
                self._watch(unit, index, output)
                unit.release()

        return hook

    # -- backward ------------------------------------------------------------------------------------------------

    def _watch(self, unit: Unit, index: int, outputs: Any) -> None:
        """Have the unit climb, and its parameters get gradients, when a backward reaches one of its outputs."""
        epoch = self.weights_epoch

        def before_backward(grad: torch.Tensor) -> None:
            if not self._in_backward:
                raise LevelError("call backward(loss) of the engine or model instead of loss.backward()")
            if epoch != self.weights_epoch:
                raise LevelError("a step has changed the weights since this loss was computed; compute it again")
            if not unit.in_backward:
                unit.in_backward = True
                unit.wait_full()
                self._start_ahead(index, -1)
                for group in unit.groups:
                    group.begin_backward()

        for tensor in _tensors(outputs):
            if tensor.requires_grad:
                self._graph_alive = True
                tensor.register_hook(before_backward)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around autograd's backward; at its end every unit is settled that autograd left open."""
        if self.generating:
            raise LevelError("there is no backward in GENERATE mode; flip to TRAIN first")
        self._in_backward = True
        try:
            yield
            self._graph_alive = False
            for unit in (*self._layers, self._root):  # such as a first layer whose input needs no gradient
                self._finish_unit(unit)
        finally:
            self._in_backward = False

    def _finish_unit(self, unit: Unit) -> None:
        unit.in_backward = False
        for group in unit.groups:
            group.end_backward(self._reduce_in_backward)
        unit.release()

    def forget(self) -> None:
        """Forwards and backwards so far are over, however they ended."""
        self._graph_alive, self._depth = False, 0
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
