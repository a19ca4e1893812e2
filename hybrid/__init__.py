"""RLHF on one copy of the weights: ZeRO training and tensor-parallel generation in one engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid.config import InferenceConfig, OptimConfig, PPOConfig, ZeroConfig
    from hybrid.deepspeed import HybridConfig
    from hybrid.engine import HybridEngine
    from hybrid.inference.generator import Delta
    from hybrid.inference.params import SamplingParams
    from hybrid.inference.sequence import Completion
    from hybrid.models.ragged import RaggedBatch
    from hybrid.parallel import ParallelMesh, init_parallel
    from hybrid.rl.setup import make_ppo_trainer
    from hybrid.rl.trainer import PPOTrainer
    from hybrid.zero.model import ShardedModel

# Names load on first use, so that `import hybrid.config` (and with it `--help`) never pays for torch.
_EXPORTS = {
    "Completion": "hybrid.inference.sequence",
    "Delta": "hybrid.inference.generator",
    "HybridConfig": "hybrid.deepspeed",
    "HybridEngine": "hybrid.engine",
    "InferenceConfig": "hybrid.config",
    "OptimConfig": "hybrid.config",
    "PPOConfig": "hybrid.config",
    "PPOTrainer": "hybrid.rl.trainer",
    "ParallelMesh": "hybrid.parallel",
    "RaggedBatch": "hybrid.models.ragged",
    "SamplingParams": "hybrid.inference.params",
    "ShardedModel": "hybrid.zero.model",
    "ZeroConfig": "hybrid.config",
    "init_parallel": "hybrid.parallel",
    "make_ppo_trainer": "hybrid.rl.setup",
}

__all__ = [
    "Completion",
    "Delta",
    "HybridConfig",
    "HybridEngine",
    "InferenceConfig",
    "OptimConfig",
    "PPOConfig",
    "PPOTrainer",
    "ParallelMesh",
    "RaggedBatch",
    "SamplingParams",
    "ShardedModel",
    "ZeroConfig",
    "init_parallel",
    "make_ppo_trainer",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
