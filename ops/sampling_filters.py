"""Which tokens a row's min_p, top_k and top_p leave: those from a certain logit upwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ops import sampling_cpu
from ops.sampling_cdf import VocabShard, block_sums, row_maxima

# A nucleus is looked for among this many of the largest logits, then among eight times as many.
_FIRST_CANDIDATES = 256


def filter_logits(
    logits: torch.Tensor,
    divisors: torch.Tensor,
    top_ks: Sequence[int],
    top_ps: Sequence[float],
    min_ps: Sequence[float],
    shard: VocabShard,
) -> None:
    """Set what the rows' filters leave out to -inf, in place: min_p first, then top_k, then top_p of what is left.

    Tokens tied with the last one kept are kept. On T ranks this takes one gather of the largest logits, with a top_p
    another of sums, and one more each time that a nucleus is wider than its candidates.

    Args:
        logits: (R, V) fp32, this rank's stretch of the vocabulary.
        divisors: (R,) fp32, temperatures.
        top_ks, top_ps, min_ps: R each; 0, 1 and 0 keep all.
    """
    by_k = [row for row, top_k in enumerate(top_ks) if 0 < top_k < shard.vocab_size]
    by_p = [row for row, top_p in enumerate(top_ps) if top_p < 1]
    by_min = [row for row, min_p in enumerate(min_ps) if min_p > 0]
    if not (by_k or by_p or by_min):
        return
    if not shard.is_shared and sampling_cpu.takes(logits):
        floors = sampling_cpu.row_floors(logits, divisors, top_ks, top_ps, min_ps)
        _drop_below(logits, sorted({*by_k, *by_p, *by_min}), floors)
        return
    count = max([1, *(top_ks[row] for row in by_k), *(_FIRST_CANDIDATES for _ in by_p[:1])])
    largest = _largest(logits, sorted({*by_k, *by_p}), min(count, shard.vocab_size), shard)
    floors = torch.full_like(divisors, float("-inf"))
    if by_min:
        ratios = divisors.new_tensor([min_ps[row] for row in by_min]).log()
        floors[by_min] = largest[by_min, 0] + divisors[by_min] * ratios
    if by_k:
        last = torch.tensor([top_ks[row] - 1 for row in by_k], device=logits.device)
        floors[by_k] = torch.maximum(floors[by_k], largest[by_k, last])
    _drop_below(logits, sorted({*by_k, *by_min}), floors)
    if by_p:
        largest = largest[by_p]
        largest.masked_fill_(largest < floors[by_p, None], float("-inf"))
        masses = torch.tensor([top_ps[row] for row in by_p], dtype=torch.float64, device=logits.device)
        floors[by_p] = _nucleus_floors(logits[by_p], divisors[by_p], masses, largest, shard)
        _drop_below(logits, by_p, floors)


def _drop_below(logits: torch.Tensor, rows: list[int], floors: torch.Tensor) -> None:
    """Set the rows' logits under their floors (R,) to -inf, in place."""
    if len(rows) == logits.shape[0]:
        logits.masked_fill_(logits < floors[:, None], float("-inf"))
    elif rows:
        chosen = logits[rows]
        logits[rows] = chosen.masked_fill_(chosen < floors[rows, None], float("-inf"))


def _largest(logits: torch.Tensor, ranked: list[int], count: int, shard: VocabShard) -> torch.Tensor:
    """(R, count) largest logits of the whole vocabulary, falling; of rows not ``ranked`` the first alone, then -inf."""
    num_rows, width = logits.shape
    local = logits.new_full((num_rows, count), float("-inf"))
    local[:, 0] = row_maxima(logits)
    num_here = min(count, width)
    if ranked and num_here:
        rows = logits if len(ranked) == num_rows else logits[ranked]
        local[ranked, :num_here] = rows.topk(num_here, dim=-1).values
    gathered = shard.all_gather(local)  # (T, R, count)
    if len(gathered) == 1:
        return gathered[0]
    return gathered.transpose(0, 1).reshape(num_rows, -1).topk(count, dim=-1).values


def _nucleus_floors(
    logits: torch.Tensor, divisors: torch.Tensor, masses: torch.Tensor, largest: torch.Tensor, shard: VocabShard
) -> torch.Tensor:
    """(R,) smallest logits of the fewest tokens whose share of the probability reaches ``masses`` (R,) fp64.

    Args:
        logits: (R, V) fp32, this rank's stretch.
        largest: (R, candidates) fp32, of the whole vocabulary, falling.
    """
    maxima = largest[:, 0].clone()
    finite = maxima.masked_fill(maxima == float("-inf"), 0.0)  # of a row with nothing left, whose sums are then 0
    sums = block_sums(logits, finite, divisors).sum(-1, keepdim=True)
    totals = shard.all_gather(sums).sum(0)  # (R, 1)
    floors = torch.empty_like(maxima)
    pending = torch.arange(logits.shape[0], device=logits.device)
    while True:
        count = largest.shape[1]
        scores = (largest - maxima[pending, None]) / divisors[pending, None]
        reached = scores.double().exp().cumsum(-1) / totals[pending]
        # Tokens before which the mass was still missing; the most probable one always is one of them.
        kept = (reached < masses[pending, None]).sum(-1) + 1
        # Candidates that end in -inf are all there are, and rounding alone may keep them under the mass.
        found = (kept <= count) | (largest[:, -1] == float("-inf")) | (count == shard.vocab_size)
        floors[pending[found]] = largest[found].gather(-1, kept[found, None].clamp_(max=count) - 1)[:, 0]
        pending = pending[~found]
        if not len(pending):
            return floors
        rows = list(range(len(pending)))
        largest = _largest(logits[pending], rows, min(count * 8, shard.vocab_size), shard)
