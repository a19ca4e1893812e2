"""The collectives of tensor-parallel generation, applied from outside the model as hooks.

Row-parallel projections yield partial sums, the embedding yields rows of its own stretch of the vocabulary, and the
LM head yields its own stretch of the logits. The hooks are installed once and act in generation alone; with a tensor
group of one rank there are none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybrid.layout import split_units
from hybrid.models.plans import ModelPlan
from hybrid.parallel import ParallelMesh


class TensorParallelHooks:
    """Completes the outputs of sliced modules over the tensor group while ``enabled``."""

    def __init__(self, module: nn.Module, plan: ModelPlan, mesh: ParallelMesh) -> None:
        self._enabled = False
        self._mesh = mesh
        self._embedding: Any = None
        self._foreign_ids = torch.empty(0, dtype=torch.bool)  # of the embedding's call under way: other ranks' rows
        if mesh.tp_size == 1:
            return
        for name in plan.row_parallel:
            module.get_submodule(name).register_forward_hook(self._sum_partials)
        if plan.embedding is not None:
            self._embedding = embedding = module.get_submodule(plan.embedding)
            self._padding_idx: int | None = getattr(embedding, "padding_idx", None)
            self._vocab_bounds = split_units(plan.params[f"{plan.embedding}.weight"].shape[0], mesh.tp_size)
            embedding.register_forward_pre_hook(self._localise_ids)
            embedding.register_forward_hook(self._sum_rows)
        if plan.lm_head is not None:
            module.get_submodule(plan.lm_head).register_forward_hook(self._gather_vocabulary)

    @property
    def enabled(self) -> bool:
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        if self._embedding is not None:
            # It concerns gradients alone, but torch refuses one outside the rows present, and a slice has few.
            self._embedding.padding_idx = None if enabled else self._padding_idx

    def _sum_partials(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return self._mesh.all_reduce(output, axis="tensor") if self._enabled else None

    def _localise_ids(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if not self._enabled:
            return None
        ids, *rest = args
        start, stop = self._vocab_bounds[self._mesh.tp_rank : self._mesh.tp_rank + 2]
        self._foreign_ids = (ids < start) | (ids >= stop)
        return ((ids - start).masked_fill(self._foreign_ids, 0), *rest)

    def _sum_rows(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not self._enabled:
            return None
        output = output.masked_fill(self._foreign_ids.unsqueeze(-1), 0.0)
        return self._mesh.all_reduce(output, axis="tensor")

    def _gather_vocabulary(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not self._enabled:
            return None
        *lead, width = output.shape
        rows = output.numel() // width if width else 0
        # Vocabulary first, so that each rank's stretch is one contiguous range even where stretches are uneven.
        gathered = output.new_empty(self._vocab_bounds[-1], rows)
        start, stop = self._vocab_bounds[self._mesh.tp_rank : self._mesh.tp_rank + 2]
        gathered[start:stop] = output.reshape(rows, width).T
        self._mesh.all_gather_ranges(gathered.view(-1), [bound * rows for bound in self._vocab_bounds], "tensor")
        return gathered.T.reshape(*lead, self._vocab_bounds[-1])
