"""One token from each row of logits, as a pure function of the row, its settings and one uniform number.

The order is vLLM's: masks, biases and penalties (`sampling_edits`), temperature, then min_p, top_k and top_p
(`sampling_filters`). The token is found by walking the cumulative distribution to the uniform (inverse CDF), block by
block, so nothing is sorted unless a filter asks for it, and then only as many of the largest logits as it keeps. Rows
that are not edited or filtered are read in their own dtype where they lie.

On T ranks that share the vocabulary out, each reads its own stretch. A step takes one gather of each row's (maximum,
its id, sum) and, unless all rows are greedy, one of its (token, logit); `filter_logits` says what filters add. All that
is decided is decided from gathered numbers in the same order, so that every rank reaches the same token bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ops.sampling_cdf import VocabShard, block_sums, first_maxima, invert_cdf, row_maxima, target_logprobs
from ops.sampling_edits import LogitEdits, edit_logits
from ops.sampling_filters import filter_logits

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# Columns of what a rank tells the others of each row.
_PEAK, _BEST, _MASS, _RAW_PEAK, _RAW_MASS, _NUM_COLUMNS = range(6)


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


class UnsampleableError(FloatingPointError):
    """A row of logits that no token can be taken from."""

    def __init__(self, row: int, *, is_empty: bool) -> None:
        what = "only -inf among the tokens it allows" if is_empty else "NaN or infinite entries"
        super().__init__(f"row {row} of the logits has {what} and cannot be sampled from")
        self.row = row
        self.is_empty = is_empty  # there are no other entries than -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one row's token is chosen, and what is reported besides."""

    uniform: float = 0.0  # in [0, 1)
    temperature: float = 1.0  # 0 takes the most probable token, the lowest id of equals
    top_k: int = 0  # keep the k largest logits; 0 for all
    top_p: float = 1.0  # keep the fewest tokens whose probability reaches p; 1 for all
    min_p: float = 0.0  # keep tokens at least this fraction as probable as the most probable; 0 for all
    edits: LogitEdits | None = None
    num_alternatives: int = 0  # most probable tokens to report
    wants_raw: bool = False  # report the token's log-prob under the logits as they came, too

    @property
    def divisor(self) -> float:
        return self.temperature or 1.0

    def changes(self, vocab_size: int) -> bool:
        """Whether the row is sampled from other logits than those that came."""
        if self.edits is not None:
            return True
        filters = 0 < self.top_k < vocab_size or self.top_p < 1 or self.min_p > 0
        return filters and self.temperature != 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token of each of R rows. Log-probs are nats; a greedy row's are those of temperature 1, all tokens."""

    tokens: torch.Tensor  # (R,) int64
    logprobs: torch.Tensor  # (R,) fp32, of the distribution sampled from
    raw_logprobs: torch.Tensor | None  # (R,) fp32, of the logits as they came, for rows that want it; None: no row does
    alternatives: torch.Tensor  # (R, A) int64, the most probable tokens sampled from, falling; of equals the lowest
    alternative_logprobs: torch.Tensor  # (R, A) fp32, -inf past a row's number of them or of the tokens left


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a batch that are read alike: as they came, or edited and filtered in fp32."""

    rows: torch.Tensor  # (P,) int64
    logits: torch.Tensor  # (P, V)
    peaks: torch.Tensor  # (P,) fp32, the largest of this rank's stretch
    maxima: torch.Tensor  # (P,) fp32, the same with 0 in place of -inf, which sums can be relative to
    divisors: torch.Tensor  # (P,) fp32
    cumulative: torch.Tensor  # (P, blocks) fp64 running sums of the blocks


@dataclass(frozen=True, slots=True)
class _Whole:
    """What all ranks' stretches make together."""

    peaks: torch.Tensor  # (T, R) fp64, each rank's largest logit
    maxima: torch.Tensor  # (R,) fp64
    cumulative: torch.Tensor  # (T, R) fp64, running sums over the ranks, relative to the maxima
    scales: torch.Tensor  # (T, R) fp64, what a rank's own sums are multiplied by to be so

    @classmethod
    def of(cls, peaks: torch.Tensor, masses: torch.Tensor, divisors: torch.Tensor) -> _Whole:
        """Put together the ranks' maxima and the sums that are relative to them, (T, R) fp64 both."""
        maxima = peaks.amax(0)
        scales = ((peaks - maxima) / divisors).exp()
        return cls(peaks, maxima, (masses * scales).cumsum(0), scales)

    @property
    def totals(self) -> torch.Tensor:
        """(R,) fp64 sums over the whole vocabulary."""
        return self.cumulative[-1]

    def logprobs(self, logits: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
        """fp32 log-probs of logits (R,) or (R, A), rounded as in a computation in fp32."""
        maxima, divisors, totals = self.maxima, divisors, self.totals
        if logits.ndim == 2:
            maxima, divisors, totals = maxima[:, None], divisors[:, None], totals[:, None]
        return target_logprobs(logits, maxima, divisors, totals)


def sample(logits: torch.Tensor, draws: Sequence[Draw], shard: VocabShard | None = None) -> Sampled:
    """Choose one token from each row.

    Args:
        logits: (R, V), any floating dtype; not changed. With ``shard``, this rank's stretch of the vocabulary.
        draws: R.
        shard: where that stretch lies; every rank of the group makes the same call.

    Raises:
        UnsampleableError: a row has NaN or +inf, or nothing but -inf.
        ValueError: the shapes do not fit.
    """
    shard = shard or VocabShard.whole(logits.shape[1])
    if tuple(logits.shape) != (len(draws), shard.stop - shard.start):
        raise ValueError(
            f"logits are {tuple(logits.shape)} and there are {len(draws)} draws over ids {shard.start} to {shard.stop}"
        )
    parts, changed = _parts(logits, draws, shard)
    divisors = torch.tensor([draw.divisor for draw in draws], dtype=torch.float64, device=logits.device)
    raw = [row for row, draw in enumerate(draws) if draw.wants_raw and (row in changed or draw.divisor != 1)]
    count = min(shard.vocab_size, max((draw.num_alternatives for draw in draws), default=0))

    local = logits.new_zeros(len(draws), _NUM_COLUMNS + 2 * count, dtype=torch.float64)
    for part in parts:
        _summarise(part, draws, count, shard.start, local)
    if raw:
        _summarise_raw(logits[raw], raw, local)
    gathered = shard.all_gather(local)  # (T, R, columns)
    whole = _Whole.of(gathered[..., _PEAK], gathered[..., _MASS], divisors)
    if not bool(torch.isfinite(whole.totals).all()):
        row = int((~torch.isfinite(whole.totals)).nonzero()[0])
        raise UnsampleableError(row, is_empty=whole.maxima[row].item() == float("-inf"))

    chosen = _choose(logits, parts, draws, whole, gathered[..., _BEST], shard, needs_raw=bool(raw))
    logprobs = whole.logprobs(chosen[:, 1], divisors)
    raw_logprobs = None
    if any(draw.wants_raw for draw in draws):
        raw_logprobs = logprobs.clone()
        if raw:
            ones = torch.ones_like(divisors[raw])
            of_raw = _Whole.of(gathered[:, raw, _RAW_PEAK], gathered[:, raw, _RAW_MASS], ones)
            raw_logprobs[raw] = of_raw.logprobs(chosen[raw, 2], ones)
    alternatives, alternative_logprobs = _best_of_all(gathered[..., _NUM_COLUMNS:], draws, whole, divisors)
    return Sampled(chosen[:, 0].long(), logprobs, raw_logprobs, alternatives, alternative_logprobs)


def _parts(logits: torch.Tensor, draws: Sequence[Draw], shard: VocabShard) -> tuple[list[_Part], set[int]]:
    """The rows as they are to be sampled from, and which of them were changed for it."""
    changed = [row for row, draw in enumerate(draws) if draw.changes(shard.vocab_size)]
    kept = sorted(set(range(len(draws))).difference(changed))
    parts = []
    for rows in (kept, changed):
        if not rows:
            continue
        chosen = [draws[row] for row in rows]
        divisors = torch.tensor([draw.divisor for draw in chosen], dtype=torch.float32, device=logits.device)
        scores = logits if len(rows) == len(draws) else logits[rows]
        if rows is changed:
            scores = scores.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            edit_logits(scores, [draw.edits for draw in chosen], shard.start)
            top_ks = [draw.top_k if draw.temperature else 0 for draw in chosen]
            top_ps = [draw.top_p if draw.temperature else 1.0 for draw in chosen]
            min_ps = [draw.min_p if draw.temperature else 0.0 for draw in chosen]
            filter_logits(scores, divisors, top_ks, top_ps, min_ps, shard)
        peaks = row_maxima(scores)
        maxima = _finite(peaks)
        cumulative = block_sums(scores, maxima, divisors).cumsum(-1)
        parts.append(_Part(torch.tensor(rows, device=logits.device), scores, peaks, maxima, divisors, cumulative))
    return parts, set(changed)


def _finite(maxima: torch.Tensor) -> torch.Tensor:
    """Maxima (R,) with 0 for -inf: what has no probability on this rank is a sum of 0 there, not NaN."""
    return maxima.masked_fill(maxima == float("-inf"), 0.0)


def _summarise(part: _Part, draws: Sequence[Draw], count: int, start: int, local: torch.Tensor) -> None:
    """Write what this rank knows of a part's rows into ``local`` (R, columns)."""
    rows, width = part.rows, part.logits.shape[1]
    local[rows, _PEAK] = part.peaks.double()
    if width:
        local[rows, _MASS] = part.cumulative[:, -1]
    drawn = [draws[row] for row in rows.tolist()]
    greedy = [index for index, draw in enumerate(drawn) if draw.temperature == 0]
    if greedy and width:
        best = first_maxima(part.logits if len(greedy) == len(rows) else part.logits[greedy])
        local[rows[greedy], _BEST] = (best + start).double()
    if count:
        local[rows, _NUM_COLUMNS : _NUM_COLUMNS + count] = float("-inf")
        for index, draw in enumerate(drawn):
            values, ids = _largest(part.logits[index], min(draw.num_alternatives, width))
            local[rows[index], _NUM_COLUMNS : _NUM_COLUMNS + len(ids)] = values.double()
            local[rows[index], _NUM_COLUMNS + count : _NUM_COLUMNS + count + len(ids)] = (ids + start).double()


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(count,) largest of logits (V,), falling, and their columns; of equals the first (`topk` promises no order)."""
    if not count:
        return logits[:0], logits.new_empty(0, dtype=torch.int64)
    columns = (logits >= logits.topk(count).values[-1]).nonzero()[:, 0]
    values, places = logits[columns].sort(descending=True, stable=True)
    return values[:count], columns[places[:count]]


def _summarise_raw(logits: torch.Tensor, rows: list[int], local: torch.Tensor) -> None:
    maxima = row_maxima(logits)
    local[rows, _RAW_PEAK] = maxima.double()
    local[rows, _RAW_MASS] = block_sums(logits, _finite(maxima), torch.ones_like(maxima)).sum(-1)


def _choose(
    logits: torch.Tensor,
    parts: list[_Part],
    draws: Sequence[Draw],
    whole: _Whole,
    best: torch.Tensor,  # (T, R) fp64, each rank's first id with its largest logit, of greedy rows
    shard: VocabShard,
    *,
    needs_raw: bool,
) -> torch.Tensor:
    """(R, 3) fp64: each row's token, its logit as sampled from and its logit as it came."""
    num_greedy = sum(draw.temperature == 0 for draw in draws)
    uniforms = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64, device=logits.device)
    targets = uniforms * whole.totals  # under the total, since a uniform is at most 1 - 2**-53
    if len(best) == len(parts) == 1 and not num_greedy:
        part = parts[0]
        columns = invert_cdf(part.logits, None, part.maxima, part.divisors, part.cumulative, targets)[:, None]
        return torch.cat((columns.double(), part.logits.gather(-1, columns), logits.gather(-1, columns)), dim=-1)

    every = torch.arange(len(draws), device=logits.device)
    is_greedy = torch.tensor([draw.temperature == 0 for draw in draws], device=logits.device)
    first = ((whole.peaks == whole.maxima).cumsum(0) == 0).sum(0)  # the lowest rank that has the largest logit
    owners = torch.where(is_greedy, first, (whole.cumulative <= targets).sum(0))  # the rank that has each row's token
    if num_greedy == len(draws) and not needs_raw:
        return torch.stack((best[owners, every], whole.maxima, whole.maxima), dim=-1)

    before = torch.cat((torch.zeros_like(targets)[None], whole.cumulative))[owners, every]
    targets = (targets - before) / whole.scales[owners, every]  # in the owner's own sums
    found = logits.new_zeros(len(draws), 3, dtype=torch.float64)
    for part in parts:
        mine = (owners[part.rows] == shard.index).nonzero()[:, 0]
        if not len(mine):
            continue
        rows = part.rows[mine]
        columns = best[shard.index, rows].long() - shard.start
        drawn = (~is_greedy[rows]).nonzero()[:, 0]
        at = mine[drawn]
        columns[drawn] = invert_cdf(
            part.logits, at, part.maxima[at], part.divisors[at], part.cumulative[at], targets[rows[drawn]]
        )
        found[rows, 0] = (columns + shard.start).double()
        found[rows, 1] = part.logits[mine, columns].double()
        found[rows, 2] = logits[rows, columns].double()
    return shard.all_gather(found)[owners, every]


def _best_of_all(
    gathered: torch.Tensor, draws: Sequence[Draw], whole: _Whole, divisors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable ids (R, A) int64 and their log-probs fp32, -inf past a row's number of them.

    Args:
        gathered: (T, R, 2 * A) fp64, each rank's A largest logits, then their ids.
    """
    count = gathered.shape[-1] // 2
    if not count:
        empty = divisors.new_empty(len(draws), 0)
        return empty.long(), empty.float()
    values = gathered[..., :count].transpose(0, 1).flatten(1)  # (R, T * A)
    ids = gathered[..., count:].transpose(0, 1).flatten(1)
    values, places = values.sort(dim=-1, descending=True, stable=True)  # of equals the lowest rank's first
    numbers = torch.tensor([[draw.num_alternatives] for draw in draws], device=values.device)
    past = torch.arange(count, device=values.device) >= numbers
    values = values[:, :count].masked_fill(past, float("-inf"))
    return ids.gather(-1, places[:, :count]).long(), whole.logprobs(values, divisors)
