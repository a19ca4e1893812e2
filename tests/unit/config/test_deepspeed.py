"""DeepSpeed's JSON: what people have is understood, and what is absent here is said by the key's path."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from hybrid.arguments import UsageError, parse_arguments
from hybrid.config import InferenceConfig, OptimConfig, ParallelConfig, PPOSettings, ZeroConfig
from hybrid.deepspeed import DeepSpeedArguments, HybridConfig, deepspeed_presets

# The example of transformers' DeepSpeed guide for ZeRO-3, without offload.
HF_AUTO: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}

# What DeepSpeed-Chat's get_train_ds_config makes for an actor in bf16.
CHAT: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    },
    "bfloat16": {"enabled": True, "loss_scale_window": 100},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "hybrid_engine": {
        "enabled": True,
        "max_out_tokens": 512,
        "inference_tp_size": 2,
        "release_inference_cache": False,
        "pin_parameters": True,
        "tp_gather_partition_size": 8,
    },
    "tensorboard": {"enabled": False, "output_path": "step3/ds_tensorboard_logs/", "job_name": "actor_tensorboard"},
}


def read(config: Any, **options: Any) -> HybridConfig:
    """Read what should cause no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return HybridConfig.from_deepspeed(config, **options)


def nested(path: str, value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for ``a.b``, with its blocks turned on and named where they need it."""
    block: Any = value
    for key in reversed(path.split(".")):
        block = {key: block}
    for name in ("fp16", "bf16"):
        if name in block:
            block[name].setdefault("enabled", True)
    if "optimizer" in block:
        block["optimizer"].setdefault("params", {}).setdefault("lr", 1e-5)
    return block


def test_the_fewest_keys_mean_what_deepspeed_means_by_them() -> None:
    config = read({"train_batch_size": 8})
    assert config == HybridConfig(
        zero=ZeroConfig(stage=0), optim=OptimConfig(max_grad_norm=0.0), dtype="fp32", train_batch_size=8
    )
    assert read({"zero_optimization": {}}).zero.stage == 0
    assert read({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}).zero == ZeroConfig(stage=2)


def test_deepspeed_chats_configuration() -> None:
    with pytest.warns(UserWarning, match="has no effect") as caught:
        config = HybridConfig.from_deepspeed(CHAT)
    assert config == HybridConfig(
        zero=ZeroConfig(
            stage=3, persistence_threshold=10_000, prefetch_bucket_size=30_000_000, max_live_parameters=30_000_000
        ),
        parallel=ParallelConfig(tp_size=2),
        dtype="bf16",
        train_batch_size=32,
        train_micro_batch_size_per_gpu=4,
    )
    assert type(config.zero.persistence_threshold) is int
    assert [str(warning.message).partition("=")[0] for warning in caught] == [
        "steps_per_print",
        "zero_optimization.memory_efficient_linear",
        "bfloat16.loss_scale_window",
        "hybrid_engine.max_out_tokens",
        "hybrid_engine.release_inference_cache",
        "hybrid_engine.pin_parameters",
        "hybrid_engine.tp_gather_partition_size",
    ]
    assert {warning.filename for warning in caught} == {__file__}  # where the caller can do something about it


def fill_as_transformers(config: dict[str, Any], args: Any, hidden_size: int, num_steps: int) -> dict[str, Any]:
    """What transformers' Trainer makes of "auto"; its class needs deepspeed only to be constructed."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    class Oracle(HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
        def __init__(self) -> None:
            self.mismatches: list[str] = []
            HfDeepSpeedConfig.__init__(self, config)

    oracle = Oracle()
    oracle.trainer_config_process(args)
    oracle.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=hidden_size)), num_steps)
    return oracle.config


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_auto_resolves_as_in_transformers(dtype: Any) -> None:
    base = HybridConfig(
        optim=OptimConfig(
            learning_rate=3e-6, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.1, max_grad_norm=0.7, warmup_steps=5
        ),
        dtype=dtype,
        train_batch_size=24,
        train_micro_batch_size_per_gpu=3,
        gradient_accumulation_steps=2,
        total_steps=50,
    )
    args = SimpleNamespace(
        world_size=4,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_grad_norm=0.7,
        learning_rate=3e-6,
        adam_beta1=0.8,
        adam_beta2=0.99,
        adam_epsilon=1e-7,
        weight_decay=0.1,
        save_on_each_node=False,
        fp16=dtype == "fp16",
        bf16=dtype == "bf16",
        fp16_full_eval=False,
        bf16_full_eval=False,
        get_warmup_steps=lambda num_steps: 5,
    )
    filled = fill_as_transformers(HF_AUTO, args, hidden_size=576, num_steps=50)
    assert '"auto"' not in json.dumps(filled)
    ours = read(HF_AUTO, base=base).resolve(hidden_size=576).check_batch(4)
    assert ours == read(filled)
    assert ours.optim is not None and ours.optim.lr_scheduler == "linear"
    assert (ours.zero.prefetch_bucket_size, ours.zero.persistence_threshold) == (298_598, 5_760)


