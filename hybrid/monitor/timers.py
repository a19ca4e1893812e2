"""Seconds spent in named stages."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """Adds up the seconds of each stage until they are drained.

    A device computes behind the host's back; ``synchronize`` (such as ``torch.cuda.synchronize``) waits for it, so
    that a stage is charged with its own work and not with its predecessor's.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self._seconds[stage] += time.perf_counter() - start

    def drain(self) -> dict[str, float]:
        """Seconds by stage since the last drain."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def _wait(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
