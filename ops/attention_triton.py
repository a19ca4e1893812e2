"""Attention over KV blocks in Triton, for CUDA machines without flash-attn; see ``ops.attention`` for the contract.

A program takes a tile of query rows of one KV head, the heads that share it for one token or several, so that keys are
read once for all of them. It walks the keys in tiles that start at multiples of the tile's width and keeps the softmax
as a running maximum and sum (FlashAttention-2, https://arxiv.org/abs/2307.08691). Sequences that decode, one new token
each, have programs of their own, which cut long contexts into splits whose results a second kernel merges
(Flash-Decoding, https://pytorch.org/blog/flash-decoding).

Tiles follow from the model's shapes, splits from a sequence's own context, and masked keys add exact zeros. So a
request's result has the same bits whatever shares its batch.

Grids follow from what the host knows, the number of sequences and bounds on their lengths. The lengths themselves are
read on the device, and programs without work return: a CUDA graph may be replayed over other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from ops.paged import PagedBatch

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
# A split of fewer keys would cost more in merging than it gains. More splits fill no GPU better: 8 KV heads of one
# sequence are 256 programs then. Contexts beyond the product of the two get longer splits.
_MIN_SPLIT = tl.constexpr(512)
_MAX_SPLITS = tl.constexpr(32)

_LOG2_E = tl.constexpr(1.4426950408889634)
# Triton's interpreter keeps bf16 as integers, and its tl.dot would multiply those.
_WIDENS_OPERANDS = tl.constexpr(knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class _Tile:
    """The rows and keys a program takes at a time, and how the compiler is to run it."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _chunk_tile(group: int, head_dim: int, dtype: torch.dtype) -> _Tile:
    """For sequences with several new tokens.

    At head_dim 128 in 16 bits a thread keeps 64 registers of output and 32 of scores; in all it takes 185 of its 255 on
    an H100, without spills, and the program 97 KiB of shared memory, which consumer GPUs with their 99 KiB have too.
    fp32 is computed without tensor cores, from operands in registers, and so takes small tiles.
    """
    rows = triton.next_power_of_2(group)
    if dtype == torch.float32:
        return _Tile(max(16, rows), 32 if head_dim <= 128 else 16, 4, 1)
    if head_dim > 128:
        return _Tile(max(64, rows), 32, 4, 2)
    return _Tile(max(128, rows), 64, 8, 2)


def _decode_tile(group: int, head_dim: int, dtype: torch.dtype) -> _Tile:
    """For sequences with one new token: the fewest rows tl.dot takes, and more keys in flight, since memory bounds it.

    At head_dim 128 in 16 bits a thread takes 160 registers and a program 71 KiB: an H100's multiprocessor runs three.
    """
    rows = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return _Tile(rows, 32 if head_dim <= 128 else 16, 4, 1)
    return _Tile(rows, 64 if head_dim <= 128 else 32, 8 if rows > 64 else 4, 4)