def test_auto_is_resolved_into_new_objects() -> None:
    source, base = copy.deepcopy(HF_AUTO), HybridConfig()
    waiting = read(source, base=base)
    resolved = waiting.resolve(hidden_size=10)
    assert (source, base) == (HF_AUTO, HybridConfig())
    assert waiting.auto_sizes == ("reduce_bucket_size", "prefetch_bucket_size", "persistence_threshold")
    assert waiting.zero == ZeroConfig(stage=3, max_live_parameters=1_000_000_000, max_reuse_distance=1_000_000_000)
    assert (resolved.auto_sizes, resolved.zero.reduce_bucket_size) == ((), 100)
    assert resolved.resolve(hidden_size=20) == resolved
    assert waiting.dtype == "auto" and waiting.optim is not None and waiting.optim.betas == (0.9, 0.95)
    with pytest.raises(ValueError, match="hidden_size=0 is too small"):
        waiting.resolve(hidden_size=0)


@pytest.mark.parametrize(
    ("blocks", "base", "dtype"),
    [
        ({"fp16": {"enabled": "auto"}}, "bf16", "bf16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": False}}, "auto", "fp32"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": False}}, "fp16", "fp16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, "auto", "auto"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}, "fp16", "bf16"),
        ({"bf16": {}}, "bf16", "fp32"),
        ({}, "bf16", "fp32"),
    ],
)
def test_the_dtype(blocks: dict[str, Any], base: Any, dtype: str) -> None:
    assert read(blocks, base=HybridConfig(dtype=base)).dtype == dtype


@pytest.mark.parametrize(
    ("path", "value", "field", "expected"),
    [
        ("zero_optimization.reduce_bucket_size", 2e8, "zero.reduce_bucket_size", 200_000_000),
        ("zero_optimization.prefetch_bucket_size", 7, "zero.prefetch_bucket_size", 7),
        ("zero_optimization.stage3_prefetch_bucket_size", 7, "zero.prefetch_bucket_size", 7),
        ("zero_optimization.param_persistence_threshold", 7, "zero.persistence_threshold", 7),
        ("zero_optimization.max_live_parameters", 7, "zero.max_live_parameters", 7),
        ("zero_optimization.stage3_max_reuse_distance", 1e9, "zero.max_reuse_distance", 1_000_000_000),
        ("zero_optimization.overlap_comm", False, "zero.overlap_comm", False),
        ("communication_data_type", "fp32", "zero.reduce_dtype", "fp32"),
        ("hybrid_engine.inference_tp_size", 4, "parallel.tp_size", 4),
        ("gradient_clipping", 1, "optim.max_grad_norm", 1.0),
        ("fp16.loss_scale", 128, "optim.loss_scale", 128.0),
        ("fp16.initial_scale_power", 12, "optim.initial_scale_power", 12),
        ("fp16.min_loss_scale", 0.5, "optim.min_loss_scale", 0.5),
        ("optimizer.params.weight_decay", 0.01, "optim.weight_decay", 0.01),
        ("optimizer.type", "AdamW", "optim.betas", (0.9, 0.999)),  # DeepSpeed's and torch's
        ("optimizer.type", "Adam", "optim.optimizer", "adamw"),
        ("optimizer.type", "FusedAdam", "optim.optimizer", "adamw"),
        ("optimizer", {"type": "Adam", "params": {"lr": 1, "adam_w_mode": False}}, "optim.optimizer", "adam"),
        ("optimizer", {"type": "AdamW", "params": {"lr": 1, "adam_w_mode": False}}, "optim.optimizer", "adamw"),
        ("optimizer.type", "Adagrad", "optim.optimizer", "adagrad"),
        (
            "optimizer",
            {"type": "SGD", "params": {"lr": 1, "momentum": 0.9, "nesterov": True}},
            "optim.optim_args",
            "momentum=0.9,nesterov=True",
        ),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_type": "linear"}}, "optim.warmup_steps", 1000),
        ("scheduler.params.warmup_max_lr", 2e-5, "optim.learning_rate", 2e-5),
        ("scheduler.params.total_num_steps", 90, "total_steps", 90),
    ],
)
def test_a_key_sets_its_field(path: str, value: Any, field: str, expected: Any) -> None:
    config = read(nested(path, value))
    for name in field.split("."):
        config = getattr(config, name)
    assert config == expected


