"""Root-mean-square norms in one pass on a CPU (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import ctypes

import torch

from ops import cpu


def rms_norm(
    hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, *, offset: float = 0.0, rounds_first: bool = True
) -> torch.Tensor:
    """``hidden / sqrt(mean(hidden**2) + epsilon) * (offset + weight)`` over the last dimension, computed in fp32.

    Args:
        hidden: (..., H).
        weight: (H,) of the same dtype.
        offset: added to the weight: 0, or 1 in families whose weights are kept around 0.
        rounds_first: whether the normed values are rounded to the dtype before they meet the weight, as llama's are.

    Returns:
        (..., H), contiguous where the compiled kernel runs. Not differentiable there.
    """
    library = cpu.library() if hidden.device.type == "cpu" else None
    takes = hidden.dtype in (torch.float32, torch.bfloat16) and hidden.dtype == weight.dtype
    if library is None or not takes:
        return rms_norm_reference(hidden, weight, epsilon, offset=offset, rounds_first=rounds_first)
    size = hidden.shape[-1]
    rows = hidden.reshape(-1, size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    output = torch.empty(hidden.shape, dtype=hidden.dtype)
    library.rms_norm(
        *(ctypes.c_void_p(each.data_ptr()) for each in (rows, weight.contiguous(), output)),
        hidden.dtype == torch.bfloat16,
        *map(ctypes.c_int64, (rows.shape[0], size, rows.stride(0))),
        ctypes.c_float(epsilon),
        ctypes.c_float(offset),
        rounds_first,
        torch.get_num_threads(),
    )
    return output


def rms_norm_reference(
    hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, *, offset: float = 0.0, rounds_first: bool = True
) -> torch.Tensor:
    """What `rms_norm` computes, in plain torch."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if rounds_first:
        normed = normed.to(hidden.dtype).float()
    return (normed * (offset + weight.float())).to(hidden.dtype)
