"""Start a world of ranks for a test: fast, on one machine, and with the culprit's traceback first when it fails.

Ranks are forked from a server that has imported the library already (0.1 s instead of 5 s), meet through a file, and
use one thread each. A rank that fails writes its traceback and the time before it dies; a rank that waits for a dead
peer gives up after the group's timeout, and is killed half a minute after the first one ended.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

GROUP_TIMEOUT_S = 20.0
OUTLIVE_S = 30.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["transformers.models.llama.modeling_llama", "hybrid.engine", "hybrid.rl.setup", "hybrid.checkpoint", "pytest"]
)


class WorldError(RuntimeError):
    """Some ranks failed; the message holds their tracebacks, earliest first."""

    def __init__(self, message: str, exit_codes: list[int | None]) -> None:
        super().__init__(message)
        self.exit_codes = exit_codes


def run_world(
    fn: Callable[..., Any], world_size: int, tmp_path: Path, *args: Any, timeout_s: float = 180.0
) -> list[Any]:
    """Run ``fn(*args)`` on every rank of a gloo world and return what each returned, by rank.

    ``fn`` and ``args`` must be picklable (a function of the test's module). RANK, LOCAL_RANK, WORLD_SIZE and
    LOCAL_WORLD_SIZE are set and the process group exists before ``fn`` runs.

    Raises:
        WorldError: a rank raised, died, or outlived the others or ``timeout_s``.
    """
    directory = tmp_path / f"world-{uuid.uuid4().hex[:8]}"
    directory.mkdir(parents=True)
    ranks = [
        _context.Process(target=_run_rank, args=(fn, args, rank, world_size, directory), name=f"rank-{rank}")
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    killed = _join(ranks, timeout_s)
    exit_codes = [process.exitcode for process in ranks]
    if any(exit_codes) or killed:
        raise WorldError(_report(directory, exit_codes, killed), exit_codes)
    return [pickle.loads((directory / f"{rank}.result").read_bytes()) for rank in range(world_size)]


def _run_rank(fn: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, directory: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    with (directory / f"{rank}.stack").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        # os._exit: threads of the process group would wait for peers, which are waiting for us.
        os._exit(_run_guarded(fn, args, rank, world_size, directory))


def _run_guarded(fn: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, directory: Path) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(directory / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
        )
        result = pickle.dumps(fn(*args))
        dist.barrier()  # a rank that leaves early takes down those that are still connecting to it
        dist.destroy_process_group()
    except BaseException:
        (directory / f"{rank}.error").write_text(f"{time.time()}\n{traceback.format_exc()}")
        return 1
    (directory / f"{rank}.result").write_bytes(result)
    return 0


def _join(ranks: list[BaseProcess], timeout_s: float) -> list[int]:
    """Wait for all ranks; returns those that had to be killed."""
    deadline = time.monotonic() + timeout_s
    alive = dict(enumerate(ranks))
    while alive and time.monotonic() < deadline:
        wait([process.sentinel for process in alive.values()], timeout=max(0.0, deadline - time.monotonic()))
        ended = [rank for rank, process in alive.items() if not process.is_alive()]
        if ended and len(alive) == len(ranks):
            deadline = min(deadline, time.monotonic() + OUTLIVE_S)
        for rank in ended:
            del alive[rank]
    for process in alive.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGUSR1)  # have it write down where it is
    if alive:
        time.sleep(0.5)
    for process in alive.values():
        process.kill()
    for process in ranks:
        process.join()
    return sorted(alive)


def _report(directory: Path, exit_codes: list[int | None], killed: list[int]) -> str:
    errors = []
    for rank in range(len(exit_codes)):
        path = directory / f"{rank}.error"
        if path.exists():
            when, _, text = path.read_text().partition("\n")
            errors.append((float(when), rank, text))
    parts = [
        f"--- rank {rank}, at {time.strftime('%X', time.localtime(when))}\n{text}"
        for when, rank, text in sorted(errors)
    ]
    told = {rank for _, rank, _ in errors}
    parts += [
        f"--- rank {rank} died without a word (exit code {code})"
        for rank, code in enumerate(exit_codes)
        if code and rank not in told and rank not in killed
    ]
    parts += [
        f"--- rank {rank} hung and was killed, at\n{(directory / f'{rank}.stack').read_text()}" for rank in killed
    ]
    return f"a world of {len(exit_codes)} failed, exit codes {exit_codes}\n" + "\n".join(parts)