@pytest.mark.parametrize(
    ("name", "ours"),
    [("WarmupLR", "constant_with_warmup"), ("WarmupDecayLR", "linear"), ("WarmupCosineLR", "cosine")],
)
def test_schedules_by_their_names(name: str, ours: str) -> None:
    config = nested("scheduler.type", name)
    with pytest.warns(UserWarning, match=r'scheduler.params.warmup_type="log", .* rises linearly; set it to "linear"'):
        found = HybridConfig.from_deepspeed(config)
    assert found.optim is not None and found.optim.lr_scheduler == ours
    config["scheduler"]["params"] = {"warmup_num_steps": 0}
    read(config)  # there is no warmup whose shape could differ


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("zero_optimization.contiguous_gradients", False, "=false has no effect: gradients are always contiguous"),
        ("zero_optimization.allgather_bucket_size", 5e8, "has no effect: weights are gathered by layers"),
        ("zero_optimization.reduce_scatter", False, "has no effect: how gradients are reduced follows from the stage"),
        ("zero_optimization.round_robin_gradients", True, "has no effect: it serves offload"),
        ("hybrid_engine.enabled", False, "has no effect: one copy of the weights always serves"),
        ("activation_checkpointing", {"partition_activations": True}, "--gradient_checkpointing turns recomputation"),
        ("tensorboard", {"enabled": True, "job_name": "x"}, "has no effect: set --report_to tensorboard"),
        ("flops_profiler", {"enabled": True, "profile_step": 1}, "has no effect"),
        ("wall_clock_breakdown", True, "has no effect: times, throughput and memory are in metrics.jsonl"),
        ("communication_data_type", "fp16", 'communication_data_type="fp16" has no effect: gradients are summed'),
        ("data_types.grad_accum_dtype", "bf16", "has no effect: gradients are accumulated in fp32"),
        ("gradient_predivide_factor", 2.0, "has no effect"),
        ("bf16.check_grad_overflow", True, "has no effect"),
        ("optimizer", {"type": "AdamW"}, "optimizer.params.lr is not set"),
    ],
)
def test_a_key_without_effect_warns_once_with_the_reason(path: str, value: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=path) as caught:
        HybridConfig.from_deepspeed(nested(path, value) if path != "optimizer" else {path: value})
    assert len(caught) == 1
    assert str(caught[0].message).startswith(path) and message in str(caught[0].message)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zero_optimization.contiguous_gradients", True),
        ("zero_optimization.elastic_checkpoint", True),
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save", False),
        ("zero_optimization.zero_hpz_partition_size", 1),
        ("zero_optimization.mics_shard_size", -1),
        ("zero_optimization.cpu_offload", False),
        ("zero_optimization.offload_param", None),
        ("zero_optimization.offload_optimizer", {"nvme_path": "/local_nvme", "buffer_count": 4}),
        ("zero_optimization.stage3_max_live_parameters", "auto"),
        ("optimizer.params.torch_adam", True),
        ("optimizer.params.bias_correction", True),
        ("steps_per_print", float("inf")),
        ("communication_data_type", "fp32"),
        ("prescale_gradients", False),
        ("gradient_predivide_factor", 1.0),
        ("zero_allow_untested_optimizer", True),
        ("hybrid_engine", {"enabled": True, "release_inference_cache": True}),
        ("fp16", {"enabled": False, "auto_cast": True}),  # what a block that is off says besides means nothing
        ("elasticity", {"enabled": False, "max_train_batch_size": 2000}),
        ("compression_training", {"weight_quantization": {"shared_parameters": {"enabled": False}, "groups": 3}}),
        ("activation_checkpointing", {"partition_activations": False, "number_checkpoints": None}),
        ("aio", {"block_size": 1048576}),
    ],
)
def test_what_happens_anyway_is_silent(path: str, value: Any) -> None:
    read(nested(path, value))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            'offload_param.device="cpu": offload is not avail',
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device",
        ),
        ({"zero_optimization": {"cpu_offload": True}}, "zero_optimization.cpu_offload=true: offload is not available"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size=8: ZeRO++ is not available"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "ZeRO++ is not available; leave it out"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "MiCS is not available"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: stage=4 is no ZeRO stage; choose 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "three"}}, 'zero_optimization.stage="three" is not a whole number'),
        ({"zero_optimization": {"sub_group_size": 1.5}}, "zero_optimization.sub_group_size=1.5 is not a whole number"),
        ({"zero_optimization": {"overlap_comm": "yes"}}, 'overlap_comm="yes" is not true or false'),
        (
            {"zero_optimization": {"stage3_max_live_parameters": -1}},
            "zero_optimization.stage3_max_live_parameters: max",
        ),
        ({"zero_optimization": True}, "zero_optimization=true must be an object"),
        (
            {"zero_optimization": {"stge": 3}},
            "unknown key zero_optimization.stge; did you mean zero_optimization.stage?",
        ),
        ({"stage": 3}, "unknown key stage; did you mean zero_optimization.stage?"),
        (
            {"zero_optimization": {"gradient_clipping": 1}},
            "did you mean gradient_clipping, outside of zero_optimization?",
        ),
        ({"zzzz": 1}, "unknown key zzzz; it is no key of DeepSpeed's that is known here"),
        (
            {"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 2}},
            "zero_optimization.max_live_parameters=1 and zero_optimization.stage3_max_live_parameters=2 are the same",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled=true and fp16.enabled=true exclude"),
        (
            {"fp16": {"enabled": True, "hysteresis": 0}},
            "fp16.hysteresis: hysteresis=0 is too small; set it to 1 or more",
        ),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "the optimizer's state is always fp32"),
        (
            {"optimizer": {"type": "Lamb"}},
            'optimizer.type="Lamb" is not an optimizer that is known here; choose one of',
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, "choose one of adamw, adam, sgd"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, "optimizer.params.betas=0.9 is not a list of two"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1]}}}, "optimizer.params.betas: betas=(0.9, 1.0)"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "params.max_grad_norm=1: set gradient_clip"),
        ({"scheduler": {"type": "OneCycle"}}, 'scheduler.type="OneCycle" is not a scheduler that is known here'),
        ({"scheduler": {"params": {"warmup_min_lr": 1e-6}}}, "scheduler.params.warmup_min_lr=1e-06: the learning rate"),
        (
            {
                "optimizer": {"params": {"lr": 1e-5}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}},
            },
            "scheduler.params.warmup_max_lr=0.001 and optimizer.params.lr=1e-05 differ",
        ),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "apex is not available; enable bf16 or fp16 instead"),
        ({"compression_training": {"a": {"b": {"enabled": True}}}}, "compression is not available"),
        (
            {"sparse_attention": {"mode": "fixed"}},
            'sparse_attention={"mode": "fixed"}: sparse attention is not available',
        ),
        ({"train_batch_size": 0}, "train_batch_size: train_batch_size=0 is too small"),
        ({"hybrid_engine": {"inference_tp_size": 0}}, "hybrid_engine.inference_tp_size: tp_size=0 is too small"),
    ],
)
def test_what_is_absent_or_wrong_is_named_by_its_path(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        HybridConfig.from_deepspeed(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "ds.json: is not JSON: Expecting property name"),
        ('{"a": 1,}', "; comments and trailing commas are not JSON"),
        ("[1]", "ds.json: must hold one JSON object, not [1]"),
        ('{"fp16": {}, "fp16": {}}', "ds.json: fp16 is set twice in one object; set it once"),
        ('{"zero_optimization": {"stage": 9}}', "ds.json: zero_optimization.stage: stage=9 is no ZeRO stage"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        HybridConfig.from_deepspeed(tmp_path / "ds.json")
    assert message in str(caught.value)


def test_a_file_is_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(HF_AUTO))
    assert read(tmp_path / "ds.json") == read(str(tmp_path / "ds.json")) == read(HF_AUTO)
    with pytest.raises(ValueError, match=r"/nowhere.json: cannot be read: No such file or directory"):
        HybridConfig.from_deepspeed("/nowhere.json")


def test_a_model_that_is_never_trained_gets_no_optimizer_by_accident() -> None:
    base = HybridConfig(optim=None, inference=InferenceConfig(block_size=8))
    config = read({"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}, base=base)
    assert (config.optim, config.inference.block_size, config.zero.stage) == (None, 8, 3)
    assert read(nested("optimizer.type", "SGD"), base=base).optim is not None


def test_batch_sizes_complete_each_other() -> None:
    def complete(total: int | None, micro: int | None, passes: int | None) -> tuple[Any, ...]:
        given = HybridConfig(
            train_batch_size=total, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=passes
        ).check_batch(4)
        return given.train_batch_size, given.train_micro_batch_size_per_gpu, given.gradient_accumulation_steps

    assert complete(64, 8, None) == complete(64, None, 2) == complete(None, 8, 2) == complete(64, 8, 2) == (64, 8, 2)
    assert complete(64, None, None) == complete(None, 16, None) == (64, 16, 1)
    assert complete(None, None, None) == (None, None, None)
    for given, message in {
        (60, 8, 2): "train_batch_size=60 is not train_micro_batch_size_per_gpu=8 x gradient_accumulation_steps=2 x 4 "
        "ranks; set it to 64, or to auto",
        (60, 8, None): "train_batch_size=60 is no multiple of train_micro_batch_size_per_gpu=8 x 4 ranks; set it to a "
        "multiple of 32",
        (3, None, None): "train_batch_size=3 is no multiple of 4 ranks",
        (None, None, 2): "gradient_accumulation_steps=2 alone gives no batch size",
    }.items():
        with pytest.raises(ValueError) as caught:
            complete(*given)
        assert message in str(caught.value)


# -- the command line --------------------------------------------------------------------------------------------------

GROUPS = [*get_type_hints(PPOSettings).values(), DeepSpeedArguments]


def parse(line: str) -> tuple[PPOSettings, DeepSpeedArguments]:
    *configs, deepspeed = parse_arguments(GROUPS, line.split(), presets=deepspeed_presets)
    return PPOSettings(*configs), deepspeed


@pytest.fixture
def ds_json(tmp_path: Path) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(HF_AUTO | {"gradient_clipping": 0.5, "bf16": {"enabled": True}}))
    return tmp_path / "ds.json"


def test_the_json_stands_for_flags_that_are_not_set(ds_json: Path) -> None:
    for spelling in ("--deepspeed_config", "--deepspeed", "--deepspeed --deepspeed_config"):
        settings, deepspeed = parse(f"{spelling} {ds_json} --learning_rate 3e-6")
        assert settings.zero == ZeroConfig(stage=3, max_live_parameters=1_000_000_000, max_reuse_distance=1_000_000_000)
        assert settings.optim == OptimConfig(learning_rate=3e-6, max_grad_norm=0.5, lr_scheduler="linear")
        assert settings.model.dtype == "bf16"
        assert deepspeed.resolve(settings.zero, 100).persistence_threshold == 1_000
    assert parse("--deepspeed") == parse("")


def test_flags_and_yaml_win_over_the_json_and_say_so(ds_json: Path) -> None:
    ds_json.with_name("run.yaml").write_text(f"max_grad_norm: 2.0\ndeepspeed_config: {ds_json}\n")
    with pytest.warns(UserWarning, match="gives way") as caught:
        settings, deepspeed = parse(
            f"--config {ds_json.with_name('run.yaml')} --zero_stage 2 --dtype bf16 --zero_reduce_bucket_size 9"
        )
    assert (settings.optim.max_grad_norm, settings.zero.stage) == (2.0, 2)
    assert deepspeed.resolve(settings.zero, 100).reduce_bucket_size == 9
    assert [str(warning.message) for warning in caught] == [
        f"{ds_json}: zero_optimization.stage gives way to --zero_stage: 2, not 3",
        f"{ds_json}: gradient_clipping gives way to --max_grad_norm: 2.0, not 0.5",
    ]


def test_numbers_that_ppo_counts_in_another_way_warn(tmp_path: Path) -> None:
    document = {"train_batch_size": 64, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    document["scheduler"] = {"type": "WarmupLR", "params": {"total_num_steps": 9, "warmup_num_steps": 0}}
    (tmp_path / "ds.json").write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="has no effect|have no effect") as caught:
        settings, _ = parse(f"--deepspeed_config {tmp_path}/ds.json")
    assert len(caught) == 2
    assert "train_batch_size=64, gradient_accumulation_steps=2 have no effect" in str(caught[0].message)
    assert "set --prompts_per_step" in str(caught[0].message)
    assert "scheduler.params.total_num_steps=9 has no effect" in str(caught[1].message)
    assert settings.run.total_steps is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--deepspeed_config /nowhere.json", "/nowhere.json: cannot be read"),
        ("--deepspeed_config", "expected one argument"),
        ("--deepspeed a.json --deepspeed_config b.json", "to different values; set --deepspeed_config once"),
        ("--zero_auto_sizes everything", "auto_sizes='everything' is unknown; choose among reduce_bucket_size"),
        ("--zero_auto_sizes reduce_bucket_size --zero_reduce_bucket_size 3", "exclude each other; set one of them"),
    ],
)
def test_mistakes_on_the_command_line_are_named(line: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(line)
    assert message in str(caught.value)


def test_programs_without_the_flag_do_not_know_it() -> None:
    with pytest.raises(UsageError, match="unknown flag --deepspeed"):
        parse_arguments(GROUPS[:-1], ["--deepspeed", "ds.json"])
