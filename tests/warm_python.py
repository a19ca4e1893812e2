"""A Python that has imported the library already: each command runs in a fork, so that it need not import it anew.

``WarmPython(directory)`` starts it, and ``program`` is an executable that is called as ``python`` is: with a script and
its arguments, with ``-m`` or with ``-c``. A command has a process, an environment, a working directory and streams of
its own, any number run at once, and one whose caller is killed is ended. ``torchrun`` starts its ranks by it if
PYTHON_EXEC names it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLOO_SOCKET_IFNAME": "lo",
}
_MOST_BYTES = 1 << 20


@functools.cache
def warm_python() -> str:
    """The program of one that serves until this process ends."""
    running = ExitStack()
    directory = running.enter_context(tempfile.TemporaryDirectory(prefix="warm-python-"))
    python = running.enter_context(WarmPython(Path(directory), ENVIRONMENT))
    atexit.register(running.close)
    return str(python.program)


class WarmPython:
    """The server as a context manager; ``directory`` holds its socket and its program."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.program = directory / "python"
        self.program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" ask "{directory}/socket" "$@"\n')
        self.program.chmod(0o755)
        command = [sys.executable, __file__, "serve", f"{directory}/socket"]
        self._server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> WarmPython:
        if self._server.stdout is None or self._server.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the server did not start: {self._server.poll()=}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.kill()
        self._server.communicate()


def serve(address: str) -> None:
    """Run commands until whoever started this is gone, which closes its standard input."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import hybrid.engine
    import hybrid.learning.run
    import hybrid.rl.setup  # noqa: F401

    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as selector:
        server.bind(address)
        server.listen()
        selector.register(server, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is server:
                    _start(server, selector)
                else:
                    _attend(key, selector)


def _start(server: socket.socket, selector: selectors.BaseSelector) -> None:
    connection, _ = server.accept()
    request, streams, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
    child = os.fork()
    if child == 0:
        server.close()
        connection.close()
        selector.close()
        run(json.loads(request), streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    selector.register(connection, selectors.EVENT_READ, (child, connection, ended))
    selector.register(ended, selectors.EVENT_READ, (child, connection, ended))


def _attend(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    """A command has ended, or else its caller has."""
    child, connection, ended = key.data
    if key.fileobj == ended:
        _, status = os.waitpid(child, 0)
        os.close(ended)
        if connection.fileno() >= 0:
            selector.unregister(connection)
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()
        selector.unregister(ended)
    else:
        selector.unregister(connection)
        connection.close()
        os.kill(child, signal.SIGTERM)


def run(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Do in this process what Python would do with the command, and end it."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # so that TMPDIR is read again
    first, *rest = words = [word for word in request["words"] if word != "-u"]
    sys.argv = words if first not in ("-c", "-m") else [rest[0] if first == "-m" else first, *rest[1:]]
    if first == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")
    sys.exit()


def ask(address: str, words: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = {"words": words, "cwd": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        return int(connection.recv(16) or 1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
