"""Rewards that are Python functions, with errors that say which sample."""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import inspect
import math
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, cast

from hybrid.rewards.protocol import RewardError, RewardOutput

RewardFunction = Callable[..., Any]
_LISTS = ("prompts", "completions", "completion_ids")

# What finding the sample to blame may cost: a function may be slow, or paid for by the call.
_BLAME_CALLS = 16
_BLAME_SECONDS = 10.0


class FunctionReward:
    """A function ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, sync or async.

    It is passed those of the three lists and of the columns that it has parameters for, and all of them if it takes
    ``**kwargs``. None masks a sample.
    """

    def __init__(self, function: RewardFunction, *, name: str | None = None) -> None:
        if not callable(function):
            raise ValueError(f"a reward must be callable, not {type(function).__name__}")
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._takes = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._needs = {p.name for p in parameters if p.name in self._takes and p.default is p.empty}
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ValueError(
                f"reward function {self.name} has positional-only parameters; it is called with keywords: "
                f"{', '.join(_LISTS)} and the prompts' other columns"
            )

    def score(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> RewardOutput:
        """Call the function once on all samples.

        Raises:
            ValueError: it asks for a column that there is not.
            RewardError: it raises, or returns something else than one finite number or None a sample.
        """
        if not prompts:
            return RewardOutput([], {self.name: []})
        arguments = self._arguments(
            {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        )
        started = time.monotonic()
        try:
            result = self._call(arguments)
        except (Exception, SystemExit) as error:  # a user's function may raise anything, or call sys.exit
            what = f"reward function {self.name} raised {type(error).__name__}: {error}"
            deadline = started + _BLAME_SECONDS
            where = self._blame(arguments, prompts, completions, type(error), deadline)
            raise RewardError(f"{what}, {where}", _user_frames(error.__traceback__)) from error
        rewards = self._checked(result, prompts, completions)
        return RewardOutput(rewards, {self.name: rewards})

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise ValueError if the function needs a column that is not among ``names``."""
        missing = sorted(self._needs - {*_LISTS, *names})
        if missing:
            raise ValueError(
                f"reward function {self.name} needs {', '.join(missing)}; besides {', '.join(_LISTS)} the prompts have "
                f"{', '.join(sorted(names)) or 'no columns'}"
            )

    def _arguments(self, available: dict[str, Any]) -> dict[str, Any]:
        self.check_columns([name for name in available if name not in _LISTS])
        return {name: value for name, value in available.items() if self._takes_all or name in self._takes}

    def _call(self, arguments: dict[str, Any]) -> Any:
        result = self.function(**arguments)
        return _wait(result) if inspect.isawaitable(result) else result

    def _blame(
        self,
        arguments: dict[str, Any],
        prompts: Sequence[str],
        completions: Sequence[str],
        kind: type[BaseException],
        deadline: float,
    ) -> str:
        """Call the function on halves of halves of the batch to find the first sample that makes it raise."""
        low, high = 0, len(prompts)  # the culprit is in between, if it is one sample
        for _ in range(_BLAME_CALLS):
            middle = low + max(1, (high - low) // 2)
            if time.monotonic() > deadline:
                break
            raises = self._raises(kind, {name: values[low:middle] for name, values in arguments.items()})
            if raises and middle == low + 1:
                return f"on {_sample(low, prompts, completions)}"
            if not raises and middle == high:
                break
            low, high = (low, middle) if raises else (middle, high)
        return (
            f"on a batch of {len(prompts)} samples, and no one of them was found to be the cause; "
            f"the first is {_sample(0, prompts, completions)}"
        )

    def _raises(self, kind: type[BaseException], arguments: dict[str, Any]) -> bool:
        try:
            self._call(arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (see score)
            return type(error) is kind
        return False

    def _checked(self, result: Any, prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
        values = result.tolist() if hasattr(result, "tolist") else result
        if isinstance(values, (str, dict)) or not isinstance(values, Sequence):
            raise RewardError(
                f"reward function {self.name} returned {type(result).__name__}; "
                "return a list with one number (or None, to mask it) for each sample"
            )
        if len(values) != len(prompts):
            raise RewardError(
                f"reward function {self.name} returned {len(values)} rewards for {len(prompts)} samples; "
                "return one for each"
            )
        rewards: list[float | None] = []
        for index, value in enumerate(values):
            value = value.item() if hasattr(value, "item") else value
            if value is not None and (not isinstance(value, Real) or not math.isfinite(value)):
                raise RewardError(
                    f"reward function {self.name} returned {value!r} for {_sample(index, prompts, completions)}; "
                    "return a finite number, or None to mask the sample"
                )
            rewards.append(None if value is None else float(value))
        return rewards


def load_reward(path: str) -> FunctionReward:
    """The reward function that ``file.py:function`` names.

    Raises:
        ValueError: there is no such file or function, or the file cannot be imported.
    """
    file, _, name = path.rpartition(":")
    if not file or not name:
        raise ValueError(f"reward {path!r} names no function; write it as file.py:function")
    location = Path(file).expanduser()
    if not location.is_file():
        raise ValueError(f"reward {path!r}: there is no file {file}")
    module = _import_file(location, path)
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
    return FunctionReward(function, name=name)


def is_function_path(reward: str) -> bool:
    """Whether ``--reward`` names a Python function rather than a model."""
    return ".py:" in reward or reward.endswith(".py")


def _import_file(location: Path, path: str) -> ModuleType:
    name = f"reward_{location.stem}"
    spec = importlib.util.spec_from_file_location(name, location)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward {path!r}: {location} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything; it is raised again
        del sys.modules[name]
        raise ValueError(f"reward {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _wait(result: Awaitable[Any]) -> Any:
    """Run an awaitable to its end, also where an event loop runs already, as in a notebook."""

    async def finish() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(finish())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, cast(Coroutine[Any, Any, Any], finish())).result()


def _user_frames(trace: TracebackType | None) -> str:
    """The traceback without the frames that are this module's, or between it and the user's: asyncio's."""
    frames = traceback.extract_tb(trace)
    while frames and (frames[0].filename == __file__ or Path(frames[0].filename).parent.name == "asyncio"):
        frames.pop(0)
    return "".join(traceback.format_list(frames))


def _sample(index: int, prompts: Sequence[str], completions: Sequence[str]) -> str:
    return f"sample {index} (prompt {_short(prompts[index])}, completion {_short(completions[index])})"


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
