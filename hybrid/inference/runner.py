"""One forward pass of the module over a step's tokens, laid end to end, its attention reading the KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from hybrid.inference.cache import KVCache
from hybrid.inference.graphs import Capture, DecodeGraphs
from hybrid.inference.scheduler import Chunk, Step
from hybrid.models.attention import PagedCall, attention_call
from ops.paged import PagedBatch


class ModelRunner:
    """Turns a step into tensors and runs it.

    Args:
        module: called as ``module(input_ids=(1, N), position_ids=(1, N), use_cache=False, logits_to_keep=(R,))``; its
            ``logits`` are (1, R, vocabulary), or this rank's stretch of it.
        cache: this rank's.
        device: of the module.
        capture: records decode steps (see `DecodeGraphs`); None runs them as all others.
        max_num_seqs, max_context_len: sequences of a step and tokens of a sequence at most, for recordings.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        cache: KVCache,
        device: torch.device,
        *,
        capture: Capture | None = None,
        max_num_seqs: int = 1,
        max_context_len: int = 1,
    ) -> None:
        self.module = module
        self.cache = cache
        self.device = device
        self._graphs: DecodeGraphs | None = None
        if capture is not None:
            self._graphs = DecodeGraphs(
                # Not a method: a cycle of references would keep the cache over the flip, until Python looks for some.
                partial(_decode, module, cache),
                capture,
                max_num_seqs=max_num_seqs,
                max_context_len=max_context_len,
                block_size=cache.block_size,
                device=device,
                # By the CPU's kernels, whose rows have the same bits in batches of these sizes.
                fill_up=_filled_up if cache.keys_by_dim else None,
                checked=cache.keys_by_dim,
            )

    # Not inference mode: what a module makes and keeps in a forward (rescaled RoPE tables, gathered weights) would be
    # an inference tensor, which training could not use afterwards.
    @torch.no_grad()
    def run(self, step: Step) -> tuple[list[Chunk], torch.Tensor]:
        """Run one step.

        Returns:
            the R chunks that reach the end of their sequence, and their logits (R, vocabulary).
        """
        self.cache.copy_blocks(step.copies)
        chunks, batch, ids, ends = self._lay_out(step.chunks)
        sampling = [index for index, chunk in enumerate(chunks) if chunk.reaches_end]
        if self._graphs is not None and len(sampling) == batch.num_tokens:
            logits = self._graphs.run(torch.tensor(ids, device=self.device), batch)
            if logits is not None:
                return chunks, logits
        # The head always gets a row, since one that runs on none is untrodden ground for collectives.
        rows = ends[sampling or [0]]
        if self.device.type == "cpu":
            ids += [0] * (_filled_up(len(ids)) - len(ids))
            rows = np.pad(rows, (0, _filled_up(len(rows)) - len(rows)), mode="edge")
        prompt_lens = torch.tensor([chunk.sequence.num_prompt_tokens for chunk in chunks], device=self.device)
        logits = _forward(
            self.module,
            torch.tensor(ids, dtype=torch.int64, device=self.device),
            pad(batch.position_ids, (0, len(ids) - batch.num_tokens)),
            PagedCall(self.cache.key, self.cache.value, batch, prompt_lens),
            torch.from_numpy(rows).to(self.device),
        )
        return [chunks[index] for index in sampling], logits[: len(sampling)]

    def _lay_out(self, chunks: list[Chunk]) -> tuple[list[Chunk], PagedBatch, list[int], np.ndarray]:
        """Chunks in the order of the flat axis, where they lie, their ids (N), and each one's last row (S,)."""
        chunks = sorted(chunks, key=_by_prefix if self.cache.keys_by_dim else _by_length)
        query_lens = np.array([chunk.num_tokens for chunk in chunks])
        context_lens = query_lens + [chunk.sequence.num_computed_tokens for chunk in chunks]
        block_tables = np.zeros((len(chunks), max(len(chunk.sequence.blocks) for chunk in chunks)), dtype=np.int64)
        ids: list[int] = []
        for table, chunk in zip(block_tables, chunks, strict=True):
            sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
            table[: len(sequence.blocks)] = sequence.blocks
            if chunk.num_tokens == 1:
                ids.append(sequence.token_ids[start])
            else:
                ids += sequence.token_ids[start : start + chunk.num_tokens]
        batch = PagedBatch.build(
            query_lens,
            context_lens,
            block_tables,
            block_size=self.cache.block_size,
            num_kv_heads=self.cache.num_kv_heads,
            device=self.device,
        )
        return chunks, batch, ids, np.cumsum(query_lens) - 1


def _forward(
    module: Callable[..., Any],
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    call: PagedCall,
    rows: torch.Tensor | int,
) -> torch.Tensor:
    """Logits of the rows (R,), 0 for all: (R, vocabulary)."""
    with attention_call(call):
        output = module(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, logits_to_keep=rows
        )
    return output.logits[0]


def _decode(
    module: Callable[..., Any],
    cache: KVCache,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    batch: PagedBatch,
) -> torch.Tensor:
    return _forward(module, input_ids, position_ids, PagedCall(cache.key, cache.value, batch), 0)


def _filled_up(num_rows: int) -> int:
    """Rows of a step's tensors on a CPU.

    Under 16 rows a product adds up in another order, so a token would depend on what shares its batch. And oneDNN takes
    a millisecond for each shape that it has not seen: there are few this way.
    """
    tile = 16 if num_rows <= 256 else 64
    return -(-num_rows // tile) * tile


def _by_length(chunk: Chunk) -> tuple[int, int]:
    """Decoding sequences of like contexts become neighbours, and make few rectangles."""
    return chunk.num_tokens, chunk.sequence.num_computed_tokens


def _by_prefix(chunk: Chunk) -> tuple[bool, tuple[int, int]]:
    """Decoding samples of one prompt become neighbours, and their prompt is read once for all of them."""
    return chunk.num_tokens > 1, chunk.sequence.order
