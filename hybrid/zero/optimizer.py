"""The optimizer over shards: masters and their average, clipping by the global norm, loss scaling, schedules."""

from __future__ import annotations

import ast
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import SchedulerType, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from hybrid.config import OptimConfig
from hybrid.parallel import ParallelMesh
from hybrid.zero.ema import AVERAGE, WeightAverage
from hybrid.zero.group import ParamGroup
from hybrid.zero.loss_scale import LossScale

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}
# These look at a whole matrix, or at all parameters at once, and would see a stretch of some matrix instead.
_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam", "Shampoo", "LAMB", "Lamb")

_NORM_STRETCH = 2**20
# What `get_scheduler` passes by itself.
_SCHEDULE_KNOWS = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did. ``grad_norm`` is the global one, before clipping.

    ``skipped``: gradients overflowed in fp16, so that no weight was changed and the loss scale went down.
    """

    grad_norm: float
    lr: float
    skipped: bool = False
    loss_scale: float = 1.0


class ShardedOptimizer:
    """A torch optimizer over the fp32 shards of trainable groups.

    Args:
        sharded: whether ranks hold different gradients (all stages but 0), so that the norm is summed over them.
        sub_group_size: elements that one call of the torch optimizer steps at most, a whole group in any case.
        factory: makes the torch optimizer from its parameter groups; None: the one that ``config`` names.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        mesh: ParallelMesh,
        config: OptimConfig,
        *,
        sharded: bool,
        sub_group_size: int,
        factory: OptimizerFactory | None = None,
    ) -> None:
        self.config, self._mesh, self._sharded, self._sub_group_size = config, mesh, sharded, sub_group_size
        self.groups = [group for group in groups if group.master is not None]
        if not self.groups:
            raise ValueError("no parameter requires a gradient, so there is nothing to optimise; pass optim=None")
        for group in self.groups:
            if _master(group).dtype != torch.float32:
                raise TypeError(f"optimizer masters must be float32: {_master(group).dtype=} of {group.name}")
        self.torch_optimizer = (factory or _factory(config))(self._parameter_groups())
        _refuse_unless_elementwise(self.torch_optimizer)
        self.loss_scale = LossScale(config) if any(group.dtype == torch.float16 for group in self.groups) else None
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        self.total_steps: int | None = None
        self.average: WeightAverage | None = None
        self.applying = False  # some masters may have been stepped and others not

    def _parameter_groups(self) -> list[dict[str, Any]]:
        decayed = [_master(group) for group in self.groups if group.plan.decay]
        plain = [_master(group) for group in self.groups if not group.plan.decay]
        kinds = ((decayed, self.config.weight_decay), (plain, 0.0))
        return [{"params": masters, "weight_decay": decay} for masters, decay in kinds if masters]

    def keep_average(self, decay: float) -> None:
        """Keep an average of the masters from now on; a second call must have the same ``decay``."""
        if self.average is None:
            self.average = WeightAverage(map(_master, self.groups), decay)
        elif self.average.decay != decay:
            raise ValueError(
                f"an average of the weights is kept with decay={self.average.decay}, and decay={decay} would be "
                "another one; set the same, or build the model anew"
            )

    # -- schedule ------------------------------------------------------------------------------------------------

    def set_schedule(self, total_steps: int | None, steps_done: int) -> None:
        """Set the learning-rate schedule, ``steps_done`` steps on; names are those of ``get_scheduler``.

        A schedule that decays needs ``total_steps``; without it there is none yet, and `step` insists.
        """
        self.total_steps = total_steps
        name = self.config.lr_scheduler
        if total_steps is None and name not in ("constant", "constant_with_warmup"):
            self.scheduler = None
            return
        known = set(inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters) - _SCHEDULE_KNOWS
        arguments = _parse_arguments("lr_scheduler_kwargs", self.config.lr_scheduler_kwargs, known, name)
        try:
            self.scheduler = get_scheduler(name, self.torch_optimizer, self.config.warmup_steps, total_steps, arguments)
        except (TypeError, ValueError) as error:  # one that it needs is missing, or makes no sense
            raise ValueError(f"lr_scheduler {name!r}: {error}; set lr_scheduler_kwargs") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects the optimizer's step between, which was in another process
            for _ in range(steps_done):
                self.scheduler.step()

    def require_schedule(self) -> torch.optim.lr_scheduler.LRScheduler:
        if self.scheduler is None:
            raise ValueError(
                f"lr_scheduler {self.config.lr_scheduler!r} needs the number of steps; call set_schedule(total_steps) "
                "first"
            )
        return self.scheduler

    # -- step ----------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Clip, step and write the compute shards; gradients must be reduced.

        Raises:
            FloatingPointError: a gradient is not finite; names a parameter, and changes no weight. In fp16, only where
                the loss scale is as low as it may go.
            ValueError: there is no gradient, or no schedule yet.
        """
        scheduler = self.require_schedule()
        trained = [group for group in self.groups if group.grad is not None]
        if not trained:
            raise ValueError("step() without a backward() since the last one has nothing to apply")
        lr = float(self.torch_optimizer.param_groups[0]["lr"])
        scale = self.loss_scale.value if self.loss_scale else 1.0
        norm = self._norm(trained) / scale
        if not math.isfinite(norm):
            if self.loss_scale is None or not self.loss_scale.overflowed():
                self._raise_not_finite(trained, norm)
            return StepReport(grad_norm=norm, lr=lr, skipped=True, loss_scale=scale)
        limit = self.config.max_grad_norm
        factor = (limit / (norm + 1e-6) if 0 < limit < norm else 1.0) / scale
        self._apply(trained, factor)
        scheduler.step()
        if self.loss_scale is not None:
            self.loss_scale.worked()
        return StepReport(grad_norm=norm, lr=lr, loss_scale=scale)

    def _apply(self, trained: Sequence[ParamGroup], factor: float) -> None:
        """Step the masters, a sub-group at a time, each one's gradients freed right after."""
        self.applying = True
        for sub_group in self._sub_groups(trained):
            for group in sub_group:
                if factor != 1.0 and group.grad is not None:
                    group.grad.mul_(factor)
                _master(group).grad = group.grad
            self.torch_optimizer.step()
            for group in sub_group:
                _master(group).grad = group.grad = None
        for group in self.groups:
            group.write_back()
        if self.average is not None:
            self.average.update()
        self.applying = False
        _refuse_unless_elementwise(self.torch_optimizer)

    def _sub_groups(self, trained: Sequence[ParamGroup]) -> list[list[ParamGroup]]:
        sub_groups: list[list[ParamGroup]] = []
        size = 0
        for group in trained:
            size += _master(group).numel()
            if not sub_groups or size > self._sub_group_size:
                sub_groups.append([])
                size = _master(group).numel()
            sub_groups[-1].append(group)
        return sub_groups

    def _norm(self, trained: Sequence[ParamGroup]) -> float:
        """The norm of all gradients of all ranks, as they are scaled."""
        # In stretches, since each is widened for the sum.
        norms = [
            torch.linalg.vector_norm(stretch, dtype=torch.float64)
            for group in trained
            if group.grad is not None
            for stretch in group.grad.split(_NORM_STRETCH)
        ]
        total = [float(torch.stack(norms).square().sum())]
        if self._sharded:
            total = self._mesh.reduce_scalars(total)
        return math.sqrt(total[0]) if total[0] >= 0 else math.nan

    def _raise_not_finite(self, trained: Sequence[ParamGroup], norm: float) -> None:
        found = (group.find_member(lambda grad: not bool(grad.isfinite().all())) for group in trained)
        mine = next((name for name in found if name is not None), None)
        names = [name for name in self._mesh.all_gather_object(mine) if name is not None]
        raise FloatingPointError(
            f"the gradient of {names[0] if names else 'a parameter'} is not finite ({norm=}); no weight was changed"
        )

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Whether torch's optimizer has any yet: most make theirs in the first step."""
        return bool(self.torch_optimizer.state)

    def state(self, group: ParamGroup) -> Mapping[str, torch.Tensor]:
        """The optimizer's tensors for a group, the average included: those of the master's shape are sharded as it
        is."""
        state = self.torch_optimizer.state.get(_master(group), {})
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        if self.average is not None:
            tensors[AVERAGE] = self.average.of(_master(group))
        return tensors

    def set_state(self, group: ParamGroup, key: str, value: torch.Tensor) -> None:
        """Set one entry of a group's state: this rank's shard of it, or the step's count. The value is copied."""
        if key == AVERAGE and self.average is not None:
            self.average.of(_master(group)).copy_(value)
            return
        # A fused optimizer wants the step's count in fp32 on the parameter's device.
        self.torch_optimizer.state[_master(group)][key] = value.to(_master(group).device, torch.float32, copy=True)

    def clear_state(self, group: ParamGroup) -> None:
        """Forget a group's state, which the next step begins anew; an average begins at the masters as they are."""
        self.torch_optimizer.state[_master(group)].clear()
        if self.average is not None:
            self.average.restart(_master(group))


