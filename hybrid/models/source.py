"""Weights read by ranges: a rank takes from a checkpoint what it will hold, and nothing else.

Files are read with `pread` into memory that the result owns, never mapped: a mapped page counts as this process's
memory until the mapping goes, a page of the kernel's file cache does not. Peak memory is then what the caller keeps
plus the range under way.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import nn

T = TypeVar("T")

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}


class WeightSource(Protocol):
    """Where a module's parameters are read from, by the names of ``module.named_parameters()``."""

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Rows ``start:stop`` along ``dim`` of a parameter, as they are kept: the caller casts and moves them.

        A tied parameter goes under its first name. A 0-d tensor is returned whole.
        """
        ...


class TensorWeights:
    """Whole tensors at hand, by name. What `read` returns shares their memory, on whatever device that is."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        weight = _find(self._tensors, name).detach()
        _check_range(name, tuple(weight.shape), dim, start, stop)
        return weight.narrow(dim, start, stop - start) if weight.dim() else weight


class ModuleWeights(TensorWeights):
    """A module whose parameters are real."""

    def __init__(self, module: nn.Module) -> None:
        # The parameters and not their data: a caller that replaces the data frees it.
        super().__init__(dict(module.named_parameters()))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


ReadStored = Callable[[StoredTensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """A parameter that is computed from stored tensors, such as experts that a file holds one by one.

    The functions are given what reads a stored tensor, and not the tensors, so that they alone hold them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    convert: Callable[[ReadStored], torch.Tensor]
    convert_row: Callable[[ReadStored, int], torch.Tensor] | None = None  # one row of it, where that takes a part


@dataclass(frozen=True, slots=True)
class ZeroTensor:
    """A parameter that the checkpoint lacks and that starts at zero."""

    shape: tuple[int, ...]


Source = StoredTensor | ConvertedTensor | ZeroTensor


class SafetensorsWeights:
    """Parameters in safetensors files. `read` returns tensors that own their memory and reads the bytes asked for only.

    A `ConvertedTensor` is made row by row where it can be, from those that are asked for. Otherwise it is made whole
    and the last one is kept, since a rank asks for its parts in turn.

    Files are opened when first read and closed by `close`, after which a read opens them again.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)
        self._descriptors: dict[Path, int] = {}
        self._converted: tuple[str, torch.Tensor] | None = None
        weakref.finalize(self, _close_all, self._descriptors)

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        source = _find(self._sources, name)
        _check_range(name, source.shape, dim, start, stop)
        if isinstance(source, StoredTensor):
            return self._read_stored(source, dim, start, stop)
        if isinstance(source, ZeroTensor):
            return torch.zeros(_range_shape(source.shape, dim, start, stop))
        if source.convert_row is not None:
            return self._convert_rows(source, source.convert_row, dim, start, stop)
        whole = self._convert(name, source)
        return whole.narrow(dim, start, stop - start).clone() if whole.dim() else whole.clone()

    def close(self) -> None:
        _close_all(self._descriptors)
        self._converted = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _convert(self, name: str, source: ConvertedTensor) -> torch.Tensor:
        if self._converted is None or self._converted[0] != name:
            self._converted = None  # before the next is made, so that there is one at a time
            self._converted = (name, source.convert(self._read_whole))
        return self._converted[1]

    def _convert_rows(
        self,
        source: ConvertedTensor,
        convert: Callable[[ReadStored, int], torch.Tensor],
        dim: int,
        start: int,
        stop: int,
    ) -> torch.Tensor:
        made = torch.empty(_range_shape(source.shape, dim, start, stop), dtype=source.dtype)
        if made.numel():
            for target, index in zip(made, range(start, stop) if dim == 0 else range(source.shape[0]), strict=True):
                row = convert(self._read_whole, index)
                target.copy_(row if dim == 0 else row.narrow(dim - 1, start, stop - start))
        return made

    def _read_whole(self, stored: StoredTensor) -> torch.Tensor:
        return self._read_stored(stored, 0, 0, stored.shape[0] if stored.shape else 1)

    def _read_stored(self, stored: StoredTensor, dim: int, start: int, stop: int) -> torch.Tensor:
        shape = _range_shape(stored.shape, dim, start, stop)
        data = torch.empty(math.prod(shape) * stored.dtype.itemsize, dtype=torch.uint8)
        array: Any = data.numpy()
        target, descriptor = memoryview(array), self._open(stored.file)
        if shape == stored.shape:
            _fill(target, descriptor, stored.offset, stored.file)
        elif target:
            # The range is one run of bytes in each index of the dimensions before it.
            inner = math.prod(stored.shape[dim + 1 :]) * stored.dtype.itemsize
            run, stride, first = (stop - start) * inner, stored.shape[dim] * inner, stored.offset + start * inner
            for index in range(len(target) // run):
                _fill(target[index * run : (index + 1) * run], descriptor, first + index * stride, stored.file)
        return data.view(stored.dtype).view(shape)

    def _open(self, file: Path) -> int:
        descriptor = self._descriptors.get(file)
        if descriptor is None:
            descriptor = self._descriptors[file] = os.open(file, os.O_RDONLY)
        return descriptor


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of safetensors files by their names there; of a name in several files the last counts.

    Raises:
        ValueError: a file is cut off, is no safetensors, or holds a dtype that torch has no name for.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        with file.open("rb", buffering=0) as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = os.fstat(stream.fileno()).st_size
            try:
                header: dict[str, Any] = json.loads(stream.read(length) if 8 + length <= size else b"")
                header.pop("__metadata__", None)
                for name, entry in header.items():
                    start, stop = entry["data_offsets"]
                    tensor = StoredTensor(file, _DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + start)
                    if stop - start != math.prod(tensor.shape) * tensor.dtype.itemsize or 8 + length + stop > size:
                        raise ValueError(f"{name} does not fit the file")
                    tensors[name] = tensor
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{file} is damaged or no safetensors ({error}); copy or download it again") from error
    return tensors


def equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two stored tensors hold the same values; both are read in pieces of a few MiB."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    with SafetensorsWeights({"first": first, "second": second}) as weights:
        num_rows = first.shape[0] if first.shape else 1
        row_bytes = math.prod(first.shape[1:]) * first.dtype.itemsize
        step = max(1, 2**22 // max(1, row_bytes))
        for start in range(0, num_rows, step):
            stop = min(num_rows, start + step)
            if not torch.equal(weights.read("first", 0, start, stop), weights.read("second", 0, start, stop)):
                return False
    return True


def _find(tensors: Mapping[str, T], name: str) -> T:
    if name not in tensors:
        raise KeyError(f"there are no weights of {name}; a tied parameter goes under its first name")
    return tensors[name]


def _close_all(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def _fill(target: memoryview, descriptor: int, offset: int, file: Path) -> None:
    # The kernel may return less than asked for: 2 GiB at most, and what a network file system has at hand.
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise ValueError(f"{file} ends before its tensors do; copy or download it again")
        target, offset = target[count:], offset + count


def _range_shape(shape: tuple[int, ...], dim: int, start: int, stop: int) -> tuple[int, ...]:
    return (*shape[:dim], stop - start, *shape[dim + 1 :]) if shape else ()


def _check_range(name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> None:
    if shape and not (0 <= dim < len(shape) and 0 <= start <= stop <= shape[dim]):
        raise ValueError(f"{name} has shape {shape}; there is no range {start}:{stop} along {dim=}")
