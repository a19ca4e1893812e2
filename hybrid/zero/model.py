"""A Hugging Face module on the ladder: its forward, backward and optimizer step over shards."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, get_scheduler

from hybrid.config import OptimConfig, ZeroConfig
from hybrid.models.heads import TokenScores, token_logprobs, token_values
from hybrid.models.plans import ModelPlan, whole_plan
from hybrid.models.ragged import RaggedBatch
from hybrid.parallel import ParallelMesh
from hybrid.zero.group import Member, ParamGroup
from hybrid.zero.level import Level, LevelError
from hybrid.zero.schedule import TrainingSchedule, Unit


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did. ``grad_norm`` is the global one, before clipping."""

    grad_norm: float
    lr: float


class ShardedModel:
    """One module whose weights, gradients and optimizer state are sharded over the world (ZeRO).

    Training is data-parallel over all N ranks: every rank calls `backward` and `step` equally often, each on its own
    tokens. Without ``optim`` (a reference or reward model) there are no masters, gradients or moments.

    Args:
        module: a causal language model or a sequence classifier with one label, whole, on any device. Its parameters
            are taken over group by group, and its buffers moved as they are: RoPE tables keep their dtype.
        plan: the tensor-parallel layout; without one the model is never sliced.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        mesh: ParallelMesh,
        *,
        zero: ZeroConfig,
        optim: OptimConfig | None = None,
        plan: ModelPlan | None = None,
    ) -> None:
        self.module, self.mesh, self.zero, self.optim_config = module, mesh, zero, optim
        self.plan = plan or whole_plan(module)
        if optim is None:
            module.requires_grad_(False)
        module.eval()  # dropout would make the sampled and the trained function differ
        self.weights_version = 0
        self._total_steps: int | None = None
        self._warn_of_ignored_settings()
        self.groups, root, layers = self._build_units()
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                owner._buffers[name] = buffer.to(mesh.device)
        root_modules = {id(m): m for m in (module, module.base_model)}.values()
        self.schedule = TrainingSchedule(root, list(root_modules), layers, zero.prefetch_groups, zero.stage >= 2)
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        if optim is not None:
            self.optimizer = self._make_optimizer(optim)
            self.set_schedule(None)

    # -- construction --------------------------------------------------------------------------------------------

    def _warn_of_ignored_settings(self) -> None:
        zero, default = self.zero, ZeroConfig()
        if zero.keep_slices and (zero.stage < 3 or self.mesh.size("slice") == 1 or self.mesh.tp_size == 1):
            warnings.warn(
                "keep_slices changes nothing: it needs stage 3, several replicas and tp_size > 1", stacklevel=3
            )
        if zero.stage < 3 and zero.persistence_threshold != default.persistence_threshold:
            warnings.warn(f"persistence_threshold changes nothing at ZeRO stage {zero.stage}", stacklevel=3)

    def _build_units(self) -> tuple[list[ParamGroup], Unit, list[Unit]]:
        """Sort the parameters into groups by the unit that owns them, and units into the order of the forward."""
        layer_classes = set(self.module._no_split_modules or ())
        layers = [(name, m) for name, m in self.module.named_modules() if type(m).__name__ in layer_classes]
        if not layers and self.zero.stage == 3:
            warnings.warn(
                f"{type(self.module).__name__} does not say what its layers are (_no_split_modules), so all of it is "
                "gathered at once and ZeRO stage 3 saves no memory while it computes",
                stacklevel=3,
            )
        sorted_members: dict[tuple[Any, ...], list[Member]] = {}
        for name, parameter in self.module.named_parameters():
            layout = self.plan.params[name]
            owner = next((prefix for prefix, _ in layers if name.startswith(f"{prefix}.")), "")
            persistent = self.zero.stage < 3 or layout.numel <= self.zero.persistence_threshold
            sliced = not persistent and self.mesh.tp_size > 1 and layout.axis is not None
            # Weights that rest FULL need not be gathered in time, so the small ones of all layers travel as one.
            home = "persistent" if persistent and self.zero.stage == 3 else owner
            key = (home, persistent, sliced, parameter.ndim > 1, parameter.requires_grad, parameter.dtype)
            member = Member(name, parameter, layout, added_once=name in self.plan.row_biases)
            sorted_members.setdefault(key, []).append(member)
        by_home: dict[str, list[ParamGroup]] = {}
        groups = []
        for (home, persistent, sliced, decay, *_), members in sorted_members.items():
            group = ParamGroup(
                f"{home or 'root'}[{members[0].name}{', ...' if len(members) > 1 else ''}]",
                members,
                self.mesh,
                sliced=sliced,
                resting=Level.FULL if persistent else Level.SHARD,
                replicated=self.zero.stage == 0,
                decay=decay,
                keep_slices=self.zero.keep_slices,
            )
            by_home.setdefault(home, []).append(group)
            groups.append(group)
        root = Unit("root", self.module, by_home.get("", []) + by_home.get("persistent", []))
        return groups, root, [Unit(name, m, by_home.get(name, [])) for name, m in layers]

    def _make_optimizer(self, optim: OptimConfig) -> torch.optim.Optimizer:
        decayed = [g.master for g in self.groups if g.master is not None and g.decay]
        plain = [g.master for g in self.groups if g.master is not None and not g.decay]
        for master in decayed + plain:
            if master.dtype != torch.float32:
                raise TypeError(f"optimizer masters must be float32: {master.dtype=}")
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=optim.learning_rate,
            betas=optim.betas,
            eps=optim.eps,
            fused=True,
        )

    def set_schedule(self, total_steps: int | None) -> None:
        """Set the learning-rate schedule, as far on as there have been steps; names are those of ``get_scheduler``.

        Raises:
            ValueError: the schedule decays and ``total_steps`` is None.
        """
        if self.optimizer is None or self.optim_config is None:
            return
        self._total_steps = total_steps
        name = self.optim_config.lr_scheduler
        if total_steps is None and name not in ("constant", "constant_with_warmup"):
            self.scheduler = None  # set once the number of steps is known; `step` insists
            return
        self.scheduler = get_scheduler(name, self.optimizer, self.optim_config.warmup_steps, total_steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects the optimizer's step between, which was in another process
            for _ in range(self.weights_version):
                self.scheduler.step()

    # -- forward -------------------------------------------------------------------------------------------------

    def logprobs(self, batch: RaggedBatch, *, temperature: float = 1.0) -> TokenScores:
        """Log-probabilities and entropies (R,) of the scored tokens, fp32; differentiable where grad mode is on."""
        with self.schedule.root_held():
            scores = token_logprobs(self.module, batch, temperature=temperature)
            self.schedule.watch_root(scores.logprobs, scores.entropy)
        return scores

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
        self._require_optimizer()
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction {reduction!r} is unknown; set 'mean' or 'sum'")
        try:
            with self.schedule.backward():
                (loss / self.mesh.world_size if reduction == "mean" else loss).backward()
        except BaseException:
            self.zero_grad()
            raise

    def _require_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ValueError("this model was built without an optimizer (optim=None), so it has no backward or step")
        return self.optimizer

    def step(self) -> StepReport:
        """Clip by the global norm, step the optimizer on the shards, and refresh what rests FULL.

        Raises:
            FloatingPointError: a gradient is not finite; names a parameter, and changes no weight.
            ValueError: there was no backward since the last step.
        """
        optimizer = self._require_optimizer()
        if self.scheduler is None or self.optim_config is None:
            name = self.optim_config.lr_scheduler if self.optim_config else None
            raise ValueError(f"lr_scheduler {name!r} needs the number of steps; call set_schedule(total_steps) first")
        for group in self.groups:
            group.reduce_gradients()
        trained = [group for group in self.groups if group.grad is not None and group.master is not None]
        if not trained:
            raise ValueError("step() without a backward() since the last one has nothing to apply")
        norm = self._clip(trained, self.optim_config.max_grad_norm)
        for group in trained:
            group.master.grad = group.grad  # pyright: ignore[reportOptionalMemberAccess]
        lr = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        self.scheduler.step()
        for group in self.groups:
            group.write_back()
        self.zero_grad()
        self.weights_version += 1
        self.schedule.weights_epoch += 1
        return StepReport(grad_norm=norm, lr=lr)

    def _clip(self, groups: Sequence[ParamGroup], max_norm: float) -> float:
        norms = [
            torch.linalg.vector_norm(group.grad, dtype=torch.float64) for group in groups if group.grad is not None
        ]
        total = [sum(float(norm) ** 2 for norm in norms)]
        if self.zero.stage > 0:  # at stage 0 every rank has all of them
            total = self.mesh.reduce_scalars(total)
        norm = math.sqrt(total[0]) if total[0] >= 0 else math.nan
        if not math.isfinite(norm):
            found = (group.find_member(lambda grad: not bool(grad.isfinite().all())) for group in groups)
            mine = next((name for name in found if name is not None), None)
            names = [name for name in self.mesh.all_gather_object(mine) if name is not None]
            self.zero_grad()
            raise FloatingPointError(
                f"the gradient of {names[0] if names else 'a parameter'} is not finite ({norm=}); no weight was changed"
            )
        if max_norm > 0 and norm > max_norm:
            for group in groups:
                if group.grad is not None:
                    group.grad.mul_(max_norm / (norm + 1e-6))
        return norm

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

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter whole, in turn; a collective. A tensor is valid until the next one is asked for."""
        with self.schedule.root_held():  # which also refuses GENERATE mode
            for group in self.groups:
                group.wait_full()
                for member in group.members:
                    yield member.name, member.parameter.data
                group.release()

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
            for key, value in self.optimizer.state[group.master].items():
                if value.shape == group.master.shape:
                    whole = group.gather_whole(value)
                else:  # the step's count
                    whole = {member.name: value.clone() for member in group.members}
                tensors |= {f"{name}#{key}": tensor for name, tensor in whole.items()}
            yield tensors

    def load_optimizer_state(self, tensors: Mapping[str, torch.Tensor], weights_version: int) -> None:
        """Restore what `optimizer_state` yielded, whatever the sharding it came from; every rank calls this.

        Raises:
            ValueError: a tensor has another shape than the parameter.
        """
        optimizer = self._require_optimizer()
        if self.schedule.generating:
            raise LevelError("weights cannot be loaded in GENERATE mode; flip to TRAIN first")
        self.zero_grad()
        keys = sorted({key.partition("#")[2] for key in tensors if "#" in key})
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
            state = optimizer.state[group.master]
            for key in keys:
                whole = {member.name: tensors[f"{member.name}#{key}"] for member in group.members}
                first = whole[group.members[0].name]
                is_moment = first.shape == group.members[0].layout.shape
                # A fused optimizer wants the step's count in fp32 on the parameter's device.
                state[key] = group.cut_shard(whole) if is_moment else first.to(group.master.device, torch.float32)
            group.write_back()
        self.weights_version = weights_version
        self.schedule.weights_epoch += 1
        if self.scheduler is not None:
            self.set_schedule(self._total_steps)

    def save_pretrained(self, directory: str | Path, tokenizer: Any = None) -> None:
        """Write a Hugging Face model directory; every rank calls this, the first one writes."""
        state: dict[str, torch.Tensor] = {}
        for name, weight in self.full_parameters():
            if self.mesh.is_main:
                state[name] = weight.detach().to("cpu", copy=True).contiguous()
        if self.mesh.is_main:
            for name, buffer in self.module.state_dict().items():
                if name not in state and isinstance(buffer, torch.Tensor) and buffer.numel():
                    state[name] = buffer
            tied = getattr(self.module, "all_tied_weights_keys", None) or {}
            for name, source in tied.items():
                state.setdefault(name, state[source])
            self.module.save_pretrained(directory, state_dict=state)
            if tokenizer is not None:
                tokenizer.save_pretrained(directory)
        self.mesh.barrier()
