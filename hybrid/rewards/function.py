"""Rewards that are Python functions, with errors that say which sample and a limit on what each may take."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Literal

from hybrid.rewards.callers import is_async, make_caller
from hybrid.rewards.pool import auto_workers
from hybrid.rewards.protocol import RewardError, RewardOutput
from hybrid.rewards.remote import is_url
from hybrid.rewards.results import Scores, read_scores
from hybrid.rewards.signature import Form, Signature
from hybrid.rewards.worker import Origin, Outcome, Status

RewardFunction = Callable[..., Any]

DEFAULT_TIMEOUT = 60.0

# What finding the sample to blame may cost: a function may be slow, or paid for by the call.
_BLAME_CALLS = 16
_BLAME_SECONDS = 10.0


class FunctionReward:
    """A function ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, sync or async.

    It is passed those of the three lists and of the columns that it has parameters for, and all of them if it takes
    ``**kwargs``. None masks a sample. Other forms are told by the names of their parameters:

    - ``f(prompt, completion, **columns) -> float | None``, called for each sample;
    - verl's ``compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict``, called for each
      sample, and ``compute_score(data_sources, solution_strs, ground_truths, extra_infos)`` for a batch;
    - OpenRLHF's ``reward_func(queries, prompts, labels)``, which returns lists, tensors or a dict of them.

    ``ground_truth`` and ``labels`` are the prompts' column ground_truth, answer, solution or label. A sample's result
    may be a dict with a ``score``, a batch's one with ``rewards`` (or ``scores``) and ``extra_logs``: their other
    numbers are sub-scores, which `RewardOutput.parts` holds as ``name/sub-score``.

    What takes longer than ``timeout`` is cut off. Where the function is called for each sample that sample is masked,
    named in a warning, and counted as ``name/timed_out``; a batch is an error. Async functions are cancelled, and
    those for single samples run side by side. Others run in a thread; one that hangs is given up on, and goes on
    until it returns to Python. With ``own_process`` a function runs in a process, which is killed: it sees the state
    of its module as that is after import, and not what this program made of it. Lambdas, closures, methods, objects
    and what a script defines itself cannot be imported by another process, so they stay in a thread.

    With several ``workers`` as many such processes share the samples of a function that is called for each: a slow one
    takes a part of the time. Each imports the function's file, and knows nothing of the others' calls.

    Args:
        name: for errors and metrics (default: the function's).
        timeout: seconds for each call; None or 0: no limit, and the function is called in the caller's own thread,
            which those that use signals need.
        own_process: call it in a process of its own.
        workers: how many of them, at most one for each sample; more than 1 stands for ``own_process`` too. "auto": this
            rank's part of the cores, at most 8, where the function is called for each sample in a process of its own
            and is not async; otherwise 1.
        origin: where such a process finds the function (default: in its module).
    """

    def __init__(
        self,
        function: RewardFunction,
        *,
        name: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        own_process: bool = False,
        workers: int | Literal["auto"] = 1,
        origin: Origin | None = None,
    ) -> None:
        if not callable(function):
            raise ValueError(f"a reward must be callable, not {type(function).__name__}")
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout={timeout} is no number of seconds; set it to 0 (no limit) or more")
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.timeout = timeout or None
        self.origin = origin
        self.signature = Signature.of(function, self.name)
        self._caller = make_caller(function, self.name, origin, num_processes=self._num_processes(own_process, workers))

    def score(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> RewardOutput:
        """Call the function on all samples: once, or once for each.

        Raises:
            ValueError: it asks for a column that there is not.
            RewardError: it raises, hangs on a batch, or returns something else than one finite number or None a
                sample.
        """
        if not prompts:
            return RewardOutput([], {self.name: []})
        self.check_columns(list(columns))
        calls = self.signature.calls(prompts, completions, completion_ids, columns)
        if self.signature.form.is_per_sample:
            scores, timed_out = self._score_each(calls, prompts, completions)
        else:
            scores, timed_out = self._score_batch(calls[0], prompts, completions), None
        parts = {self.name: scores.rewards} | {f"{self.name}/{name}": values for name, values in scores.extras.items()}
        if timed_out is None:
            return RewardOutput(scores.rewards, parts)
        parts[f"{self.name}/timed_out"] = [float(index in timed_out) for index in range(len(prompts))]
        return RewardOutput(scores.rewards, parts, tuple(sorted(timed_out)))

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise ValueError if the function needs a column that is not among ``names``."""
        missing = self.signature.missing(names)
        if missing:
            raise ValueError(
                f"reward function {self.name} needs {', '.join(missing)}; besides "
                f"{', '.join(self.signature.form.given)} the prompts have {', '.join(sorted(names)) or 'no columns'}"
            )

    def close(self) -> None:
        """End the function's processes, if it has any; the next score starts others."""
        self._caller.close()

    def _num_processes(self, own_process: bool, workers: int | Literal["auto"]) -> int:
        """0 for a thread."""
        if workers != "auto" and workers < 1:
            raise ValueError(f"workers={workers} is too small; set it to 1 or more, or to auto")
        reason = None
        if not self.signature.form.is_per_sample:
            reason = (
                f"which takes a batch at once; define it for one sample, as {self.name}({', '.join(Form.SAMPLE.given)})"
            )
        elif is_async(self.function):
            reason = "which is async: its calls run side by side in one process"
        elif self.timeout is None:
            reason = "which is called in this process, since it has no limit; set --reward_timeout to seconds"
        if workers == "auto":
            workers = auto_workers() if reason is None and own_process else 1
        elif workers > 1 and reason is not None:
            warnings.warn(f"reward_workers={workers} has no effect on {self.name}, {reason}", stacklevel=3)
            workers = 1
        return 0 if self.timeout is None or not (own_process or workers > 1) else workers

    def _score_each(
        self, calls: list[dict[str, Any]], prompts: Sequence[str], completions: Sequence[str]
    ) -> tuple[Scores, set[int]]:
        values: list[Any] = []
        timed_out: set[int] = set()
        with closing(self._caller.call(calls, self.timeout)) as outcomes:  # what is not taken is not worked on
            for index, outcome in enumerate(outcomes):
                if outcome.status is Status.FAILED:
                    raise self._error(outcome, f"on {_sample(index, prompts, completions)}")
                if outcome.status is Status.TIMED_OUT:
                    timed_out.add(index)
                    warnings.warn(
                        f"reward function {self.name} took longer than {self.timeout:g} s for "
                        f"{_sample(index, prompts, completions)}, which is masked; see --reward_timeout",
                        stacklevel=4,
                    )
                values.append(outcome.value)
        return self._read(values, "list", prompts, completions), timed_out

    def _score_batch(self, call: dict[str, Any], prompts: Sequence[str], completions: Sequence[str]) -> Scores:
        started = time.monotonic()
        outcome = self._call(call)
        if outcome.status is Status.TIMED_OUT:
            raise RewardError(
                f"reward function {self.name} took longer than {self.timeout:g} s for {len(prompts)} samples, the "
                f"first {_sample(0, prompts, completions)}; set --reward_timeout to more, or define it for one sample, "
                f"as {self.name}({', '.join(Form.SAMPLE.given)}), so that only those that hang are cut off"
            )
        if isinstance(outcome.error, RewardError):  # a remote one's, which says it all
            raise outcome.error
        if outcome.status is Status.FAILED:
            where = self._blame(call, prompts, completions, outcome, started + _BLAME_SECONDS)
            raise self._error(outcome, where)
        return self._read(outcome.value, outcome.kind, prompts, completions)

    def _call(self, call: dict[str, Any]) -> Outcome:
        return next(iter(self._caller.call([call], self.timeout)))

    def _error(self, outcome: Outcome, where: str) -> RewardError:
        message = f"reward function {self.name} raised {outcome.kind}: {outcome.message}, {where}"
        if "signal only works in main thread" in outcome.message:
            message += "; set its timeout to 0, so that it is called in the main thread"
        error = RewardError(message, outcome.frames)
        error.__cause__ = outcome.error
        return error

    def _read(self, value: Any, kind: str, prompts: Sequence[str], completions: Sequence[str]) -> Scores:
        who = f"reward function {self.name}"
        return read_scores(value, kind, len(prompts), who, lambda index: _sample(index, prompts, completions))

    def _blame(
        self,
        call: dict[str, Any],
        prompts: Sequence[str],
        completions: Sequence[str],
        outcome: Outcome,
        deadline: float,
    ) -> str:
        """Call the function on halves of halves of the batch to find the first sample that makes it raise."""
        low, high = 0, len(prompts)  # the culprit is in between, if it is one sample
        for _ in range(_BLAME_CALLS):
            middle = low + max(1, (high - low) // 2)
            if time.monotonic() > deadline:
                break
            part = self._call({name: values[low:middle] for name, values in call.items()})
            raises = part.status is Status.FAILED and part.kind == outcome.kind
            if raises and middle == low + 1:
                return f"on {_sample(low, prompts, completions)}"
            if not raises and middle == high:
                break
            low, high = (low, middle) if raises else (middle, high)
        return (
            f"on a batch of {len(prompts)} samples, and no one of them was found to be the cause; "
            f"the first is {_sample(0, prompts, completions)}"
        )


def is_function_path(reward: str) -> bool:
    """Whether ``--reward`` names a Python function or a server rather than a model."""
    return is_url(reward) or ".py:" in reward or reward.endswith(".py")


def _sample(index: int, prompts: Sequence[str], completions: Sequence[str]) -> str:
    return f"sample {index} (prompt {_short(prompts[index])}, completion {_short(completions[index])})"


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
