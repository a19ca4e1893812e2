"""Decode steps as recorded graphs: a small step costs more in launching its kernels than in running them.

A forward over one new token of each of B sequences is recorded once, on tensors that stay, and launched again at a
stroke over whatever those tensors hold by then: on a GPU as a CUDA graph, on a CPU as a tape (see `ops.tape`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ops.paged import PagedBatch
from ops.tape import NotRecordable

# (input_ids (B,), position_ids (B,), batch) -> logits (B, V)
Forward = Callable[[torch.Tensor, torch.Tensor, PagedBatch], torch.Tensor]
# Records what a call launches, and returns what launches it again; both give the tensor the call returned.
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]

# A recording takes as long as several steps, and lives as long as the KV pool: until the flip back.
_WORTH_RECORDING = 4
_NO_SLOT = -1  # of a row that stands for no sequence: nothing is written for it


@dataclass(frozen=True, slots=True)
class _Recording:
    input_ids: torch.Tensor  # (B,)
    position_ids: torch.Tensor  # (B,)
    batch: PagedBatch  # of B sequences
    launch: Callable[[], torch.Tensor]  # -> (B, V)


class DecodeGraphs:
    """Runs decode steps by recordings, one for each size that batches are filled up to.

    Args:
        forward: what is recorded.
        capture: see `ParallelMesh.capture`.
        max_num_seqs: sequences of a step at most.
        max_context_len: tokens of a sequence at most.
        block_size: of the KV blocks.
        device: of the model.
        fill_up: the size that a number of sequences is filled up to; None: `_filled_up`, ``max_num_seqs`` at most.
        checked: compare each recording with the forward, over other numbers than it was made with, and go without
            recordings if they differ by a bit. Python's own decisions are not recorded: on a CPU a model may have
            taken one by numbers that nobody sees it read.
    """

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        max_num_seqs: int,
        max_context_len: int,
        block_size: int,
        device: torch.device,
        fill_up: Callable[[int], int] | None = None,
        checked: bool = False,
    ) -> None:
        self._forward, self._capture = forward, capture
        self._fill_up = fill_up or (lambda num_seqs: min(_filled_up(num_seqs), max_num_seqs))
        self._checked, self._is_possible = checked, True
        self._max_context_len = max_context_len
        self._table_width = -(-max_context_len // block_size)
        self._device = device
        self._uses: Counter[int] = Counter()
        self._recordings: dict[int, _Recording] = {}

    def run(self, input_ids: torch.Tensor, batch: PagedBatch) -> torch.Tensor | None:
        """Logits (S, V) of a step of S sequences with one new token each, good until the next call.

        None for a size that has not come often enough to be recorded, or a model that cannot be: run the step as any
        other. Tensor ranks count alike, and so record alike.
        """
        num_seqs = input_ids.numel()
        size = self._fill_up(num_seqs)
        self._uses[size] += 1
        if not self._is_possible or self._uses[size] <= _WORTH_RECORDING:
            return None
        recording = self._recordings.get(size)
        if recording is None:
            try:
                recording = self._recordings[size] = self._record(size, input_ids, batch)
            except NotRecordable:
                self._is_possible = False
                self._recordings.clear()
                return None
        else:
            _load(recording.input_ids, recording.position_ids, recording.batch, input_ids, batch)
        return recording.launch()[:num_seqs]

    def _record(self, size: int, input_ids: torch.Tensor, batch: PagedBatch) -> _Recording:
        def filled(count: int, dtype: torch.dtype = torch.int64, value: int = 0) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=self._device)

        kept = PagedBatch(
            cu_seqlens=filled(size + 1, torch.int32),
            context_lens=filled(size, torch.int32),
            block_tables=filled(size * self._table_width, torch.int32).view(size, -1),
            max_query_len=1,
            max_context_len=self._max_context_len,  # grids are made for the longest there may be
            slot_blocks=filled(size, value=_NO_SLOT),
            slot_offsets=filled(size),
            position_ids=filled(size),
            rectangles=None,
        )
        ids, positions = filled(size), kept.position_ids

        def forward() -> torch.Tensor:
            return self._forward(ids, positions, kept)

        if not self._checked:
            _load(ids, positions, kept, input_ids, batch)  # since recording runs it to warm up
            return _Recording(ids, positions, kept, self._capture(forward))
        recording = _Recording(ids, positions, kept, self._capture(forward))  # over rows that stand for no sequence
        _load(ids, positions, kept, input_ids, batch)
        if not torch.equal(recording.launch(), forward()):
            raise NotRecordable("a recording gives other logits than the forward that it was made of")
        return recording


def _load(
    kept_ids: torch.Tensor, kept_positions: torch.Tensor, kept: PagedBatch, input_ids: torch.Tensor, batch: PagedBatch
) -> None:
    """Put a step's S sequences into the kept tensors of B; the rest get no new token, no context and no slot."""
    num_seqs, width = batch.block_tables.shape
    for target, source, rest in (
        (kept_ids, input_ids, 0),
        (kept_positions, batch.position_ids, 0),
        (kept.slot_blocks, batch.slot_blocks, _NO_SLOT),
        (kept.slot_offsets, batch.slot_offsets, 0),
        (kept.context_lens, batch.context_lens, 0),
        (kept.cu_seqlens, batch.cu_seqlens, num_seqs),
    ):
        target[: source.numel()] = source
        target[source.numel() :] = rest
    kept.block_tables[:num_seqs, :width] = batch.block_tables


def _filled_up(num_seqs: int) -> int:
    """1, 2, 4, 8, then multiples of 8: few recordings, and little computed for nothing."""
    if num_seqs > 8:
        return -(-num_seqs // 8) * 8
    return 1 << (num_seqs - 1).bit_length()