@dataclass(frozen=True, slots=True)
class _Call:
    """What the launches of one call share."""

    query: torch.Tensor  # (N, q_heads, head_dim)
    key: torch.Tensor  # (blocks, block_size, kv_heads, head_dim); keys that are not in blocks are blocks of one
    value: torch.Tensor
    out: torch.Tensor  # (N, q_heads, head_dim)
    cu_seqlens: torch.Tensor  # (S + 1,)
    context_lens: torch.Tensor  # (S,)
    block_tables: torch.Tensor  # (S, B)
    scale: float
    window: int | None
    softcap: float | None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.key.shape[2]

    def attend_chunks(self, max_query_len: int) -> None:
        """The sequences with several new tokens."""
        tile = _chunk_tile(self.group, self.query.shape[2], self.query.dtype)
        num_sequences = self.cu_seqlens.shape[0] - 1
        grid = (triton.cdiv(max_query_len, tile.rows // self.group), self.key.shape[2], num_sequences)
        self._launch(grid, tile, None, None)

    def attend_decodes(self, max_context_len: int) -> None:
        """The sequences with one new token, and the padding."""
        num_heads, head_dim = self.query.shape[1:]
        tile = _decode_tile(self.group, head_dim, self.query.dtype)
        if self.window is not None:  # a walk begins up to a tile's width before the window
            max_context_len = min(max_context_len, self.window + tile.keys - 1)
        num_splits = max(1, min(_MAX_SPLITS.value, triton.cdiv(max_context_len, _MIN_SPLIT.value)))
        num_sequences = self.cu_seqlens.shape[0] - 1
        shape = (num_sequences, num_heads, num_splits) if num_splits > 1 else (0, 0, 0)
        partial = self.query.new_empty((*shape, head_dim), dtype=torch.float32)
        partial_lse = self.query.new_empty(shape, dtype=torch.float32)
        self._launch((num_splits, self.key.shape[2], num_sequences + 1), tile, partial, partial_lse)
        if num_splits > 1:
            _run(
                _merge_kernel,
                (num_heads, num_sequences),
                partial,
                partial_lse,
                self.out,
                self.cu_seqlens,
                self.context_lens,
                self.window,
                num_splits,
                self.out.stride(),
                HEAD_DIM=head_dim,
                BLOCK_N=tile.keys,
                BLOCK_D=_padded(head_dim),
            )

    def _launch(
        self,
        grid: tuple[int, int, int],
        tile: _Tile,
        partial: torch.Tensor | None,  # given to the decodes
        partial_lse: torch.Tensor | None,
    ) -> None:
        _run(
            _attention_kernel,
            grid,
            self.query,
            self.key,
            self.value,
            self.out,
            partial,
            partial_lse,
            self.cu_seqlens,
            self.context_lens,
            self.block_tables,
            self.scale,
            self.window,
            self.softcap,
            self.cu_seqlens.shape[0] - 1,
            self.query.shape[0],
            self.block_tables.stride(0),
            self.query.stride(),
            self.key.stride(),
            self.value.stride(),
            self.out.stride(),
            TOKENS=tile.rows // self.group if partial is None else 1,
            GROUP=self.group,
            HEAD_DIM=self.query.shape[2],
            BLOCK_SIZE=self.key.shape[1],
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            BLOCK_D=_padded(self.query.shape[2]),
            num_warps=tile.num_warps,
            # Looking up the blocks takes a stage of its own before the loads.
            num_stages=tile.num_stages + (tile.num_stages > 1),
        )


def paged_attention_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``ops.attention.paged_attention``.

    Args:
        query: (N or more, q_heads, head_dim), any strides; head_dim is at most 256.
        key_cache: (num_blocks, block_size, kv_heads, head_dim), any strides.
        value_cache: the same shape.
        batch: ``cu_seqlens``, ``context_lens`` and ``block_tables`` are read on the device; ``max_query_len`` and
            ``max_context_len`` may be more than the longest. A sequence may have no new token.
        scale, window, softcap: as there.
        out: like ``query``, to write to; None for a new one.

    Returns:
        ``out``, zero in the rows past ``cu_seqlens[-1]``.
    """
    _check(query, key_cache, value_cache, window, softcap)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    if out.shape != query.shape:
        raise ValueError(f"out is {tuple(out.shape)} and must have the shape of query, {tuple(query.shape)}")
    places = (batch.cu_seqlens, batch.context_lens, batch.block_tables)
    call = _Call(query, key_cache, value_cache, out, *places, scale, window, softcap)
    call.attend_decodes(batch.max_context_len)
    if batch.max_query_len > 1:
        call.attend_chunks(batch.max_query_len)
    return out


def write_kv_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
) -> None:
    """See ``ops.attention.write_kv``; any strides.

    Beyond what is said there, a slot whose block is negative takes nothing, so that the padding of a captured graph can
    have slots.
    """
    num_tokens, (num_heads, head_dim) = batch.slot_blocks.shape[0], key.shape[1:]
    if key.shape != value.shape or key.shape[0] < num_tokens:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must have one shape, and a row for each of "
            f"{num_tokens} slots"
        )
    if key_cache.shape[2:] != key.shape[1:] or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"the caches {tuple(key_cache.shape)} and {tuple(value_cache.shape)} must have one shape, and heads like "
            f"those of key {tuple(key.shape)}"
        )
    if num_tokens == 0:
        return
    _run(
        _write_kernel,
        (num_tokens,),
        key,
        value,
        key_cache,
        value_cache,
        batch.slot_blocks,
        batch.slot_offsets,
        key.stride(),
        value.stride(),
        key_cache.stride(),
        value_cache.stride(),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )


def _run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch ``kernel``, which a type checker takes for the function it was made from."""
    kernel[grid](*arguments, **options)


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))  # tl.dot sums over 16 at least


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, softcap: float | None
) -> None:
    """``key`` and ``value`` are (..., kv_heads, head_dim)."""
    num_heads, head_dim = query.shape[1:]
    if key.shape != value.shape or key.shape[-1] != head_dim or num_heads % key.shape[-2]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must agree: key and "
            "value in shape, all in head_dim, and query's heads must be a multiple of key's"
        )
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _DTYPES:
        raise ValueError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; they must be of one dtype, one of "
            f"{', '.join(map(str, _DTYPES))}"
        )
    if head_dim > _MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim is {head_dim} and the Triton kernel takes at most {_MAX_HEAD_DIM}; use another attention backend"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window} and must be at least 1, the query itself; set None to see every key")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap} and must be positive; set None for no cap")


