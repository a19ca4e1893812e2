"""Attention on a CPU by the compiled kernels of ``ops/cpu/attention.cpp``.

A token's result has the same bits whatever is attended beside it: in a chunk or decoding, over KV blocks or over keys
laid end to end. That is what lets generation and training agree exactly.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.nn.functional import pad

from ops import cpu, varlen_cpu
from ops.paged import PagedBatch
from ops.prefixes import Prefixes

TILE = 64  # keys the kernel takes at a time
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
    output = torch.empty(query.shape, dtype=query.dtype)
    output[batch.num_tokens :] = 0
    call = _cache_call(key_cache, value_cache)
    call.query, call.output = query.data_ptr(), output.data_ptr()
    call.query_row, call.query_head, call.q_heads = query.stride(0), query.stride(1), query.shape[1]
    call.cu_seqlens, call.context_lens = batch.cu_seqlens.data_ptr(), batch.context_lens.data_ptr()
    call.block_tables, call.table_width = batch.block_tables.data_ptr(), batch.block_tables.shape[1]
    call.num_sequences = batch.context_lens.numel()
    call.scale, call.softcap, call.window = scale, softcap or 0.0, window or 0
    _library().paged_attention(ctypes.byref(call), key_cache.dtype == torch.bfloat16, torch.get_num_threads())
    return output


def write_kv_cpu(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, batch: PagedBatch
) -> None:
    """See ``ops.attention.write_kv``."""
    key, value = _rows(key.to(key_cache.dtype)), _rows(value.to(value_cache.dtype))
    _library().write_kv(
        ctypes.byref(_cache_call(key_cache, value_cache)),
        key_cache.dtype == torch.bfloat16,
        *(ctypes.c_void_p(each.data_ptr()) for each in (key, value, batch.slot_blocks, batch.slot_offsets)),
        *map(ctypes.c_int64, (batch.num_tokens, *key.stride()[:2], *value.stride()[:2])),
    )


def varlen_attention_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefixes: Prefixes | None = None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """See ``ops.attention.varlen_attention``: the bits of ``paged_attention_cpu``; the gradient is ``varlen_cpu``'s."""
    return _VarlenAttention.apply(query, key, value, cu_seqlens, prefixes, scale, window, softcap)


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, cu_seqlens, prefixes, scale, window, softcap):
        ctx.save_for_backward(query, key, value, cu_seqlens)
        ctx.options = {"scale": scale, "window": window, "softcap": softcap}
        ctx.prefixes = prefixes
        key_cache, value_cache, batch = _as_cache(key, value, cu_seqlens, prefixes)
        return paged_attention_cpu(query, key_cache, value_cache, batch, **ctx.options)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        *tensors, cu_seqlens = ctx.saved_tensors
        query, key, value = (tensor.detach().requires_grad_() for tensor in tensors)
        prefixes = None if ctx.prefixes is None else ctx.prefixes.indices
        with torch.enable_grad():
            output = varlen_cpu.varlen_attention(query, key, value, cu_seqlens, prefixes, **ctx.options)
        return (*torch.autograd.grad(output, (query, key, value), grads), None, None, None, None, None)


def _as_cache(
    key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, prefixes: Prefixes | None
) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """Sequences laid end to end as blocks of a tile each: copies, since the kernel reads whole tiles."""
    query_lens, cu_seqlens_k = cu_seqlens.diff().long(), cu_seqlens
    if prefixes is not None:
        key, value, cu_seqlens_k = key[prefixes.key_rows], value[prefixes.key_rows], prefixes.cu_seqlens_k
    lengths = cu_seqlens_k.diff().long()
    blocks = (lengths + TILE - 1) // TILE
    first = pad(blocks.cumsum(0), (1, 0))
    # Where each key goes: its sequence's first block, and its place in the sequence from there.
    places = torch.arange(key.shape[0]) + torch.repeat_interleave(first[:-1] * TILE - cu_seqlens_k[:-1], lengths)
    num_blocks = int(first[-1])

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        spread_out = tensor.new_zeros(num_blocks * TILE, *tensor.shape[1:]).index_copy_(0, places, tensor)
        return spread_out.view(num_blocks, TILE, *tensor.shape[1:])

    tables = torch.minimum(first[:-1, None] + torch.arange(int(blocks.max())), first[1:, None] - 1)
    batch = PagedBatch.build(
        query_lens.numpy(),
        lengths.numpy(),
        tables.numpy(),
        block_size=TILE,
        num_kv_heads=key.shape[1],
        device=key.device,
    )
    return spread(key).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), spread(value), batch


def _cache_call(key_cache: torch.Tensor, value_cache: torch.Tensor) -> _Call:
    call = _Call(key=key_cache.data_ptr(), value=value_cache.data_ptr())
    _, call.block_size, call.kv_heads, call.head_dim = key_cache.shape
    call.key_block, call.key_head = key_cache.stride(0), key_cache.stride(2)
    call.value_block, call.value_token, call.value_head = value_cache.stride()[:3]
    return call


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Heads' dimensions next to each other, as the kernels read them; a view as a rule."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _library() -> ctypes.CDLL:
    library = cpu.library()
    if library is None:
        raise RuntimeError("the CPU kernels are not available; ask is_available() first")
    return library
