"""Running a recipe in a process of its own, or under torchrun, and reading what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.warm_python import ENVIRONMENT, ROOT, warm_python

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_MOST_S = 180


def run(
    recipe: str, *words: Any, launcher: tuple[str, ...] = (), cwd: Path = ROOT, python: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a recipe, by default by a Python that is warm; a run that hangs is ended with all its ranks."""
    python = python or warm_python()
    command = [python, *launcher, str(ROOT / "recipes" / recipe), *map(str, words)]
    with tempfile.TemporaryDirectory() as directory:  # torchrun leaves its logs in TMPDIR
        process = subprocess.Popen(
            command,
            env=ENVIRONMENT | {"TMPDIR": directory, "PYTHON_EXEC": python},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=_MOST_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its ranks, which are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{' '.join(command)} hung: {process.communicate()}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
