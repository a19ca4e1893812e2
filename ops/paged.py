"""Where a generation step's tokens and their contexts lie in the KV blocks: built once a step, read by every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

# Sequences are attended together as one dense rectangle as long as its padding stays within these bounds.
_MAX_PADDED_TOKENS = 65_536  # keys of one rectangle, which bounds the gathered copy
_MAX_SCORES = 8_388_608  # query rows times keys of one rectangle, which bounds its mask
_CONTEXT_SLACK = 64  # keys by which the longest context may always exceed the shortest; beyond, it may double
_QUERY_SLACK = 16


@dataclass(slots=True)
class PagedGroup:
    """Neighbouring sequences of similar lengths, attended as one rectangle of G sequences x Q queries x L keys.

    The queries of sequence g are the last ones of its context; rows past a sequence's queries repeat its last one
    and are dropped again. Masks depend on the layer's window alone and are kept from layer to layer.
    """

    first_row: int  # the group's tokens are rows first_row .. last_row - 1 of the flat axis
    last_row: int
    num_sequences: int  # G
    num_queries: int  # Q
    num_keys: int  # L, a multiple of the block size
    is_fresh: bool  # no context but the queries themselves, all of one length: plain causal attention
    block_rows: torch.Tensor  # (G * kv_heads * L / block_size,) rows of the cache seen as (blocks * kv_heads, ...)
    query_positions: torch.Tensor  # (G, Q)
    padded_rows: torch.Tensor | None  # (G * Q,) flat row of each query, or None where the rows are the rectangle
    kept_rows: torch.Tensor | None  # (last_row - first_row,) rows of the rectangle that are real queries
    masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """(G, 1, Q, L) additive mask: a query sees itself and the window - 1 keys before it (all of them: None)."""
        found = self.masks.get((window, dtype))
        if found is None:
            keys = torch.arange(self.num_keys, device=self.query_positions.device)
            queries = self.query_positions[:, :, None]
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            found = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            found = found.masked_fill_(~visible, float("-inf"))[:, None]
            self.masks[window, dtype] = found
        return found


@dataclass(slots=True)
class PagedBatch:
    """S sequences, each with some new tokens (N in all) whose keys and values go into its blocks.

    A sequence's context is everything up to and including its last new token. Queries may have rows past the N tokens,
    which fill up a shape: they belong to no sequence, are written nowhere and attend to nothing.
    """

    cu_seqlens: torch.Tensor  # (S + 1,) int32, where each sequence's new tokens start on the flat axis
    context_lens: torch.Tensor  # (S,) int32
    block_tables: torch.Tensor  # (S, B) int32; entries past a context are 0 and never read
    max_query_len: int
    max_context_len: int
    slot_blocks: torch.Tensor  # (N,) int64, the block that takes each new token
    slot_offsets: torch.Tensor  # (N,) int64, and the place in it
    position_ids: torch.Tensor  # (N,) int64
    rectangles: _Rectangles | None  # None: lengths are known on the device alone, as in a recorded graph
    buffers: dict[tuple[str, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        query_lens: np.ndarray,
        context_lens: np.ndarray,
        block_tables: np.ndarray,
        *,
        block_size: int,
        num_kv_heads: int,
        device: torch.device,
    ) -> PagedBatch:
        """Lay out a step. Sequences sorted by ``(query_len, context_len)`` need the fewest groups.

        Args:
            query_lens: (S,) int64, new tokens of each sequence, at least 1.
            context_lens: (S,) int64, tokens of each sequence up to its last new one.
            block_tables: (S, B) int64, padded with 0.
            block_size: tokens a block holds.
            num_kv_heads: of this rank's cache.
            device: of the cache.
        """
        bounds = np.concatenate(([0], np.cumsum(query_lens)))
        owners = np.repeat(np.arange(len(query_lens)), query_lens)  # (N,) the sequence of each token
        positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1] - (context_lens - query_lens), query_lens)

        def tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.from_numpy(array).to(device=device, dtype=dtype)

        return cls(
            cu_seqlens=tensor(bounds, torch.int32),
            context_lens=tensor(context_lens, torch.int32),
            block_tables=tensor(block_tables, torch.int32),
            max_query_len=int(query_lens.max()),
            max_context_len=int(context_lens.max()),
            slot_blocks=tensor(block_tables[owners, positions // block_size]),
            slot_offsets=tensor(positions % block_size),
            position_ids=tensor(positions),
            rectangles=_Rectangles(query_lens, context_lens, block_tables, bounds, block_size, num_kv_heads, tensor),
        )

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.position_ids.numel()

    @property
    def groups(self) -> tuple[PagedGroup, ...]:
        """The sequences as rectangles, for kernels that take dense ones."""
        if self.rectangles is None:
            raise RuntimeError("lengths are on the device alone, so no rectangles can be made; use a kernel that pages")
        return self.rectangles.groups()

    def gathered(self, name: str, cache: torch.Tensor, group: PagedGroup, dtype: torch.dtype) -> torch.Tensor:
        """(G, kv_heads, L, head_dim) copy of a group's blocks, in a buffer that all layers and groups reuse.

        ``cache`` (num_blocks, block_size, kv_heads, head_dim) keeps a head's part of a block together in memory, so
        that one row of the gather is one contiguous piece. Where that part lies token by token the copy is contiguous
        by head, and attention on the CPU a third quicker for it.
        """
        num_blocks, block_size, num_kv_heads, head_dim = cache.shape
        by_dim = cache.stride(1) == 1 and cache.stride(3) == block_size  # as the CPU kernels read keys
        rows = cache.permute(0, 2, 3, 1) if by_dim else cache.transpose(1, 2)
        rows = rows.view(num_blocks * num_kv_heads, block_size * head_dim)
        dense = self._buffer(name, cache.dtype, group, rows)
        torch.index_select(rows, 0, group.block_rows, out=dense)
        if dtype != cache.dtype:
            dense = self._buffer(name, dtype, group, rows).copy_(dense)
        if by_dim:
            dense = dense.view(-1, head_dim, block_size).transpose(1, 2)
        return dense.reshape(group.num_sequences, num_kv_heads, group.num_keys, head_dim)

    def _buffer(self, name: str, dtype: torch.dtype, group: PagedGroup, rows: torch.Tensor) -> torch.Tensor:
        """Room for a group's rows. Fresh memory for each would cost more in page faults than the copy itself."""
        buffer = self.buffers.get((name, dtype))
        if buffer is None:
            longest = max(group.block_rows.numel() for group in self.groups)
            buffer = self.buffers[name, dtype] = rows.new_empty(longest, rows.shape[1], dtype=dtype)
        return buffer[: group.block_rows.numel()]


