"""Several sources of prompts as one endless order, and the file that lists them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """One source of prompts; the fields have the names of the flags that they stand for."""

    prompts: str  # a file or a Hub dataset
    weight: float | None = None  # how often it is drawn from, beside the others' weights
    prompts_config: str | None = None
    prompts_split: str | None = None
    prompt_column: str | None = None


def check_weights(weights: Sequence[float], num_sources: int) -> None:
    """Raise ValueError unless there is one positive, finite weight for each source."""
    if len(weights) != num_sources or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(
            f"prompt_weights={tuple(weights)} must be {num_sources} positive number{'s' * (num_sources != 1)}, one for "
            "each source of prompts; leave out a source that is not wanted"
        )


def draws_per_epoch(sizes: Sequence[int], weights: Sequence[float] | None) -> tuple[int, ...]:
    """How often each source is drawn from in an epoch, which has as many draws as there are prompts in all.

    Without weights each prompt is drawn once. With weights the draws are in their proportion, the largest remainders
    rounded up, and at least 1: prompts of a small source with a large weight are drawn several times, those of a large
    source with a small weight in one epoch after the other.
    """
    if weights is None:
        return tuple(sizes)
    check_weights(weights, len(sizes))
    total, whole = sum(sizes), sum(weights)
    shares = [weight / whole * total for weight in weights]
    counts = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (int(shares[i]) - shares[i], i))
    for i in by_remainder[: max(0, total - sum(counts))]:
        counts[i] += 1
    while sum(counts) > total:  # sources that were raised to 1
        counts[max(range(len(counts)), key=lambda i: counts[i])] -= 1
    return tuple(counts)


def held_out_rows(num_rows: int, size: int, seed: int) -> set[int]:
    """Which ``size`` of a dataset's rows are held out, drawn by ``seed``.

    Raises:
        ValueError: nothing would be left.
    """
    if size >= num_rows:
        raise ValueError(f"eval_size={size} of {num_rows} rows leaves none to train on; set --eval_size to less")
    return set(random.Random(f"held out/{seed}").sample(range(num_rows), size))


@lru_cache(maxsize=4)
def mixed_order(sizes: tuple[int, ...], counts: tuple[int, ...], seed: int, epoch: int) -> list[int]:
    """The rows of one epoch, counted through all sources: ``counts[i]`` of source i, on from where the last one ended.

    Each source goes through its own rows in a new order each time, so that none is drawn again before all were.
    """
    if counts == sizes:
        order = list(range(sum(sizes)))
    else:
        order, start = [], 0
        for number, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            places = range(epoch * count, (epoch + 1) * count)
            own = {turn: _own_order(size, number, seed, turn) for turn in {place // size for place in places}}
            order += [start + own[place // size][place % size] for place in places]
            start += size
    random.Random(f"prompts/{seed}/{epoch}").shuffle(order)
    return order


def _own_order(size: int, number: int, seed: int, turn: int) -> list[int]:
    order = list(range(size))
    random.Random(f"prompts/{seed}/source/{number}/{turn}").shuffle(order)
    return order


def is_source_list(source: str) -> bool:
    return Path(source).suffix.lower() in (".yaml", ".yml")


def read_source_list(path: str) -> list[Source]:
    """The sources that a YAML file lists, each as ``prompts: FILE`` with, where wanted, a ``weight`` and the rest.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    import yaml

    try:
        entries = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"prompts {path!r} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"prompts {path!r} must be a list of sources, each with prompts: FILE and, say, weight: 2")
    return [_read_source(entry, number, path) for number, entry in enumerate(entries, 1)]


def _read_source(entry: Any, number: int, path: str) -> Source:
    known = [field.name for field in fields(Source)]
    if not isinstance(entry, Mapping) or not isinstance(entry.get("prompts"), str):
        raise ValueError(f"source {number} of {path} names no prompts; write it as prompts: FILE, with {known[1:]}")
    unknown = [key for key in entry if key not in known]
    if unknown:
        raise ValueError(f"source {number} of {path} has {unknown[0]!r}; it may have {', '.join(known)}")
    weight = entry.get("weight")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, (int, float))):
        raise ValueError(f"source {number} of {path} has weight {weight!r}; it must be a number")
    return Source(**entry)
