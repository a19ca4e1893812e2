"""``HybridConfig``: what an engine is made from, in one object, and how a DeepSpeed JSON fills it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hybrid.config import InferenceConfig, OptimConfig, ParallelConfig, ZeroConfig, setting
from hybrid.deepspeed.reading import AUTO_SIZES, Reading, read_deepspeed

Dtype = Literal["auto", "bf16", "fp16", "fp32"]
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check_sizes(sizes: tuple[str, ...]) -> None:
    """Raise ValueError for a name that is none of `AUTO_SIZES`."""
    unknown = [size for size in sizes if size not in AUTO_SIZES]
    if unknown:
        raise ValueError(f"auto_sizes={unknown[0]!r} is unknown; choose among {', '.join(AUTO_SIZES)}")


def resolve_zero(zero: ZeroConfig, sizes: tuple[str, ...], hidden_size: int) -> ZeroConfig:
    """A new object in which ``sizes`` follow the hidden size."""
    if hidden_size < 1:
        raise ValueError(f"hidden_size={hidden_size} is too small; set it to the model's")
    return dataclasses.replace(zero, **{size: AUTO_SIZES[size](hidden_size) for size in sizes})


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """What an engine is made from.

    ``HybridConfig.from_deepspeed("ds.json").resolve(hidden_size=model.config.hidden_size)``
    """

    zero: ZeroConfig = setting(ZeroConfig(), "what rests as shards between uses")
    optim: OptimConfig | None = setting(OptimConfig(), "the optimizer and its schedule; None: never trained")
    parallel: ParallelConfig = setting(ParallelConfig(), "the grid of ranks")
    inference: InferenceConfig = setting(InferenceConfig(), "the KV cache and its scheduler")
    dtype: Dtype = setting("auto", "what the weights compute in")
    train_batch_size: int | None = setting(None, "sequences per optimizer step, over all ranks")
    train_micro_batch_size_per_gpu: int | None = setting(None, "sequences per forward and backward pass of a rank")
    gradient_accumulation_steps: int | None = setting(None, "passes of a rank per optimizer step")
    total_steps: int | None = setting(None, "optimizer steps after which the schedule ends")
    auto_sizes: tuple[str, ...] = setting((), "sizes of ``zero`` that `resolve` works out from the hidden size")

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype={self.dtype!r} is unknown; choose one of {', '.join(get_args(Dtype))}")
        for name in (*BATCH, "total_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is too small; set it to 1 or more")
        check_sizes(self.auto_sizes)

    @classmethod
    def from_deepspeed(
        cls, source: str | Path | Mapping[str, Any], *, base: HybridConfig | None = None
    ) -> HybridConfig:
        """Read a DeepSpeed JSON, a file or a dictionary.

        Args:
            base: what "auto" stands for, as transformers takes it from its training arguments, and what keys that are
                absent leave as it is (default: every configuration's defaults).

        An absent key has DeepSpeed's meaning where training would come out different: stage 0, no gradient clipping,
        fp32, Adam's betas (0.9, 0.999), a warmup of 1000 steps. Sizes that only trade memory for speed keep
        `ZeroConfig`'s defaults, which put memory first: ``stage3_max_reuse_distance`` is 0 where DeepSpeed has 1e9,
        and would hold on to 1e9 elements of gathered weights, whatever memory generation needs. Sizes that are "auto"
        wait for `resolve`.

        Warns:
            UserWarning: once for each key that has no effect here, with the reason.

        Raises:
            ValueError: the file cannot be read, a key is unknown, a value out of range or in want of something that is
                absent here; the message names the key by its path.
        """
        base = cls() if base is None else base
        reading = read_deepspeed(source, dtype=base.dtype)
        config = apply(base, reading)
        for note in reading.notes:
            warnings.warn(reading.say(note), stacklevel=2)
        return config

    def resolve(self, *, hidden_size: int) -> HybridConfig:
        """A new object in which sizes that were "auto" follow the model's hidden size, as in transformers."""
        return dataclasses.replace(self, zero=resolve_zero(self.zero, self.auto_sizes, hidden_size), auto_sizes=())

    def check_batch(self, world_size: int) -> HybridConfig:
        """A new object whose batch sizes are complete: any two give the third, and one alone DeepSpeed's others.

        Raises:
            ValueError: train_batch_size is not micro batch x accumulation x ``world_size``.
        """
        total, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        passes = self.gradient_accumulation_steps
        if total is None and micro is None:
            if passes is None:
                return self
            raise ValueError(
                f"gradient_accumulation_steps={passes} alone gives no batch size; "
                "set train_micro_batch_size_per_gpu or train_batch_size too"
            )
        if total is None:
            total = (micro or 1) * (passes or 1) * world_size
        if passes is None:
            passes = 1 if micro is None else total // (micro * world_size)
        if micro is None:
            micro = total // (passes * world_size)
        if micro * passes * world_size != total:
            raise ValueError(self._wrong_batch(world_size))
        return dataclasses.replace(self, **dict(zip(BATCH, (total, micro, passes), strict=True)))

    def _wrong_batch(self, world_size: int) -> str:
        given = {name: getattr(self, name) for name in BATCH[1:] if getattr(self, name) is not None}
        factors = " x ".join([*(f"{name}={value}" for name, value in given.items()), f"{world_size} ranks"])
        product = world_size
        for value in given.values():
            product *= value
        if len(given) == 2:
            return f"train_batch_size={self.train_batch_size} is not {factors}; set it to {product}, or to auto"
        return (
            f"train_batch_size={self.train_batch_size} is no multiple of {factors}; set it to a multiple of {product}"
        )


# Our groups of settings by the name that a reading's fields start with.
GROUPS = {"zero": ZeroConfig, "optim": OptimConfig, "parallel": ParallelConfig}


def apply(base: HybridConfig, reading: Reading) -> HybridConfig:
    """``base`` with what a reading says, in a new object."""
    changes: dict[str, Any] = {"auto_sizes": reading.auto_sizes}
    grouped: dict[str, dict[str, Any]] = {}
    for name, value in reading.values.items():
        group, dot, field = name.partition(".")
        if dot:
            grouped.setdefault(group, {})[field] = value
        else:
            changes[name] = value
    # A model that is never trained stays so unless the JSON has an optimizer for it.
    trained = any(path.startswith(("optimizer", "scheduler")) for path in reading.paths.values())
    if base.optim is None and not trained:
        grouped.pop("optim", None)
    for group, fields in grouped.items():
        before = getattr(base, group) or GROUPS[group]()
        changes[group] = _replace(before, fields, f"{group}.", reading)
    return _replace(base, changes, "", reading)


def _replace(config: Any, fields: Mapping[str, Any], prefix: str, reading: Reading) -> Any:
    try:
        return dataclasses.replace(config, **fields)
    except ValueError as error:
        field = str(error).partition("=")[0]  # what is out of range opens its message
        path = reading.paths.get(prefix + field)
        raise ValueError(reading.say(f"{path}: {error}" if path else str(error))) from error
