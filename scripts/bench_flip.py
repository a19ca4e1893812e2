"""Time flips between training and generation, and check the bytes they move: one JSON object on the last line.

    torchrun --nproc-per-node 2 scripts/bench_flip.py --model smollm2-135m --tp_size 2 --flips 100
    python scripts/bench_flip.py --model smollm2-135m --flips 1000

``bytes_received`` is counted where collectives hand over their tensors; ``bytes_expected`` is the layout's slice less
its shard, on the first rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import closing

import psutil

from hybrid.config import InferenceConfig, ZeroConfig
from hybrid.engine import HybridEngine
from hybrid.models.loading import load_tokenizer, open_causal_lm, resolve_model
from hybrid.parallel import init_parallel, run_main
from hybrid.zero.level import Level

WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a directory, Hub id or alias")
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--flips", type=int, default=100, help="round trips")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--zero_stage", type=int, choices=[0, 1, 2, 3], default=3)
    options = parser.parse_args()

    mesh = init_parallel(options.tp_size)
    model = resolve_model(options.model)
    with closing(open_causal_lm(model, options.dtype)) as opened:
        engine = HybridEngine(
            opened.module,
            load_tokenizer(model),
            mesh,
            zero=ZeroConfig(stage=options.zero_stage),
            inference=InferenceConfig(kv_cache_gb=0.25),
            weights=opened.weights,
        )
    before = engine.verify()
    for _ in range(WARM_UP):
        flip_there_and_back(engine)
    engine.flips.clear()
    held = psutil.Process().memory_info().rss
    for _ in range(options.flips):
        flip_there_and_back(engine)
    drift = psutil.Process().memory_info().rss - held
    flips = list(engine.flips)
    same = engine.verify() == before
    if mesh.is_main:
        there = [flip for flip in flips if flip.direction == "generate"]
        back = [flip for flip in flips if flip.direction == "train"]
        moving = [group for group in engine.model.groups if group.resting is Level.SHARD]
        report = {
            "world_size": mesh.world_size,
            "tp_size": mesh.tp_size,
            "flips": options.flips,
            "to_generate_ms": spread([flip.milliseconds for flip in there]),
            "climb_ms": spread([flip.climb_milliseconds for flip in there]),
            "to_train_ms": spread([flip.milliseconds for flip in back]),
            "bytes_received": sorted({flip.bytes_received for flip in there}),
            "bytes_received_to_train": sorted({flip.bytes_received for flip in back}),
            "bytes_expected": sum(group.flip_bytes for group in moving),
            "rss_drift_mb": round(drift / 2**20, 2),
            "checksum_ok": same,
        }
        print(json.dumps(report))


def flip_there_and_back(engine: HybridEngine) -> None:
    engine.generate_mode()
    engine.train_mode()


def spread(milliseconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    ordered = sorted(milliseconds)
    return {
        "median": round(statistics.median(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 3),
    }


if __name__ == "__main__":
    run_main(main)
