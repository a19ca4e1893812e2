"""A process that calls one function: started when it is needed, killed when it takes too long, started again."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from hybrid.rewards import worker
from hybrid.rewards.protocol import RewardError
from hybrid.rewards.worker import Origin, Outcome, Status

Arguments = Mapping[str, Any]

# A process imports the function's file before its first call, torch and models perhaps.
START_SECONDS = 300.0

# The operating system counts milliseconds in 32 bits.
_LONGEST_WAIT_SECONDS = 1e6


class Phase(Enum):
    """ABSENT -> STARTING -> IDLE <-> BUSY; and from each of them back to ABSENT, with `FunctionProcess.close`."""

    ABSENT = auto()
    STARTING = auto()  # it imports the function
    IDLE = auto()
    BUSY = auto()  # it has been asked and has not answered


class FunctionProcess:
    """One process and what is under way in it. Whoever asks it something takes the answer before the next question.

    Args:
        name: of the function, for errors.
        environment: variables that the process has where this one has not.
    """

    def __init__(self, name: str, origin: Origin, environment: Mapping[str, str] | None = None) -> None:
        self.name, self.origin = name, origin
        self._environment = environment or {}
        self._phase = Phase.ABSENT
        self._deadline: float | None = None  # of what is under way, by the monotonic clock; None: it may take for ever
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._owner = 0

    @property
    def phase(self) -> Phase:
        if self._owner != os.getpid():  # this program is a fork of the one whose process it is
            return Phase.ABSENT
        if self._phase is Phase.IDLE and self._process is not None and self._process.poll() is not None:
            self.close()  # it was killed, by the kernel for its memory say, while nobody asked it anything
        return self._phase

    @property
    def connection(self) -> Connection:
        """What becomes readable when an answer has come, or the process has ended."""
        if self._connection is None:
            raise RuntimeError(f"there is no process to wait for: {self._phase=}")
        return self._connection

    def seconds_left(self) -> float | None:
        """How long what is under way may still take; None: without end."""
        if self._deadline is None:
            return None
        return min(max(0.0, self._deadline - time.monotonic()), _LONGEST_WAIT_SECONDS)

    def start(self) -> None:
        """Start the process, which then imports the function; `finish_start` takes its answer."""
        self.close()
        ours, theirs = Pipe()
        lifeline, held = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", worker.__file__, str(theirs.fileno()), str(lifeline)],
            pass_fds=(theirs.fileno(), lifeline),
            stdin=subprocess.DEVNULL,
            env={**self._environment, **os.environ},
            start_new_session=True,  # its children are killed with it, and an interrupt at the terminal is not its own
        )
        theirs.close()
        os.close(lifeline)
        self._connection, self._owner = ours, os.getpid()
        self._end = weakref.finalize(self, _end_process, self._process, ours, held, self._owner)
        where = self.origin
        request = pickle.dumps((sys.path, where.where, where.name, where.is_file))
        self._send(request, START_SECONDS, Phase.STARTING)

    def finish_start(self) -> None:
        """Wait until the function is imported.

        Raises:
            RewardError: it cannot be.
        """
        (outcome,) = self.answer()
        if outcome.status is not Status.RETURNED:
            self.close()
            reason = f"{outcome.kind}: {outcome.message}" if outcome.kind else f"not done within {START_SECONDS:g} s"
            raise RewardError(
                f"reward function {self.name} cannot be imported in a process of its own ({reason}); set "
                "--reward_timeout 0 to call it without one",
                outcome.frames,
            )

    def ask(self, many: Sequence[Arguments], limit: float | None, hard_limit: float | None) -> None:
        """Have ``many`` calls made; `answer` gives their outcomes.

        Args:
            limit: seconds for each call of an async function, which is cancelled then.
            hard_limit: seconds until the process is killed.

        Raises:
            ValueError: an argument cannot be sent to another process.
        """
        self._send(pickled(many, limit), hard_limit, Phase.BUSY)

    def answer(self) -> list[Outcome]:
        """The outcomes of the calls, or one outcome if there was no answer in time or the process ended."""
        connection, process, outcomes = self.connection, self._process, None
        try:
            if not connection.poll(self.seconds_left()):
                return [Outcome(Status.TIMED_OUT)]
            outcomes = [Outcome.decode(fields) for fields in pickle.loads(connection.recv_bytes())]
            self._phase = Phase.IDLE
            return outcomes
        except (EOFError, ConnectionError):
            code = process.wait() if process is not None else 0
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return [Outcome(Status.FAILED, kind="ProcessEnded", message=f"its process {how}")]
        finally:
            if outcomes is None:  # also when interrupted: an answer that comes late must not meet the next question
                self.close()

    def close(self) -> None:
        """Leave nothing running."""
        if self._end is not None and self._owner == os.getpid():
            self._end()
        self._connection = self._process = self._end = None
        self._phase = Phase.ABSENT

    def _send(self, request: bytes, limit: float | None, phase: Phase) -> None:
        self._phase = phase  # first of all: one that is interrupted here is not asked again
        with contextlib.suppress(ConnectionError):  # whoever waits for the answer finds that the process has ended
            self.connection.send_bytes(request)
        self._deadline = None if limit is None else time.monotonic() + limit


def pickled(many: Sequence[Arguments], limit: float | None) -> bytes:
    """A request for ``many`` calls.

    Raises:
        ValueError: an argument cannot be pickled; the message names it.
    """
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
