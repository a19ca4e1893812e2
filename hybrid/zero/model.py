"""A Hugging Face module on the ladder: its forward, backward and optimizer step over shards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from hybrid.config import OptimConfig, ZeroConfig
from hybrid.models.flops import ForwardCost, forward_cost
from hybrid.models.fused_layers import fuse_layers
from hybrid.models.heads import TokenScores, token_logprobs, token_loss, token_values
from hybrid.models.loading import OpenedModel
from hybrid.models.plans import ModelPlan, whole_plan
from hybrid.models.ragged import RaggedBatch
from hybrid.models.recompute import recompute_in_backward
from hybrid.models.rope import depends_on_length
from hybrid.models.saving import ModelWriter
from hybrid.models.source import ModuleWeights, WeightSource
from hybrid.parallel import ParallelMesh
from hybrid.zero.access import StateAccess
from hybrid.zero.agreement import Agreement
from hybrid.zero.ema import AVERAGE
from hybrid.zero.group import Member, ParamGroup, reduce_gradients
from hybrid.zero.level import LevelError
from hybrid.zero.optimizer import OptimizerFactory, ShardedOptimizer, StepReport
from hybrid.zero.partition import ROOT, find_layers, frozen_settings, plan_groups
from hybrid.zero.schedule import TrainingSchedule, Unit


class ShardedModel:
    """One module whose weights, gradients and optimizer state are sharded over the world (ZeRO).

    Training is data-parallel over all N ranks: every rank calls `backward` and `step` equally often, each on its own
    tokens. Without ``optim`` (a reference or reward model) there are no masters, gradients or moments, and weights rest
    as shards at every ZeRO stage, so that every forward is collective; `resident` holds them whole while they score.

    Args:
        module: a causal language model or a sequence classifier with one label. Its parameters are on any device, the
            meta device included, and are taken over group by group; its buffers are moved as they are, so that RoPE
            tables keep their dtype.
        weights: where the parameters' values are read from, by the ranges that this rank holds; by default the module.
        plan: the tensor-parallel layout; without one the model is never sliced.
        optimizer: makes another torch optimizer than ``optim`` names, from its parameter groups. It must treat each
            element by itself, since what it is given are flat stretches of weights.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        mesh: ParallelMesh,
        *,
        zero: ZeroConfig,
        optim: OptimConfig | None = None,
        plan: ModelPlan | None = None,
        weights: WeightSource | None = None,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        self.module, self.mesh = module, mesh
        self.plan = plan or whole_plan(module)
        self._may_stay = optim is None and zero.stage < 3  # whole for a while; see `resident`
        if optim is None:
            module.requires_grad_(False)
        self.zero = zero if optim is not None else frozen_settings(zero)
        module.eval()  # dropout would make the sampled and the trained function differ
        if mesh.device.type == "cpu":
            fuse_layers(module)
        self.weights_version = 0
        self._warn_of_ignored_settings()
        self._agreement = Agreement(mesh, type(module).__name__)
        self._agreement.on_divergence = self.zero_grad
        self.groups, self.schedule = self._build(weights or ModuleWeights(module))
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                owner._buffers[name] = buffer.to(mesh.device)
        self.optimizer: ShardedOptimizer | None = None
        if optim is not None:
            self.optimizer = ShardedOptimizer(
                self.groups,
                mesh,
                optim,
                sharded=zero.stage > 0,
                sub_group_size=zero.sub_group_size,
                factory=optimizer,
            )
            self.set_schedule(None)
        self.state = StateAccess(module, self.groups, mesh, self.schedule, self._agreement, self.optimizer)

    # -- construction --------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls, opened: OpenedModel, mesh: ParallelMesh, *, zero: ZeroConfig, optim: OptimConfig | None = None
    ) -> ShardedModel:
        """Read a model's weights, by the ranges that this rank holds, and close its files; every rank calls this."""
        with closing(opened):
            return cls(opened.module, mesh, zero=zero, optim=optim, weights=opened.weights)

    def _warn_of_ignored_settings(self) -> None:
        zero, default = self.zero, ZeroConfig()
        if zero.keep_slices and (zero.stage < 3 or self.mesh.size("slice") == 1 or self.mesh.tp_size == 1):
            warnings.warn(
                "keep_slices changes nothing: it needs stage 3, several replicas and tp_size > 1", stacklevel=4
            )
        if zero.stage < 3:
            gathering = ("persistence_threshold", "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
            for name in gathering:
                if getattr(zero, name) != getattr(default, name):
                    warnings.warn(f"{name} changes nothing at ZeRO stage {zero.stage}", stacklevel=4)

    def _build(self, weights: WeightSource) -> tuple[list[ParamGroup], TrainingSchedule]:
        """Groups out of parameters, units out of groups in the order of the layers, and the hooks around those."""
        module, mesh, zero = self.module, self.mesh, self.zero
        layers = find_layers(module)
        if not layers and zero.stage == 3 and not self._may_stay:
            warnings.warn(
                f"{type(module).__name__} does not say what its layers are (_no_split_modules), so all of it is "
                "gathered at once and ZeRO stage 3 saves no memory while it computes",
                stacklevel=4,
            )
        plans = plan_groups(module, self.plan, zero, world_size=mesh.world_size, tp_size=mesh.tp_size)
        _leave_meta(module)
        parameters = dict(module.named_parameters())
        groups = [
            ParamGroup(
                plan,
                [
                    Member(param.name, parameters[param.name], param, param.name in self.plan.row_biases)
                    for param in plan.layout.params
                ],
                mesh,
                weights,
                keep_slices=zero.keep_slices,
                reduce_dtype=torch.float32 if zero.reduce_dtype == "fp32" else None,
            )
            for plan in plans
        ]
        if zero.gradient_checkpointing != "none":
            for layer in layers.values():
                recompute_in_backward(layer, zero.gradient_checkpointing)
        units = {
            name: Unit(name, owner, [group for group in groups if group.plan.unit == name], self._agreement)
            for name, owner in {ROOT: module, **layers}.items()
        }
        root = units.pop(ROOT)
        root_modules = {id(m): m for m in (module, module.base_model)}.values()
        return groups, TrainingSchedule(root, list(root_modules), list(units.values()), zero, self._agreement)

    def set_schedule(self, total_steps: int | None) -> None:
        """Set the learning-rate schedule, as far on as there have been steps; names are those of ``get_scheduler``.

        A schedule that decays needs ``total_steps``; without it there is none yet, and `step` insists.
        """
        if self.optimizer is not None:
            self.optimizer.set_schedule(total_steps, self.weights_version)

    def keep_average(self, decay: float) -> None:
        """Keep an exponential moving average of the masters from now on, in fp32 and as sharded as they are.

        It begins at what they are now, and becomes ``decay * average + (1 - decay) * master`` after every step that was
        not skipped. `save_pretrained` writes it with ``what="average"``, `state` reads it by that name, and checkpoints
        hold it. A second call with the same ``decay`` changes nothing. Every rank calls this.

        Raises:
            ValueError: ``decay`` is not in [0, 1), or another than before; or there is no optimizer.
        """
        if self.optimizer is None:
            raise ValueError("this model was built without an optimizer (optim=None), so there is nothing to average")
        self._agreement.check(f"keep_average({decay})")
        self._require_optimizer().keep_average(decay)

    @cached_property
    def forward_cost(self) -> ForwardCost:
        """What a forward takes, in floating-point operations."""
        return forward_cost(self.module, self.plan)

    # -- forward -------------------------------------------------------------------------------------------------

    @property
    def can_share_prefixes(self) -> bool:
        """Whether a token's state depends on what comes before it alone, so that sequences can share a prefix's."""
        return not depends_on_length(self.module)

    def resident(self) -> AbstractContextManager[None]:
        """``with model.resident()``: gather a frozen model's weights once for all the forwards in the block.

        They stay whole from their first use to the end of the block, and then rest as shards again. At ZeRO stage 3,
        which says that memory is scarce, layers come and go as in training and the block changes nothing; nor does it
        for a model that is trained. See `StateAccess.resident`.
        """
        return self.state.resident() if self._may_stay else nullcontext()

    def logprobs(self, batch: RaggedBatch, *, temperature: float = 1.0) -> TokenScores:
        """Log-probabilities and entropies (R,) of the scored tokens, fp32; differentiable where grad mode is on."""
        with self.schedule.root_held():
            scores = token_logprobs(self.module, batch, temperature=temperature)
            self.schedule.watch_root(scores.logprobs, scores.entropy)
        return scores

    def loss(self, batch: RaggedBatch, normalizer: float | None = None) -> torch.Tensor:
        """Cross-entropy of the scored tokens, a scalar in fp32: their mean, or their sum over ``normalizer``.

        Logits exist in chunks of rows, once: gradients by the hidden states and the head are computed with them.
        """
        with self.schedule.root_held():
            loss = token_loss(self.module, batch, normalizer=normalizer)
            self.schedule.watch_root(loss)
        return loss

    def values(self, batch: RaggedBatch) -> torch.Tensor:
        """Values (R,) fp32 of the states from which the scored tokens were chosen."""
        with self.schedule.root_held():
            values = token_values(self.module, batch)
            self.schedule.watch_root(values)
        return values

    # -- backward and step ---------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, reduction: Literal["mean", "sum"] = "mean") -> None:
        """Back-propagate one micro-batch; every rank calls this equally often.

        An exception in the middle drops the gradients accumulated so far, since part of them would be this one's.

        Args:
            loss: scalar. With ``mean`` gradients are averaged over ranks, as DDP does for a per-rank mean loss. With
                ``sum`` they are added up: for a loss that each rank has divided by a global count.
        """
        optimizer = self._require_optimizer()
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction {reduction!r} is unknown; set 'mean' or 'sum'")
        factor = optimizer.loss_scale.value if optimizer.loss_scale else 1.0
        if reduction == "mean":
            factor /= self.mesh.world_size
        try:
            with self.schedule.backward():
                (loss if factor == 1.0 else loss * factor).backward()
        except BaseException:
            self.zero_grad()
            raise

    def _require_optimizer(self) -> ShardedOptimizer:
        if self.optimizer is None:
            raise ValueError("this model was built without an optimizer (optim=None), so it has no backward or step")
        if self.optimizer.applying:
            raise RuntimeError(
                "a step was interrupted when some weights had changed and others had not; load a checkpoint, or build "
                "the model anew"
            )
        return self.optimizer

    def step(self) -> StepReport:
        """Clip by the global norm, step the optimizer on the shards, and refresh what rests FULL.

        In fp16, gradients that overflowed make every rank skip the step, and the report says so.

        Raises:
            FloatingPointError: a gradient is not finite; names a parameter, and changes no weight.
            DivergenceError: another rank is doing something else.
            ValueError: there was no backward since the last step.
        """
        optimizer = self._require_optimizer()
        self.state.require_given_back("step()")
        self._agreement.check("a step")
        optimizer.require_schedule()
        self.reduce_gradients()
        had_state = optimizer.has_state
        try:
            report = optimizer.step()
        finally:
            self.zero_grad()
        if optimizer.has_state and not had_state:
            # The state that lives from now on was allocated among buffers that are gone: what they left between is
            # given back, since the next ones will go elsewhere.
            self.mesh.empty_cache()
        if not report.skipped:
            self.weights_version += 1
            self.schedule.weights_epoch += 1
        return report

    def reduce_gradients(self) -> None:
        """Sum over the ranks the gradients that stages 0 and 1 keep whole until the step; a collective there."""
        if self.zero.stage < 2:
            reduce_gradients(self.groups, self.mesh)

    def zero_grad(self) -> None:
        """Drop all gradients, and any weights gathered beyond their resting level."""
        self.settle()
        for group in self.groups:
            group.zero_grad()
            if group.master is not None:
                group.master.grad = None

    def settle(self) -> None:
        """Let go of every weight gathered beyond its resting level; gradients stay."""
        self.schedule.forget()
        for group in self.groups:
            group.abandon()

    # -- weights -------------------------------------------------------------------------------------------------

    def gathered(
        self, names: str | Sequence[str] | None = None, *, write: bool = False
    ) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """``with model.gathered(names) as tensors``: chosen parameters whole; see `StateAccess.gathered`."""
        return self.state.gathered(names, write=write)

    def optimizer_state(self) -> Iterator[dict[str, torch.Tensor]]:
        """Masters and the optimizer's state, whole, group by group; a collective.

        Keys are ``NAME`` for a parameter's master and ``NAME#KEY`` for each entry of its state.
        """
        if self.optimizer is None:
            return
        for group in self.groups:
            if group.master is None:
                continue
            tensors = group.gather_whole(group.master.data)
            for key, value in self.optimizer.state(group).items():
                if value.shape == group.master.shape:
                    whole = group.gather_whole(value)
                else:  # the step's count
                    whole = {member.name: value.clone() for member in group.members}
                tensors |= {f"{name}#{key}": tensor for name, tensor in whole.items()}
            yield tensors

    def load_optimizer_state(self, tensors: Mapping[str, torch.Tensor], weights_version: int) -> None:
        """Restore what `optimizer_state` yielded, whatever the sharding it came from; every rank calls this.

        An average of the weights that is kept and not among ``tensors`` begins at the masters; one that is among them
        and not kept is left out. Either is warned of.

        Raises:
            ValueError: a tensor has another shape than the parameter.
        """
        if self.schedule.generating:
            raise LevelError("weights cannot be loaded in GENERATE mode; flip to TRAIN first")
        if self.optimizer is not None:
            self.optimizer.applying = False  # all of what an interrupted step left is replaced
        optimizer = self._require_optimizer()
        self.state.require_given_back("load_optimizer_state()")
        self.zero_grad()
        found: dict[str, list[str]] = {}
        for name in tensors:
            parameter, separator, key = name.partition("#")
            if separator:
                found.setdefault(parameter, []).append(key)
        self._warn_of_unmatched_average(any(AVERAGE in keys for keys in found.values()))
        for group in self.groups:
            if group.master is None:
                continue
            masters = {member.name: tensors[member.name] for member in group.members}
            for member in group.members:
                shape = tuple(masters[member.name].shape)
                if shape != member.layout.shape:
                    raise ValueError(
                        f"the checkpoint's {member.name} has shape {shape} and the model's {member.layout.shape}; "
                        "resume with the model that was saved"
                    )
            group.master.data.copy_(group.cut_shard(masters))
            optimizer.clear_state(group)
            # None where it was saved before the group had had a gradient.
            for key in sorted({key for member in group.members for key in found.get(member.name, ())}):
                if key == AVERAGE and optimizer.average is None:
                    continue
                whole = {member.name: tensors[f"{member.name}#{key}"] for member in group.members}
                first = whole[group.members[0].name]
                is_moment = first.shape == group.members[0].layout.shape
                optimizer.set_state(group, key, group.cut_shard(whole) if is_moment else first)
            group.write_back()
        self.weights_version = weights_version
        self.schedule.weights_epoch += 1
        if optimizer.scheduler is not None:
            self.set_schedule(optimizer.total_steps)

    def _warn_of_unmatched_average(self, is_saved: bool) -> None:
        is_kept = self.optimizer is not None and self.optimizer.average is not None
        if is_kept and not is_saved:
            warnings.warn(
                "the checkpoint holds no average of the weights; the one that is kept begins at the weights loaded",
                stacklevel=3,
            )
        if is_saved and not is_kept:
            warnings.warn(
                "the checkpoint holds an average of the weights, which is left out, since this model keeps none; call "
                "keep_average(decay) before loading to go on with it",
                stacklevel=3,
            )

    def save_pretrained(
        self,
        directory: str | Path,
        tokenizer: Any = None,
        *,
        what: Literal["weights", "average"] = "weights",
        max_shard_bytes: int = 2**30,
    ) -> None:
        """Write a Hugging Face model directory; every rank calls this, the first one writes.

        Weights pass by one at a time, in either mode, and the first rank holds those of one file at most.

        Args:
            what: "average" for the one that `keep_average` keeps, in the dtypes of the weights.

        Raises:
            ValueError: ``what`` is unknown, or no average is kept.
        """
        if what not in ("weights", "average"):
            raise ValueError(f"what={what!r} cannot be saved as a model; choose weights or average")
        if what == "average":
            self.state.require_average()
        writer = ModelWriter(directory, self.module, max_shard_bytes=max_shard_bytes) if self.mesh.is_main else None
        with writer or nullcontext():  # an exception discards what was written so far
            for name, weight in self.state.stream(what, cpu=False, rank0_only=True):
                if writer is not None:
                    writer.add(name, weight.to(self.module.get_parameter(name).dtype))
        if self.mesh.is_main and tokenizer is not None:
            tokenizer.save_pretrained(directory)
        self.mesh.barrier()


def _leave_meta(module: nn.Module) -> None:
    """Replace parameters on the meta device, whose data cannot be set, by empty ones; tied ones stay one."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in replaced:
                replaced[parameter] = nn.Parameter(
                    torch.empty(0, dtype=parameter.dtype), requires_grad=parameter.requires_grad
                )
            owner._parameters[name] = replaced[parameter]
