"""What each rank will hold in each mode, before anything is allocated.

The model is built on the meta device and laid out by the code that the engine runs: the tensor-parallel plan, the
groups, and the training schedule itself, which is rehearsed on groups that count bytes instead of holding them. All
numbers are bytes unless their name says otherwise.

Counted are weights, masters, the optimizer's state, gradients, the LM head's working memory and the KV cache. See
`NOT_COUNTED` for the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hybrid.config import InferenceConfig, OptimConfig, ParallelConfig, ZeroConfig
from hybrid.inference.cache import KVCache
from hybrid.layout import ParamLayout
from hybrid.models.empty import skeleton
from hybrid.models.families import head_dim
from hybrid.models.heads import output_head
from hybrid.models.loading import DType, resolve_dtype, resolve_model
from hybrid.models.plans import ModelPlan, tensor_parallel_plan
from hybrid.models.prepacked import PackedLinears
from hybrid.zero.partition import find_layers, frozen_settings, plan_groups
from hybrid.zero.rehearsal import GroupSizes, PeakBytes, rehearse_training
from ops import cpu
from ops.logprob import CHUNK_ELEMENTS, CHUNK_ELEMENTS_IN_PLACE

NOT_COUNTED = (
    "activations, temporary tensors of autograd and of the optimizer's step, buffers of collectives, "
    "the device's context and the allocator's fragmentation"
)

_FP32 = torch.float32.itemsize
# fp32 tensors of a weight's shape that each of torch's optimizers keeps, and arguments that ask for one more.
_STATE_TENSORS = {
    "adamw": 2,
    "adam": 2,
    "sgd": 0,
    "rmsprop": 1,
    "adagrad": 1,
    "adadelta": 2,
    "adamax": 2,
    "nadam": 2,
    "radam": 2,
    "asgd": 1,
    "rprop": 2,
}
_STATE_ARGUMENTS = ("amsgrad", "momentum", "centered")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestBytes:
    """What a rank holds in TRAIN mode between steps, and keeps in GENERATE mode."""

    shards: int  # weights that are gathered for use
    whole: int  # weights that are kept whole: stages 0 to 2, the small ones at stage 3, and a world of one rank
    masters: int  # 0 where weights compute in fp32, since the shard is the master
    optimizer_state: int
    buffers: int  # the module's, such as RoPE tables

    @property
    def total(self) -> int:
        return self.shards + self.whole + self.masters + self.optimizer_state + self.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBytes:
    """What GENERATE mode adds to what rests; a flip back to TRAIN frees it all, but for zeros in place of biases."""

    received: int  # what a flip brings to the rank from others
    slices: int  # of weights, beyond the shards
    packed: int  # of weights again, as oneDNN reads them; on a CPU alone
    kv_block: int
    kv_token: int
    kv_blocks: int  # a number of blocks
    kv_pool: int
    max_tokens: int  # a number of tokens: those that the pool has room for

    @property
    def total(self) -> int:
        return self.slices + self.packed + self.kv_pool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What is held by each of the ranks that share a place in their tensor groups."""

    tp_rank: int
    ranks: tuple[int, ...]
    rest: RestBytes
    peak: PeakBytes
    head: int  # the LM head's working memory: a chunk of logits, and its weight's gradient as chunks add to it
    generate: GenerateBytes

    @property
    def train_total(self) -> int:
        """An upper bound of what is counted: the head computes before most gradients exist."""
        return self.rest.total + self.peak.together + self.head

    @property
    def generate_total(self) -> int:
        return self.rest.total + self.generate.total


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What each rank will hold in each mode. ``tensor_ranks`` has one entry for each place in a tensor group."""

    model_type: str
    num_parameters: int
    world_size: int
    tp_size: int
    zero_stage: int
    dtype: str
    tensor_ranks: tuple[RankPlan, ...]

    def of_rank(self, rank: int) -> RankPlan:
        return self.tensor_ranks[rank % self.tp_size]

    @property
    def worst(self) -> RankPlan:
        """The ranks that need the most, in whichever mode."""
        return max(self.tensor_ranks, key=lambda rank: max(rank.train_total, rank.generate_total))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, the totals included."""
        plain = asdict(self)
        for entry, rank in zip(plain["tensor_ranks"], self.tensor_ranks, strict=True):
            entry |= {"train_total": rank.train_total, "generate_total": rank.generate_total}
            for part in ("rest", "generate"):
                entry[part]["total"] = getattr(rank, part).total
        return plain | {"not_counted": NOT_COUNTED}


