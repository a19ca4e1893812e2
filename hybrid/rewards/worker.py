"""Calls of a user's function, and the program of the process that such a function can have to itself.

It runs by its path and imports the standard library alone, so that the process is there in some 100 ms; what the
function's own file imports comes on top. Results cross the pipe as plain data: no class is needed on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import importlib.util
import inspect
import os
import pickle
import select
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

# How many calls of an async function for single samples are under way at once.
CONCURRENT_CALLS = 64

# What a user's code may raise and is reported; asyncio's cancellation is no Exception.
USER_ERRORS = (Exception, SystemExit, asyncio.CancelledError)

_HERE = Path(__file__).parent


class Status(Enum):
    RETURNED = "returned"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one call."""

    status: Status
    value: Any = None  # of plain data (see ``plain``)
    kind: str = ""  # the class of what was returned or raised
    message: str = ""
    frames: str = ""  # the traceback in the author's own code
    error: BaseException | None = None  # where it was raised in this process

    def encode(self) -> tuple[Any, ...]:
        return self.status.value, self.value, self.kind, self.message, self.frames

    @classmethod
    def decode(cls, fields: Sequence[Any]) -> Outcome:
        return cls(Status(fields[0]), *fields[1:])


class _LimitReached(Exception):
    """An async function was cancelled; not TimeoutError, which it may raise by itself."""


def call(function: Callable[..., Any], arguments: Mapping[str, Any], limit: float | None) -> Outcome:
    """Call a function, and wait for it if it is async. Only an async one is cut off here at its limit."""
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_within(result, limit))
        return _returned(result)
    except _LimitReached:
        return Outcome(Status.TIMED_OUT)
    except USER_ERRORS as error:
        return failed(error)


def call_all(
    function: Callable[..., Awaitable[Any]], many: Sequence[Mapping[str, Any]], limit: float | None
) -> list[Outcome]:
    """Call an async function many times at once; each call has its own limit."""

    async def one(arguments: Mapping[str, Any], gate: asyncio.Semaphore) -> Outcome:
        async with gate:
            try:
                return _returned(await _within(function(**arguments), limit))
            except _LimitReached:
                return Outcome(Status.TIMED_OUT)
            except USER_ERRORS as error:
                return failed(error)

    async def gathered() -> list[Outcome]:
        gate = asyncio.Semaphore(CONCURRENT_CALLS)
        return await asyncio.gather(*(one(arguments, gate) for arguments in many))

    return asyncio.run(gathered())


async def _within(result: Awaitable[Any], limit: float | None) -> Any:
    scope = asyncio.timeout(limit)
    try:
        async with scope:
            return await result
    except TimeoutError:
        if scope.expired():
            raise _LimitReached from None
        raise


def _returned(result: Any) -> Outcome:
    return Outcome(Status.RETURNED, plain(result), type(result).__name__)


def failed(error: BaseException) -> Outcome:
    return Outcome(
        Status.FAILED,
        kind=type(error).__name__,
        message=str(error),
        frames=_user_frames(error.__traceback__),
        error=error,
    )


def plain(value: Any) -> Any:
    """``value`` in lists, dicts, numbers and text: tensors and arrays as lists, what is none of these as its text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist"):  # torch's and numpy's, their scalars too
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return float(value) if isinstance(value, Real) else repr(value)


def _user_frames(trace: TracebackType | None) -> str:
    """The traceback without the frames between this module and the user's code."""
    frames = traceback.extract_tb(trace)
    while frames and _is_machinery(frames[0].filename):
        frames.pop(0)
    return "".join(traceback.format_list(frames))


def _is_machinery(filename: str) -> bool:
    folder = Path(filename).parent
    return folder == _HERE or folder.name in ("asyncio", "importlib") or filename.startswith("<frozen")


def import_file(location: str) -> ModuleType:
    """Import a Python file by its path; raises what it raises."""
    name = f"reward_{Path(location).stem}"
    spec = importlib.util.spec_from_file_location(name, location)
    if spec is None or spec.loader is None:
        raise ImportError(f"{location} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@dataclass(frozen=True, slots=True)
class Origin:
    """Where another process finds a function: in a file, or in a module that can be imported."""

    where: str  # a path, or a module's name
    name: str  # of the function, dotted inside of a class
    is_file: bool

    def load(self) -> Callable[..., Any]:
        found: Any = import_file(self.where) if self.is_file else importlib.import_module(self.where)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


def _die_with_the_parent(lifeline: int) -> None:
    """Have the kernel end this process and its children when the pipe's other end closes, whatever runs here then."""
    os.set_blocking(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit()  # it was too late for the signal


def _serve(connection: Connection) -> None:
    path, where, name, is_file = pickle.loads(connection.recv_bytes())
    sys.path[:] = path
    try:
        function = Origin(where, name, is_file).load()
    except USER_ERRORS as error:
        connection.send_bytes(pickle.dumps([failed(error).encode()]))
        return
    connection.send_bytes(pickle.dumps([Outcome(Status.RETURNED).encode()]))
    while True:
        request = connection.recv_bytes()
        try:
            many, limit = pickle.loads(request)
        except USER_ERRORS as error:  # a column holds an object whose module cannot be imported here
            outcomes = [failed(error)]
        else:
            outcomes = call_all(function, many, limit) if len(many) > 1 else [call(function, many[0], limit)]
        connection.send_bytes(pickle.dumps([outcome.encode() for outcome in outcomes]))


if __name__ == "__main__":
    _connection, _lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    del sys.argv[1:]
    _die_with_the_parent(_lifeline)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is done with it
        _serve(_connection)
