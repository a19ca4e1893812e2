"""What a step is told about itself: metrics over its samples and its time, and warnings of what taught nothing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hybrid.parallel import ParallelMesh
from hybrid.rl.metrics import sample_metrics
from hybrid.rl.sampling import StepSamples

if TYPE_CHECKING:
    import torch

    from hybrid.config import PPOConfig
    from hybrid.engine import FlipReport
    from hybrid.rl.rollout import ScoredSample

_COMPUTING = ("old_logprob", "ref", "values", "update_actor", "update_critic")


def batch_metrics(batch: StepSamples, config: PPOConfig) -> dict[str, float]:
    """Of a step's samples as a whole: rewards, lengths, and what dynamic sampling and the clip of rewards did."""
    samples = batch.samples
    metrics = sample_metrics(samples)
    if batch.kept is not None:
        metrics["rollout/resampled_groups"] = float(batch.num_drawn - config.prompts_per_step)
        metrics["rollout/missing_groups"] = float(config.prompts_per_step - len(batch.kept))
    clipped = [sample for sample in batch.trained if abs(sample.reward or 0.0) > config.reward_clip]
    metrics["completions/reward_clipped_ratio"] = len(clipped) / len(samples)
    return metrics


def evaluation_metrics(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """The same of held-out prompts' samples, under ``eval/``."""
    return {f"eval/{name}": value for name, value in sample_metrics(samples).items() if name != "frac_reward_zero_std"}


def speed_metrics(samples: Sequence[ScoredSample], seconds: Mapping[str, float]) -> dict[str, float]:
    """``timing_s/*`` of the stages, and tokens a second over the world."""
    generated = sum(sample.num_completion_tokens for sample in samples)
    processed = generated + sum(sample.num_prompt_tokens for sample in samples)
    metrics = {f"timing_s/{name}": value for name, value in seconds.items()}
    metrics["perf/tokens_per_s"] = processed / max(seconds["step"], 1e-9)
    metrics["perf/generated_tokens_per_s"] = generated / max(seconds["generate"], 1e-9)
    return metrics


def utilisation(mesh: ParallelMesh, flops: float, seconds: Mapping[str, float], dtype: torch.dtype) -> float:
    """MFU: the share of the peak that forwards and backwards reach while they run; a collective.

    Generation is left out: it is bound by memory, and has its tokens a second.

    Args:
        flops: this rank's.
        seconds: of the step's stages.
    """
    (total,) = mesh.reduce_scalars([flops])
    busy = sum(seconds.get(stage, 0.0) for stage in _COMPUTING)
    return total / max(busy * mesh.peak_flops(dtype) * mesh.world_size, 1e-9)


def flip_metrics(flips: Sequence[FlipReport]) -> dict[str, float]:
    """Bytes received by all of a step's flips; KV blocks and memory at their most."""
    if not flips:
        return {}
    return {
        "flip/bytes_received": float(sum(flip.bytes_received for flip in flips)),
        "flip/kv_blocks": float(max(flip.kv_blocks for flip in flips)),
        "flip/peak_bytes": float(max(flip.peak_bytes for flip in flips)),
    }


class StepWarnings:
    """Says, on the main rank and the first time it happens, that a step taught nothing or less than its rewards say."""

    def __init__(self, mesh: ParallelMesh, config: PPOConfig) -> None:
        self._mesh, self._config = mesh, config
        self._said: set[str] = set()

    def look_at(self, batch: StepSamples, step: int) -> None:
        """``step`` counts from 1."""
        config, samples = self._config, batch.samples
        if batch.kept is not None and len(batch.kept) < config.prompts_per_step:
            self._say(
                "no spread",
                f"{batch.num_drawn} prompts of step {step} gave {len(batch.kept)} groups with spread in reward, of "
                f"{config.prompts_per_step} wanted; raise --max_resamplings or --num_generations, or take a reward "
                "with more values",
            )
        elif not batch.trained:
            self._say("masked", f"all {len(samples)} samples of step {step} are masked: no update was made")
        largest = max((s.reward for s in samples if s.reward is not None), key=abs, default=0.0)
        if abs(largest) > config.reward_clip:
            self._say(
                "clipped",
                f"a reward of {largest:g} is beyond reward_clip={config.reward_clip:g}, so it is clipped; scale the "
                "reward or raise --reward_clip",
            )

    def _say(self, what: str, message: str) -> None:
        if self._mesh.is_main and what not in self._said:
            self._said.add(what)
            warnings.warn(message, stacklevel=5)
