"""What the curves' script makes of metrics: whether a reward rose, and a picture."""

from __future__ import annotations

import math
import statistics

import pytest

from scripts.demo_curves import draw, summary


def _lines(rewards: list[float]) -> list[dict[str, float]]:
    step = {"kl": 0.1, "rollout/logprob_gap_max": 0.2, "timing_s/step": 3.0, "perf/max_memory_gb": 1.5}
    lines = [{"eval/reward": 0.1, "timing_s/eval": 1.0}, *({"reward": reward, **step} for reward in rewards)]
    lines[-1]["eval/reward"] = 0.9
    return lines


def test_a_rise_is_one_beyond_two_standard_errors() -> None:
    rewards = [0.1, 0.3, 0.2, 0.4, 0.5, 0.6, 0.7, 0.9]
    found = summary(_lines(rewards))
    error = math.sqrt((statistics.variance(rewards[:2]) + statistics.variance(rewards[-2:])) / 2)
    assert (found["steps"], found["standard_error"]) == (8, pytest.approx(error, abs=1e-4))
    assert (found["reward_first_quarter"], found["reward_last_quarter"], found["rose"]) == (0.2, 0.8, True)
    assert (found["held_out_before"], found["held_out_after"]) == (0.1, 0.9)
    assert not summary(_lines([0.1, 0.5, 0.3, 0.3, 0.3, 0.3, 0.2, 0.6]))["rose"]


def test_a_picture_has_a_curve_for_each_algorithm(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    draw({"ppo": {0: _lines([0.1, 0.2]), 1: _lines([0.2, 0.3])}, "grpo": {0: _lines([0.0])}}, tmp_path / "a" / "b.svg")
    text = (tmp_path / "a" / "b.svg").read_text()
    assert "ppo, mean of 2 seeds" in text and "grpo, mean of 1 seed" in text
