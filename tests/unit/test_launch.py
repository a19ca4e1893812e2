"""How many replicas a command starts by itself, and that none of them outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed

from hybrid import launch
from hybrid.launch import local_ranks, replicas_to_start
from hybrid.parallel import init_parallel

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """4 cores, 20 GiB free and no GPU; a model of 100 MB."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "uses_cuda", lambda: False)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(launch.psutil, "virtual_memory", lambda: SimpleNamespace(available=20 * GIB))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 10**8)
    return tmp_path


def test_a_core_each_while_there_is_memory_and_work(machine, monkeypatch):
    def auto(**given):
        return replicas_to_start("auto", **{"model": machine, "cache_bytes": GIB, "num_samples": 1000, **given})

    assert auto() == 4
    assert auto(num_samples=40) == 2
    assert auto(num_samples=3) == 1
    assert auto(cache_bytes=5 * GIB) == 2  # of the 16 GiB that are not left to others
    assert auto(tp_size=2) == 1
    assert auto(model=machine / "nowhere") == 1
    monkeypatch.setenv("RANK", "0")
    assert auto() == 1


def test_a_number_is_obeyed_or_refused(machine, monkeypatch):
    given = {"model": machine, "cache_bytes": GIB, "num_samples": 1}
    assert replicas_to_start(3, **given) == 3
    assert replicas_to_start(1, tp_size=2, **given) == 1
    with pytest.raises(ValueError, match="replicas=3 starts processes on a CPU"):
        replicas_to_start(3, tp_size=2, **given)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="torchrun's ranks are the replicas"):
        replicas_to_start(3, **given)


def test_ranks_are_told_who_they_are_and_waited_for(tmp_path):
    code = "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
    with local_ranks(3, ["-c", code, f"{tmp_path}/"]):
        assert (os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("0", "3")
    assert "RANK" not in os.environ
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"1": "3", "2": "3"}


def test_ranks_that_made_a_process_group_end_together(monkeypatch):
    """None waits for the others to be ended."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    code = "from hybrid.parallel import init_parallel, run_main; run_main(init_parallel)"
    started = time.monotonic()
    with local_ranks(2, ["-c", code]):
        assert init_parallel().world_size == 2
    assert time.monotonic() - started < launch._PATIENCE_S / 2
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(1); raise SystemExit(7)", "rank 1 ended with exit code 7, see above"),
        ("import time; time.sleep(60)", "rank 1 was still running a minute after"),
    ],
)
def test_a_rank_that_does_not_end_well_is_not_passed_over(monkeypatch, code, said):
    monkeypatch.setattr(launch, "_PATIENCE_S", 2.0)
    with pytest.raises(SystemExit, match=said), local_ranks(2, ["-c", code]):
        pass


def test_a_failure_here_ends_them_at_once():
    started = time.monotonic()
    with pytest.raises(KeyError), local_ranks(2, ["-c", "import time; time.sleep(60)"]):
        raise KeyError
    assert time.monotonic() - started < 20
    assert not [child for child in psutil.Process().children() if "time.sleep(60)" in " ".join(child.cmdline())]


def test_a_rank_that_fails_ends_this_process_too(tmp_path):
    code = (
        "import time; from hybrid import launch; launch._GRACE_S = 0.5\n"
        "with launch.local_ranks(3, ['-c', 'import os, time; time.sleep(60 * int(os.environ[\"RANK\"]) - 60);"
        " raise SystemExit(7)']):\n    time.sleep(60)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 1
    assert "rank 1 ended with exit code 7, see above" in done.stderr
    assert time.monotonic() - started < 40


def test_one_rank_starts_nothing():
    with local_ranks(1, [sys.executable, "-c", "raise SystemExit(1)"]):
        assert "MASTER_PORT" not in os.environ
