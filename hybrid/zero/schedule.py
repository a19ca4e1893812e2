"""When groups climb and drop in training: hooks around the modules that own them.

A *unit* is a module whose weights travel together in time: each decoder layer, and the root for everything else.
Layers climb just before they compute, forward and backward, with the next ones under way, and drop right after.
The root (embedding, head) is used at both ends of a pass, so it stays FULL from its first use to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        root: the unit of everything outside the layers; also hooked on the base model, which is called on its own
            where the LM head is fused with the loss.
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
        self._root, self._layers, self._prefetch = root, tuple(layers), prefetch
        self._reduce_in_backward = reduce_in_backward
        self._trains = any(group.trainable for unit in (root, *layers) for group in unit.groups)
        self._depth = 0  # forwards and holds that are using the root now
        self._graph_alive = False  # a forward has built a graph whose backward will read the root's weights
        for module in root_modules:
            module.register_forward_pre_hook(self._enter_root)
            # Also after a forward that raised, or the root would stay FULL for good.
            module.register_forward_hook(self._leave_root, always_call=True)
        for index, unit in enumerate(layers):
            unit.module.register_forward_pre_hook(self._before_forward(index, unit), with_kwargs=True)
            unit.module.register_forward_hook(self._after_forward(index, unit))

    # -- root ----------------------------------------------------------------------------------------------------

    def hold_root(self) -> None:
        """Keep the root FULL until the matching `let_go_root`, beyond the end of a forward."""
        self._root.wait_full()
        self._depth += 1
        self._graph_alive |= self._trains and torch.is_grad_enabled()

    def let_go_root(self) -> None:
        self._depth -= 1
        if self._depth == 0 and not self._graph_alive:
            self._root.release()

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        if self.generating:
            self._check_generating(self._root)
        else:
            self.hold_root()

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.generating:
            self.let_go_root()

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
            passed = _AfterBackward.apply(lambda: self._finish_backward(unit), *(leaves[i] for i in chosen))
            for i, tensor in zip(chosen, passed, strict=True):
                leaves[i] = tensor
            return tree_unflatten(leaves, spec)

        return hook

    def _after_forward(self, index: int, unit: Unit) -> Callable[..., Any]:
        def before_backward(grad: torch.Tensor) -> None:
            if not unit.in_backward:
                unit.in_backward = True
                unit.wait_full()
                self._start_ahead(index, -1)
                for group in unit.groups:
                    group.begin_backward()

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.generating or unit.in_backward:
                return
            if torch.is_grad_enabled():
                for leaf in tree_flatten(output)[0]:
                    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                        leaf.register_hook(before_backward)
            unit.release()

        return hook

    def _finish_backward(self, unit: Unit) -> None:
        unit.in_backward = False
        if self._reduce_in_backward:
            for group in unit.groups:
                group.reduce_gradients()
        unit.release()

    def finish(self) -> None:
        """After a backward: settle every unit that autograd left open (a first layer whose input needs no gradient)."""
        self.forget_graph()
        for unit in (*self._layers, self._root):
            self._finish_backward(unit)

    def forget_graph(self) -> None:
        """No backward will come for the forwards so far."""
        self._graph_alive = False
        for unit in self._layers:
            unit.in_backward = False

    # -- generation ----------------------------------------------------------------------------------------------

    def _check_generating(self, unit: Unit) -> None:
        for group in unit.groups:
            if group.level is not Level.SLICE:
                raise LevelError(
                    f"{group.members[0].name} is at {group.level.name} in GENERATE mode, where a forward needs SLICE; "
                    "enter the mode with engine.generate_mode()"
                )
