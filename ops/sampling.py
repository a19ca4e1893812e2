"""One token from each row of logits, as a pure function of the row, its settings and one uniform number.

The distribution is temperature first, then top_k, top_p and min_p, in transformers' order. The token is found by
walking the cumulative distribution to the uniform (inverse CDF), block by block, so nothing is sorted unless a top_p
asks for it, and then only as many of the largest logits as hold its mass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# The CDF is summed over blocks of this many tokens first; also what makes a row's sums independent of its neighbours.
_BLOCK = 512
# A nucleus is looked for among this many of the largest logits, then among eight times as many.
_FIRST_CANDIDATES = 256


def _mix64(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood: https://doi.org/10.1145/2714064.2660195)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1), a pure function of ``(seed, position)``: splitmix64 by counter."""
    key = _mix64((seed + _GOLDEN) & _MASK64)
    return (_mix64((key + (position + 1) * _GOLDEN) & _MASK64) >> 11) * 2.0**-53


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample ``index`` of a request: the request's own for the first, mixed with the index for the rest."""
    return seed if index == 0 else _mix64((_mix64((seed + _GOLDEN) & _MASK64) + index) & _MASK64)


def sample(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
    min_ps: Sequence[float],
    uniforms: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token from each row.

    Args:
        logits: (R, V), any floating dtype; not changed.
        temperatures: R numbers; 0 takes the most probable token.
        top_ks: R numbers; keep the k largest logits (and those equal to the last of them); 0 for all.
        top_ps: R numbers; keep the fewest tokens whose probability reaches p; 1 for all.
        min_ps: R numbers; keep tokens at least this fraction as probable as the most probable; 0 for all.
        uniforms: R numbers in [0, 1).

    Returns:
        tokens: (R,) int64.
        logprobs: (R,) fp32, of the distribution sampled from; a greedy row's is that of temperature 1, all tokens.

    Raises:
        FloatingPointError: a row has NaN or +inf, or nothing but -inf.
    """
    num_rows, vocab_size = logits.shape
    greedy = [index for index, temperature in enumerate(temperatures) if temperature == 0]
    random = [index for index, temperature in enumerate(temperatures) if temperature != 0]
    divisors = torch.tensor([[t or 1.0] for t in temperatures], dtype=torch.float32, device=logits.device)

    # One fp32 copy, padded to whole blocks with tokens of no probability; everything below happens in it.
    num_blocks = -(-vocab_size // _BLOCK)
    scores = logits.new_empty(num_rows, num_blocks * _BLOCK, dtype=torch.float32)
    scores[:, vocab_size:] = float("-inf")
    scores[:, :vocab_size] = logits
    maxima = scores.amax(-1, keepdim=True)
    scores.sub_(maxima).div_(divisors)
    _truncate(scores, random, top_ks, top_ps, min_ps, vocab_size)

    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if greedy:
        tokens[greedy] = _rows(scores, greedy).argmax(-1)
    weights = scores.exp_()
    block_sums = weights.view(num_rows, num_blocks, _BLOCK).sum(-1).double()
    cumulative = block_sums.cumsum(-1)
    totals = cumulative[:, -1]
    if not bool(torch.isfinite(totals).all()):
        bad = int((~torch.isfinite(totals)).nonzero()[0])
        raise FloatingPointError(f"row {bad} of the logits has NaN or infinite entries and cannot be sampled from")
    if random:
        numbers = torch.tensor([uniforms[index] for index in random], dtype=torch.float64, device=logits.device)
        tokens[random] = _invert_cdf(_rows(weights, random), _rows(cumulative, random), numbers)
    chosen = logits.gather(-1, tokens[:, None]).float()
    logprobs = chosen.sub_(maxima).div_(divisors)[:, 0].double() - totals.log()
    return tokens, logprobs.float()


def _rows(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows, which are ascending; all of them without a copy."""
    return tensor if len(rows) == tensor.shape[0] else tensor[rows]


def _truncate(
    scores: torch.Tensor,  # (R, V padded), 0 at each row's maximum
    rows: list[int],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
    min_ps: Sequence[float],
    vocab_size: int,
) -> None:
    """Set what the rows' filters leave out to -inf, in place. Tokens tied with the last one kept are kept."""
    by_k = [row for row in rows if 0 < top_ks[row] < vocab_size]
    if by_k:
        counts = torch.tensor([top_ks[row] for row in by_k], device=scores.device)
        largest = _rows(scores, by_k).topk(int(counts.max()), dim=-1).values
        _drop_below(scores, by_k, largest.gather(-1, counts[:, None] - 1))
    by_p = [row for row in rows if top_ps[row] < 1]
    if by_p:
        masses = torch.tensor([top_ps[row] for row in by_p], dtype=torch.float64, device=scores.device)
        _drop_below(scores, by_p, _nucleus_floor(_rows(scores, by_p), masses))
    by_min = [row for row in rows if min_ps[row] > 0]
    if by_min:
        ratios = torch.tensor([[min_ps[row]] for row in by_min], dtype=torch.float32, device=scores.device)
        _drop_below(scores, by_min, ratios.log())


def _drop_below(scores: torch.Tensor, rows: list[int], floors: torch.Tensor) -> None:
    """Set scores under a row's floor (len(rows), 1) to -inf, in place."""
    if len(rows) == scores.shape[0]:
        scores.masked_fill_(scores < floors, float("-inf"))
    else:
        chosen = scores[rows]
        scores[rows] = chosen.masked_fill_(chosen < floors, float("-inf"))


def _nucleus_floor(scores: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """(R, 1) smallest score of the fewest tokens whose probability reaches ``masses`` (R,)."""
    num_rows, size = scores.shape
    totals = scores.exp().sum(-1, dtype=torch.float64)
    floors = scores.new_empty(num_rows, 1)
    pending = torch.arange(num_rows, device=scores.device)
    count = min(_FIRST_CANDIDATES, size)
    while True:
        values = scores[pending].topk(count, dim=-1).values
        reached = values.double().exp().cumsum(-1) / totals[pending, None]
        # Tokens before which the mass was still missing; the most probable one always is one of them.
        kept = (reached < masses[pending, None]).sum(-1) + 1
        found = (kept <= count) if count < size else torch.ones_like(kept, dtype=torch.bool)
        floors[pending[found]] = values[found].gather(-1, kept[found, None].clamp_(max=count) - 1)
        pending = pending[~found]
        if not pending.numel():
            return floors
        count = min(count * 8, size)


def _invert_cdf(weights: torch.Tensor, cumulative: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """(R,) tokens: the first whose cumulative weight exceeds ``uniform * total``, which never has weight 0.

    Args:
        weights: (R, blocks * _BLOCK) fp32, not negative.
        cumulative: (R, blocks) fp64, of the blocks' sums.
        uniforms: (R,) fp64 in [0, 1).
    """
    num_rows, num_blocks = cumulative.shape
    zero = cumulative.new_zeros(num_rows, 1)
    targets = uniforms[:, None] * cumulative[:, -1:]  # under the total, since a uniform is at most 1 - 2**-53
    blocks = (cumulative <= targets).sum(-1, keepdim=True)  # (R, 1)
    before = torch.cat((zero, cumulative), dim=1).gather(-1, blocks)
    inside = weights.view(num_rows, num_blocks, _BLOCK)[torch.arange(num_rows, device=weights.device), blocks[:, 0]]
    inside = inside.double().cumsum(-1)
    # The block's sum in fp32 may be a little more than its sum in fp64: stay strictly under the latter.
    last = inside[:, -1:]
    remainders = torch.minimum(targets - before, torch.nextafter(last, zero))
    return blocks[:, 0] * _BLOCK + (inside <= remainders).sum(-1)