def memory_plan(
    model: PreTrainedConfig | str | Path,
    world_size: int,
    tp_size: int = 1,
    *,
    zero: ZeroConfig = ZeroConfig(),
    optim: OptimConfig | None = OptimConfig(),
    inference: InferenceConfig = InferenceConfig(),
    dtype: torch.dtype | DType = "auto",
    max_tokens_per_microbatch: int = 2048,
    device_memory: int | None = None,
) -> MemoryPlan:
    """Plan an engine of these settings; nothing is allocated and no weights are read.

    Args:
        model: a configuration, its file, a directory with at least a config.json, a Hub id or an alias.
        optim: None for a model that only generates and scores.
        max_tokens_per_microbatch: tokens whose log-probs are computed at once; bounds the logits.
        device_memory: bytes of one device, from which ``kv_blocks="auto"`` takes its part of what is free. Without it
            "auto" is ``kv_cache_gb``, as on a CPU.

    Raises:
        ValueError: there is no such model, or it cannot be laid out on this grid; the message says what to set.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} is too small; set it to 1 or more")
    ParallelConfig(tp_size=tp_size).check_world(world_size)
    module = skeleton(_find_config(model), resolve_dtype(dtype))
    stage = zero.stage
    if optim is None:
        module.requires_grad_(False)
        zero = frozen_settings(zero)
    plan = tensor_parallel_plan(module, tp_size)
    groups = plan_groups(module, plan, zero, world_size=world_size, tp_size=tp_size)
    head = _head_bytes(module, max_tokens_per_microbatch, on_cpu=device_memory is None)
    packs = device_memory is None and PackedLinears.wanted(inference, groups[0].dtype, torch.device("cpu"))
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    peaks: dict[tuple[GroupSizes, ...], PeakBytes] = {}
    ranks = []
    for tp_rank in range(tp_size):
        sizes = tuple(GroupSizes.of(group, plan, tp_rank, tp_size) for group in groups)
        if sizes not in peaks:  # ranks with equal slices rehearse once
            peaks[sizes] = rehearse_training(find_layers(module), sizes, zero, world_size)
        ranks.append(
            RankPlan(
                tp_rank=tp_rank,
                ranks=tuple(range(tp_rank, world_size, tp_size)),
                rest=_rest_bytes(sizes, optim, buffers),
                peak=peaks[sizes],
                head=head,
                generate=replace(
                    _generate_bytes(sizes, module, plan.num_local_kv_heads(tp_rank), inference),
                    packed=_packed_bytes(module, plan, tp_rank, tp_size) if packs else 0,
                ),
            )
        )
    return MemoryPlan(
        model_type=module.config.model_type,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        world_size=world_size,
        tp_size=tp_size,
        zero_stage=stage,
        dtype=str(groups[0].dtype).removeprefix("torch."),
        tensor_ranks=_with_pools(ranks, inference, device_memory),
    )


# -- the model ---------------------------------------------------------------------------------------------------


def _find_config(model: PreTrainedConfig | str | Path) -> PreTrainedConfig:
    if isinstance(model, PreTrainedConfig):
        return copy.deepcopy(model)
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        try:
            return resolve_model(str(model)).config
        except ValueError as error:
            hint = "a memory plan needs no more of it than its config.json"
            raise ValueError(f"{str(error).rstrip('.')}; {hint}") from error
    try:
        return AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{file} is no configuration of a model: {str(error).splitlines()[0]}") from error


def _head_bytes(module: PreTrainedModel, max_tokens: int, *, on_cpu: bool) -> int:
    """What `ops.logprob` works with: a chunk of logits and one of their probabilities, in fp32; in a backward also the
    chunk's gradient in the compute dtype, and the weight's gradient, summed in fp32 and then cast. Kernels on a CPU
    work in the memory of plain logits, and the first chunk of them is kept for the backward."""
    head = output_head(module)
    weight = head.weight
    trains, size = weight.requires_grad, weight.itemsize
    narrow = size if weight.dtype != torch.float32 else 0
    in_place = on_cpu and head.scale == 1 and head.softcap is None and cpu.library() is not None
    limit = max(1, (CHUNK_ELEMENTS_IN_PLACE if in_place else CHUNK_ELEMENTS) // len(weight))
    logits = min(max_tokens, limit) * len(weight)
    is_one_chunk = max_tokens <= limit
    if in_place:
        chunks = logits * size * (1 if is_one_chunk or not trains else 2)
    else:
        chunks = logits * (2 * _FP32 + (narrow if trains else 0))
    gradient = weight.numel() * (size if is_one_chunk else _FP32 + narrow)
    return chunks + (gradient if trains else 0)


# -- what is held ------------------------------------------------------------------------------------------------


def _rest_bytes(sizes: Sequence[GroupSizes], optim: OptimConfig | None, buffers: int) -> RestBytes:
    trained = [size for size in sizes if size.plan.trainable]
    return RestBytes(
        shards=sum(size.piece * size.plan.dtype.itemsize for size in sizes if not size.rests_full),
        whole=sum(size.slice * size.plan.dtype.itemsize for size in sizes if size.rests_full),
        masters=sum(size.piece * _FP32 for size in trained if size.plan.dtype != torch.float32),
        optimizer_state=sum(size.piece for size in trained) * _FP32 * _num_state_tensors(optim),
        buffers=buffers,
    )


def _num_state_tensors(optim: OptimConfig | None) -> int:
    """fp32 tensors of a weight's shape that the optimizer keeps."""
    if optim is None:
        return 0
    arguments = [part.partition("=") for part in (optim.optim_args or "").split(",")]
    values = [value.strip() for name, _, value in arguments if name.strip() in _STATE_ARGUMENTS]
    return _STATE_TENSORS[optim.optimizer] + sum(value not in ("False", "None", "0", "0.0") for value in values)