def _cut(query_lens: np.ndarray, context_lens: np.ndarray) -> Iterator[tuple[int, int]]:
    """Split the sequences, in order, into runs whose rectangle is not mostly padding."""
    queries, contexts = query_lens.tolist(), context_lens.tolist()
    start, low_q, high_q, low_k, high_k = 0, queries[0], queries[0], contexts[0], contexts[0]
    for index in range(1, len(queries)):
        query, context = queries[index], contexts[index]
        next_low_q, next_high_q = min(low_q, query), max(high_q, query)
        next_low_k, next_high_k = min(low_k, context), max(high_k, context)
        size = index + 1 - start
        joins = (
            # A decode row never shares a rectangle with a chunk: its fast path has no query axis.
            (next_low_q == next_high_q or (next_low_q > 1 and next_high_q <= next_low_q + _QUERY_SLACK))
            and next_high_k <= max(2 * next_low_k, next_low_k + _CONTEXT_SLACK)
            and size * next_high_k <= _MAX_PADDED_TOKENS
            and size * next_high_q * next_high_k <= _MAX_SCORES
        )
        if joins:
            low_q, high_q, low_k, high_k = next_low_q, next_high_q, next_low_k, next_high_k
        else:
            yield start, index
            start, low_q, high_q, low_k, high_k = index, query, query, context, context
    yield start, len(queries)


@dataclass(slots=True)
class _Rectangles:
    """What the groups of a batch are made from, once somebody asks for them."""

    query_lens: np.ndarray  # (S,)
    context_lens: np.ndarray  # (S,)
    block_tables: np.ndarray  # (S, B)
    bounds: np.ndarray  # (S + 1,)
    block_size: int
    num_kv_heads: int
    tensor: Callable[[np.ndarray], torch.Tensor]
    made: tuple[PagedGroup, ...] | None = None

    def groups(self) -> tuple[PagedGroup, ...]:
        if self.made is None:
            self.made = tuple(self._group(*run) for run in _cut(self.query_lens, self.context_lens))
        return self.made

    def _group(self, start: int, stop: int) -> PagedGroup:
        """Sequences start .. stop - 1 as one rectangle."""
        queries, contexts = self.query_lens[start:stop], self.context_lens[start:stop]
        bounds, heads = self.bounds[start : stop + 1], self.num_kv_heads
        num_queries, longest = int(queries.max()), int(contexts.max())
        num_blocks = -(-longest // self.block_size)
        # (G, 1, B) blocks and (kv_heads, 1) heads give rows in the order (sequence, head, block).
        block_rows = self.block_tables[start:stop, None, :num_blocks] * heads + np.arange(heads)[:, None]
        steps = np.minimum(np.arange(num_queries), queries[:, None] - 1)  # (G, Q) pad rows repeat the last one
        is_padded = bool((queries < num_queries).any())
        kept = np.arange(num_queries) < queries[:, None]
        return PagedGroup(
            first_row=int(bounds[0]),
            last_row=int(bounds[-1]),
            num_sequences=stop - start,
            num_queries=num_queries,
            num_keys=num_blocks * self.block_size,
            is_fresh=not is_padded and bool((contexts == num_queries).all()),
            block_rows=self.tensor(block_rows.reshape(-1)),
            query_positions=self.tensor((contexts - queries)[:, None] + steps),
            padded_rows=self.tensor((bounds[:-1, None] + steps).reshape(-1)) if is_padded else None,
            kept_rows=self.tensor(np.flatnonzero(kept)) if is_padded else None,
        )
