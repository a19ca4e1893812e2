"""``silu(gate) * up`` in one pass each way on a CPU (SwiGLU, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ops import cpu
from ops.tape import recordable

_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, rounded to the dtype after each of the two, as transformers' MLPs are; differentiable.

    For the backward it keeps ``gate`` and ``up``, where torch keeps ``silu(gate)`` besides.

    Args:
        gate, up: of one shape and dtype.

    Returns:
        of their shape, contiguous where the compiled kernel runs.
    """
    takes = gate.device.type == up.device.type == "cpu" and gate.dtype == up.dtype and gate.dtype in _KERNEL_DTYPES
    if not takes or gate.shape != up.shape or cpu.library() is None:
        return F.silu(gate) * up
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _Swiglu.apply(gate, up)  # pyright: ignore[reportReturnType]
    return _forward(gate, up)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up, grad = (tensor.contiguous() for tensor in (*ctx.saved_tensors, grad))
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        cpu.loaded().swiglu_backward(*map(_pointer, (gate, up, grad, grad_gate, grad_up)), *_size(gate))
        return grad_gate, grad_up


@recordable
def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    output = torch.empty_like(gate)
    cpu.loaded().swiglu(*map(_pointer, (gate, up, output)), *_size(gate))
    return output


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _size(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype == torch.bfloat16, ctypes.c_int64(tensor.numel()), torch.get_num_threads()
