"""More ranks from one command: this process becomes the first of a world on this machine, and starts the others.

What `torchrun` does for several machines and for ranks that must outlive one another, this does for a recipe that wants
all cores of one: no port to choose, no second way to spell its flags.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import psutil
import torch.distributed as dist

from hybrid.parallel import meet_at_the_end, uses_cuda

_STARTED = "HYBRID_STARTED"  # set in ranks that a first one started
# For a rank that has nothing left to do, and for this one to say itself what another failed of.
_PATIENCE_S, _GRACE_S = 60.0, 5.0
# A rank's own: the interpreter, torch and what a step works with.
_BASE_BYTES = 1 << 30
# Each is a copy of the weights, and two are what has been measured.
_MOST_REPLICAS = 8
# Samples for each replica under which its start is not worth while.
_FEWEST_SAMPLES = 16


def replicas_to_start(
    asked: int | Literal["auto"], *, model: str | Path, cache_bytes: int, num_samples: int, tp_size: int = 1
) -> int:
    """Replicas to generate with in processes of one's own; 1 under torchrun, on a GPU and with a tensor group.

    "auto" is what generates fastest on a CPU: as many as it has cores, while there is memory and work. Two replicas of
    one thread are quicker than one of two, whose small operations no second thread can share.

    Args:
        model: its directory, whose files tell what a copy takes; any other is not copied.
        cache_bytes: of a replica's KV pool.
        num_samples: that there are to make.

    Raises:
        ValueError: a number of replicas where ranks are there already, or are wanted for something else.
    """
    if _STARTED in os.environ:
        return 1
    if asked != "auto":
        if asked > 1 and ("RANK" in os.environ or tp_size > 1 or uses_cuda()):
            raise ValueError(
                f"replicas={asked} starts processes on a CPU, each with the whole model; under torchrun, on GPUs or "
                "with a tp_size leave it out: torchrun's ranks are the replicas"
            )
        return asked
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    if "RANK" in os.environ or tp_size > 1 or uses_cuda() or not weights:
        return 1
    cores = len(os.sched_getaffinity(0))
    # A replica packs its weights a second time.
    fitting = int(psutil.virtual_memory().available * 0.8) // (2 * weights + cache_bytes + _BASE_BYTES)
    return max(1, min(cores, fitting, num_samples // _FEWEST_SAMPLES, _MOST_REPLICAS))


@contextmanager
def local_ranks(count: int, command: Sequence[str]) -> Iterator[None]:
    """Inside the block this process is rank 0 of ``count``; the others run ``python command`` and are waited for.

    They are told their ranks as by torchrun, and this process is too. If the block raises they are ended at once, and
    if one of them fails, so does this process, which may be waiting for it. An interrupt from the keyboard reaches them
    all by itself. A process group that was made inside the block ends with it.

    Raises:
        SystemExit: the block went well here, and failed in another rank.
    """
    if count == 1:
        yield
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": str(port), "OMP_WAIT_POLICY": "PASSIVE", _STARTED: "1"}
    before = dict(os.environ)
    others = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
        )
        for rank in range(1, count)
    ]
    os.environ.update(world, RANK="0", LOCAL_RANK="0")
    patience, is_over = 0.0, threading.Event()
    threading.Thread(target=_watch, args=(others, is_over), daemon=True).start()
    try:
        yield
        meet_at_the_end()  # as `run_main` has the others do
        patience = _PATIENCE_S
    finally:
        is_over.set()
        os.environ.clear()
        os.environ.update(before)
        _end(others, patience)
    if dist.is_initialized():
        dist.destroy_process_group()
    for rank, process in enumerate(others, 1):
        if process.returncode:
            raise SystemExit(f"error: rank {rank} {_fate(process)}")


def _watch(processes: Sequence[subprocess.Popen], is_over: threading.Event) -> None:
    """End the world when a rank fails: the first may wait for it inside a call that nothing else can end."""
    while not is_over.wait(0.2):
        failed = next((rank for rank, process in enumerate(processes, 1) if process.poll()), None)
        if failed is not None and not is_over.wait(_GRACE_S):
            print(f"error: rank {failed} {_fate(processes[failed - 1])}", file=sys.stderr, flush=True)
            _end(processes, 0.0)
            os._exit(1)


def _fate(process: subprocess.Popen) -> str:
    code = process.returncode
    if code == -signal.SIGTERM:
        return "was still running a minute after this one was done, and was ended"
    return f"ended with exit code {code}, see above"


def _end(processes: Sequence[subprocess.Popen], patience: float) -> None:
    """Wait for each as long as that, then end it."""
    for process in processes:
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.terminate()
    for process in processes:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
