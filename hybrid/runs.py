"""Where a run goes and what it goes on from: checked before anything is loaded, alike for every recipe."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid.checkpoint import find_checkpoints, is_checkpoint, read_trainer_state
from hybrid.config import RunConfig
from hybrid.monitor import check_output_dir, check_trackers


def check_run(run: RunConfig, role: str = "actor") -> Path | None:
    """Check where a run would go and what it would go on from; returns the checkpoint, or None for a fresh run.

    Args:
        role: the directory that the run's model goes to, without which a run has not ended.

    Raises:
        ValueError: ``output_dir`` cannot be written or holds a run that would be lost, there is no such checkpoint, or
            a tracker is missing.
    """
    checkpoint = _find_checkpoint(run)
    # A run that was stopped before its first checkpoint, and is started again with auto, has nothing to lose.
    restarts = run.resume_from_checkpoint == "auto" and checkpoint is None and not (run_directory(run) / role).exists()
    overwrite = run.overwrite_output_dir or resumes_in_place(run, checkpoint) or restarts
    check_output_dir(run.output_dir, overwrite=overwrite)
    check_trackers(run.report_to)
    return checkpoint


def resumes_in_place(run: RunConfig, checkpoint: Path | None) -> bool:
    """Whether a run goes on in the directory of the one that it resumes."""
    return checkpoint is not None and checkpoint.resolve().parent == run_directory(run).resolve()


def run_directory(run: RunConfig) -> Path:
    return Path(run.output_dir or ".").expanduser()


def check_resume(checkpoint: Path, total_steps: int, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint beyond the run's end; warn of settings that it was written without.

    Args:
        settings: by name, those that a resumed run should share; its checkpoints keep them under "settings".
    """
    state = read_trainer_state(checkpoint)
    if state["global_step"] > total_steps:
        raise ValueError(
            f"{checkpoint} is at step {state['global_step']}, beyond total_steps={total_steps}; "
            "set --total_steps to more, or resume from an earlier checkpoint"
        )
    before = state.get("extra", {}).get("settings", {})
    for name, value in settings.items():
        if name in before and before[name] != value:
            warnings.warn(
                f"{checkpoint} was written with {name}={before[name]} and the run goes on with {name}={value}",
                stacklevel=3,
            )


def _find_checkpoint(run: RunConfig) -> Path | None:
    name = run.resume_from_checkpoint
    if name is None:
        return None
    if name != "auto":
        checkpoint = Path(name).expanduser()
        if not is_checkpoint(checkpoint):
            raise ValueError(
                f"resume_from_checkpoint={name} is no complete checkpoint; set it to a checkpoint-N or to auto"
            )
        return checkpoint
    found = find_checkpoints(run_directory(run))
    return found[-1] if found else None
