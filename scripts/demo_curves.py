"""Run the demo with several algorithms and seeds, say whether its reward rose, and draw the curves.

    python scripts/demo_curves.py --algorithms ppo grpo --seeds 0 1 2 --picture curves.svg
    python scripts/demo_curves.py --seeds 0 -- --total_steps 40      # what follows -- goes to the recipe
    python scripts/demo_curves.py --at_once 2 ...                    # two runs at a time: no times worth quoting

The reward has risen where the mean of the last quarter of the steps is above that of the first by more than two
standard errors of their difference. The last line is one JSON object. A picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "rlhf_step3.py"

Steps = list[dict[str, float]]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["ppo"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at_once", type=int, default=1, help="runs that go on at a time, sharing the cores")
    parser.add_argument("--picture", type=Path, help="where the curves go, as .svg or .png")
    parser.add_argument("recipe_args", nargs="*", help="after --: flags for the recipe")
    options = parser.parse_args(argv)
    if options.picture is not None:
        import matplotlib  # noqa: F401 - missing, it is better missed before the runs than after
    named = list(itertools.product(options.algorithms, options.seeds))
    threads = max(1, (os.cpu_count() or 1) // options.at_once)
    results: dict[str, dict[int, dict[str, Any]]] = {algorithm: {} for algorithm in options.algorithms}
    curves: dict[str, dict[int, Steps]] = {algorithm: {} for algorithm in options.algorithms}
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = pool.map(lambda name: run(name[0], name[1], threads, options.recipe_args), named)
        for (algorithm, seed), (steps, seconds) in zip(named, runs, strict=True):
            curves[algorithm][seed] = steps
            results[algorithm][seed] = summary(steps) | {"seconds": round(seconds, 1)}
            print(f"{algorithm}, seed {seed}: {json.dumps(results[algorithm][seed])}", flush=True)
    if options.picture is not None:
        draw(curves, options.picture)
    all_rose = all(result["rose"] for seeds in results.values() for result in seeds.values())
    print(json.dumps({"all_rose": all_rose, "at_once": options.at_once, "threads": threads, **results}))


def run(algorithm: str, seed: int, threads: int, recipe_args: Sequence[str]) -> tuple[Steps, float]:
    """The metrics of one run of the recipe in a directory of its own, which is removed, and its seconds."""
    with tempfile.TemporaryDirectory() as directory:
        output_dir, started = Path(directory) / "run", time.perf_counter()
        command = [sys.executable, str(RECIPE), "--algorithm", algorithm, "--seed", str(seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([*command, "--output_dir", str(output_dir), *recipe_args], check=True, env=environment)
        seconds = time.perf_counter() - started
        return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()], seconds


def summary(lines: Steps) -> dict[str, Any]:
    """First and last quarter of a run's rewards, their standard errors, held-out rewards, and what the run cost."""
    steps = [line for line in lines if "reward" in line]
    evaluations = [line["eval/reward"] for line in lines if "eval/reward" in line]
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
        "held_out_before": round(evaluations[0], 3) if evaluations else None,
        "held_out_after": round(evaluations[-1], 3) if evaluations else None,
        "kl_last": round(steps[-1]["kl"], 4),
        "logprob_gap_max": round(max(step["rollout/logprob_gap_max"] for step in steps), 4),
        "step_s_median": round(statistics.median(step["timing_s/step"] for step in steps), 2),
        "peak_gb": round(max(step["perf/max_memory_gb"] for step in steps), 2),
    }


def draw(curves: Mapping[str, Mapping[int, Steps]], path: Path) -> None:
    """Rewards and KL by step: a line for each seed, thin, and their mean, thick."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for number, (algorithm, seeds) in enumerate(curves.items()):
        for axis, name in zip(axes, ("reward", "kl"), strict=True):
            lines = [[step[name] for step in steps if name in step] for steps in seeds.values()]
            for line in lines:
                axis.plot(range(1, len(line) + 1), line, color=f"C{number}", alpha=0.35, linewidth=0.8)
            mean = [statistics.fmean(values) for values in zip(*lines, strict=False)]
            label = f"{algorithm}, mean of {len(lines)} seed{'s' * (len(lines) != 1)}"
            axis.plot(range(1, len(mean) + 1), mean, color=f"C{number}", linewidth=2, label=label)
    for axis, title in zip(axes, ("mean reward of a step's samples", "KL to the start, nats a token"), strict=True):
        axis.set_xlabel("step")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
