"""A Python that has imported the library already: each command runs in a fork, so that it need not import it anew.

``WarmPython(directory)`` starts it, and ``program`` is an executable that is called as ``python`` is, with a script and
its arguments, or with ``-c``. A command has a process, an environment, a working directory and streams of its own.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

_MOST_BYTES = 1 << 20


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
    import transformers.models.llama.modeling_llama  # noqa: F401

    import hybrid.learning.run
    import hybrid.rl.setup  # noqa: F401

    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        request, streams, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
        child = os.fork()
        if child == 0:
            server.close()
            connection.close()
            run(json.loads(request), streams)
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(child, 0)
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        connection.close()


def run(request: dict[str, Any], streams: list[int]) -> None:
    """Do in this process what Python would do with the command, and end it."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["words"]
    if sys.argv[0] == "-c":
        code = sys.argv.pop(1)
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
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
