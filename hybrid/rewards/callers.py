"""Where a user's function runs, so that it can be cut off when it hangs: in a process of its own, or in a thread.

A process can be killed whatever it does. A thread can only be given up on: it is asked to end, which an endless loop in
Python does and a call that blocks in C does not, and one that holds the interpreter's lock stops this program too.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import inspect
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

from hybrid.rewards import worker
from hybrid.rewards.protocol import RewardError
from hybrid.rewards.worker import CONCURRENT_CALLS, Origin, Outcome, Status

Arguments = Mapping[str, Any]

# A process imports the function's file before its first call, torch and models perhaps.
START_SECONDS = 300.0

# What an async function has beyond its limit for cleaning up once it is cancelled.
GRACE_SECONDS = 2.0


class Caller(Protocol):
    """Calls one function."""

    def call(self, many: Sequence[Arguments], limit: float | None) -> Iterator[Outcome]:
        """One outcome for each of ``many`` calls, in order, each call being cut off after ``limit`` seconds."""
        ...

    def close(self) -> None:
        """Leave nothing running; the next call starts anew."""
        ...


class ThreadCaller:
    """Calls in this process: without a limit right here, else in a thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._is_async = _is_async(function)

    def call(self, many: Sequence[Arguments], limit: float | None) -> Iterator[Outcome]:
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


class ProcessCaller:
    """Calls in a process that is started for the first call, killed at the limit, and started again when needed."""

    def __init__(self, function: Callable[..., Any], name: str, origin: Origin) -> None:
        self.name, self.origin = name, origin
        self._is_async = _is_async(function)
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._owner = 0

    def call(self, many: Sequence[Arguments], limit: float | None) -> Iterator[Outcome]:
        if self._is_async and len(many) > 1:
            outcomes = self._ask(many, limit, _limit_of_all(many, limit))
            if len(outcomes) == len(many):
                yield from outcomes
                return
        for arguments in many:
            yield self._ask([arguments], limit, _with_grace(limit, self._is_async))[0]

    def close(self) -> None:
        if self._end is not None and self._owner == os.getpid():
            self._end()
        self._connection = self._process = self._end = None

    def _ask(self, many: Sequence[Arguments], limit: float | None, hard_limit: float | None) -> list[Outcome]:
        """The outcomes of ``many`` calls, or one outcome if there was no answer in time or the process ended."""
        request = _pickled(many, limit)
        if self._connection is None or self._owner != os.getpid():
            self._start()
        return self._exchange(request, hard_limit)

    def _start(self) -> None:
        ours, theirs = Pipe()
        lifeline, held = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", worker.__file__, str(theirs.fileno()), str(lifeline)],
            pass_fds=(theirs.fileno(), lifeline),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # its children are killed with it
        )
        theirs.close()
        os.close(lifeline)
        self._connection, self._owner = ours, os.getpid()
        self._end = weakref.finalize(self, _end_process, self._process, ours, held, self._owner)
        where = self.origin
        request = pickle.dumps((sys.path, where.where, where.name, where.is_file))
        (outcome,) = self._exchange(request, START_SECONDS)
        if outcome.status is not Status.RETURNED:
            self.close()
            reason = f"{outcome.kind}: {outcome.message}" if outcome.kind else f"not done within {START_SECONDS:g} s"
            raise RewardError(
                f"reward function {self.name} cannot be imported in a process of its own ({reason}); set "
                "--reward_timeout 0 to call it without one",
                outcome.frames,
            )

    def _exchange(self, request: bytes, limit: float | None) -> list[Outcome]:
        connection, process, outcomes = self._connection, self._process, None
        if connection is None or process is None:
            raise RuntimeError(f"there is no process to ask: {connection=}, {process=}")
        try:
            connection.send_bytes(request)
            if not connection.poll(limit):
                return [Outcome(Status.TIMED_OUT)]
            outcomes = [Outcome.decode(fields) for fields in pickle.loads(connection.recv_bytes())]
            return outcomes
        except (EOFError, ConnectionError):
            code = process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return [Outcome(Status.FAILED, kind="ProcessEnded", message=f"its process {how}")]
        finally:
            if outcomes is None:  # also when interrupted: an answer that comes late must not meet the next question
                self.close()


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


def make_caller(function: Callable[..., Any], name: str, origin: Origin | None, *, own_process: bool) -> Caller:
    """A process if one is wanted and can import the function, which is said if it cannot; else a thread."""
    if not own_process:
        return ThreadCaller(function)
    origin = origin or origin_of(function)
    if origin is None:
        warnings.warn(
            f"reward function {name} cannot be imported by another process, so it runs in a thread, which cannot be "
            "stopped while it blocks in C; define it at the top of a module or pass it as file.py:function",
            stacklevel=3,
        )
        return ThreadCaller(function)
    return ProcessCaller(function, name, origin)


def _is_async(function: Callable[..., Any]) -> bool:
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


def _pickled(many: Sequence[Arguments], limit: float | None) -> bytes:
    try:
        return pickle.dumps((many, limit))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        name = next((name for name in many[0] if not _can_be_pickled([a[name] for a in many])), "an argument")
        raise ValueError(
            f"column {name} holds objects that cannot be sent to the reward function's process ({error}); "
            "leave the column out, or set --reward_timeout 0 to call the function without a process of its own"
        ) from error


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def _end_process(process: subprocess.Popen[bytes], connection: Connection, held: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork of this program ends: the process is not its own
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    connection.close()
    os.close(held)
