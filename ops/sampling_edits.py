"""What changes a row of logits before temperature does: masks, biases and penalties for what was said already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Penalties:
    """vLLM's penalties of a row.

    A token of the prompt or the completion has a positive logit divided by ``repetition`` and a negative one multiplied
    by it; then one of the completion loses ``frequency`` for each time it occurs there, and ``presence`` once.
    """

    repetition: float
    frequency: float
    presence: float
    ids: np.ndarray  # (K,) int64, the distinct tokens of the prompt and the completion
    counts: np.ndarray  # (K,) int64, how often each occurs in the completion


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes to one row, made in this order. All ids are of the whole vocabulary, each at most once in a list."""

    allowed: np.ndarray | None = None  # (A,) int64: all other ids get -inf
    banned: Sequence[int] = ()  # these get -inf
    biased: np.ndarray | None = None  # (B,) int64: these get their bias added
    biases: np.ndarray | None = None  # (B,) fp32
    penalties: Penalties | None = None


def edit_logits(logits: torch.Tensor, edits: Sequence[LogitEdits | None], start: int = 0) -> None:
    """Change rows of logits in place.

    Args:
        logits: (R, V) fp32, contiguous; ids ``start`` to ``start + V`` of the vocabulary.
        edits: R, None for a row that stays as it is.
        start: first id of a rank's stretch of the vocabulary; the other ranks' ids are left to them.
    """
    rows = [(row, each) for row, each in enumerate(edits) if each is not None]
    flat = logits.view(-1)

    def places(of: Callable[[LogitEdits], np.ndarray | None]) -> _Places:
        return _Places.find([(row, ids) for row, each in rows if (ids := of(each)) is not None], logits, start)

    allowed = places(lambda each: each.allowed)
    if allowed.rows:
        kept = flat[allowed.index]
        logits[allowed.rows] = float("-inf")
        flat[allowed.index] = kept
    banned = places(lambda each: np.asarray(each.banned, dtype=np.int64) if len(each.banned) else None)
    if banned.rows:
        flat[banned.index] = float("-inf")
    biased = places(lambda each: each.biased)
    if biased.rows:
        flat[biased.index] += biased.pick([each.biases for _, each in rows if each.biases is not None])
    penalised = places(lambda each: each.penalties and each.penalties.ids)
    if penalised.rows:
        _penalise(flat, penalised, [each.penalties for _, each in rows if each.penalties is not None])


@dataclass(frozen=True, slots=True)
class _Places:
    """Where several rows' ids lie in this rank's logits."""

    rows: list[int]
    lengths: list[int]  # ids of each of the rows
    here: np.ndarray  # (all ids,) bool: in this rank's stretch
    index: torch.Tensor  # (those here,) int64, into the flat logits

    @classmethod
    def find(cls, ids_by_row: list[tuple[int, np.ndarray]], logits: torch.Tensor, start: int) -> _Places:
        rows, lengths = [row for row, _ in ids_by_row], [len(ids) for _, ids in ids_by_row]
        if not rows:
            return cls([], [], np.empty(0, dtype=bool), torch.empty(0, dtype=torch.int64))
        width = logits.shape[1]
        columns = np.concatenate([ids for _, ids in ids_by_row]) - start
        here = (columns >= 0) & (columns < width)
        index = (np.repeat(rows, lengths) * width + columns)[here]
        return cls(rows, lengths, here, torch.from_numpy(index).to(logits.device))

    def pick(self, values: Sequence[np.ndarray]) -> torch.Tensor:
        """(those here,) fp32, of values that lie as the ids do."""
        return torch.from_numpy(np.concatenate(values)[self.here].astype(np.float32)).to(self.index.device)

    def spread(self, values: Sequence[float]) -> torch.Tensor:
        """(those here,) fp32, of one value a row."""
        return self.pick([np.repeat(np.array(values, dtype=np.float32), self.lengths)])


def _penalise(flat: torch.Tensor, places: _Places, penalties: Sequence[Penalties]) -> None:
    scores = flat[places.index]
    repetition = places.spread([each.repetition for each in penalties])
    counts = places.pick([each.counts for each in penalties])
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores -= places.spread([each.frequency for each in penalties]) * counts
    scores -= places.spread([each.presence for each in penalties]) * (counts > 0)
    flat[places.index] = scores
