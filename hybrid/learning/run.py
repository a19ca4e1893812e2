"""A run of a learning trainer: its directory, its metrics and bar, its checkpoints, and the model it ends with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hybrid.arguments import save_config, to_flags
from hybrid.checkpoint import checkpoint_name, drop_old_checkpoints
from hybrid.learning.setup import settings_to_compare
from hybrid.monitor import MetricsLogger, Progress, make_output_dir
from hybrid.runs import resumes_in_place

if TYPE_CHECKING:
    from hybrid.config import RunConfig
    from hybrid.learning.setup import LearningInputs
    from hybrid.learning.trainer import LearningTrainer
    from hybrid.learning_config import PreferenceSettings, SFTSettings

T = TypeVar("T")

# What the bar shows of a step's metrics: name, label, format.
_SHOWN = (
    ("loss", "loss", "{:.4g}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("eval/loss", "eval loss", "{:.4g}"),
    ("perf/tokens_per_s", "tok/s", "{:.0f}"),
)


def run_training(
    trainer: LearningTrainer[T],
    inputs: LearningInputs[T],
    settings: SFTSettings | PreferenceSettings,
    *,
    recipe: str,
) -> Path:
    """Train to the end and save the model; returns the run's directory. Every rank calls this."""
    mesh, run, objective = trainer.mesh, settings.run, trainer.objective
    output_dir = None
    if mesh.is_main:
        replace = run.overwrite_output_dir and not resumes_in_place(run, inputs.checkpoint)
        output_dir = make_output_dir(run.output_dir, recipe, replace=replace)
    output_dir = mesh.broadcast_object(output_dir)
    if inputs.checkpoint is not None:
        trainer.load_checkpoint(inputs.checkpoint)
    recorder = None
    if mesh.is_main:
        resolved = dataclasses.replace(run, total_steps=inputs.total_steps, output_dir=str(output_dir))
        configs = settings._replace(run=resolved)
        save_config(output_dir / "config.yaml", configs)
        recorder = _Recorder(output_dir, resolved, to_flags(configs), trainer.global_step)

    def after_step(step: int, metrics: dict[str, float]) -> None:
        if recorder is not None:
            recorder.record(step, metrics)
        if step and run.save_steps and step % run.save_steps == 0:
            with trainer.timers("save"):
                trainer.save_checkpoint(
                    output_dir / checkpoint_name(step), settings=settings_to_compare(settings.learn)
                )
                if mesh.is_main:
                    drop_old_checkpoints(output_dir, run.save_total_limit, step)

    trainer.callbacks = [*trainer.callbacks, after_step]
    with recorder or contextlib.nullcontext():  # closed before an error is printed, or the bar would be drawn again
        trainer.train(inputs.total_steps)
        objective.model.save_pretrained(output_dir / objective.role, inputs.tokenizer)
    if recorder is not None:
        recorder.conclude(objective.role)
    return output_dir


class _Recorder:
    """Writes metrics and moves the bar. Made on the main rank alone."""

    def __init__(self, output_dir: Path, run: RunConfig, config: Mapping[str, Any], step: int) -> None:
        self.output_dir, self.logging_steps = output_dir, run.logging_steps
        self._logger = MetricsLogger(output_dir, run.report_to, config, resume_step=step)
        self._evaluations = [kept for kept in self._logger.kept if "eval/loss" in kept]
        self._progress = Progress(run.total_steps, "learn", _SHOWN, initial=step)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        if step:
            self._progress.update(metrics)
        if "eval/loss" in metrics:
            self._evaluations.append(dict(metrics))
        if step % self.logging_steps == 0 or "eval/loss" in metrics:
            self._logger.log(step, metrics)

    def conclude(self, role: str) -> None:
        """Print what became of the metrics of what is held out, and where the model is."""
        if self._evaluations:
            first, last = self._evaluations[0], self._evaluations[-1]
            for name in sorted(name for name in last if name.startswith("eval/") and name in first):
                print(f"{name.removeprefix('eval/')} on held-out examples: {first[name]:.4f} -> {last[name]:.4f}")
        print(f"model: {self.output_dir / role}; metrics and configuration: {self.output_dir}")

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        self._logger.close()
