"""What a run writes and shows."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hybrid.config import RunConfig
from hybrid.monitor import (
    MetricsLogger,
    RunRecorder,
    SamplesWriter,
    Timers,
    check_output_dir,
    check_trackers,
    make_output_dir,
    sample_table,
)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_timers_add_up_until_drained() -> None:
    waits: list[None] = []
    timers = Timers(lambda: waits.append(None))
    for _ in range(2):
        with timers("generate"):
            time.sleep(0.01)
    with pytest.raises(KeyError), timers("reward"):
        raise KeyError
    seconds = timers.drain()
    assert sorted(seconds) == ["generate", "reward"]
    assert 0.02 <= seconds["generate"] < 1
    assert len(waits) == 6  # the device is waited for at both ends of a stage
    assert timers.drain() == {}


def test_metrics_are_on_disk_line_by_line(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    logger.log(1, {"reward": 0.5, "kl": float("nan")})
    assert read_lines(tmp_path / "metrics.jsonl") == [{"training/global_step": 1, "reward": 0.5, "kl": None}]
    logger.log(2, {"reward": float("inf")})
    logger.close()
    assert read_lines(tmp_path / "metrics.jsonl")[1] == {"training/global_step": 2, "reward": None}


def test_samples(tmp_path: Path) -> None:
    writer = SamplesWriter(tmp_path)
    writer.write(3, [{"prompt": "ü\n", "parts": {"f": float("nan")}}])
    writer.close()
    assert read_lines(tmp_path / "samples.jsonl") == [{"step": 3, "prompt": "ü\n", "parts": {"f": None}}]


def test_a_resumed_run_keeps_lines_that_hold_unicode_line_ends(tmp_path: Path) -> None:
    for step in (1, 2):  # the second time it reads what it wrote
        writer = SamplesWriter(tmp_path, resume_step=step - 1)
        writer.write(step, [{"prompt": "a\u2028b\u0085ü"}])
        writer.close()
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [{"step": n, "prompt": "a\u2028b\u0085ü"} for n in (1, 2)]


def test_unknown_and_missing_trackers_are_refused() -> None:
    check_trackers(())
    with pytest.raises(ValueError, match=r"unknown tracker 'tensorbord'; set --report_to to some of .*tensorboard"):
        check_trackers(["tensorbord"])


def test_metrics_reach_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import tracking

    told: list[Any] = []

    class Tracker(tracking.GeneralTracker):
        name = "tensorboard"
        requires_logging_directory = True
        tracker = None

        def __init__(self, project: str, directory: str) -> None:
            super().__init__()
            told.append((project, directory))

        def store_init_configuration(self, values: dict) -> None:
            told.append(values)

        def log(self, values: dict, step: int | None = None, **_: Any) -> None:
            told.append((step, values))

        def finish(self) -> None:
            told.append("finished")

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Tracker)
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["tensorboard"])
    with MetricsLogger(tmp_path, ["tensorboard"], {"seed": 1, "kl_target": None}) as logger:
        logger.log(1, {"reward": 0.5})
    assert told == [("hybrid", str(tmp_path)), {"seed": 1}, (1, {"reward": 0.5}), "finished"]


def test_the_table_shows_both_sides_and_takes_markup_as_text() -> None:
    before = [{"prompt": "[bold]Q[/bold]", "completion": "", "reward": None}]
    after = [{"prompt": "[bold]Q[/bold]", "completion": " [/red] 42", "reward": 1.0}]
    out = io.StringIO()
    Console(file=out, width=100).print(sample_table(before, after))
    for text in ("[bold]Q[/bold]", "(empty)", "[/red] 42", "1.00"):
        assert text in out.getvalue()
    with pytest.raises(ValueError, match="1 samples before and 0 after"):
        sample_table(before, [])


def test_a_directory_with_a_run_is_not_overwritten_silently(tmp_path: Path) -> None:
    check_output_dir(None, overwrite=False)
    check_output_dir(str(tmp_path / "new"), overwrite=False)
    check_output_dir(str(tmp_path), overwrite=False)  # there is one, without a run
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=r"holds a run already \(metrics.jsonl\); set --output_dir to another"):
        check_output_dir(str(tmp_path), overwrite=False)
    check_output_dir(str(tmp_path), overwrite=True)
    with pytest.raises(ValueError, match="is a file"):
        check_output_dir(str(tmp_path / "metrics.jsonl"), overwrite=True)


def test_a_directory_with_only_checkpoints_holds_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match=r"holds a run already \(checkpoint-2\)"):
        check_output_dir(str(tmp_path), overwrite=False)


def test_a_replaced_run_leaves_nothing_and_other_files_stay(tmp_path: Path) -> None:
    ours = ["checkpoint-2/actor", "checkpoint-30.partial", "actor", "metrics.jsonl", "samples.jsonl", "config.yaml"]
    theirs = ["checkpoint-best", "checkpoints", "notes.txt"]
    for name in ours + theirs:
        (tmp_path / name).mkdir(parents=True) if "." not in name or "partial" in name else (tmp_path / name).touch()
    make_output_dir(str(tmp_path), "x")
    assert all((tmp_path / name).exists() for name in ours)
    make_output_dir(str(tmp_path), "x", replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == theirs


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(ValueError, match=rf"new/run cannot be written: {tmp_path} is read-only; set --output_dir"):
        check_output_dir(str(tmp_path / "new" / "run"), overwrite=False)


def test_runs_without_a_name_get_directories_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    assert [make_output_dir(None, "x") for _ in range(3)] == [Path(f"runs/x/now{end}") for end in ("", "-2", "-3")]


def test_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = RunRecorder(tmp_path, total_steps=4, config={}, run=RunConfig(logging_steps=2))
    sample = {"prompt": "p", "completion": "c", "reward": 0.0}
    for step in range(1, 5):
        recorder.record(step, {"reward": step / 4, "kl": 0.1}, [sample])
    recorder.finish([sample], [sample])
    assert [line["training/global_step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [2, 4]
    assert [line["step"] for line in read_lines(tmp_path / "samples.jsonl")] == [2, 4]
    captured = capsys.readouterr()
    assert "0.250 -> 1.000" in captured.out
    assert "reward=1.000, kl=0.100" in captured.err
