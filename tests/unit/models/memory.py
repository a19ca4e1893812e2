"""How much memory a process needs at its peak: resident pages, mapped files included, as Linux counts them."""

from __future__ import annotations

import ctypes
from pathlib import Path

_M_MMAP_THRESHOLD = -3


def give_back_freed_memory() -> None:
    """Have glibc return what is freed (from 1 MiB on) at once: what it keeps for reuse is its choice and not ours."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


def start_peak() -> int:
    """Forget the peak so far; returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def resident_peak() -> int:
    """The most bytes that were resident since `start_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
