"""Where a user's function runs, so that it can be cut off when it hangs: in processes of its own, or in a thread.

A process can be killed whatever it does. A thread can only be given up on: it is asked to end, which an endless loop in
Python does and a call that blocks in C does not, and one that holds the interpreter's lock stops this program too.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import inspect
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from hybrid.rewards import worker
from hybrid.rewards.pool import PoolCaller
from hybrid.rewards.process import Arguments, FunctionProcess, Phase
from hybrid.rewards.worker import CONCURRENT_CALLS, Origin, Outcome, Status

# What an async function has beyond its limit for cleaning up once it is cancelled.
GRACE_SECONDS = 2.0


class Caller(Protocol):
    """Calls one function."""

    def call(self, many: Sequence[Arguments], limit: float | None) -> Generator[Outcome]:
        """One outcome for each of ``many`` calls, in order, each call being cut off after ``limit`` seconds.

        After the first that failed there may be no more of them.
        """
        ...

    def close(self) -> None:
        """Leave nothing running; the next call starts anew."""
        ...


class ThreadCaller:
    """Calls in this process: without a limit right here, else in a thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._is_async = is_async(function)

    def call(self, many: Sequence[Arguments], limit: float | None) -> Generator[Outcome]:
        if self._is_async and len(many) > 1:
            outcomes = self._run(lambda: worker.call_all(self.function, many, limit), _limit_of_all(many, limit))
            if isinstance(outcomes, list):
                yield from outcomes
                return
        for arguments in many:
            work = self._work(arguments, limit)
            yield self._run(work, _with_grace(limit, self._is_async)) or Outcome(Status.TIMED_OUT)

    def close(self) -> None:
        pass

    def _work(self, arguments: Arguments, limit: float | None) -> Callable[[], Outcome]:
        return lambda: worker.call(self.function, arguments, limit)

    def _run(self, work: Callable[[], Any], limit: float | None) -> Any:
        """What ``work`` returns, or None if it takes longer than ``limit``."""
        if limit is None and not (self._is_async and _in_event_loop()):
            return work()
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(_answer, work, answers), name="reward", daemon=True)
        thread.start()
        try:
            return answers.get(timeout=limit)
        except queue.Empty:
            _ask_to_end(thread)
            return None


class ProcessCaller(FunctionProcess):
    """Calls one after another in a process; those of an async function for single samples side by side in it."""

    def __init__(self, function: Callable[..., Any], name: str, origin: Origin) -> None:
        super().__init__(name, origin)
        self._is_async = is_async(function)

    def call(self, many: Sequence[Arguments], limit: float | None) -> Generator[Outcome]:
        if self._is_async and len(many) > 1:
            outcomes = self._ask(many, limit, _limit_of_all(many, limit))
            if len(outcomes) == len(many):
                yield from outcomes
                return
        for arguments in many:
            yield self._ask([arguments], limit, _with_grace(limit, self._is_async))[0]

    def _ask(self, many: Sequence[Arguments], limit: float | None, hard_limit: float | None) -> list[Outcome]:
        if self.phase is not Phase.IDLE:  # not there yet, or interrupted at what it was asked last
            self.start()
            self.finish_start()
        self.ask(many, limit, hard_limit)
        return self.answer()


def origin_of(function: Callable[..., Any]) -> Origin | None:
    """Where another process can import ``function`` from; None for lambdas, closures, objects, and a script's own."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or module is None or "<" in name:
        return None
    spec = getattr(module, "__spec__", None)
    if module.__name__ == "__main__" or spec is None or not spec.has_location:
        return None
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return Origin(module.__name__, name, is_file=False) if found is function else None


def make_caller(function: Callable[..., Any], name: str, origin: Origin | None, *, num_processes: int) -> Caller:
    """As many processes as are wanted if they can import the function, which is said if they cannot; else a thread.

    Several are for a function that is called for each sample and is not async.
    """
    if num_processes == 0:
        return ThreadCaller(function)
    origin = origin or origin_of(function)
    if origin is None:
        warnings.warn(
            f"reward function {name} cannot be imported by another process, so it runs in a thread, which cannot be "
            "stopped while it blocks in C; define it at the top of a module or pass it as file.py:function",
            stacklevel=3,
        )
        return ThreadCaller(function)
    if num_processes > 1:
        return PoolCaller(name, origin, num_processes)
    return ProcessCaller(function, name, origin)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is an async function, or an object whose call is."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _with_grace(limit: float | None, is_async: bool) -> float | None:
    return limit if limit is None or not is_async else limit + GRACE_SECONDS


def _limit_of_all(many: Sequence[Arguments], limit: float | None) -> float | None:
    rounds = -(-len(many) // CONCURRENT_CALLS)
    return None if limit is None else rounds * limit + GRACE_SECONDS


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _answer(work: Callable[[], Any], answers: queue.SimpleQueue[Any]) -> None:
    try:
        answers.put(work())
    except BaseException as error:  # noqa: BLE001 - without an answer the caller would wait for the limit
        answers.put(worker.failed(error))


def _ask_to_end(thread: threading.Thread) -> None:
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
