"""Causal attention of whole sequences for training on a CPU, by the kernels of ``ops/cpu/varlen.cpp``.

One op, ``torch.ops.hybrid.varlen_attention``, so that what looks at ops by name (selective activation checkpointing)
sees an attention and keeps its result. Its arithmetic is fp32, whatever the tensors hold, and a token's result has the
bits of ``ops.attention_cpu``'s, whether its prefix is shared or not.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import torch

from ops import cpu

MAX_HEAD_DIM = 256

_TENSORS = ("query", "key", "value", "output", "lse")
_GRADIENTS = ("grad_output", "grad_query", "grad_key", "grad_value")
_SIZES = ("num_sequences", "q_heads", "kv_heads", "head_dim")
_STRIDES = ("query_row", "query_head", "key_row", "key_head", "value_row", "value_head", "grad_row", "grad_head")


class _Call(ctypes.Structure):
    """``Call`` of varlen.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_TENSORS, *_GRADIENTS, "cu_seqlens", "prefixes")),
        *((name, ctypes.c_int64) for name in (*_SIZES, *_STRIDES)),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("window", ctypes.c_int64),
    )


def is_available() -> bool:
    return cpu.library() is not None


def takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernels read such tensors: all in fp32 or all in bf16 on the CPU, heads of one size up to 256."""
    return (
        all(each.device.type == "cpu" and each.dtype == query.dtype for each in (query, key, value))
        and query.dtype in (torch.float32, torch.bfloat16)
        and 0 < query.shape[-1] == key.shape[-1] == value.shape[-1] <= MAX_HEAD_DIM
        and is_available()
    )


def varlen_attention(
    query: torch.Tensor,  # (N, q_heads, head_dim)
    key: torch.Tensor,  # (N, kv_heads, head_dim)
    value: torch.Tensor,  # (N, kv_heads, head_dim)
    cu_seqlens: torch.Tensor,  # (S + 1,) int32
    prefixes: torch.Tensor | None = None,  # (S,) int32
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of S sequences laid end to end, some of which go on from another one; differentiable once.

    Args:
        query, key, value: what ``takes`` says yes to; any strides.
        cu_seqlens: where each sequence starts; the last entry is N.
        prefixes: for each sequence, which other one's tokens come before its own; -1: none do. A prefix has none
            itself and is one of the S, as ``ops.prefixes.Prefixes.build`` has checked. Token i of a sequence with a
            prefix of p tokens is at position p + i.
        scale: of the products of queries and keys.
        window: a token sees itself and the ``window - 1`` tokens before it; None: all before it.
        softcap: scores become ``softcap * tanh(scores / softcap)``.

    Returns:
        (N, q_heads, head_dim) contiguous, in the query's dtype. The same bits on any number of threads, and so have
        the gradients.

    Raises:
        ValueError: cu_seqlens does not cut N tokens into sequences, there is not one prefix for each, or query heads
            are no multiple of KV heads.
    """
    return torch.ops.hybrid.varlen_attention(query, key, value, cu_seqlens, prefixes, scale, window, softcap)[0]


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefixes: torch.Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the logarithm of each row's sum of exponentials, (N, q_heads) fp32."""
    _check(query, key, cu_seqlens, prefixes)
    output = torch.empty(query.shape, dtype=query.dtype)
    lse = torch.empty(query.shape[:2], dtype=torch.float32)
    query, key, value = _rows(query), _rows(key), _rows(value)
    call = _call(query, key, value, output, lse, cu_seqlens, prefixes, scale, window, softcap)
    cpu.loaded().varlen_forward(ctypes.byref(call), query.dtype == torch.bfloat16, torch.get_num_threads())
    return output, lse


def _backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    *how: Any,  # what else `_forward` takes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_query, grad_key, grad_value = (torch.empty(each.shape, dtype=each.dtype) for each in (query, key, value))
    query, key, value, grad_output = _rows(query), _rows(key), _rows(value), _rows(grad_output.to(query.dtype))
    call = _call(query, key, value, output, lse, *how)
    call.grad_output, (call.grad_row, call.grad_head) = grad_output.data_ptr(), grad_output.stride()[:2]
    call.grad_query, call.grad_key, call.grad_value = (each.data_ptr() for each in (grad_query, grad_key, grad_value))
    cpu.loaded().varlen_backward(ctypes.byref(call), query.dtype == torch.bfloat16, torch.get_num_threads())
    return grad_query, grad_key, grad_value


def _fake_forward(query, key, value, cu_seqlens, prefixes, scale, window, softcap):
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


def _fake_backward(grad_output, query, key, value, *rest):
    return tuple(each.new_empty(each.shape) for each in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, scale, window, softcap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = (scale, window, softcap)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_output: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
    nothing = (None,) * 5
    if grad_output is None:
        return (None, None, None, *nothing)
    query, key, value, cu_seqlens, prefixes, output, lse = ctx.saved_tensors
    tensors = (query, key, value, output, lse, cu_seqlens, prefixes)
    grads = torch.ops.hybrid.varlen_attention_backward(grad_output, *tensors, *ctx.options)
    return (*grads, *nothing)


# Not by torch.library.custom_op, whose first call imports torch._dynamo: a second in every process.
_OPTIONS = "Tensor cu_seqlens, Tensor? prefixes, float scale, int? window, float? softcap"
_OPS = torch.library.Library("hybrid", "FRAGMENT")
_OPS.define(f"varlen_attention(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor, Tensor)")
_OPS.define(
    "varlen_attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
for _name, _kernel, _fake in (
    ("varlen_attention", _forward, _fake_forward),
    ("varlen_attention_backward", _backward, _fake_backward),
):
    _OPS.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"hybrid::{_name}", _fake, lib=_OPS)
torch.library.register_autograd("hybrid::varlen_attention", _differentiate, setup_context=_keep, lib=_OPS)


def _check(query: torch.Tensor, key: torch.Tensor, cu_seqlens: torch.Tensor, prefixes: torch.Tensor | None) -> None:
    """Raise for what would have the kernels read memory that is not theirs."""
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads are no multiple of {key.shape[1]} KV heads; they must be")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != query.shape[0] or any(stop < start for start, stop in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens spans tokens {bounds[0]} to {bounds[-1]} and there are {query.shape[0]}; "
            "it must start at 0, never fall, and end at the number of tokens"
        )
    if prefixes is None:
        return
    if prefixes.numel() != len(bounds) - 1:
        raise ValueError(
            f"there are prefixes of {prefixes.numel()} sequences and {len(bounds) - 1} sequences; give one each"
        )


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefixes: torch.Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> _Call:
    call = _Call(*(each.data_ptr() for each in (query, key, value, output, lse)))
    call.cu_seqlens, call.prefixes = _indices(cu_seqlens), None if prefixes is None else _indices(prefixes)
    call.num_sequences = cu_seqlens.numel() - 1
    (_, call.q_heads, call.head_dim), call.kv_heads = query.shape, key.shape[1]
    call.query_row, call.query_head = query.stride()[:2]
    call.key_row, call.key_head = key.stride()[:2]
    call.value_row, call.value_head = value.stride()[:2]
    call.scale, call.softcap, call.window = scale, softcap or 0.0, window or 0
    return call


def _indices(tensor: torch.Tensor) -> int:
    if tensor.dtype != torch.int32 or not tensor.is_contiguous():
        raise ValueError(
            f"cu_seqlens and prefixes must be contiguous int32, not {tensor.dtype} of strides {tensor.stride()}; "
            "make them with dtype=torch.int32"
        )
    return tensor.data_ptr()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Heads' dimensions next to each other, as the kernels read them; a view as a rule."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
