"""Attention on a CPU by the compiled kernels of ``ops/cpu/attention.cpp``.

A token's result has the same bits whatever is attended beside it, in a chunk or decoding, and those that it has in
training (see ``ops.varlen_cpu``). That is what lets the two agree exactly.
"""

from __future__ import annotations

import ctypes

import torch

from ops import cpu
from ops.paged import PagedBatch
from ops.tape import recordable

LANES = 16  # keys of a block lie this many to a vector
_DTYPES = (torch.float32, torch.bfloat16)

_INTS = ("num_sequences", "table_width", "q_heads", "kv_heads", "head_dim", "block_size", "query_row", "query_head")
_STRIDES = ("key_block", "key_head", "value_block", "value_head", "value_token")


class _Call(ctypes.Structure):
    """``Call`` of attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "output")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens", "context_lens", "block_tables")),
        *((name, ctypes.c_int64) for name in (*_INTS, *_STRIDES)),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("window", ctypes.c_int64),
    )


def is_available() -> bool:
    return cpu.library() is not None


def takes_cache(dtype: torch.dtype, device: torch.device, block_size: int) -> bool:
    """Whether a KV cache of this kind should keep its keys as the kernels read them: dimension by dimension."""
    return device.type == "cpu" and dtype in _DTYPES and block_size % LANES == 0 and is_available()


def reads_cache(key_cache: torch.Tensor) -> bool:
    """Whether a cache (num_blocks, block_size, kv_heads, head_dim) keeps its keys so."""
    block_size = key_cache.shape[1]
    return (
        key_cache.device.type == "cpu"
        and key_cache.dtype in _DTYPES
        and block_size % LANES == 0
        and key_cache.stride(1) == 1
        and key_cache.stride(3) == block_size
    )


@recordable
def paged_attention_cpu(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """See ``ops.attention.paged_attention``; the cache is one that ``reads_cache``."""
    query = _rows(query.to(key_cache.dtype))
    if batch.rectangles is None:  # a recorded step: only the tensors know how many of its rows there are
        output = torch.zeros(query.shape, dtype=query.dtype)
    else:
        output = torch.empty(query.shape, dtype=query.dtype)
        output[batch.num_tokens :] = 0
    call = _cache_call(key_cache, value_cache)
    call.query, call.output = query.data_ptr(), output.data_ptr()
    call.query_row, call.query_head, call.q_heads = query.stride(0), query.stride(1), query.shape[1]
    call.cu_seqlens, call.context_lens = batch.cu_seqlens.data_ptr(), batch.context_lens.data_ptr()
    call.block_tables, call.table_width = batch.block_tables.data_ptr(), batch.block_tables.shape[1]
    call.num_sequences = batch.context_lens.numel()
    call.scale, call.softcap, call.window = scale, softcap or 0.0, window or 0
    cpu.loaded().paged_attention(ctypes.byref(call), key_cache.dtype == torch.bfloat16, torch.get_num_threads())
    return output


@recordable
def write_kv_cpu(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, batch: PagedBatch
) -> None:
    """See ``ops.attention.write_kv``."""
    key, value = _rows(key.to(key_cache.dtype)), _rows(value.to(value_cache.dtype))
    cpu.loaded().write_kv(
        ctypes.byref(_cache_call(key_cache, value_cache)),
        key_cache.dtype == torch.bfloat16,
        *(ctypes.c_void_p(each.data_ptr()) for each in (key, value, batch.slot_blocks, batch.slot_offsets)),
        *map(ctypes.c_int64, (batch.num_tokens, *key.stride()[:2], *value.stride()[:2])),
    )


def _cache_call(key_cache: torch.Tensor, value_cache: torch.Tensor) -> _Call:
    call = _Call(key=key_cache.data_ptr(), value=value_cache.data_ptr())
    _, call.block_size, call.kv_heads, call.head_dim = key_cache.shape
    call.key_block, call.key_head = key_cache.stride(0), key_cache.stride(2)
    call.value_block, call.value_token, call.value_head = value_cache.stride()[:3]
    return call


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Heads' dimensions next to each other, as the kernels read them; a view as a rule."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
