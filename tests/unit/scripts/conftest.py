"""What tests of benchmarks share: the worlds that a benchmark starts."""

from __future__ import annotations

import sys

import pytest

from tests.warm_python import warm_python


@pytest.fixture
def warm_worlds(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ranks that a script starts are forks of a Python that is warm, on the CPU; torchrun's logs go with the test."""
    monkeypatch.setattr(sys, "executable", warm_python())
    for name, value in {
        "PYTHON_EXEC": warm_python(),
        "GLOO_SOCKET_IFNAME": "lo",
        "HYBRID_DEVICE": "cpu",
        "TMPDIR": tmp_path_factory.mktemp("torchrun"),
    }.items():
        monkeypatch.setenv(name, str(value))
