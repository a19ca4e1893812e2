"""A host's memory: what of it is free, and what the process keeps of what it has freed."""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path

import psutil

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_MALLOC_TRIM = getattr(_LIBC, "malloc_trim", None)
_MALLOPT = getattr(_LIBC, "mallopt", None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def free_bytes() -> int:
    """Bytes that the processes of this machine, or of this container, may still take."""
    return int(min(psutil.virtual_memory().available, free_in_container()))


def free_in_container(directory: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that are left of a container's limit (cgroup v2), infinite where there is none. What its files hold in the
    page cache and nobody reads is free."""
    try:
        limit = (directory / "memory.max").read_text().strip()
        if limit == "max":
            return math.inf
        used = int((directory / "memory.current").read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except OSError:
        return math.inf
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def keep_freed() -> None:
    """Have glibc keep freed buffers of up to 32 MiB, as torch's allocator does on a GPU.

    It would give them back to the system, and layer after layer a step's buffers would be mapped and zeroed anew: a
    tenth of the time of a training step in bf16. `give_back_freed` does so when something else needs the room.
    """
    if _MALLOPT is not None:
        _MALLOPT(_M_MMAP_THRESHOLD, 2**25)
        _MALLOPT(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed() -> None:
    """Give back to the system what glibc keeps: freed buffers lie in the heap of the thread that made them, where they
    fragment, and after some gathers a rank would hold several times what it uses."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)
