"""A run's directory and everything that is written to it and shown while it goes on."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hybrid.config import RunConfig
from hybrid.monitor.metrics import MetricsLogger, SamplesWriter
from hybrid.monitor.progress import Progress, print_table, sample_table

CONFIG_FILE = "config.yaml"
_MODEL_DIRS = ("actor", "actor_ema", "reward")  # the last is step 2's
RUNS_DIR = "runs"  # where runs without an output_dir go
_TRACES = (CONFIG_FILE, "metrics.jsonl", "samples.jsonl", *_MODEL_DIRS)
_CHECKPOINT = re.compile(r"checkpoint-\d+(\.partial)?")


def check_output_dir(output_dir: str | None, *, overwrite: bool) -> None:
    """Raise ValueError if ``output_dir`` is no place for a run: it holds one already, is a file, or is read-only."""
    path = Path(output_dir or RUNS_DIR).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError(f"output_dir={path} is a file; set --output_dir to a directory")
    nearest = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"output_dir={path} cannot be written: {nearest} is read-only; set --output_dir to another")
    if output_dir is None:
        return
    found = [trace.name for trace in find_traces(path)]
    if found and not overwrite:
        raise ValueError(
            f"output_dir={output_dir} holds a run already ({', '.join(found)}); "
            "set --output_dir to another directory, or --overwrite_output_dir to replace it"
        )


def make_output_dir(output_dir: str | None, recipe: str, *, replace: bool = False) -> Path:
    """Make the run's directory; without a name a new one, ``runs/<recipe>/<time>``.

    Args:
        replace: remove what an earlier run left there, and nothing else.
    """
    if output_dir is not None:
        path = Path(output_dir).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        for trace in find_traces(path) if replace else ():
            if trace.is_dir() and not trace.is_symlink():
                shutil.rmtree(trace)
            else:
                trace.unlink()
        return path
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2))):
        path = Path(RUNS_DIR, recipe, stamp + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another run started in the same second
            continue
        return path
    raise RuntimeError("unreachable: suffixes do not end")


def find_traces(directory: Path) -> list[Path]:
    """What a run left in its directory, checkpoints included: what another one would replace."""
    if not directory.is_dir():
        return []
    checkpoints = sorted(path for path in directory.iterdir() if _CHECKPOINT.fullmatch(path.name))
    return [path for name in _TRACES if (path := directory / name).exists()] + checkpoints


class RunRecorder:
    """Writes metrics and samples, moves the progress bar, and sums the run up. Make one on the main rank alone."""

    def __init__(
        self,
        output_dir: Path,
        *,
        total_steps: int,
        config: Mapping[str, Any],
        run: RunConfig,
        title: str = "train",
        resume_step: int = 0,
    ) -> None:
        self.output_dir, self.logging_steps = output_dir, run.logging_steps
        self._closed = False
        self._logger = MetricsLogger(output_dir, run.report_to, config, resume_step=resume_step)
        self._samples = SamplesWriter(output_dir, resume_step=resume_step)
        self._progress = Progress(total_steps, title, initial=resume_step)
        self._rewards, self._evaluations = (
            [float(kept[name]) for kept in self._logger.kept if kept.get(name) is not None]
            for name in ("reward", "eval/reward")
        )

    def record(self, step: int, metrics: Mapping[str, float], samples: Iterable[Mapping[str, Any]]) -> None:
        """A step, counted from 1, or an evaluation before the first, 0: its metrics, and samples as mappings."""
        if step:
            self._progress.update(metrics)
        if "reward" in metrics:
            self._rewards.append(metrics["reward"])
        if "eval/reward" in metrics:
            self._evaluations.append(metrics["eval/reward"])
        if step % self.logging_steps == 0 or "timing_s/eval" in metrics:
            self._logger.log(step, metrics)
            self._samples.write(step, samples)

    def finish(self, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> None:
        """Close the files, and print samples before and after and what became of the reward."""
        self.close()
        print_table(sample_table(before, after))
        quarter = max(1, len(self._rewards) // 4)
        if self._rewards:
            first, last = fmean(self._rewards[:quarter]), fmean(self._rewards[-quarter:])
            print(f"reward, first and last quarter of the steps: {first:.3f} -> {last:.3f}")
        if self._evaluations:
            print(f"reward on held-out prompts: {self._evaluations[0]:.3f} -> {self._evaluations[-1]:.3f}")
        print(f"model, metrics, samples and configuration: {self.output_dir}")

    def close(self) -> None:
        """Close the files and the bar; closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._progress.close()
            self._logger.close()
            self._samples.close()

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
