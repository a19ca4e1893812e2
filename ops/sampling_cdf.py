"""Passes over a vocabulary, whole or one rank's stretch of it: maxima, sums by block, and the token a sum leads to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ops import sampling_cpu

# The CDF is summed over blocks of this many tokens first; also what makes a row's sums independent of its neighbours.
BLOCK = 512
# Weights that exist at a time on the CPU: 1 MiB of fp32, which the passes over them find in a core's own cache.
_CHUNK = 2**18


@dataclass(frozen=True, slots=True)
class VocabShard:
    """One rank's stretch of a vocabulary that is shared out over a tensor group of T ranks.

    Stretches ascend with the ranks, meet without gaps and may be of different lengths, none included.
    """

    index: int  # the rank's place in its group
    start: int  # first id of the stretch
    stop: int  # and the id after its last
    vocab_size: int
    # (R, k) of each rank -> (T, R, k), the same bits on all of them.
    all_gather: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def whole(cls, vocab_size: int) -> VocabShard:
        """The only stretch of a vocabulary that is not shared out."""
        return cls(0, 0, vocab_size, vocab_size, _alone)

    @property
    def is_shared(self) -> bool:
        """Whether other ranks must be asked, even if their stretches are empty: they ask as well."""
        return self.all_gather is not _alone


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[None]


def row_maxima(logits: torch.Tensor) -> torch.Tensor:
    """(R,) fp32 largest of each row's logits (R, V); -inf where V is 0. A row with a NaN has any maximum, or NaN."""
    if sampling_cpu.takes(logits):
        return sampling_cpu.row_maxima(logits)
    if not logits.shape[1]:
        return logits.new_full((logits.shape[0],), float("-inf"), dtype=torch.float32)
    return logits.amax(-1).float()


def first_maxima(logits: torch.Tensor) -> torch.Tensor:
    """(R,) column of the first of each row's largest logits (R, V), V at least 1.

    By block, since torch finds maxima many times faster than their places.
    """
    width = logits.shape[1]
    whole = width // BLOCK * BLOCK
    maxima = [logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)] if whole else []
    if whole < width:
        maxima.append(logits[:, whole:].amax(-1, keepdim=True))
    blocks = torch.cat(maxima, dim=1).float().argmax(-1)
    return blocks * BLOCK + _block(logits, None, blocks).argmax(-1)


def _block(logits: torch.Tensor, rows: torch.Tensor | None, blocks: torch.Tensor) -> torch.Tensor:
    """(Q, BLOCK) fp32 logits of one block of each of the rows, -inf past the last column."""
    columns = blocks[:, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
    columns_here = columns.clamp(max=logits.shape[1] - 1)
    scores = logits.gather(-1, columns_here) if rows is None else logits[rows[:, None], columns_here]
    return scores.float().masked_fill_(columns >= logits.shape[1], float("-inf"))


def block_sums(logits: torch.Tensor, maxima: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
    """Sums of ``exp((logits - maxima) / divisors)`` over blocks of `BLOCK` tokens, the last one maybe shorter.

    Args:
        logits: (R, V), any floating dtype; rows may be strided, and are read where they lie.
        maxima: (R,) fp32, finite for rows whose sums shall be.
        divisors: (R,) fp32, temperatures.

    Returns:
        (R, blocks) fp64; a row's are the same bits whatever the other rows are. NaN where a row has one.
    """
    if sampling_cpu.takes(logits):
        return sampling_cpu.block_sums(logits, maxima, divisors, BLOCK)
    num_rows, width = logits.shape
    num_blocks = -(-width // BLOCK)
    padded = num_blocks * BLOCK
    sums = logits.new_empty(num_rows, num_blocks, dtype=torch.float64)
    if not sums.numel():
        return sums
    rows_at_once = max(1, _CHUNK // padded) if logits.device.type == "cpu" else num_rows
    buffer = logits.new_empty(min(rows_at_once, num_rows), padded, dtype=torch.float32)
    for start in range(0, num_rows, rows_at_once):
        rows = slice(start, start + rows_at_once)
        weights = buffer[: sums[rows].shape[0]]
        weights[:, width:] = float("-inf")
        weights[:, :width] = logits[rows]
        weights.sub_(maxima[rows, None]).div_(divisors[rows, None]).exp_()
        sums[rows] = weights.view(-1, num_blocks, BLOCK).sum(-1)
    return sums


def target_logprobs(targets: torch.Tensor, maxima: torch.Tensor, divisors: torch.Tensor, totals: torch.Tensor):
    """fp32 log-probs of logits, from their row's maximum and the sum of its weights: what sampling and training report.

    Args:
        targets: (...) logits as they came.
        maxima, divisors: like ``targets`` or broadcast to it; used in fp32.
        totals: fp64, `block_sums` added up one after the other (``cumsum``).
    """
    return ((targets.float() - maxima.float()) / divisors.float()).double().sub_(totals.log()).float()


def invert_cdf(
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    maxima: torch.Tensor,
    divisors: torch.Tensor,
    cumulative: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """(Q,) columns of logits: the first whose cumulative weight exceeds the target, which never has weight 0.

    Args:
        logits: (R, V), of which only one block for each of the Q rows is read.
        rows: (Q,) int64, which rows of the logits; None for all.
        maxima, divisors: (Q,) fp32, as `block_sums` took them.
        cumulative: (Q, blocks) fp64 running sums of what it gave, the last of them above 0.
        targets: (Q,) fp64, from 0 to the last of the running sums.
    """
    zero = cumulative.new_zeros(cumulative.shape[0], 1)
    # A target that was scaled to another shard's maximum and back may have been rounded up to the whole sum.
    targets = torch.minimum(targets[:, None], torch.nextafter(cumulative[:, -1:], zero))
    blocks = (cumulative <= targets).sum(-1)
    before = torch.cat((zero, cumulative), dim=1).gather(-1, blocks[:, None])
    scores = _block(logits, rows, blocks)
    inside = scores.sub_(maxima[:, None]).div_(divisors[:, None]).exp_().double().cumsum(-1)
    # The block's sum in fp32 may be a little more than its sum in fp64: stay strictly under the latter.
    remainders = torch.minimum(targets - before, torch.nextafter(inside[:, -1:], zero))
    return blocks * BLOCK + (inside <= remainders).sum(-1)
