"""Run the demo with several seeds and say whether its reward rose: one JSON object on the last line.

    python scripts/demo_seeds.py --seeds 0 1 2
    python scripts/demo_seeds.py --seeds 0 -- --total_steps 40      # what follows -- goes to the recipe

The reward has risen where the mean of the last quarter of the steps is above that of the first by more than two
standard errors of their difference.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "rlhf_step3.py"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("recipe_args", nargs="*", help="after --: flags for the recipe")
    options = parser.parse_args(argv)
    runs = {}
    for seed in options.seeds:
        runs[seed] = run(seed, options.recipe_args)
        print(f"seed {seed}: {json.dumps(runs[seed])}", flush=True)
    print(json.dumps({"all_rose": all(r["rose"] for r in runs.values()), "seeds": runs}))


def run(seed: int, recipe_args: list[str]) -> dict[str, Any]:
    """One run of the recipe in a directory of its own, which is removed."""
    with tempfile.TemporaryDirectory() as directory:
        output_dir = Path(directory) / "run"
        started = time.perf_counter()
        command = [sys.executable, str(RECIPE), "--seed", str(seed), "--output_dir", str(output_dir), *recipe_args]
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - started
        steps = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return summary(steps) | {"seconds": round(seconds, 1)}


def summary(steps: list[dict[str, float]]) -> dict[str, Any]:
    """First and last quarter of a run's rewards, their standard errors, and what the run cost."""
    rewards = [step["reward"] for step in steps]
    quarter = max(2, len(rewards) // 4)
    first, last = rewards[:quarter], rewards[-quarter:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / quarter)
    rise = statistics.fmean(last) - statistics.fmean(first)
    return {
        "steps": len(rewards),
        "reward_first_quarter": round(statistics.fmean(first), 3),
        "reward_last_quarter": round(statistics.fmean(last), 3),
        "standard_error": round(error, 4),
        "rose": rise > 2 * error,
        "kl_last": round(steps[-1]["kl"], 4),
        "logprob_gap_max": round(max(step["rollout/logprob_gap_max"] for step in steps), 4),
        "step_s_median": round(statistics.median(step["timing_s/step"] for step in steps), 2),
        "peak_gb": round(max(step["perf/max_memory_gb"] for step in steps), 2),
    }


if __name__ == "__main__":
    main()