@triton.jit
def _tanh(x):
    """To fp32's precision: by an exponential, and near 0, where that cancels, by the series."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.0625, series, 1 - 2 / (tl.exp2(x * (2 * _LOG2_E)) + 1))


@triton.jit
def _dot(left, right, total):
    if _WIDENS_OPERANDS:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _first_key(position, window):
    """The first key that a query at ``position`` sees."""
    first = position * 0
    if window is not None:
        first = tl.maximum(position - window + 1, 0)
    return first


@triton.jit
def _zero_rows(out, is_head, first, stop, step, stride):
    """Zero every ``step``-th row of ``out``, pointers at its row 0, from ``first`` on."""
    for row in range(first, stop, step):
        tl.store(out + row * stride, tl.zeros(out.shape, tl.float32), mask=is_head)


@triton.jit
def _decode_splits(context_len, window, BLOCK_N: tl.constexpr):
    """The first key a decoding token sees, where its walk begins, the keys of a split, and the number of splits."""
    first = _first_key(context_len - 1, window)
    begin = first // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(context_len - begin, _MAX_SPLITS), BLOCK_N) * BLOCK_N
    length = tl.maximum(length, _MIN_SPLIT)
    return first, begin, length, tl.maximum(tl.cdiv(context_len - begin, length), 1)


@triton.jit
def _span(partial, part, num_queries, context_len, window, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """A program's first token, the keys it walks from and to, and its sequence's splits, 0 where it has no work."""
    if partial is not None:
        token = part * 0
        first, begin, length, num_splits = _decode_splits(context_len, window, BLOCK_N)
        first = tl.maximum(first, begin + part * length)
        stop = tl.minimum(context_len, begin + (part + 1) * length)
        has_work = part < num_splits
    else:
        # The last tiles see the most keys: started first, they do not finish alone.
        token = (tl.num_programs(0) - 1 - part) * TOKENS
        position = context_len - num_queries + token
        first, num_splits = _first_key(position, window), 1
        stop = tl.minimum(context_len, position + TOKENS)
        has_work = token < num_queries
    return token, first, stop, tl.where(has_work, num_splits, 0)


@triton.jit
def _attend(
    query_tile,  # (BLOCK_M, BLOCK_D)
    positions,  # (BLOCK_M,) of the rows in their sequence
    key,  # at the KV head
    value,
    blocks,  # at the sequence's part of the block tables
    first,  # keys first .. stop - 1 are read
    stop,
    scale,
    window,
    softcap,
    k_strides,
    v_strides,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The rows' outputs (BLOCK_M, BLOCK_D) and the log-sum-exp (BLOCK_M,) of their scores, in base 2."""
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    output = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)  # where dimensions or slots lie far apart, 32 bits would not do
    for start in range(first // BLOCK_N * BLOCK_N, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        # No other slot is loaded: a weight of 0 times a NaN that lies there would be NaN.
        is_read = (keys >= first) & (keys < stop)
        block = tl.load(blocks + keys // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
        slot = (keys % BLOCK_SIZE).to(tl.int64)
        key_at = (block * k_strides[0] + slot * k_strides[1])[None, :] + (dims * k_strides[3])[:, None]
        key_tile = tl.load(key + key_at, mask=is_read[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        scores = _dot(query_tile, key_tile, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        if softcap is not None:
            scores = _tanh(scores * (scale / softcap)) * (softcap * _LOG2_E)
        else:
            scores = scores * (scale * _LOG2_E)
        is_seen = is_read[None, :] & (keys[None, :] <= positions[:, None])
        if window is not None:
            is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))

        highest = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no key yet has nothing to subtract, and inf - inf would be NaN.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        value_at = (block * v_strides[0] + slot * v_strides[1])[:, None] + (dims * v_strides[3])[None, :]
        value_tile = tl.load(value + value_at, mask=is_read[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        output = _dot(weights.to(value_tile.dtype), value_tile, output * decay[:, None])
        total = total * decay + tl.sum(weights, 1)
        maximum = highest
    return output / total[:, None], maximum + tl.log2(total)


# What changes from step to step would otherwise compile kernels anew for 1, for multiples of 16, and for the rest.
@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "table_stride"])
def _attention_kernel(
    query,
    key,
    value,
    out,
    partial,  # (S, q_heads, splits, head_dim) fp32, the splits' outputs; None for the sequences that do not decode
    partial_lse,  # (S, q_heads, splits) fp32, the log-sum-exp of their scores, in base 2
    cu_seqlens,
    context_lens,
    block_tables,
    scale,
    window,
    softcap,
    num_sequences,
    num_tokens,
    table_stride,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    TOKENS: tl.constexpr,  # new tokens of a tile
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (splits of keys or tiles of tokens, kv_heads, sequences and then the padding)."""
    part, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D).to(tl.int64)
    heads = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    out_at = (heads * o_strides[1])[:, None] + (dims * o_strides[2])[None, :]
    first_row = tl.load(cu_seqlens + sequence).to(tl.int64)
    if sequence == num_sequences:
        is_head = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        _zero_rows(out + out_at, is_head, first_row + part, num_tokens, tl.num_programs(0), o_strides[0])
        return
    num_queries = (tl.load(cu_seqlens + sequence + 1) - first_row).to(tl.int32)
    context_len = tl.load(context_lens + sequence)
    token, first, stop, num_splits = _span(partial, part, num_queries, context_len, window, TOKENS, BLOCK_N)
    if (num_splits == 0) | ((num_queries == 1) != (partial is not None)):
        return
    tokens = token + rows // GROUP
    is_row = (rows < TOKENS * GROUP) & (tokens < num_queries)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_at = ((first_row + tokens) * q_strides[0] + heads * q_strides[1])[:, None] + (dims * q_strides[2])[None, :]
    output, lse = _attend(
        tl.load(query + query_at, mask=mask, other=0.0),
        tl.minimum(context_len - num_queries + tokens, context_len - 1),
        key + kv_head.to(tl.int64) * k_strides[2],
        value + kv_head.to(tl.int64) * v_strides[2],
        block_tables + sequence.to(tl.int64) * table_stride,
        first,
        stop,
        scale,
        window,
        softcap,
        k_strides,
        v_strides,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
    )
    at_rows = out + ((first_row + tokens) * o_strides[0])[:, None] + out_at
    if partial is None:
        tl.store(at_rows, output, mask=mask)
    elif num_splits > 1:
        split = (sequence.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * tl.num_programs(0) + part
        tl.store(partial + split[:, None] * HEAD_DIM + dims[None, :], output, mask=mask)
        tl.store(partial_lse + split, lse, mask=is_row)
    else:
        tl.store(at_rows, output, mask=mask)


@triton.jit
def _merge_kernel(
    partial,
    partial_lse,
    out,
    cu_seqlens,
    context_lens,
    window,
    max_splits,
    o_strides,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The outputs of a context's splits, weighted by their share of its softmax. Grid: (q_heads, S)."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    row = tl.load(cu_seqlens + sequence).to(tl.int64)
    num_queries = tl.load(cu_seqlens + sequence + 1) - row
    _, _, _, num_splits = _decode_splits(tl.load(context_lens + sequence), window, BLOCK_N)
    if (num_queries != 1) | (num_splits == 1):
        return
    # Always of one shape: the order of the sum may not depend on the longest context of the batch.
    splits, dims = tl.arange(0, _MAX_SPLITS), tl.arange(0, BLOCK_D).to(tl.int64)
    is_split = splits < num_splits
    index = (sequence.to(tl.int64) * tl.num_programs(0) + head) * max_splits + splits
    lse = tl.load(partial_lse + index, mask=is_split, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    is_kept = is_split[:, None] & (dims < HEAD_DIM)[None, :]
    outputs = tl.load(partial + index[:, None] * HEAD_DIM + dims[None, :], mask=is_kept, other=0.0)
    shares = weights / tl.sum(weights, 0)
    output = tl.sum(outputs * shares[:, None], 0)
    tl.store(
        out + row * o_strides[0] + head.to(tl.int64) * o_strides[1] + dims * o_strides[2], output, mask=dims < HEAD_DIM
    )


@triton.jit
def _write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_blocks,
    slot_offsets,
    key_strides,
    value_strides,
    key_cache_strides,
    value_cache_strides,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (tokens,)."""
    row = tl.program_id(0).to(tl.int64)
    block, offset = tl.load(slot_blocks + row), tl.load(slot_offsets + row)
    if block < 0:
        return
    heads, dims = tl.arange(0, BLOCK_H)[:, None].to(tl.int64), tl.arange(0, BLOCK_D)[None, :].to(tl.int64)
    mask = (heads < NUM_HEADS) & (dims < HEAD_DIM)
    at = row * key_strides[0] + heads * key_strides[1] + dims * key_strides[2]
    to = block * key_cache_strides[0] + offset * key_cache_strides[1]
    to += heads * key_cache_strides[2] + dims * key_cache_strides[3]
    tl.store(key_cache + to, tl.load(key + at, mask=mask), mask=mask)
    at = row * value_strides[0] + heads * value_strides[1] + dims * value_strides[2]
    to = block * value_cache_strides[0] + offset * value_cache_strides[1]
    to += heads * value_cache_strides[2] + dims * value_cache_strides[3]
    tl.store(value_cache + to, tl.load(value + at, mask=mask), mask=mask)
