"""What a computation runs on a CPU, written down once and run again without the Python around it.

A model's forward is some forty calls of torch and of the compiled kernels a layer, in as much Python again: modules,
hooks, reshapes that depend on nothing. With few tokens that takes longer than the numbers do. A tape keeps the calls
alone, as straight-line code. It is on a CPU what a CUDA graph is on a GPU, and asks the same of what it records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_Function = TypeVar("_Function", bound=Callable[..., Any])
# What a tensor's numbers decide, and not its shape: such a call would come out otherwise the next time.
_DECIDED_BY_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_tape: ContextVar[_Tape | None] = ContextVar("tape", default=None)


class NotRecordable(RuntimeError):
    """A computation goes by the numbers in its tensors."""


def recordable(kernel: _Function) -> _Function:
    """Have a function that hands pointers to a compiled kernel be one call of a tape: torch sees nothing of those.

    What it returns is a tensor, a tuple of tensors, or None. Tensors inside other arguments are taken to stay.
    """

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        tape = _tape.get()
        if tape is None:
            return kernel(*args, **kwargs)
        token = _tape.set(None)  # what it calls itself is part of it
        try:
            output = kernel(*args, **kwargs)
        finally:
            _tape.reset(token)
        tape.add(kernel, args, kwargs, output)
        return output

    return run  # pyright: ignore[reportReturnType]


def record(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Run a computation, and write down what it calls.

    Args:
        compute: works on tensors that stay where they are, whose numbers may change; goes by shapes alone.

    Returns:
        what makes the same calls again, over what those tensors then hold, and gives what ``compute`` would.

    Raises:
        NotRecordable: a value was read from a tensor, or a shape depended on one.
    """
    tape = _Tape()
    token = _tape.set(tape)
    try:
        # Models ask whether they are traced before they go by numbers for the sake of speed.
        with mock.patch.object(torch.compiler, "_is_compiling_flag", True), tape:
            output = compute()
    finally:
        _tape.reset(token)
    return tape.compiled(output)


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._lines: list[tuple[list[str], str, list[str]]] = []  # names that are given, the call, names that it reads
        self._names: dict[int, str] = {}  # of tensors that calls returned, by id
        self._constants: dict[str, Any] = {}  # what the code reads from outside
        self._constant_names: dict[int, str] = {}
        self._alive: list[Any] = []  # else an id might come twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if _tape.get() is self:
            if not _DECIDED_BY_NUMBERS.isdisjoint(func.tags):
                raise NotRecordable(f"{func} goes by the numbers in a tensor")
            # A view of what stays is itself something that stays.
            if not (func.is_view and self._reads_nothing((args, kwargs))):
                self.add(func, args, kwargs, output)
        return output

    def add(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        reads: list[str] = []
        call = [self._expression(each, reads) for each in args]
        call += [f"{key}={self._expression(each, reads)}" for key, each in kwargs.items()]
        name = self._constant(function)
        self._alive.append((args, kwargs, output))
        results = output if isinstance(output, (tuple, list)) else (output,)
        gives = []
        for index, each in enumerate(results):
            gives.append(f"v{len(self._lines)}_{index}")
            if isinstance(each, torch.Tensor):
                self._names[id(each)] = gives[-1]
        target = ", ".join(gives) + ("," if isinstance(output, (tuple, list)) else "")
        self._lines.append((gives, f"{target} = {name}({', '.join(call)})", reads))

    def compiled(self, output: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The calls as one function; what it makes is let go where it is last read."""
        reads: list[str] = []
        result = self._expression(output, reads)
        kept, code = set(reads), [f"    return {result}"]
        for gives, call, reads in reversed(self._lines):
            done = [name for name in dict.fromkeys((*gives, *reads)) if name not in kept]
            kept.update(reads)
            code += [f"    del {', '.join(done)}"] * bool(done) + [f"    {call}"]
        names = dict(self._constants)
        exec("\n".join(["def launch():", *reversed(code)]), names)  # of this module's own making
        return names.pop("launch")  # else a cycle would keep all that it reads until the next collection

    def _reads_nothing(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return all(map(self._reads_nothing, value))
        if isinstance(value, dict):
            return self._reads_nothing(list(value.values()))
        return id(value) not in self._names

    def _expression(self, value: Any, reads: list[str]) -> str:
        if isinstance(value, torch.Tensor) and id(value) in self._names:
            reads.append(self._names[id(value)])
            return reads[-1]
        if isinstance(value, (tuple, list)):
            items = "".join(f"{self._expression(each, reads)}, " for each in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        if id(value) not in self._constant_names:
            name = self._constant_names[id(value)] = f"c{len(self._constants)}"
            self._constants[name] = value
        return self._constant_names[id(value)]
