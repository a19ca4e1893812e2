"""Which of a run's checkpoints stay: names alone decide, so empty ones will do."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.checkpoint import drop_old_checkpoints, read_trainer_state


@pytest.mark.parametrize(
    ("keep", "step", "left"),
    [(2, 10, [9, 10]), (1, 9, [9]), (2, 9, [2, 9]), (0, 9, [2, 9]), (0, 12, [2, 9, 10, 12]), (9, 3, [2])],
)
def test_checkpoints_beyond_the_present_step_are_neither_counted_nor_kept(
    tmp_path: Path, keep: int, step: int, left: list[int]
) -> None:
    for number in (2, 9, 10, 12):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / "state.json").touch()
    drop_old_checkpoints(tmp_path, keep, step)
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.iterdir()) == left


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"is damaged: its state.json cannot be read; resume from another"):
        read_trainer_state(tmp_path)
