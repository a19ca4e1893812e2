"""The passes over a vocabulary by the compiled kernels of ``ops/cpu/sampling.cpp``; see ``ops.sampling_cdf``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ops import cpu


def takes(logits: torch.Tensor) -> bool:
    """Whether the kernels read such logits (R, V)."""
    return (
        logits.device.type == "cpu"
        and logits.dtype in (torch.float32, torch.bfloat16)
        and logits.stride(-1) == 1
        and cpu.library() is not None
    )


def row_maxima(logits: torch.Tensor) -> torch.Tensor:
    """(R,) fp32; -inf where V is 0. A NaN is passed over: sums relative to the maximum have it."""
    maxima = logits.new_empty(logits.shape[0], dtype=torch.float32)
    cpu.loaded().row_maxima(*_rows(logits), ctypes.c_void_p(maxima.data_ptr()), torch.get_num_threads())
    return maxima


def block_sums(logits: torch.Tensor, maxima: torch.Tensor, divisors: torch.Tensor, block: int) -> torch.Tensor:
    """(R, blocks) fp64 sums of ``exp((logits - maxima) / divisors)`` over ``block`` neighbours each."""
    maxima, divisors = maxima.float().contiguous(), divisors.float().contiguous()
    sums = logits.new_empty(logits.shape[0], -(-logits.shape[1] // block), dtype=torch.float32)
    cpu.loaded().block_sums(
        *_rows(logits),
        ctypes.c_int64(block),
        *(ctypes.c_void_p(each.data_ptr()) for each in (maxima, divisors, sums)),
        torch.get_num_threads(),
    )
    return sums.double()


def row_floors(
    logits: torch.Tensor,
    divisors: torch.Tensor,
    top_ks: Sequence[int],
    top_ps: Sequence[float],
    min_ps: Sequence[float],
) -> torch.Tensor:
    """(R,) fp32, the smallest of a row's logits (R, V) fp32 that its min_p, top_k and top_p leave, in this order."""
    floors = torch.empty_like(divisors)
    settings = (
        divisors.contiguous(),
        torch.tensor(min_ps, dtype=torch.float32),
        torch.tensor(top_ks, dtype=torch.int64),
        torch.tensor(top_ps, dtype=torch.float64),
    )
    address, _, *shape = _rows(logits)
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in (*settings, floors))
    cpu.loaded().row_floors(address, *shape, *pointers, torch.get_num_threads())
    return floors


def _rows(logits: torch.Tensor) -> tuple[Any, ...]:
    shape = (logits.shape[0], logits.shape[1], logits.stride(0))
    return ctypes.c_void_p(logits.data_ptr()), logits.dtype == torch.bfloat16, *map(ctypes.c_int64, shape)
