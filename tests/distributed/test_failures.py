"""One rank dies or raises under torchrun: the world ends within seconds, and the culprit's traceback comes first."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hybrid.parallel import init_parallel

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import os, signal, sys, time
import torch
from hybrid.parallel import init_parallel, run_main

def main():
    mesh = init_parallel()
    # One write: the ranks share the pipe, and print may write the newline by itself.
    os.write(1, f"started {mesh.rank} {os.getpid()}\\n".encode())
    for turn in range(10_000):
        mesh.all_reduce(torch.ones(1000))
        if turn == 50 and mesh.rank == 1:
            if sys.argv[1] == "raise":
                raise ZeroDivisionError("the culprit's own words")
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)

run_main(main)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def launch(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def run(how: str) -> tuple[subprocess.CompletedProcess[str], float]:
        started = time.monotonic()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
        finished = subprocess.run(
            [*command, str(script), how],
            capture_output=True,
            text=True,
            timeout=90,
            cwd=ROOT,
            # torchrun leaves a directory for logs in TMPDIR.
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)},
        )
        return finished, time.monotonic() - started

    return run


def pids(output: str) -> list[int]:
    return [int(line.split()[2]) for line in output.splitlines() if line.startswith("started")]


def test_an_exception_on_one_rank_ends_the_world_with_its_traceback_first(launch):
    finished, seconds = launch("raise")
    assert finished.returncode != 0
    assert seconds < 30
    first = finished.stderr.index("Traceback (most recent call last)")
    assert "[rank 1]" in finished.stderr[:first]
    assert "ZeroDivisionError: the culprit's own words" in finished.stderr[first : first + 1500]
    assert not any(psutil.pid_exists(pid) for pid in pids(finished.stdout))


def test_a_killed_rank_ends_the_world(launch):
    finished, seconds = launch("kill")
    assert finished.returncode != 0
    assert seconds < 30
    assert f"Signal {int(signal.SIGKILL)} (SIGKILL)" in finished.stderr or "SIGKILL" in finished.stderr
    assert len(pids(finished.stdout)) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids(finished.stdout))


def test_a_tp_size_that_does_not_divide_the_world_is_refused_before_the_rendezvous(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        ValueError, match=r"tp_size 3 does not divide the world of 4 ranks; set --tp_size to one of \[1, 2, 4\]"
    ):
        init_parallel(3)
