"""Root-mean-square norms in one pass on a CPU (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ops import cpu
from ops.tape import recordable

# Rows whose share of the weight's gradient is added up by itself. A fixed number, so that the sum does not depend on
# how many threads there are.
_BLOCK_ROWS = 64


def takes(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `rms_norm` runs as a compiled kernel."""
    is_known = hidden.dtype in (torch.float32, torch.bfloat16) and hidden.dtype == weight.dtype
    return is_known and hidden.device.type == weight.device.type == "cpu" and cpu.library() is not None


def rms_norm(
    hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, *, offset: float = 0.0, rounds_first: bool = True
) -> torch.Tensor:
    """``hidden / sqrt(mean(hidden**2) + epsilon) * (offset + weight)`` over the last dimension, computed in fp32.

    Differentiable. The compiled kernel keeps ``hidden`` for the backward and nothing else. The weight's gradient is
    summed in fp32, to the same bits on any number of threads.

    Args:
        hidden: (..., H).
        weight: (H,) of the same dtype.
        offset: added to the weight: 0, or 1 in families whose weights are kept around 0.
        rounds_first: whether the normed values are rounded to the dtype before they meet the weight, as llama's are.

    Returns:
        (..., H), contiguous where the compiled kernel runs.
    """
    if not takes(hidden, weight):
        return rms_norm_reference(hidden, weight, epsilon, offset=offset, rounds_first=rounds_first)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(hidden, weight, epsilon, offset, rounds_first)  # pyright: ignore[reportReturnType]
    return _forward(hidden, weight, epsilon, offset, rounds_first)


def rms_norm_reference(
    hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, *, offset: float = 0.0, rounds_first: bool = True
) -> torch.Tensor:
    """What `rms_norm` computes, in plain torch."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if rounds_first:
        normed = normed.to(hidden.dtype).float()
    return (normed * (offset + weight.float())).to(hidden.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float, rounds_first: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.formula = epsilon, offset, rounds_first
        return _forward(hidden, weight, epsilon, offset, rounds_first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        rows, grads, weight = _rows(hidden), _rows(grad), weight.contiguous()
        count, size = rows.shape
        grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype)
        sums = grad_weight = None
        if ctx.needs_input_grad[1]:
            sums = torch.empty(-(-count // _BLOCK_ROWS), size, dtype=torch.float32)
            grad_weight = torch.empty_like(weight)
        cpu.loaded().rms_norm_backward(
            *map(_pointer, (rows, weight, grads, grad_hidden, sums, grad_weight)),
            hidden.dtype == torch.bfloat16,
            *map(ctypes.c_int64, (count, size, rows.stride(0), grads.stride(0), _BLOCK_ROWS)),
            *_formula(*ctx.formula),
        )
        return grad_hidden, grad_weight, None, None, None


@recordable
def _forward(
    hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float, rounds_first: bool
) -> torch.Tensor:
    rows, weight = _rows(hidden), weight.contiguous()
    output = torch.empty(hidden.shape, dtype=hidden.dtype)
    cpu.loaded().rms_norm(
        *map(_pointer, (rows, weight, output)),
        hidden.dtype == torch.bfloat16,
        *map(ctypes.c_int64, (*rows.shape, rows.stride(0))),
        *_formula(epsilon, offset, rounds_first),
    )
    return output


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(R, H) with the elements of a row next to each other."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _formula(epsilon: float, offset: float, rounds_first: bool) -> tuple[Any, ...]:
    return ctypes.c_float(epsilon), ctypes.c_float(offset), rounds_first, torch.get_num_threads()
