"""Weights are read by ranges: the right values, the bytes asked for, and no memory besides."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybrid.models import source
from hybrid.models.source import ConvertedTensor, ModuleWeights, SafetensorsWeights, ZeroTensor, equal, read_headers
from tests.distributed.world import run_world
from tests.unit.models.memory import give_back_freed_memory, resident_peak, start_peak


def save(path: Path, **tensors: torch.Tensor) -> dict[str, source.StoredTensor]:
    save_file(tensors, path)
    return read_headers([path])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_ranges_along_every_dimension(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {str(n): (torch.randn([5, 7, 3, 4][:n]) * 9).to(dtype) for n in range(5)}
    with SafetensorsWeights(save(tmp_path / "a.safetensors", **tensors)) as weights:
        for name, tensor in tensors.items():
            for dim, size in enumerate(tensor.shape):
                for start, stop in ((0, size), (0, 1), (1, 3), (size - 1, size), (2, 2)):
                    found = weights.read(name, dim, start, stop)
                    assert found.dtype == dtype
                    assert torch.equal(found, tensor.narrow(dim, start, stop - start))
        assert torch.equal(weights.read("0", 0, 0, 1), tensors["0"])


def test_only_the_bytes_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = save(tmp_path / "a.safetensors", a=torch.randn(64, 32))
    counts: list[int] = []

    def count(descriptor: int, buffers: Any, offset: int) -> int:
        counts.append(os.readv(descriptor, buffers) if os.lseek(descriptor, offset, os.SEEK_SET) >= 0 else 0)
        return counts[-1]

    monkeypatch.setattr(source.os, "preadv", count)
    with SafetensorsWeights(stored) as weights:
        for dim, start, stop, num_reads in ((0, 10, 30, 1), (1, 3, 11, 64), (1, 0, 32, 1)):
            counts.clear()
            tensor = weights.read("a", dim, start, stop)
            assert (sum(counts), len(counts)) == (tensor.nbytes, num_reads)


def test_a_read_that_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(16, 8)
    stored = save(tmp_path / "a.safetensors", a=tensor)
    whole = os.preadv
    monkeypatch.setattr(source.os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:10]], offset))
    with SafetensorsWeights(stored) as weights:
        assert torch.equal(weights.read("a", 1, 2, 7), tensor[:, 2:7])


_NUM_TENSORS, _TENSOR_BYTES = 9, 2**24


def _measure(path: str, dim: int) -> int:
    """Bytes that the resident memory grew by, at its peak, while a quarter of each tensor was read into buffers."""
    give_back_freed_memory()
    shape = [2048, 2048]
    shape[dim] //= 4
    held = [torch.full(shape, 7.0) for _ in range(_NUM_TENSORS)]
    weights = SafetensorsWeights(read_headers([Path(path)]))
    start, before = shape[dim], 0
    for index, buffer in enumerate(held):
        buffer.copy_(weights.read(str(index), dim, start, 2 * start))
        if index == 0:  # the code that runs is in memory by now, and counts
            before = start_peak()
    peak = resident_peak()
    assert all(bool((buffer == index).all()) for index, buffer in enumerate(held))
    return peak - before


@pytest.mark.parametrize("dim", [0, 1])
def test_memory_beyond_what_is_held_is_less_than_a_tensor(tmp_path: Path, dim: int) -> None:
    path = tmp_path / "a.safetensors"
    save_file({str(index): torch.full((2048, 2048), float(index)) for index in range(_NUM_TENSORS)}, path)
    (growth,) = run_world(_measure, 1, tmp_path, str(path), dim)
    assert growth < _TENSOR_BYTES / 4 + 2**20  # the range under way


def test_closing_lets_go_of_files_and_a_read_opens_them_again(tmp_path: Path) -> None:
    tensor = torch.randn(4)
    stored = save(tmp_path / "a.safetensors", a=tensor)
    before = set(os.listdir("/proc/self/fd"))
    weights = SafetensorsWeights(stored)
    for _ in range(2):
        assert torch.equal(weights.read("a", 0, 1, 3), tensor[1:3])
        weights.close()
        assert set(os.listdir("/proc/self/fd")) == before
    weights.read("a", 0, 0, 4)
    del weights
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_converted_parameter_is_made_once_for_all_its_parts(tmp_path: Path) -> None:
    parts = {str(index): torch.randn(3, 2) for index in range(4)}
    stored = save(tmp_path / "a.safetensors", **parts)
    made: list[int] = []

    def stack(read: Any) -> torch.Tensor:
        made.append(1)
        return torch.stack([read(stored[str(index)]) for index in range(4)])

    weights = SafetensorsWeights(
        {"experts": ConvertedTensor((4, 3, 2), torch.float32, stack), "head": ZeroTensor((1, 6))}
    )
    for dim, start, stop in ((0, 0, 2), (0, 2, 4), (1, 1, 3)):
        expected = torch.stack(list(parts.values())).narrow(dim, start, stop - start)
        assert torch.equal(weights.read("experts", dim, start, stop), expected)
    assert len(made) == 1
    assert torch.equal(weights.read("head", 1, 2, 5), torch.zeros(1, 3))
    weights.close()


def test_a_converted_parameter_is_made_of_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    parts = {str(index): torch.randn(3, 2) for index in range(4)}
    stored = save(tmp_path / "a.safetensors", **parts)
    made: list[int] = []

    def convert(read: Any) -> torch.Tensor:
        raise AssertionError("the whole is not needed")

    def convert_row(read: Any, row: int) -> torch.Tensor:
        made.append(row)
        return read(stored[str(row)])

    source = ConvertedTensor((4, 3, 2), torch.float32, convert, convert_row)
    expected = torch.stack(list(parts.values()))
    with SafetensorsWeights({"experts": source}) as weights:
        for dim, start, stop, rows in (
            (0, 1, 3, [1, 2]),
            (0, 2, 2, []),
            (1, 1, 3, [0, 1, 2, 3]),
            (2, 0, 1, [0, 1, 2, 3]),
        ):
            made.clear()
            assert torch.equal(weights.read("experts", dim, start, stop), expected.narrow(dim, start, stop - start))
            assert made == rows


def test_a_module_s_own_weights() -> None:
    module = torch.nn.Linear(6, 4)
    weights = ModuleWeights(module)
    assert torch.equal(weights.read("weight", 1, 2, 5), module.weight[:, 2:5])
    assert weights.read("bias", 0, 0, 4).data_ptr() == module.bias.data_ptr()
    module.weight.data = torch.ones(4, 6)  # what a caller puts in its place is what is read
    assert weights.read("weight", 0, 0, 4).eq(1).all()


def test_what_is_asked_for_wrongly(tmp_path: Path) -> None:
    weights = SafetensorsWeights(save(tmp_path / "a.safetensors", a=torch.randn(4, 6)))
    for dim, start, stop in ((0, 0, 5), (2, 0, 1), (1, -1, 2), (0, 3, 2)):
        with pytest.raises(ValueError, match=r"a has shape \(4, 6\); there is no range"):
            weights.read("a", dim, start, stop)
    with pytest.raises(KeyError, match="no weights of b; a tied parameter goes under its first name"):
        weights.read("b", 0, 0, 1)


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    stored = save(path, a=torch.randn(64, 6))
    whole = path.read_bytes()
    for damaged in (b"", b"no safetensors", whole[:-1], whole[:20]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="a.safetensors is damaged or no safetensors"):
            read_headers([path])
        with pytest.raises(ValueError, match="ends before its tensors do"):  # it was cut off after it was opened
            SafetensorsWeights(stored).read("a", 0, 0, 64)
    header = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(ValueError, match="'F4'"):
        read_headers([path])


def test_equal_tensors(tmp_path: Path) -> None:
    first = torch.randn(3000, 512)
    other = first.clone()
    other[-1, -1] += 1
    stored = save(tmp_path / "a.safetensors", a=first, b=first.clone(), c=other, d=first.half())
    assert equal(stored["a"], stored["b"])
    assert not equal(stored["a"], stored["c"])
    assert not equal(stored["a"], stored["d"])
