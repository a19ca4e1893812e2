"""How fast a device multiplies matrices at best: what its data sheet says, or what a large product takes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import torch

# TFLOPS of tensor cores on fp16 and bf16 (V100 and T4 have fp16 alone), sums in fp32, no sparsity: NVIDIA's data sheets
# and architecture papers. By what a GPU calls itself, the first pattern that fits.
_DATA_SHEETS = {
    "GB200": 2500,
    "B200": 2250,
    "H100 PCIe": 756,
    "(H100|H200) NVL": 835,
    "GH200|H200|H100|H800": 989,
    "H20": 148,
    "A100|A800": 312,
    "A30": 165,
    "A40": 149.7,
    "A10": 125,
    "A10G": 70,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 6000 Ada Generation": 364,
    "RTX A6000": 154.8,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
}
# A slower card of the same name, or a part of one.
_LESSER = r"Laptop|Max-Q|MIG|\bD\b"

_MEASURE_S = 0.1


def data_sheet_flops(device_name: str) -> float | None:
    """Operations a second of a GPU in fp16 or bf16; None for one that is not known."""
    if re.search(_LESSER, device_name):
        return None
    fits = (tflops for name, tflops in _DATA_SHEETS.items() if re.search(rf"\b({name})\b", device_name))
    return next((tflops * 1e12 for tflops in fits), None)


def measured_flops(device: torch.device, dtype: torch.dtype, size: int, synchronize: Callable[[], None]) -> float:
    """Operations a second in a product of ``size`` x ``size`` matrices, the best of those that 0.1 s has room for.

    Args:
        synchronize: waits for the device.
    """
    matrix = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)  # draws no random numbers
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < _MEASURE_S:  # the first one warms up
        synchronize()
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
