"""Metrics and samples as JSON lines, and the same metrics to whatever tracker accelerate knows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


class _JsonLines:
    """A file of one JSON object a line, each on disk before the next is written.

    A run that is resumed keeps the lines up to ``resume_step``, the step it goes on from; any other replaces the file.
    """

    def __init__(self, path: Path, *, step_key: str, resume_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.kept: list[dict[str, Any]] = []
        if resume_step and path.exists():
            lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028, which JSON may hold
            records = [json.loads(line) for line in lines if line.endswith("}")]
            self.kept = [record for record in records if record[step_key] <= resume_step]
        # By line, so that a run that is killed leaves whole lines.
        self._file = path.open("w", buffering=1, encoding="utf-8", newline="\n")
        for record in self.kept:
            self.write(record)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


class MetricsLogger:
    """Writes ``metrics.jsonl`` and reports to trackers. Make one on the main rank alone.

    Args:
        output_dir: where ``metrics.jsonl`` goes; None: nowhere.
        report_to: trackers by accelerate's names ("tensorboard", "wandb", ...).
        config: the run's settings, told to the trackers.
        resume_step: the step that a resumed run goes on from; ``kept`` then holds the metrics up to it.
    """

    def __init__(
        self,
        output_dir: str | Path | None = None,
        report_to: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        *,
        resume_step: int = 0,
    ) -> None:
        check_trackers(report_to)
        self._file, self.kept = None, []
        if output_dir is not None:
            path = Path(output_dir) / "metrics.jsonl"
            self._file = _JsonLines(path, step_key="training/global_step", resume_step=resume_step)
            self.kept = self._file.kept
        self._trackers = _start_trackers(report_to, Path(output_dir or "."), config or {})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line for ``step``. A value that is not finite is written as null."""
        if self._file is not None:
            self._file.write({"training/global_step": step, **metrics})
        for tracker in self._trackers:
            tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        for tracker in self._trackers:
            tracker.finish()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SamplesWriter:
    """Writes ``samples.jsonl``: prompts, completions and their rewards, step by step."""

    def __init__(self, output_dir: str | Path, *, resume_step: int = 0) -> None:
        self._file = _JsonLines(Path(output_dir) / "samples.jsonl", step_key="step", resume_step=resume_step)

    def write(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        for sample in samples:
            self._file.write({"step": step, **sample})

    def close(self) -> None:
        self._file.close()


def check_trackers(report_to: Sequence[str]) -> None:
    """Raise ValueError for a tracker that accelerate does not know or whose package is missing."""
    if not report_to:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = sorted(LOGGER_TYPE_TO_CLASS)
    available = {str(name) for name in get_available_trackers()}
    for name in report_to:
        if name not in known:
            raise ValueError(f"unknown tracker {name!r}; set --report_to to some of {', '.join(known)}")
        if name not in available:
            raise ValueError(f"tracker {name!r} is not installed; run: pip install {name}")


def _start_trackers(names: Sequence[str], directory: Path, config: Mapping[str, Any]) -> list[GeneralTracker]:
    if not names:
        return []
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # accelerate's loggers refuse to work before it; it takes over the process group that is there
    plain = {name: value for name, value in config.items() if isinstance(value, (bool, int, float, str))}
    trackers = []
    for name in names:
        kind = LOGGER_TYPE_TO_CLASS[name]
        project = "hybrid"
        tracker = kind(project, str(directory)) if kind.requires_logging_directory else kind(project)
        tracker.start()
        tracker.store_init_configuration(plain)
        trackers.append(tracker)
    return trackers


def _finite(value: Any) -> Any:
    """``value`` with null for numbers that JSON has no word for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