def _generate_bytes(
    sizes: Sequence[GroupSizes], module: PreTrainedModel, num_kv_heads: int, inference: InferenceConfig
) -> GenerateBytes:
    """All but the pool, whose size the ranks of a tensor group agree on."""
    config = module.config.get_text_config(decoder=True)
    if not num_kv_heads:
        raise ValueError(f"{config.model_type} has no attention heads, and generation needs a KV cache")
    shape = (num_kv_heads, head_dim(config), sizes[0].plan.dtype)
    return GenerateBytes(
        received=sum(max(0, s.slice_beyond_shard - s.piece) * s.plan.dtype.itemsize for s in sizes),
        slices=sum((s.slice_beyond_shard + s.copies) * s.plan.dtype.itemsize for s in sizes),
        packed=0,
        kv_block=KVCache.block_bytes(config.num_hidden_layers, inference.block_size, *shape),
        kv_token=KVCache.block_bytes(config.num_hidden_layers, 1, *shape),
        kv_blocks=0,
        kv_pool=0,
        max_tokens=0,
    )


def _packed_bytes(module: PreTrainedModel, plan: ModelPlan, tp_rank: int, tp_size: int) -> int:
    """The slices of all plain linear layers; oneDNN may fill some up to whole tiles."""
    layouts: dict[torch.Tensor, ParamLayout] = {
        parameter: plan.params[name] for name, parameter in module.named_parameters()
    }
    weights = [layer.weight for layer in module.modules() if type(layer) is nn.Linear]
    return sum(layouts[weight].part_numel(tp_rank, tp_size) * weight.itemsize for weight in weights)


def _with_pools(
    ranks: Sequence[RankPlan], inference: InferenceConfig, device_memory: int | None
) -> tuple[RankPlan, ...]:
    """The ranks with their KV pools: as many blocks on each as the one with the least room for them has."""
    if inference.kv_blocks != "auto":
        blocks = inference.kv_blocks
    else:
        blocks = max(
            0, min(int(_kv_budget(rank, inference, device_memory) // rank.generate.kv_block) for rank in ranks)
        )
    planned = []
    for rank in ranks:
        tokens, pool = blocks * inference.block_size, blocks * rank.generate.kv_block
        generate = replace(rank.generate, kv_blocks=blocks, kv_pool=pool, max_tokens=tokens)
        planned.append(replace(rank, generate=generate))
    return tuple(planned)


def _kv_budget(rank: RankPlan, inference: InferenceConfig, device_memory: int | None) -> float:
    if device_memory is None:
        return inference.kv_cache_gb * 2**30
    return (device_memory - rank.generate_total) * inference.kv_memory_fraction
