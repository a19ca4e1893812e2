"""From a DeepSpeed JSON to values for our own configurations' fields.

What a key's absence means follows DeepSpeed where training would come out different: no ``stage`` is stage 0, no
``gradient_clipping`` none, neither ``bf16`` nor ``fp16`` is fp32, Adam without ``betas`` has (0.9, 0.999), a warmup
without ``warmup_num_steps`` takes 1000. What only trades memory for speed keeps this engine's own defaults.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid.deepspeed.keys import EXPECTED, KEYS, Ignored, Refused, Rule, Section, Sets, asks_for_nothing

# Fields whose "auto" transformers works out from the model's hidden size, and how.
AUTO_SIZES = {
    "reduce_bucket_size": lambda hidden_size: hidden_size * hidden_size,
    "prefetch_bucket_size": lambda hidden_size: int(0.9 * hidden_size * hidden_size),
    "persistence_threshold": lambda hidden_size: 10 * hidden_size,
}


@dataclass(slots=True)
class Reading:
    """What a JSON says, as ``group.field`` of ours."""

    source: str = ""  # the file, where there is one; opens every message
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)  # the key that states a value; implied ones have none
    auto: set[str] = field(default_factory=set)  # stated as "auto"
    notes: list[str] = field(default_factory=list)  # what has no effect, and why

    @property
    def auto_sizes(self) -> tuple[str, ...]:
        return tuple(size for size in AUTO_SIZES if f"zero.{size}" in self.auto)

    def say(self, text: str) -> str:
        return f"{self.source}: {text}" if self.source else text

    def take(self, name: str, default: Any = None) -> Any:
        """Remove what only stands for something else, and return it."""
        return self.values.pop(name, default)

    def imply(self, name: str, value: Any) -> None:
        """Set what a key's absence means."""
        if name not in self.auto:
            self.values.setdefault(name, value)


def read_deepspeed(source: str | Path | Mapping[str, Any], *, dtype: str = "auto") -> Reading:
    """Read a file or a dictionary; ``dtype`` is what ``bf16.enabled: "auto"`` stands for.

    Raises:
        ValueError: no such file, no JSON, an unknown key, a value that cannot be read or asks for what is absent. The
            message starts with the file and names the key by its path.
    """
    if isinstance(source, Mapping):
        return _read(source, dtype)
    try:
        reading = _read(_load(Path(source).expanduser()), dtype)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    reading.source = str(source)
    return reading


def _load(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_without_repeats)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}; set it to a DeepSpeed JSON") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is not text in UTF-8 (byte {error.start}); save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"is not JSON: {error.msg} in line {error.lineno}, column {error.colno}; "
            "comments and trailing commas are not JSON"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"must hold one JSON object, not {_show(found)}")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} is set twice in one object; set it once")
        found[key] = value
    return found


def _read(document: Mapping[str, Any], dtype: str) -> Reading:
    reading = Reading()
    _walk(document, KEYS, "", reading)
    reading.imply("zero.stage", 0)
    reading.imply("optim.max_grad_norm", 0.0)
    _settle_dtype(reading, dtype)
    _settle_optimizer(reading)
    _settle_scheduler(reading)
    return reading


# -- keys, one by one ------------------------------------------------------------------------------------------------


def _walk(block: Mapping[str, Any], rules: Section, prefix: str, reading: Reading) -> None:
    # What a block that is off says besides, DeepSpeed does not read either. A switch that has no effect here is on.
    switch = rules.get("enabled")
    off = switch is not None and block.get("enabled", isinstance(switch, Ignored)) is False
    for key, value in block.items():
        path = prefix + key
        if key not in rules:
            raise ValueError(_unknown(key, prefix, rules))
        rule = rules[key]
        if value is None or (off and key != "enabled"):
            continue
        if not isinstance(rule, Mapping):
            _follow(rule, path, value, reading)
        elif isinstance(value, Mapping):
            _walk(value, rule, f"{path}.", reading)
        else:
            raise ValueError(f"{path}={_show(value)} must be an object, {{...}}")


def _follow(rule: Rule, path: str, value: Any, reading: Reading) -> None:
    if isinstance(rule, Sets):
        _set(rule, path, value, reading)
    elif not asks_for_nothing(value, rule.fine):
        if isinstance(rule, Refused):
            raise ValueError(f"{path}={_show(value)}: {rule.reason}")
        if isinstance(rule, Ignored) and rule.reason:
            reading.notes.append(f"{path}={_show(value)} has no effect: {rule.reason}")


