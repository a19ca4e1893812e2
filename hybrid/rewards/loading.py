"""Rewards by what the command line calls them: ``file.py:function``, or the address of a server."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hybrid.rewards.combined import CombinedReward
from hybrid.rewards.function import DEFAULT_TIMEOUT, FunctionReward
from hybrid.rewards.protocol import Reward
from hybrid.rewards.remote import RemoteFunction, is_url
from hybrid.rewards.worker import USER_ERRORS, Origin, import_file


def load_reward(
    path: str, *, timeout: float | None = DEFAULT_TIMEOUT, workers: int | Literal["auto"] = 1
) -> FunctionReward:
    """The reward function that ``file.py:function`` names, or the one behind ``http://host:port/path``.

    A function from a file runs in a process of its own, so that one that hangs can be killed. Several addresses of one
    service, with commas between, share each batch.

    Args:
        timeout: seconds for a call or a request; None or 0: no limit, and no process.
        workers: processes that share the samples of a function that is called for each; see `FunctionReward`.

    Raises:
        ValueError: there is no such file or function, the file cannot be imported, or the address is none.
    """
    if is_url(path):
        if workers not in ("auto", 1):
            warnings.warn(
                f"reward_workers={workers} has no effect on {path}, which is asked for a batch at once; several "
                "addresses, with commas between, share it",
                stacklevel=2,
            )
        return FunctionReward(RemoteFunction(path.split(","), timeout=timeout), timeout=None)
    file, _, name = path.rpartition(":")
    if not file or not name:
        raise ValueError(f"reward {path!r} names no function; write it as file.py:function")
    location = Path(file).expanduser()
    if not location.is_file():
        raise ValueError(f"reward {path!r}: there is no file {file}")
    location = location.resolve()
    try:
        module = import_file(str(location))
    except USER_ERRORS as error:
        raise ValueError(f"reward {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        defined = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        close = difflib.get_close_matches(name, defined, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it defines {', '.join(defined) or 'none'}"
        raise ValueError(f"reward {path!r}: {file} has no function {name}; {hint}")
    if not callable(function):
        raise ValueError(f"reward {path!r}: {name} is a {type(function).__name__}, not a function")
    origin = Origin(str(location), name, is_file=True)
    return FunctionReward(function, name=name, timeout=timeout, own_process=True, workers=workers, origin=origin)


def combine_rewards(rewards: Sequence[Reward], weights: Sequence[float] = ()) -> Reward:
    """One reward from several; a single one without a weight stays as it is."""
    if len(rewards) == 1 and not weights:
        return rewards[0]
    return CombinedReward(rewards, weights)