def _master(group: ParamGroup) -> torch.nn.Parameter:
    if group.master is None:
        raise ValueError(f"{group.name} is frozen and has no master weights")
    return group.master


def _factory(config: OptimConfig) -> OptimizerFactory:
    """The factory of the optimizer that a configuration names."""
    kind = _CLASSES[config.optimizer]
    known = set(inspect.signature(kind).parameters) - {"params", "self"}
    arguments: dict[str, Any] = {"lr": config.learning_rate}
    if "betas" in known:  # the others' eps means something else
        arguments |= {"betas": config.betas, "eps": config.eps}
    if "fused" in known:
        arguments["fused"] = True
    arguments |= _parse_arguments("optim_args", config.optim_args, known, config.optimizer)
    return lambda params: kind(params, **arguments)


def _parse_arguments(setting: str, text: str | None, known: set[str], owner: str) -> dict[str, Any]:
    """``name=value,name=value`` as keyword arguments of ``owner``, which knows these names."""
    arguments: dict[str, Any] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in known:
            raise ValueError(
                f"{setting}: {part.strip()!r} is no argument of {owner}; "
                + (f"write name=value with one of {', '.join(sorted(known))}" if known else "it takes none")
            )
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments


def _refuse_unless_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that would do something else to a shard than to the whole weight."""
    kinds = {cls.__name__ for cls in type(optimizer).__mro__}
    if kinds & set(_NOT_ELEMENTWISE):
        raise ValueError(
            f"{type(optimizer).__name__} looks at whole matrices, and ranks hold stretches of them; choose an "
            f"optimizer that treats each element by itself, such as {', '.join(_CLASSES)}"
        )
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps a {key} of shape {tuple(value.shape)} for a shard of "
                    f"{parameter.numel()} elements, so it is not elementwise and cannot run on shards"
                )
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dtype != torch.float32:
                raise TypeError(f"optimizer state must be float32: {value.dtype=} of {key}")
