"""Attention over a flat token axis: packed sequences, KV blocks, and the write into them.

One call each. On CUDA flash-attn where it is installed and can do what is asked, else Triton for KV blocks; on a CPU
kernels compiled for it (see ``ops.cpu``); plain torch otherwise. All of it is causal: query i of a sequence sees keys
up to its own position, and with ``window`` w itself and the w - 1 before it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

from ops import attention_cpu, varlen_cpu
from ops.attention_torch import paged_attention_torch, varlen_attention_torch
from ops.paged import PagedBatch
from ops.prefixes import Prefixes

BACKENDS = ("flash", "triton", "cpu", "reference")
# flash-attn's paged kernel reads blocks of a multiple of this many tokens.
_FLASH_BLOCK = 256
_override: ContextVar[str | None] = ContextVar("attention_backend", default=None)


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _allows(name: str) -> bool:
    return _override.get() in (None, name)


@contextmanager
def override_backend(name: str) -> Iterator[None]:
    """Use one backend inside the block, or the reference where it cannot do what is asked; for tests."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is unknown; choose one of {', '.join(BACKENDS)}")
    if name == "flash" and not _installed("flash_attn"):
        raise ValueError("attention backend 'flash' needs the flash-attn package; install hybrid[gpu]")
    if name == "triton" and not _installed("triton"):
        raise ValueError("attention backend 'triton' needs the triton package; pip install triton")
    if name == "cpu" and not attention_cpu.is_available():
        raise ValueError("attention backend 'cpu' needs a C++ compiler; install g++, or set CXX")
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def key_layout(dtype: torch.dtype, device: torch.device, block_size: int) -> Literal["token", "dim"]:
    """How a KV cache should keep a block's keys of one head: token by token, or dimension by dimension."""
    by_dim = _allows("cpu") and attention_cpu.takes_cache(dtype, device, block_size)
    return "dim" if by_dim else "token"


def _flash_takes(query: torch.Tensor) -> bool:
    return (
        query.is_cuda
        and _allows("flash")
        and _installed("flash_attn")
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
    )


def _triton_takes(tensor: torch.Tensor) -> bool:
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16) or tensor.shape[-1] > 256:
        return False
    forced = _override.get() == "triton"  # through its interpreter, in tests
    return forced or (tensor.is_cuda and _allows("triton") and _installed("triton"))


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    scale: float,
    prefixes: Prefixes | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal self-attention of S sequences laid end to end; differentiable.

    By the kernels for CPUs a token has the bits that ``paged_attention`` gives it.

    Args:
        query: (N, q_heads, head_dim).
        key: (N, kv_heads, head_dim); q_heads is a multiple of kv_heads.
        value: (N, kv_heads, head_dim).
        cu_seqlens: (S + 1,) int32, where each sequence starts; the last entry is N.
        max_seqlen: length of the longest sequence.
        scale: factor on the scores.
        prefixes: whose tokens a sequence sees before its own; None: nobody's.
        window: keys a query sees, itself included; None for all.
        softcap: scores become ``softcap * tanh(scores / softcap)``.

    Returns:
        (N, q_heads, head_dim)
    """
    options = {"scale": scale, "window": window, "softcap": softcap}
    if _allows("cpu") and varlen_cpu.takes(query, key, value):
        indices = None if prefixes is None else prefixes.indices
        return varlen_cpu.varlen_attention(query, key, value, cu_seqlens, indices, **options)
    if not _flash_takes(query):
        return varlen_attention_torch(query, key, value, cu_seqlens, prefixes, **options)
    from flash_attn import flash_attn_varlen_func

    cu_seqlens_k, max_seqlen_k = cu_seqlens, max_seqlen
    if prefixes is not None:
        # Causal is aligned at the end there: the last query of a sequence sees the last of its keys.
        key, value = key[prefixes.key_rows], value[prefixes.key_rows]
        cu_seqlens_k, max_seqlen_k = prefixes.cu_seqlens_k, prefixes.max_seqlen_k
    return flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        window_size=_flash_window(window),
        softcap=softcap or 0.0,
    )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens over their sequences' KV blocks, which hold the new tokens' own KV already.

    Args:
        query: (N or more, q_heads, head_dim), the new tokens of S sequences laid end to end: one of each that decodes,
            several of each that prefills; rows past the batch's N tokens give zeros.
        key_cache: (num_blocks, block_size, kv_heads, head_dim), a head's part of a block together in memory, laid out
            as ``key_layout`` says.
        value_cache: the same shape, token by token.
        batch: where the sequences lie.
        scale, window, softcap: as in ``varlen_attention``.

    Returns:
        (N or more, q_heads, head_dim)
    """
    options = {"scale": scale, "window": window, "softcap": softcap}
    if _flash_takes(query) and key_cache.shape[1] % _FLASH_BLOCK == 0:
        return _paged_attention_flash(query, key_cache, value_cache, batch, **options)
    if _triton_takes(query):
        from ops.attention_triton import paged_attention_triton

        return paged_attention_triton(query, key_cache, value_cache, batch, **options)
    if _allows("cpu") and attention_cpu.reads_cache(key_cache) and attention_cpu.is_available():
        return attention_cpu.paged_attention_cpu(query, key_cache, value_cache, batch, **options)
    return paged_attention_torch(query, key_cache, value_cache, batch, **options)


def _paged_attention_flash(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    output = torch.zeros_like(query)
    output[: batch.num_tokens] = flash_attn_varlen_func(
        query[: batch.num_tokens],
        key_cache,
        value_cache,
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_k=torch.nn.functional.pad(batch.context_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_context_len,
        softmax_scale=scale,
        causal=True,
        window_size=_flash_window(window),
        softcap=softcap or 0.0,
        block_table=batch.block_tables,
    )
    return output


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
) -> None:
    """Put the new tokens' keys and values (N or more, kv_heads, head_dim) into their slots, in place.

    Rows past the batch's N tokens have no slot and are written nowhere.
    """
    if _allows("cpu") and attention_cpu.reads_cache(key_cache) and attention_cpu.is_available():
        attention_cpu.write_kv_cpu(key, value, key_cache, value_cache, batch)
        return
    if _triton_takes(key):
        from ops.attention_triton import write_kv_triton

        write_kv_triton(key, value, key_cache, value_cache, batch)
        return
    slots = (batch.slot_blocks, batch.slot_offsets)
    key_cache.index_put_(slots, key[: batch.num_tokens])
    value_cache.index_put_(slots, value[: batch.num_tokens])


def _flash_window(window: int | None) -> tuple[int, int]:
    return (-1, -1) if window is None else (window - 1, 0)
