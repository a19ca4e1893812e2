"""Fields of configurations, and the rules that their values keep. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any, TypeVar

T = TypeVar("T")


def setting(default: T, help: str, *, flag: str | None = None, is_text: bool = False) -> T:
    """A dataclass field with its help text.

    Args:
        flag: its name on the command line (default: the field's).
        is_text: a tuple of texts, each taken as it is; others are cut at commas.
    """
    metadata: dict[str, Any] = {"help": help, "flag": flag, "is_text": is_text}
    value: Any = field(default=default, metadata=metadata)
    return value


def by_algorithm(help: str) -> Any:
    """A field that gets its value from the algorithm where none is given."""
    return setting(None, f"{help} (default: the algorithm's)")


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def at_least(minimum: float, **values: float) -> None:
    for name, value in values.items():
        require(value >= minimum, f"{name}={value} is too small; set it to {minimum} or more")


def positive(**values: float) -> None:
    for name, value in values.items():
        require(value > 0, f"{name}={value} must be positive")


def finite(**values: float) -> None:
    for name, value in values.items():
        require(math.isfinite(value), f"{name}={value} is no finite number")


def in_range(low: float, high: float, *, open_low: bool = False, **values: float) -> None:
    for name, value in values.items():
        holds = (low < value if open_low else low <= value) and value <= high
        require(holds, f"{name}={value} is out of range; it must be in {'(' if open_low else '['}{low}, {high}]")
