"""Rotary embeddings in one pass each way on a CPU (RoPE, https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ops import cpu
from ops.tape import recordable


def takes(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether `rotary` runs as a compiled kernel."""
    tensors = (query, key, cos, sin)
    return (
        query.ndim == key.ndim == 4
        and query.shape[0] == key.shape[0] == 1
        and query.shape[2:] == key.shape[2:]
        and cos.shape == sin.shape == (1, *query.shape[2:])
        and query.shape[-1] % 2 == 0
        and query.dtype in (torch.float32, torch.bfloat16)
        and all(each.dtype == query.dtype and each.device.type == "cpu" and each.stride(-1) == 1 for each in tensors)
        and not (cos.requires_grad or sin.requires_grad)
        and cpu.library() is not None
    )


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each token's halves: ``x * cos + (-second half, first half) * sin``, for queries and for keys.

    Rounded to the dtype after each product and after the sum, as transformers' ``apply_rotary_pos_emb`` is, bit for
    bit. Differentiable; keeps ``cos`` and ``sin`` for the backward, which rounds once.

    Args:
        query, key: (1, heads, N, D), of any strides whose last is 1, where the compiled kernel is to run.
        cos, sin: (1, N, D) in the same dtype, which need no gradient.

    Returns:
        query and key rotated; from the compiled kernel laid out token by token, (1, N, heads, D) transposed.
    """
    if not takes(query, key, cos, sin):
        return rotary_reference(query, key, cos, sin)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return _Rotary.apply(query, key, cos, sin)  # pyright: ignore[reportReturnType]
    return _turn(query, key, cos, sin)  # pyright: ignore[reportReturnType]


def rotary_reference(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rotary` computes, in plain torch."""
    cos, sin = cos[:, None], sin[:, None]

    def turned(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-second, first), dim=-1) * sin

    return turned(query), turned(key)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        return _turn(query, key, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, query: torch.Tensor | None, key: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        return *_turn(query, key, *ctx.saved_tensors, is_backward=True), None, None


@recordable
def _turn(
    query: torch.Tensor | None,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    is_backward: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Queries and keys rotated, or the gradients by them from those by the rotated ones; None of what is not there."""
    query, key = _rows(query), _rows(key)
    outputs, layouts = [], []
    for each in (query, key):
        if each is None:
            outputs.append(None)
            layouts += [0, 0, 0]
        else:
            heads, size = each.shape[1], each.shape[3]
            outputs.append(each.new_empty_strided(each.shape, (each.numel(), size, heads * size, 1)))
            layouts += [heads, each.stride(2), each.stride(1)]
    cpu.loaded().rotary(
        *map(_pointer, (query, key, cos, sin, *outputs)),
        cos.dtype == torch.bfloat16,
        is_backward,
        *map(ctypes.c_int64, (*cos.shape[1:], *layouts, cos.stride(1), sin.stride(1))),
        torch.get_num_threads(),
    )
    return outputs[0], outputs[1]


def _rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """With the elements of a head next to each other, which a gradient's may not be."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
