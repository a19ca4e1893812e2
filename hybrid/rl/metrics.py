"""Means and extremes over every token or sample of a step, whichever rank and micro-batch held it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from hybrid.parallel import ParallelMesh
from hybrid.rl.rollout import ScoredSample

Scalar = float | int | torch.Tensor


class StepMetrics:
    """Collects sums, counts and extremes on this rank without waiting for the device; reduced at the end.

    All ranks must name the same metrics, in whatever order; a rank without tokens adds sums and counts of 0.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Scalar] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, Scalar] = {}
        self._minima: set[str] = set()  # names in _maxima that hold the negative

    def add_mean(self, name: str, total: Scalar, count: int = 1) -> None:
        """``count`` more observations that add up to ``total``."""
        self._totals[name] = self._totals.get(name, 0.0) + total
        self._counts[name] = self._counts.get(name, 0) + count

    def add_spread(self, prefix: str, values: torch.Tensor) -> None:
        """``prefix/mean``, ``/max`` and ``/min`` of a flat tensor; call it once for each prefix."""
        self.add_mean(f"{prefix}/mean", values.sum(), values.numel())
        self.add_max(f"{prefix}/max", values)
        self.add_max(f"{prefix}/min", -values)
        self._minima.add(f"{prefix}/min")

    def add_max(self, name: str, values: torch.Tensor) -> None:
        self._maxima[name] = values.max() if values.numel() else float("-inf")

    def reduce(self, mesh: ParallelMesh) -> dict[str, float]:
        """The metrics over all ranks; those that nothing was observed of are left out. Every rank must call it."""
        means, maxima = sorted(self._totals), sorted(self._maxima)
        totals = mesh.reduce_scalars([float(self._totals[n]) for n in means])
        counts = mesh.reduce_scalars([float(self._counts[n]) for n in means])
        metrics = {name: total / count for name, total, count in zip(means, totals, counts, strict=True) if count}
        extremes = mesh.reduce_scalars([float(self._maxima[n]) for n in maxima], op="max")
        for name, value in zip(maxima, extremes, strict=True):
            if value != float("-inf"):
                metrics[name] = -value if name in self._minima else value
        return metrics


def sample_metrics(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """Rewards and lengths over all samples of a step; masked samples count in lengths and in ``completions/masked``."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    lengths = [sample.num_completion_tokens for sample in samples]
    metrics = {
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        "completions/masked": float(len(samples) - len(rewards)),
    }
    if rewards:
        metrics |= {"reward": statistics.fmean(rewards), "reward_std": statistics.pstdev(rewards)}
    for name in sorted({name for sample in samples for name in sample.parts}):
        parts = [part for sample in samples if (part := sample.parts.get(name)) is not None]
        if parts:
            # A function's own score, or what it says besides: function/name.
            metrics[f"rewards/{name}" if "/" in name else f"rewards/{name}/mean"] = statistics.fmean(parts)
    groups: dict[int, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            groups.setdefault(sample.prompt_index, []).append(sample.reward)
    if groups:
        metrics["frac_reward_zero_std"] = sum(len(set(group)) == 1 for group in groups.values()) / len(groups)
    return metrics
