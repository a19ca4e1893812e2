"""What a person watching the terminal sees: a bar with the numbers that matter, a table of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

# What a bar shows of a step's metrics: name, label, format.
Shown = Sequence[tuple[str, str, str]]
_SHOWN: Shown = (
    ("reward", "reward", "{:.3f}"),
    ("kl", "kl", "{:.3f}"),
    ("completions/mean_length", "len", "{:.1f}"),
    ("perf/tokens_per_s", "tok/s", "{:.0f}"),
)


class Progress:
    """A progress bar over steps. On ranks other than the main one (``enabled=False``) it shows nothing."""

    def __init__(
        self,
        total_steps: int | None,
        title: str = "train",
        shown: Shown = _SHOWN,
        *,
        enabled: bool = True,
        initial: int = 0,
    ) -> None:
        self._shown = shown
        self._bar = tqdm(
            total=total_steps,
            initial=initial,
            disable=not enabled,
            desc=title,
            unit="step",
            dynamic_ncols=True,
            smoothing=0.1,
        )

    def update(self, metrics: Mapping[str, float]) -> None:
        """One step further, with its metrics."""
        shown = {label: form.format(metrics[name]) for name, label, form in self._shown if name in metrics}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(1)

    def note(self, message: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.write(message)

    def close(self) -> None:
        self._bar.close()


def sample_table(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Table:
    """The same prompts' completions before and after training, side by side.

    Args:
        before: one mapping a sample with ``prompt``, ``completion`` and ``reward``.
        after: the same prompts, in the same order.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} samples before and {len(after)} after; give the same prompts to both")
    table = Table(title="Samples before and after", show_lines=True)
    table.add_column("prompt", overflow="fold", ratio=3)
    for title in ("before", "after"):
        table.add_column(title, overflow="fold", ratio=3)
        table.add_column("reward", justify="right", no_wrap=True)
    for old, new in zip(before, after, strict=True):
        table.add_row(
            # Text, not str: a completion may contain what rich reads as markup.
            Text(old["prompt"]),
            Text(_visible(old["completion"])),
            _number(old["reward"]),
            Text(_visible(new["completion"])),
            _number(new["reward"]),
        )
    return table


def print_table(table: Table) -> None:
    Console().print(table)


def _visible(completion: str) -> str:
    return completion.strip() or "(empty)"


def _number(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.2f}"
