"""What tensor-parallel generation adds to a model, from outside: collectives as hooks, and local numbers of heads.

Row-parallel projections yield partial sums, the embedding yields rows of its own stretch of the vocabulary, and a norm
over all heads sees the heads of its rank. The LM head yields its own stretch of the logits: the generator samples from
stretches (`TensorParallelHooks.vocab_shard`), and any other forward gets them all. The hooks are installed once and act
in generation alone; with a tensor group of one rank there are none.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid.layout import ParamLayout, split_units
from hybrid.models.attention import PagedCall, current_call
from hybrid.models.plans import ModelPlan
from hybrid.parallel import ParallelMesh
from ops.sampling_cdf import VocabShard

_CONFIG = "config."


@dataclass(frozen=True, slots=True)
class _CutNorm:
    """An RMS norm of ``size`` elements, of which a rank has some; ``counted`` on one of the ranks that share them."""

    size: int
    epsilon: float
    attribute: str
    counted: bool


class TensorParallelHooks:
    """Completes the outputs of sliced modules over the tensor group while ``enabled``."""

    def __init__(self, module: nn.Module, plan: ModelPlan, mesh: ParallelMesh) -> None:
        self._enabled = False
        self._mesh = mesh
        self._embedding: Any = None
        self._foreign_ids = torch.empty(0, dtype=torch.bool)  # of the embedding's call under way: other ranks' rows
        self._norms: dict[nn.Module, _CutNorm] = {}
        self._local: list[tuple[nn.Module, str, int]] = []  # attributes of modules, and this rank's numbers
        self._replaced: list[tuple[nn.Module, str, Any]] = []  # what they were before
        self._head_bounds: tuple[int, ...] = ()  # of the ranks' stretches of the logits; none where they are whole
        if mesh.tp_size == 1:
            return
        for name in plan.row_parallel:
            module.get_submodule(name).register_forward_hook(self._sum_partials)
        for name, attribute in plan.norms.items():
            self._install_norm(module.get_submodule(name), plan.params[f"{name}.weight"], attribute)
        for name, attributes in plan.attributes.items():
            owner = module.get_submodule(name)
            self._local += [(owner, attribute, values[mesh.tp_rank]) for attribute, values in attributes.items()]
        if plan.embedding is not None:
            self._embedding = embedding = module.get_submodule(plan.embedding)
            self._padding_idx: int | None = getattr(embedding, "padding_idx", None)
            self._vocab_bounds = split_units(plan.params[f"{plan.embedding}.weight"].shape[0], mesh.tp_size)
            embedding.register_forward_pre_hook(self._localise_ids)
            embedding.register_forward_hook(self._sum_rows)
        if plan.lm_head is not None:
            # A tied head goes by the embedding's name.
            weight = plan.params.get(f"{plan.lm_head}.weight") or plan.params[f"{plan.embedding}.weight"]
            self._head_bounds = split_units(weight.shape[0], mesh.tp_size)
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
        self._restore_attributes()
        if enabled:
            self._localise_attributes()

    @property
    def vocab_shard(self) -> VocabShard | None:
        """The stretch of the logits that this rank's paged forwards yield; None where they yield them all."""
        if not self._head_bounds:
            return None
        start, stop = self._stretch(self._head_bounds)
        return VocabShard(self._mesh.tp_rank, start, stop, self._head_bounds[-1], self._gather_rows)

    def _stretch(self, bounds: tuple[int, ...]) -> tuple[int, int]:
        return bounds[self._mesh.tp_rank], bounds[self._mesh.tp_rank + 1]

    # -- numbers of heads ----------------------------------------------------------------------------------------

    def _localise_attributes(self) -> None:
        for owner, attribute, value in self._local:
            if attribute.startswith(_CONFIG):
                # The configuration is the whole model's: this module gets one of its own.
                self._replace(owner, "config", copy.copy(owner.config))
                setattr(owner.config, attribute.removeprefix(_CONFIG), value)
            else:
                self._replace(owner, attribute, value)

    def _replace(self, owner: nn.Module, attribute: str, value: Any) -> None:
        self._replaced.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, value)

    def _restore_attributes(self) -> None:
        while self._replaced:  # last first, for an attribute that was replaced twice
            owner, attribute, value = self._replaced.pop()
            setattr(owner, attribute, value)
        for norm, cut in self._norms.items():
            setattr(norm, cut.attribute, cut.epsilon)  # a forward that failed left its tensor

    # -- norms over all heads ------------------------------------------------------------------------------------

    def _install_norm(self, norm: nn.Module, layout: ParamLayout, attribute: str) -> None:
        rank, size = self._mesh.tp_rank, self._mesh.tp_size
        # Ranks that hold the same heads are neighbours; the first of them counts their squares.
        counted = rank == 0 or layout.part_rows(rank, size) != layout.part_rows(rank - 1, size)
        self._norms[norm] = _CutNorm(layout.shape[0], getattr(norm, attribute), attribute, counted)
        norm.register_forward_pre_hook(self._complete_squares)
        norm.register_forward_hook(self._restore_epsilon)

    def _complete_squares(self, norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """Have the norm divide by the root of all heads' mean square, though it sees this rank's heads.

        It adds its epsilon to the mean square of what it sees. An epsilon with the difference of the means in it, one
        for each token, makes that the mean of all, and leaves the family's own formula and roundings to the family.
        """
        if not self._enabled:
            return
        cut = self._norms[norm]
        local = args[0].float().pow(2).mean(-1, keepdim=True)
        squares = local * args[0].shape[-1] if cut.counted else torch.zeros_like(local)
        total = self._mesh.all_reduce(squares, axis="tensor")
        setattr(norm, cut.attribute, cut.epsilon + (total / cut.size - local))

    def _restore_epsilon(self, norm: nn.Module, args: Any, output: torch.Tensor) -> None:
        if self._enabled:
            setattr(norm, self._norms[norm].attribute, self._norms[norm].epsilon)

    # -- partial sums and the vocabulary -------------------------------------------------------------------------

    def _sum_partials(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return self._mesh.all_reduce(output, axis="tensor") if self._enabled else None

    def _localise_ids(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if not self._enabled:
            return None
        ids, *rest = args
        start, stop = self._stretch(self._vocab_bounds)
        self._foreign_ids = (ids < start) | (ids >= stop)
        return ((ids - start).masked_fill(self._foreign_ids, 0), *rest)

    def _sum_rows(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not self._enabled:
            return None
        output = output.masked_fill(self._foreign_ids.unsqueeze(-1), 0.0)
        return self._mesh.all_reduce(output, axis="tensor")

    def _gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """(R, k) of each rank -> (T, R, k)."""
        gathered = tensor.new_empty(self._mesh.tp_size, *tensor.shape)
        self._mesh.all_gather(gathered.view(-1), "tensor", piece=tensor.contiguous().view(-1))
        return gathered

    def _gather_vocabulary(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not self._enabled or isinstance(current_call(), PagedCall):
            return None
        *lead, width = output.shape
        rows = output.numel() // width if width else 0
        # Vocabulary first, so that each rank's stretch is one contiguous range even where stretches are uneven.
        gathered = output.new_empty(self._head_bounds[-1], rows)
        start, stop = self._stretch(self._head_bounds)
        gathered[start:stop] = output.reshape(rows, width).T
        self._mesh.all_gather(gathered.view(-1), "tensor", bounds=[bound * rows for bound in self._head_bounds])
        return gathered.T.reshape(*lead, self._head_bounds[-1])
