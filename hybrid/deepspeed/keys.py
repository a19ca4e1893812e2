"""DeepSpeed's keys, one a line: what it sets here, why it has no effect, or why it is refused.

The names are those of DeepSpeed's ``runtime/config.py``, ``runtime/zero/config.py`` and ``runtime/lr_schedules.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from hybrid.config import Optimizer

# -- how values are read: each returns None for what it cannot read ---------------------------------------------------


def number(value: Any) -> float | None:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """An int, or a float without a fraction: JSON's 5e8 is a float."""
    found = number(value)
    return int(value) if found is not None and found.is_integer() else None


def truth(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def pair(value: Any) -> tuple[float, float] | None:
    numbers = [number(part) for part in value] if isinstance(value, (list, tuple)) else []
    match numbers:
        case [float(first), float(second)]:
            return first, second
    return None


def dtype_name(value: Any) -> str | None:
    names = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    return names.get(str(value).lower())


def warmup_type(value: Any) -> str | None:
    return value if value in ("log", "linear") else None


def argument(value: Any) -> str | None:
    """An argument of a torch optimizer as ``OptimConfig.optim_args`` writes it."""
    return repr(value) if isinstance(value, (bool, int, float)) else None


# DeepSpeed's "Adam" decays weights as AdamW does, whichever kernel runs it; ``adam_w_mode: false`` makes it Adam.
ADAM = {"adam", "fusedadam", "cpuadam", "deepspeedcpuadam"}
SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def optimizer(value: Any) -> str | None:
    name = str(value).lower()
    if name in ADAM:
        return "adam"
    return name if name in get_args(Optimizer) else None


def scheduler(value: Any) -> str | None:
    return SCHEDULERS.get(value) if isinstance(value, str) else None


EXPECTED: dict[Callable[[Any], Any], str] = {
    number: "a number",
    whole: "a whole number",
    truth: "true or false",
    pair: "a list of two numbers",
    dtype_name: "one of fp32, fp16, bf16",
    warmup_type: "one of log, linear",
    argument: "a number, true or false",
    optimizer: f"an optimizer that is known here; choose one of {', '.join(get_args(Optimizer))}",
    scheduler: f"a scheduler that is known here; choose one of {', '.join(SCHEDULERS)}",
}


# -- what a key does here --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sets:
    """The key's value goes to ``field``, written as group.field; "auto" leaves that to whoever else sets it."""

    field: str
    read: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Ignored:
    """The key has no effect: a warning gives the reason, unless the value asks for what happens anyway."""

    reason: str = ""  # none: nothing is lost, so nothing is said
    fine: tuple[Any, ...] | None = None  # what happens anyway; None: whatever is off


@dataclass(frozen=True, slots=True)
class Refused:
    """The key asks for what is absent: an error, unless the value asks for what happens anyway."""

    reason: str
    fine: tuple[Any, ...] | None = None


Rule = Sets | Ignored | Refused
Section = Mapping[str, Any]  # a Rule or a Section for each key


def asks_for_nothing(value: Any, fine: tuple[Any, ...] | None) -> bool:
    """Whether a value is one of ``fine``, or off: false, 0, empty, none, auto, or a block in which nothing is on."""
    if value == "auto" or (fine is not None and value in fine):
        return True
    return fine is None and _is_off(value)


def _is_off(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return not value or str(value).lower() in ("none", "auto")
    switches = list(_switches(value))
    return True not in switches if switches else all(map(_is_off, value.values()))


def _switches(block: Mapping[str, Any]) -> Iterator[Any]:
    for key, value in block.items():
        if key == "enabled":
            yield value
        elif isinstance(value, Mapping):
            yield from _switches(value)


# -- the table -------------------------------------------------------------------------------------------------------

HARMLESS = Ignored()
NO_OFFLOAD = "offload is not available yet; set it to none"
NO_ZEROPP = "ZeRO++ is not available; leave it out"
NO_MICS = "MiCS is not available; leave it out"


def _offload(*tuning: str) -> Section:
    names = ("nvme_path", "pin_memory", "buffer_count", "buffer_size", "fast_init", *tuning)
    return {"device": Refused(NO_OFFLOAD), **dict.fromkeys(names, HARMLESS)}


def _both_spellings(keys: Mapping[str, Rule]) -> dict[str, Rule]:
    """DeepSpeed takes stage 3's keys with and without their prefix."""
    return {spelling: rule for key, rule in keys.items() for spelling in (key, f"stage3_{key}")}


ZERO: Section = {
    "stage": Sets("zero.stage", whole),
    "reduce_bucket_size": Sets("zero.reduce_bucket_size", whole),
    "overlap_comm": Sets("zero.overlap_comm", truth),
    "sub_group_size": Sets("zero.sub_group_size", whole),
    **_both_spellings(
        {
            "prefetch_bucket_size": Sets("zero.prefetch_bucket_size", whole),
            "param_persistence_threshold": Sets("zero.persistence_threshold", whole),
            "max_live_parameters": Sets("zero.max_live_parameters", whole),
            "max_reuse_distance": Sets("zero.max_reuse_distance", whole),
            "model_persistence_threshold": Ignored("what is kept whole depends on a parameter's own size alone"),
            "gather_16bit_weights_on_model_save": HARMLESS,  # a saved model always has whole weights
            "gather_fp16_weights_on_model_save": HARMLESS,
            "module_granularity_threshold": Ignored("a layer's weights are always gathered together"),
            "use_all_reduce_for_fetch_params": Ignored("weights are gathered by all-gather"),
            "allgather_sequential": Ignored("a layer's weights are always gathered together"),
            "partition_stream_chunk_size": Ignored("there is no zero.Init"),
        }
    ),
    "contiguous_gradients": Ignored("gradients are always contiguous", fine=(True,)),
    "allgather_bucket_size": Ignored("weights are gathered by layers", fine=()),
    "allgather_partitions": Ignored("weights are always gathered by all-gather", fine=(True,)),
    "reduce_scatter": Ignored("how gradients are reduced follows from the stage", fine=(True,)),
    "use_multi_rank_bucket_allreduce": Ignored("gradients are reduced by layers", fine=(True,)),
    "round_robin_gradients": Ignored("it serves offload, which is not available yet"),
    "ignore_unused_parameters": Ignored("unused parameters are not looked for", fine=(True,)),
    "memory_efficient_linear": Ignored("gathered weights are never kept for the backward pass", fine=(True,)),
    "load_from_fp32_weights": Ignored("a checkpoint always holds the fp32 masters", fine=(True,)),
    "override_module_apply": Ignored("a module's apply is never replaced"),
    "elastic_checkpoint": HARMLESS,  # a checkpoint loads at any world size
    "legacy_stage1": Ignored("there is one stage 1"),
    "pipeline_loading_checkpoint": Ignored("there is no pipeline"),
    "log_trace_cache_warnings": Ignored("there is no trace that could become invalid"),
    "enable_sanity_checks": Ignored("invariants are always checked"),
    "leaf_module": Ignored("a layer's weights are always gathered together"),
    "offload_param": _offload("max_in_cpu"),
    "offload_optimizer": _offload("pipeline_read", "pipeline_write", "pipeline", "ratio", "super_offload"),
    "cpu_offload": Refused("offload is not available yet; set it to false"),
    "cpu_offload_param": Refused("offload is not available yet; set it to false"),
    "cpu_offload_use_pin_memory": HARMLESS,
    "zenflow": Refused("ZenFlow is not available; leave it out", fine=({},)),
    "zero_hpz_partition_size": Refused(f"{NO_ZEROPP}, and see --zero_keep_slices", fine=(0, 1)),
    "zero_quantized_weights": Refused(NO_ZEROPP),
    "zero_quantized_nontrainable_weights": Refused(NO_ZEROPP),
    "zero_quantized_gradients": Refused(NO_ZEROPP),
    "zeropp_loco_param": Refused(NO_ZEROPP, fine=({},)),
    "mics_shard_size": Refused(NO_MICS, fine=(-1, 0)),
    "mics_hierarchical_params_gather": Refused(NO_MICS),
    "save_muon_momentum_buffer_in_memory": HARMLESS,
}

FP16: Section = {
    "enabled": Sets("fp16", truth),
    "loss_scale": Sets("optim.loss_scale", number),
    "initial_scale_power": Sets("optim.initial_scale_power", whole),
    "loss_scale_window": Sets("optim.loss_scale_window", whole),
    "hysteresis": Sets("optim.hysteresis", whole),
    "min_loss_scale": Sets("optim.min_loss_scale", number),
    "consecutive_hysteresis": Ignored("the count of overflows is reset by every step that works", fine=(True,)),
    "auto_cast": Ignored("token ids need no cast"),
    "fused_mode": HARMLESS,
    "opt_level": Ignored("it is apex's"),
    "fp16_master_weights_and_grads": Refused("masters are always fp32; set it to false"),
}

BF16: Section = {
    "enabled": Sets("bf16", truth),
    "immediate_grad_update": HARMLESS,
    "check_grad_overflow": Ignored("a gradient that is not finite shows in grad_norm"),
    "bf16_master_weights_and_grads": Refused("masters are always fp32; set it to false"),
    "bf16_optimizer_states": Refused("the optimizer's state is always fp32; set it to false"),
    # DeepSpeed-Chat writes one block for both dtypes.
    **dict.fromkeys(
        (key for key in FP16 if "scale" in key or key == "hysteresis"), Ignored("bf16 needs no loss scale")
    ),
}

OPTIMIZER: Section = {
    "type": Sets("optimizer", optimizer),
    "legacy_fusion": HARMLESS,
    "params": {
        "lr": Sets("optim.learning_rate", number),
        "betas": Sets("optim.betas", pair),
        "eps": Sets("optim.eps", number),
        "weight_decay": Sets("optim.weight_decay", number),
        "adam_w_mode": Sets("adam_w_mode", truth),
        "bias_correction": Refused("Adam's bias correction cannot be turned off", fine=(True,)),
        "max_grad_norm": Refused("set gradient_clipping instead"),
        **dict.fromkeys(
            ("torch_adam", "fused", "foreach", "capturable", "set_grad_none", "fp32_optimizer_states"), HARMLESS
        ),
        **{
            name: Sets(f"optim_args.{name}", argument)
            for name in (
                *("momentum", "dampening", "nesterov", "amsgrad", "alpha", "centered", "rho", "lambd", "t0"),
                *("lr_decay", "initial_accumulator_value", "momentum_decay", "decoupled_weight_decay"),
            )
        },
    },
}

FROM_ZERO = "the learning rate rises from 0 here; set it to 0"
SCHEDULER: Section = {
    "type": Sets("optim.lr_scheduler", scheduler),
    "params": {
        "warmup_num_steps": Sets("optim.warmup_steps", whole),
        "total_num_steps": Sets("total_steps", whole),
        "warmup_max_lr": Sets("warmup_max_lr", number),
        "warmup_type": Sets("warmup_type", warmup_type),
        "warmup_min_lr": Refused(FROM_ZERO),
        "warmup_min_ratio": Refused(FROM_ZERO),
        "cos_min_ratio": Ignored("the cosine ends at 0", fine=(0, 0.0001)),
        "last_batch_iteration": Refused("a checkpoint knows its step; leave it out", fine=(-1,)),
    },
}

HYBRID_ENGINE: Section = {
    "enabled": Ignored("one copy of the weights always serves training and generation", fine=(True,)),
    "inference_tp_size": Sets("parallel.tp_size", whole),
    "max_out_tokens": Ignored("each request says how long it may get (--max_completion_length)", fine=()),
    "release_inference_cache": Ignored("the KV cache is always given back before training", fine=(True,)),
    "pin_parameters": Ignored("generation reads the training's weights, without a copy to pin", fine=()),
    "tp_gather_partition_size": Ignored("slices are gathered by layers", fine=()),
}

IN_METRICS = "times, throughput and memory are in metrics.jsonl"
KEYS: Section = {
    "zero_optimization": ZERO,
    "hybrid_engine": HYBRID_ENGINE,
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
    "fp16": FP16,
    "bf16": BF16,
    "bfloat16": BF16,  # its older name
    "train_batch_size": Sets("train_batch_size", whole),
    "train_micro_batch_size_per_gpu": Sets("train_micro_batch_size_per_gpu", whole),
    "gradient_accumulation_steps": Sets("gradient_accumulation_steps", whole),
    "gradient_clipping": Sets("optim.max_grad_norm", number),
    "communication_data_type": Sets("communication_data_type", dtype_name),
    "data_types": {
        "grad_accum_dtype": Ignored("gradients are accumulated in fp32", fine=("fp32", None)),
        "param_dtype": Ignored("weights compute in what bf16 and fp16 say", fine=(None,)),
        "buffer_dtype": Ignored("buffers keep the dtype that the model gives them", fine=(None,)),
    },
    "prescale_gradients": Ignored("gradients are divided by global counts"),
    "gradient_predivide_factor": Ignored("gradients are divided by global counts", fine=(1,)),
    "activation_checkpointing": Ignored("it configures alone; --gradient_checkpointing turns recomputation on"),
    "steps_per_print": Ignored("metrics are written every --logging_steps", fine=(None, math.inf, "inf")),
    "wall_clock_breakdown": Ignored(IN_METRICS),
    "memory_breakdown": Ignored(IN_METRICS),
    "flops_profiler": Ignored(IN_METRICS),
    "comms_logger": Ignored("the bytes of each flip are in metrics.jsonl"),
    "timers": HARMLESS,
    "dump_state": Ignored("a run's settings are in its config.yaml"),
    "log_level": HARMLESS,
    "comms_config": HARMLESS,  # LLaMA-Factory writes these two, which DeepSpeed does not read
    "monitor_config": HARMLESS,
    "tensorboard": Ignored("set --report_to tensorboard"),
    "wandb": Ignored("set --report_to wandb"),
    "comet": Ignored("set --report_to comet_ml"),
    "csv_monitor": Ignored("metrics are in metrics.jsonl"),
    "zero_allow_untested_optimizer": HARMLESS,
    "zero_force_ds_cpu_optimizer": HARMLESS,
    "disable_allgather": Ignored("weights are always gathered by all-gather"),
    "sparse_gradients": Ignored("gradients are dense"),
    "dataloader_drop_last": Ignored("the last samples are never dropped"),
    "checkpoint": Ignored("a checkpoint is written once for all ranks and loads at any world size"),
    "aio": HARMLESS,  # it tunes offload to disk, which is refused by itself
    "compile": Ignored("models are not compiled"),
    "pipeline": Ignored("there is no pipeline parallelism"),
    "seq_parallel_communication_data_type": HARMLESS,
    "vocabulary_size": HARMLESS,
    "sequence_parallel_size": Refused("sequence parallelism is not available; set it to 1", fine=(1,)),
    "tensor_parallel": Refused("training is not tensor-parallel; for generation set hybrid_engine.inference_tp_size"),
    "expert_parallel": Refused("expert parallelism is not available; leave it out"),
    "amp": Refused("apex is not available; enable bf16 or fp16 instead"),
    "torch_autocast": Refused("autocast is not available; enable bf16 or fp16 instead"),
    "data_efficiency": Refused("data efficiency is not available; leave it out"),
    "curriculum_learning": Refused("curriculum learning is not available; leave it out"),
    "progressive_layer_drop": Refused("layers are never dropped; leave it out"),
    "eigenvalue": Refused("eigenvalues are not available; leave it out"),
    "compression_training": Refused("compression is not available; leave it out"),
    "quantize_training": Refused("quantized training is not available; leave it out"),
    "weight_quantization": Refused("quantized weights are not available; leave it out"),
    "sparse_attention": Refused("sparse attention is not available; leave it out", fine=({},)),
    "elasticity": Refused("elastic training is not available; a checkpoint loads at any world size instead"),
    "autotuning": Refused("autotuning is not available; leave it out"),
    "nebula": Refused("Nebula is not available; leave it out"),
    "graph_harvesting": Refused("graph harvesting is not available; leave it out"),
}
