"""Attention over a flat token axis: packed sequences, KV blocks, and the write into them.

One call each; flash-attn on CUDA where it is installed and can do what is asked, plain torch otherwise. All of it is
causal: query i of a sequence sees keys up to its own position, and with ``window`` w itself and the w - 1 before it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ops.attention_torch import paged_attention_torch, varlen_attention_torch
from ops.paged import PagedBatch

BACKENDS = ("flash", "reference")
# flash-attn's paged kernel reads blocks of a multiple of this many tokens.
_FLASH_BLOCK = 256
_override: ContextVar[str | None] = ContextVar("attention_backend", default=None)


@functools.cache
def _default_backend() -> str:
    return "flash" if torch.cuda.is_available() and importlib.util.find_spec("flash_attn") else "reference"


def backend() -> str:
    """The backend in use: "flash" or "reference"."""
    return _override.get() or _default_backend()


@contextmanager
def override_backend(name: str) -> Iterator[None]:
    """Use one backend inside the block, for tests and comparisons."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is unknown; choose one of {', '.join(BACKENDS)}")
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        raise ValueError("attention backend 'flash' needs the flash-attn package; install hybrid[gpu]")
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def _flash_takes(query: torch.Tensor) -> bool:
    return (
        backend() == "flash"
        and query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
    )


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal self-attention of S sequences laid end to end; differentiable.

    Args:
        query: (N, q_heads, head_dim).
        key: (N, kv_heads, head_dim); q_heads is a multiple of kv_heads.
        value: (N, kv_heads, head_dim).
        cu_seqlens: (S + 1,) int32, where each sequence starts; the last entry is N.
        max_seqlen: length of the longest sequence.
        scale: factor on the scores.
        window: keys a query sees, itself included; None for all.
        softcap: scores become ``softcap * tanh(scores / softcap)``.

    Returns:
        (N, q_heads, head_dim)
    """
    if not _flash_takes(query):
        return varlen_attention_torch(query, key, value, cu_seqlens, scale=scale, window=window, softcap=softcap)
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
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
        query: (N, q_heads, head_dim), the new tokens of S sequences laid end to end: one of each that decodes,
            several of each that prefills.
        key_cache: (num_blocks, block_size, kv_heads, head_dim), contiguous as (block, head, token): see KVCache.
        value_cache: the same shape.
        batch: where the sequences lie.
        scale, window, softcap: as in ``varlen_attention``.

    Returns:
        (N, q_heads, head_dim)
    """
    if not _flash_takes(query) or key_cache.shape[1] % _FLASH_BLOCK:
        return paged_attention_torch(query, key_cache, value_cache, batch, scale=scale, window=window, softcap=softcap)
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        query,
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


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
) -> None:
    """Put the new tokens' keys and values (N, kv_heads, head_dim) into their slots, in place."""
    slots = (batch.slot_blocks, batch.slot_offsets)
    key_cache.index_put_(slots, key)
    value_cache.index_put_(slots, value)


def _flash_window(window: int | None) -> tuple[int, int]:
    return (-1, -1) if window is None else (window - 1, 0)
