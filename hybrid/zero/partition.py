"""Which parameters travel together: decided from names and shapes alone, before any tensor exists."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hybrid.config import ZeroConfig
from hybrid.layout import GroupLayout, ParamLayout
from hybrid.models.plans import ModelPlan

ROOT = "root"


class _Kind(NamedTuple):
    """What parameters of one group have in common."""

    unit: str
    rests_full: bool
    num_slices: int
    decay: bool
    trainable: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """A group of parameters of one dtype that is gathered, released and reduced together.

    ``unit`` is the module whose computation it is gathered for: a decoder layer's name, or "root" for all others.
    ``rests_full`` groups are kept whole between uses: all of them at stages 0 to 2, and the small ones at stage 3.
    ``replicated`` is stage 0, where a rank's shard is the whole group.
    """

    unit: str
    layout: GroupLayout
    dtype: torch.dtype
    trainable: bool
    decay: bool  # whether weight decay applies: to matrices, not to vectors
    rests_full: bool
    replicated: bool

    @property
    def name(self) -> str:
        first, *others = (param.name for param in self.layout.params)
        return f"{self.unit}[{first}{', ...' if others else ''}]"


def find_layers(module: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules that are gathered one at a time: the decoder layers, by name and in the order of their registration."""
    classes = set(module._no_split_modules or ())
    return {name: child for name, child in module.named_modules() if type(child).__name__ in classes}


def frozen_settings(zero: ZeroConfig) -> ZeroConfig:
    """ZeRO's settings for a model that is not trained: at every stage it rests as shards.

    At stages 0 to 2 it would be held whole all the time, for the small part of a step in which it computes.
    """
    if zero.stage == 3:
        return zero
    # What the other two keep after a use would be held as long; `ShardedModel.resident` says when it is worth it.
    return dataclasses.replace(zero, stage=3, keep_slices=False, max_reuse_distance=0)


def plan_groups(
    module: PreTrainedModel, plan: ModelPlan, zero: ZeroConfig, *, world_size: int, tp_size: int
) -> list[GroupPlan]:
    """Sort the parameters of a module, which may be on the meta device, into groups."""
    layers = find_layers(module)
    sorted_params: dict[_Kind, list[ParamLayout]] = {}
    for name, parameter in module.named_parameters():
        layout = plan.params[name]
        rests_full = (
            zero.stage < 3
            or layout.numel <= zero.persistence_threshold
            or _rests_as_shared_heads(layout, world_size, tp_size)
        )
        owner = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), ROOT)
        kind = _Kind(
            # Weights that rest FULL need not be gathered in time, so the small ones of all layers travel as one.
            unit=ROOT if rests_full and zero.stage == 3 else owner,
            rests_full=rests_full,
            num_slices=1 if rests_full else layout.num_slices(tp_size),
            decay=parameter.ndim > 1,
            trainable=parameter.requires_grad,
            dtype=parameter.dtype,
        )
        sorted_params.setdefault(kind, []).append(layout)
    replicated = zero.stage == 0
    return [
        GroupPlan(
            layout=GroupLayout(
                params=tuple(params),
                num_slices=kind.num_slices,
                num_pieces=1 if replicated else world_size // kind.num_slices,
            ),
            replicated=replicated,
            unit=kind.unit,
            dtype=kind.dtype,
            trainable=kind.trainable,
            decay=kind.decay,
            rests_full=kind.rests_full,
        )
        for kind, params in sorted_params.items()
    ]


def _rests_as_shared_heads(layout: ParamLayout, world_size: int, tp_size: int) -> bool:
    """Whether these are key/value heads, each held by several tensor ranks, that had better rest whole.

    Where ranks share heads unequally (3 heads, 4 ranks) no pieces of slices are all of one size. Where the tensor group
    is the world, a flip moves nothing at all, and would have to gather these alone.
    """
    shared = layout.axis is not None and all(
        segment.units_per_group == 1 and not segment.tiles(tp_size) for segment in layout.segments
    )
    return shared and (layout.num_slices(tp_size) == 1 or world_size == tp_size)
