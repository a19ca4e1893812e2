"""C++ kernels for CPUs, compiled for the machine at their first use and kept in the user's cache.

They need a C++ compiler (``CXX``, g++ or clang++) and nothing else: plain functions on pointers, called through ctypes,
which lets go of the GIL. Where there is none, callers do the same in plain torch, slower, and a warning says so once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SOURCES = (
    *("accumulate.cpp", "attention.cpp", "logprob.cpp", "norm.cpp"),
    *("rotary.cpp", "sampling.cpp", "swiglu.cpp", "varlen.cpp"),
)
_HEADERS = ("vector.h",)
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-Wno-psabi")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had (no compiler, HYBRID_CPU_KERNELS=0)."""
    if os.environ.get("HYBRID_CPU_KERNELS", "1") == "0":
        return None
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        _warn("there is no C++ compiler (set CXX, or install g++)")
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        _warn(f"{compiler} failed: {getattr(error, 'stderr', None) or error}")
        return None


def loaded() -> ctypes.CDLL:
    """`library`, where somebody has asked for it before."""
    found = library()
    if found is None:
        raise RuntimeError("the CPU kernels are not available; ask whether they take what is given first")
    return found


def _warn(reason: str) -> None:
    warnings.warn(
        f"the CPU runs in plain torch, which is slower: {reason}; HYBRID_CPU_KERNELS=0 silences this",
        RuntimeWarning,
        stacklevel=3,
    )


def _compiled(compiler: str) -> Path:
    """The library's file, compiled unless the same sources were for such a machine before."""
    here = Path(__file__).parent
    content = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        content.update((here / name).read_bytes())
    content.update(repr((_FLAGS, compiler, _machine())).encode())
    target = _cache() / f"cpu-{content.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            objects = [str(Path(scratch) / f"{name}.o") for name in _SOURCES]
            commands = [["-c", str(here / name), "-o", each] for name, each in zip(_SOURCES, objects, strict=True)]

            def run(arguments: list[str]) -> None:
                subprocess.run([compiler, *_FLAGS, *arguments], check=True, capture_output=True, text=True)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(run, commands))
            run(["-shared", *objects, "-o", str(made)])
            made.replace(target)  # at once: ranks that compile at the same time overwrite each other with the same
    return target


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "hybrid"


def _machine() -> str:
    """What -march=native depends on: a home directory may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")
