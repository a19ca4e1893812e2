"""Several processes that share a batch: each is handed the next sample as soon as it is done with one."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from hybrid.rewards.process import Arguments, FunctionProcess, Phase
from hybrid.rewards.worker import Origin, Outcome, Status

# What "auto" goes up to: each process has the function's imports in memory.
MOST_AUTO_WORKERS = 8


def auto_workers() -> int:
    """This rank's part of the machine's cores, at most `MOST_AUTO_WORKERS`."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_AUTO_WORKERS, len(os.sched_getaffinity(0)) // ranks))


@dataclass(slots=True)
class _Batch:
    """How far the calls of one batch have come; a call is in one of the first three, by its index."""

    waiting: deque[int]
    busy: dict[FunctionProcess, int] = field(default_factory=dict)
    done: dict[int, Outcome] = field(default_factory=dict)
    retried: set[int] = field(default_factory=set)  # their process ended once


class PoolCaller:
    """Calls a function that is not async in up to ``size`` processes, each call in one of them.

    They are started when there are calls for them. One is killed when its call takes too long, while the others go on.
    A call whose process ends by itself is made once more in another, since a process may be killed for what it had
    piled up before; if that ends too the call has failed.
    """

    def __init__(self, name: str, origin: Origin, size: int) -> None:
        # The processes share the cores: what they import should not start threads for all of them in each.
        self._processes = [FunctionProcess(name, origin, {"OMP_NUM_THREADS": "1"}) for _ in range(size)]

    def call(self, many: Sequence[Arguments], limit: float | None) -> Generator[Outcome]:
        """One outcome for each of ``many`` calls, in order, up to the first that failed."""
        batch = _Batch(deque(range(len(many))))
        try:
            for index in range(len(many)):
                while index not in batch.done:
                    self._hand_out(batch, many, limit)
                    self._collect(batch)
                outcome = batch.done.pop(index)
                yield outcome
                if outcome.status is Status.FAILED:
                    return
        finally:  # also when interrupted, or not asked for the rest
            for process in self._processes:
                if process.phase is Phase.BUSY:
                    process.close()

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def _hand_out(self, batch: _Batch, many: Sequence[Arguments], limit: float | None) -> None:
        """Give every process something to do, as far as there are calls."""
        num_starting = 0
        absent: list[FunctionProcess] = []
        for process in self._processes:
            phase = process.phase
            num_starting += phase is Phase.STARTING
            if phase is Phase.ABSENT:
                absent.append(process)
            elif phase is Phase.IDLE and batch.waiting:
                index = batch.waiting.popleft()
                process.ask([many[index]], limit, limit)
                batch.busy[process] = index
        for process in absent[: max(0, len(batch.waiting) - num_starting)]:
            process.start()

    def _collect(self, batch: _Batch) -> None:
        """Wait until a process has an answer or has taken too long, and take what there is."""
        active = [p for p in self._processes if p.phase in (Phase.STARTING, Phase.BUSY)]
        limits = [seconds for p in active if (seconds := p.seconds_left()) is not None]
        ready = wait([p.connection for p in active], min(limits, default=None))
        for process in active:
            if process.connection not in ready and process.seconds_left() != 0:
                continue
            if process.phase is Phase.STARTING:
                process.finish_start()
            else:
                self._take(batch, process)

    def _take(self, batch: _Batch, process: FunctionProcess) -> None:
        index = batch.busy.pop(process)
        (outcome,) = process.answer()
        failed = outcome.status is Status.FAILED
        if failed and process.phase is Phase.ABSENT and index not in batch.retried:
            batch.retried.add(index)
            batch.waiting.appendleft(index)
            return
        batch.done[index] = outcome
        if failed:  # what comes after it is not asked for
            batch.waiting = deque(waiting for waiting in batch.waiting if waiting < index)
