"""One loop for everything that is learnt from examples: draw, share out, backward, step; evaluate now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from hybrid.checkpoint import load_checkpoint, save_checkpoint
from hybrid.learning.objective import shared_out
from hybrid.monitor import Timers
from hybrid.parallel import ParallelMesh

if TYPE_CHECKING:
    from hybrid.data.conversations import ExampleDataset
    from hybrid.learning.objective import Objective
    from hybrid.learning_config import LearnConfig

T = TypeVar("T")

Callback = Callable[[int, dict[str, float]], None]
"""Called on every rank with the number of steps done and metrics; may be collective."""


class LearningTrainer(Generic[T]):
    """Trains an objective's model on examples.

    Every rank makes one with the same arguments and calls the same methods. The result does not depend on the number
    of ranks or on ``max_tokens_per_microbatch``, up to rounding.

    Args:
        train: what is drawn from.
        held_out: what is evaluated on; None: nothing.
        num_examples: how many examples to draw in all, the last step's being what is left; None: whole steps.
        timers: measure the stages; callbacks may add to them (``trainer.timers("save")``), which the next step reports.
        callbacks: called in order after each step of `train`, and before the first if something is held out.
    """

    def __init__(
        self,
        objective: Objective[T],
        train: ExampleDataset[T],
        held_out: ExampleDataset[T] | None,
        config: LearnConfig,
        *,
        num_examples: int | None = None,
        timers: Timers | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.objective, self.examples, self.held_out = objective, train, held_out
        self.config, self.num_examples, self.callbacks = config, num_examples, callbacks
        self.mesh: ParallelMesh = objective.model.mesh
        self.timers = timers or Timers(self.mesh.synchronize)
        self.global_step = 0

    def train(self, total_steps: int) -> None:
        """Run until ``total_steps`` steps have been done, those before a resume included."""
        self.objective.model.set_schedule(total_steps)
        if self.global_step == 0 and self.held_out is not None:
            self._report(self.evaluate(self.held_out))
        while self.global_step < total_steps:
            metrics = self.step()
            is_due = self.config.eval_steps and self.global_step % self.config.eval_steps == 0
            if self.held_out is not None and (is_due or self.global_step == total_steps):
                metrics |= self.evaluate(self.held_out)
            self._report(metrics)

    def _report(self, metrics: dict[str, float]) -> None:
        for callback in self.callbacks:
            callback(self.global_step, metrics)

    def step(self) -> dict[str, float]:
        """One optimizer step on the next examples. Returns its metrics, the same on every rank."""
        config, model, role = self.config, self.objective.model, self.objective.role
        with self.timers("step"):
            batch = self.examples.batch(self.global_step, config.examples_per_step, config.seed, self.num_examples)
            metrics = self._walk(batch, train=True)
            report = model.step()
        self.global_step += 1
        metrics[f"{role}/lr"] = report.lr
        if not report.skipped:
            metrics[f"{role}/grad_norm"] = report.grad_norm
        if report.loss_scale != 1.0 or report.skipped:
            metrics |= {f"{role}/loss_scale": report.loss_scale, f"{role}/skipped_steps": float(report.skipped)}
        seconds = self.timers.drain()
        metrics |= {f"timing_s/{name}": value for name, value in seconds.items()}
        tokens = sum(self.objective.num_tokens(example) for example in batch)
        metrics["perf/tokens_per_s"] = tokens / max(seconds["step"], 1e-9)
        metrics["perf/max_memory_gb"] = self.mesh.peak_memory() / 1e9
        metrics["training/epoch"] = self.global_step * config.examples_per_step / len(self.examples)
        if self.num_examples is not None:
            metrics["training/epoch"] = min(metrics["training/epoch"], self.num_examples / len(self.examples))
        return metrics

    def evaluate(self, examples: ExampleDataset[T]) -> dict[str, float]:
        """The objective's metrics on some examples, under ``eval/``; every rank calls this."""
        with self.timers("eval"), torch.no_grad():
            return {f"eval/{name}": value for name, value in self._walk(examples.rows, train=False).items()}

    def _walk(self, examples: Sequence[T], *, train: bool) -> dict[str, float]:
        """Forward over all examples, and backward where they are trained on."""
        total = sum(self.objective.count(example) for example in examples)
        sums: dict[str, Any] = {}
        for members in shared_out(self.mesh, self.objective, examples, self.config.max_tokens_per_microbatch):
            loss, parts = self.objective.loss([examples[i] for i in members], total)
            if train:
                self.objective.model.backward(loss, reduction="sum")
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + value
        reduced = self.mesh.reduce_scalars([float(value) for value in sums.values()])
        return self.objective.describe(dict(zip(sums, reduced, strict=True)), total)

    def save_checkpoint(self, directory: str | Path, **extra: Any) -> None:
        """Write everything that a resumed run needs, and ``extra`` (JSON); every rank calls this."""
        state = {"global_step": self.global_step, "extra": extra}
        save_checkpoint(directory, {self.objective.role: self.objective.model}, state, self.mesh)

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint of any world size and ZeRO stage; returns its ``extra``.

        Raises:
            ValueError: it is no checkpoint, or one of another model.
        """
        state = load_checkpoint(directory, {self.objective.role: self.objective.model})
        self.global_step = state["global_step"]
        return state["extra"]
