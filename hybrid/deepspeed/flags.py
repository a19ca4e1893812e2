"""``--deepspeed_config``: what a DeepSpeed JSON says, as the recipes' flags."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid.config import ZeroConfig, setting
from hybrid.deepspeed.config import BATCH, GROUPS, HybridConfig, apply, check_sizes, resolve_zero
from hybrid.deepspeed.reading import AUTO_SIZES, Reading, read_deepspeed


@dataclass(frozen=True, kw_only=True)
class DeepSpeedArguments:
    """DeepSpeed's configuration: its JSON instead of flags."""

    deepspeed_config: str | None = setting(
        None,
        "a DeepSpeed JSON for what no flag sets: ZeRO, optimizer, schedule, dtype, clipping, hybrid_engine; as there, "
        "what it leaves out is off (stage 0, fp32, no clipping), and auto is what the flags say",
    )
    auto_sizes: tuple[str, ...] = setting(
        (),
        f"sizes that follow from the actor's hidden size, as auto does in a DeepSpeed JSON: {', '.join(AUTO_SIZES)}",
        flag="zero_auto_sizes",
    )

    def __post_init__(self) -> None:
        check_sizes(self.auto_sizes)

    def resolve(self, zero: ZeroConfig, hidden_size: int) -> ZeroConfig:
        """A new object in which ``auto_sizes`` follow the hidden size."""
        return resolve_zero(zero, self.auto_sizes, hidden_size)


def deepspeed_presets(given: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--deepspeed_config`` says, by flags, for `parse_arguments`, which puts flags that were set above it.

    A batch in PPO is counted in prompts per step, and the schedule ends with the run, so the JSON's batch sizes and
    total steps have no flag; they warn, and so does a value that gives way to a flag.
    """
    return _presets(given, _flags("zero", "optim", "parallel"), _count_prompts)


def learning_presets(given: Mapping[str, Any]) -> dict[str, Any]:
    """`deepspeed_presets` for steps 1 and 2, whose batch is DeepSpeed's: train_batch_size is --examples_per_step.

    The micro batch and the accumulation count towards it over all ranks of WORLD_SIZE, and must agree with it. What a
    rank computes at a time is --max_tokens_per_microbatch all the same. Nothing is generated, so hybrid_engine is not
    looked at.

    Raises:
        ValueError: train_batch_size is not micro batch x accumulation x ranks.
    """
    flags = _flags("zero", "optim") | {"train_batch_size": "examples_per_step"}
    return _presets(given, flags, _count_examples)


def _flags(*groups: str) -> dict[str, str]:
    """The flag of each field that a reading may set."""
    return {"dtype": "dtype"} | {
        f"{group}.{field.name}": field.metadata.get("flag") or field.name
        for group in groups
        for field in dataclasses.fields(GROUPS[group])
    }


def _presets(
    given: Mapping[str, Any],
    flags: Mapping[str, str],
    count_batch: Callable[[Reading, Mapping[str, Any]], list[str]],
) -> dict[str, Any]:
    typed = tuple(given.get("zero_auto_sizes", ()))
    for size in typed:
        if size in AUTO_SIZES and (flag := flags[f"zero.{size}"]) in given:
            raise ValueError(f"--zero_auto_sizes {size} and --{flag} {given[flag]} exclude each other; set one of them")
    source = given.get("deepspeed_config")
    if not source:
        return {}
    reading = read_deepspeed(source, dtype=given.get("dtype", "auto"))
    apply(HybridConfig(), reading)  # says what is out of range by the key's path
    batch_notes = count_batch(reading, given)
    notes = [*reading.notes, *batch_notes, *_uncounted_steps(reading, given)]
    presets: dict[str, Any] = {
        "zero_auto_sizes": tuple(size for size in reading.auto_sizes if flags[f"zero.{size}"] not in given)
    }
    for field, value in reading.values.items():
        flag = flags.get(field)
        if flag is None:
            continue
        presets[flag] = value
        if field in reading.paths and given.get(flag, value) != value:
            notes.append(f"{reading.paths[field]} gives way to --{flag}: {given[flag]}, not {value}")
    for note in notes:
        warnings.warn(reading.say(note), stacklevel=3)
    return presets


def _count_prompts(reading: Reading, given: Mapping[str, Any]) -> list[str]:
    """Notes on batch sizes, which PPO counts in another way."""
    batch = _stated(reading, BATCH)
    if not batch:
        return []
    return [
        f"{_no_effect(batch)}: PPO counts prompts per step; set --prompts_per_step, and for memory "
        "--max_tokens_per_microbatch"
    ]


def _count_examples(reading: Reading, given: Mapping[str, Any]) -> list[str]:
    """Complete ``train_batch_size`` from the other two, and say what becomes of them."""
    # Chat's configurations have that block for every step, turned off.
    reading.notes = [note for note in reading.notes if not note.startswith("hybrid_engine.")]
    notes = []
    if reading.values.get("parallel.tp_size", 1) != 1:
        path = reading.paths["parallel.tp_size"]
        notes.append(f"{path}={reading.values['parallel.tp_size']} has no effect: nothing is generated in this step")
    total, micro, _ = BATCH
    parts = _stated(reading, BATCH[1:])
    if not parts:
        return notes
    if "examples_per_step" in given or not reading.values.keys() & {total, micro}:
        text = f"{_no_effect(parts)}: --examples_per_step counts those of all ranks and passes"
    else:
        sizes = {name: reading.values[name] for name in BATCH if name in reading.values}
        try:
            config = HybridConfig(**sizes).check_batch(int(os.environ.get("WORLD_SIZE", "1")))
        except ValueError as error:
            raise ValueError(reading.say(str(error))) from error
        reading.values[total] = config.train_batch_size
        text = f"{', '.join(parts)}: --examples_per_step is {config.train_batch_size}, over all ranks"
    return [*notes, f"{text}; for memory set --max_tokens_per_microbatch"]


def _uncounted_steps(reading: Reading, given: Mapping[str, Any]) -> list[str]:
    if "total_steps" not in reading.values or "total_steps" in given:
        return []
    return [
        f"{reading.paths['total_steps']}={reading.values['total_steps']} has no effect: the schedule ends with the "
        "run; set --total_steps"
    ]


def _stated(reading: Reading, names: tuple[str, ...]) -> list[str]:
    return [f"{name}={reading.values[name]}" for name in names if name in reading.values]


def _no_effect(parts: list[str]) -> str:
    return f"{', '.join(parts)} {'have' if len(parts) > 1 else 'has'} no effect"