def _set(rule: Sets, path: str, value: Any, reading: Reading) -> None:
    if value == "auto":
        reading.auto.add(rule.field)
        return
    found = rule.read(value)
    if found is None:
        raise ValueError(f"{path}={_show(value)} is not {EXPECTED[rule.read]}")
    before = reading.values.setdefault(rule.field, found)
    if before != found:
        raise ValueError(
            f"{reading.paths[rule.field]}={_show(before)} and {path}={_show(found)} are the same setting; set it once"
        )
    reading.paths[rule.field] = path


def _unknown(key: str, prefix: str, rules: Section) -> str:
    close = [prefix + match for match in difflib.get_close_matches(key, rules, n=3, cutoff=0.6)]
    elsewhere = [f"{name}.{key}" for name, rule in KEYS.items() if isinstance(rule, Mapping) and key in rule]
    if key in KEYS:
        elsewhere.insert(0, f"{key}, outside of {prefix.rstrip('.')}")
    matches = close or elsewhere
    hint = f"did you mean {' or '.join(matches)}?" if matches else "it is no key of DeepSpeed's that is known here"
    return f"unknown key {prefix}{key}; {hint}"


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- what several keys say together ----------------------------------------------------------------------------------


def _settle_dtype(reading: Reading, dtype: str) -> None:
    """``dtype`` from bf16, fp16 and, where one of them is "auto", our own; ``reduce_dtype`` from what is sent."""
    stated = {name: reading.take(name) for name in ("bf16", "fp16")}
    on = [name for name, enabled in stated.items() if enabled]
    if len(on) == 2:
        raise ValueError("bf16.enabled=true and fp16.enabled=true exclude each other; set one of them to false")
    is_auto = not reading.auto.isdisjoint(stated)
    if on:
        reading.values["dtype"], reading.paths["dtype"] = on[0], reading.paths[on[0]]
    elif not is_auto or stated.get("bf16" if dtype == "auto" else dtype) is False:  # "auto" may come out as bf16
        reading.values["dtype"] = "fp32"
    sent = reading.take("communication_data_type")
    if sent == "fp32":
        reading.values["zero.reduce_dtype"] = "fp32"
        reading.paths["zero.reduce_dtype"] = "communication_data_type"
    elif sent is not None and sent != reading.values.get("dtype", dtype):
        reading.notes.append(
            f'communication_data_type="{sent}" has no effect: gradients are summed in what they were computed in; '
            "set it to fp32, or leave it out"
        )


def _settle_optimizer(reading: Reading) -> None:
    """Adam and its decay, Adam's betas, and arguments that only some optimizers have."""
    name, decoupled = reading.take("optimizer"), reading.take("adam_w_mode", True)
    if name is not None:
        reading.values["optim.optimizer"] = "adamw" if name == "adam" and decoupled else name
        reading.paths["optim.optimizer"] = reading.paths["optimizer"]
        if name in ("adam", "adamw"):
            reading.imply("optim.betas", (0.9, 0.999))
    arguments = {key: reading.take(key) for key in list(reading.values) if key.startswith("optim_args.")}
    if arguments:
        reading.values["optim.optim_args"] = ",".join(
            f"{key.partition('.')[2]}={value}" for key, value in arguments.items()
        )
        reading.paths["optim.optim_args"] = reading.paths[next(iter(arguments))]


def _settle_scheduler(reading: Reading) -> None:
    """DeepSpeed's schedules rise to ``warmup_max_lr``, whatever the optimizer's ``lr``."""
    peak, shape = reading.take("warmup_max_lr"), reading.take("warmup_type", "log")
    rate = reading.values.get("optim.learning_rate")
    if peak is not None:
        if rate is not None and rate != peak:
            raise ValueError(
                f"scheduler.params.warmup_max_lr={peak} and {reading.paths['optim.learning_rate']}={rate} differ; the "
                "learning rate rises to one value: set them equal"
            )
        reading.values["optim.learning_rate"] = peak
        reading.paths["optim.learning_rate"] = "scheduler.params.warmup_max_lr"
    elif rate is None and "optim.optimizer" in reading.values and "optim.learning_rate" not in reading.auto:
        reading.notes.append(
            "optimizer.params.lr is not set: the learning rate that is set elsewhere is used, not DeepSpeed's 0.001; "
            'set it, or set it to "auto"'
        )
    if "optim.lr_scheduler" in reading.values:
        reading.imply("optim.warmup_steps", 1000)
        if shape == "log" and reading.values.get("optim.warmup_steps") != 0:
            reading.notes.append(
                'scheduler.params.warmup_type="log", DeepSpeed\'s default, has no effect: the learning rate rises '
                'linearly; set it to "linear"'
            )
