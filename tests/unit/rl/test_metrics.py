"""Step metrics: the same whichever rank and micro-batch held a token."""

from __future__ import annotations

import pytest
import torch
from rl_fakes import run_world

from hybrid.rl.metrics import StepMetrics, sample_metrics
from hybrid.rl.rollout import ScoredSample


def test_reduces_over_ranks_and_calls():
    values = torch.tensor([3.0, -1.0, 4.0, -1.5, 9.0])

    def main(mesh):
        metrics = StepMetrics()
        share = [values[:2], values[2:2], values[2:]][mesh.rank]
        metrics.add_spread("v", share)
        for value in share:
            metrics.add_mean("m", value)
        metrics.add_mean("m", 0.0, 0)
        metrics.add_max("top", share)
        metrics.add_mean("nothing", 0.0, 0)
        metrics.add_max("nothing/max", values[:0])
        return metrics.reduce(mesh)

    for reduced in run_world(3, 1, main):
        assert reduced == pytest.approx({"v/mean": 2.7, "v/max": 9.0, "v/min": -1.5, "m": 2.7, "top": 9.0})


def _sample(prompt, reward, length=4, finish="stop", parts=None):
    return ScoredSample(prompt, 0, "p", "c", 2, length, finish, reward, parts or {})


def test_sample_metrics():
    metrics = sample_metrics(
        [
            _sample(0, 1.0, parts={"a": 1.0, "b": None}),
            _sample(0, 1.0, length=8, finish="length", parts={"a": 3.0, "b": None}),
            _sample(1, 4.0, length=0, parts={"a": 5.0, "b": 2.0}),
            _sample(1, None, parts={"a": None, "b": None}),
            _sample(1, 0.0),
            _sample(2, None, parts={"a": None, "a/length": 7.0}),
        ]
    )
    assert metrics == pytest.approx(
        {
            "reward": 1.5,
            "reward_std": 1.5,
            "rewards/a/mean": 3.0,
            "rewards/b/mean": 2.0,
            "rewards/a/length": 7.0,
            "frac_reward_zero_std": 0.5,
            "completions/mean_length": 4.0,
            "completions/min_length": 0.0,
            "completions/max_length": 8.0,
            "completions/clipped_ratio": 1 / 6,
            "completions/masked": 2.0,
        }
    )
