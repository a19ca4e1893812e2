"""Stand-ins with the interfaces that the trainer uses: ranks as threads, and models small enough to check by hand."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from hybrid.config import InferenceConfig
from hybrid.models.ragged import RaggedBatch
from hybrid.zero.optimizer import StepReport
from ops.logprob import linear_logprob_entropy

EOS = 2
VOCAB = 13
WIDTH = 8


class World:
    """What the ranks of one world share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.slots: list[Any] = [None] * size


class ThreadMesh:
    """A `ParallelMesh` whose ranks are threads of one process."""

    def __init__(self, world: World, rank: int, tp_size: int) -> None:
        self.world, self.rank, self.world_size = world, rank, world.size
        self.tp_size, self.tp_rank = tp_size, rank % tp_size
        self.dp_size, self.dp_rank = world.size // tp_size, rank // tp_size
        self.is_main = rank == 0
        self.device = torch.device("cpu")
        self.num_collectives = 0

    def all_gather_object(self, value: Any, axis: str = "world") -> list[Any]:
        if axis != "world":
            raise ValueError(f"not faked: {axis=}")
        self.num_collectives += 1
        self.world.slots[self.rank] = value
        self.world.barrier.wait()
        values = list(self.world.slots)
        self.world.barrier.wait()
        return values

    def exchange_objects(self, outgoing) -> list[Any]:
        return [each for lists in self.all_gather_object(outgoing) for each in lists[self.rank]]

    def reduce_scalars(self, values, op: str = "sum", axis: str = "world") -> list[float]:
        columns = zip(*self.all_gather_object([float(v) for v in values], axis), strict=True)
        return [{"sum": sum, "max": max, "min": min}[op](column) for column in columns]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.all_gather_object(tensor.clone())).sum(0))

    def peak_memory(self) -> int:
        return 10**9

    def peak_flops(self, dtype: torch.dtype) -> float:
        return 1e12

    def synchronize(self) -> None:
        pass


def run_world(size: int, tp_size: int, main) -> list[Any]:
    """``main(mesh)`` on every rank; returns results by rank. Exceptions are results."""
    world, results = World(size), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = main(ThreadMesh(world, rank, tp_size))
        except Exception as error:
            results[rank] = error
            time.sleep(0.2)  # the others may still be leaving the barrier of the last collective
            world.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@dataclass
class FakeModel:
    """A bigram language model, or with ``valued`` a value per token: SGD over the sum of all ranks' gradients."""

    mesh: Any
    lr: float = 0.0
    valued: bool = False
    seed: int = 0
    calls: list[tuple[str, int]] = field(default_factory=list)  # (method, tokens scored)
    can_share_prefixes = True
    forward_cost = SimpleNamespace(flops=lambda lengths, num_scored: 10 * sum(lengths) + num_scored)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        self.head = torch.randn(1 if self.valued else VOCAB, WIDTH, generator=generator).double().requires_grad_()
        self.weights_version = 0
        self.gradient: torch.Tensor | None = None
        self.total_steps: int | None = None

    def resident(self) -> nullcontext:
        return nullcontext()

    def logprobs(self, batch: RaggedBatch, *, temperature: float = 1.0) -> SimpleNamespace:
        self.calls.append(("logprobs", batch.num_targets))
        rows = self.embedding[batch.input_ids[batch.sources]]
        logprobs, entropy = linear_logprob_entropy(rows, self.head, batch.target_ids, temperature=temperature)
        return SimpleNamespace(logprobs=logprobs, entropy=entropy)

    def values(self, batch: RaggedBatch) -> torch.Tensor:
        self.calls.append(("values", batch.num_targets))
        return (self.embedding[batch.input_ids[batch.sources]] @ self.head.T).squeeze(-1)

    def backward(self, loss: torch.Tensor, reduction: str = "mean") -> None:
        if reduction != "sum" or not loss.requires_grad:
            raise ValueError(f"{reduction=}, {loss.requires_grad=}")
        self.calls.append(("backward", 0))
        loss.backward()
        self.mesh.all_gather_object(None)  # as a sharded model's backward would: every rank must come

    def step(self) -> StepReport:
        parameters = [self.embedding, self.head]
        self.gradient = torch.cat([self.mesh.all_reduce(p.grad).flatten() for p in parameters])
        with torch.no_grad():
            for parameter in parameters:
                parameter -= self.lr * parameter.grad
                parameter.grad = None
        self.weights_version += 1
        return StepReport(grad_norm=float(self.gradient.norm()), lr=self.lr)

    def set_schedule(self, total_steps: int | None) -> None:
        self.total_steps = total_steps


class FakeActor(FakeModel):
    """A `HybridEngine`: samples are a pure function of weights, prompt, request seed and sample index."""

    mode = "train"
    inference = InferenceConfig()
    tokenizer = None
    dtype = torch.float64

    @property
    def model(self) -> FakeActor:
        return self

    def __post_init__(self) -> None:
        super().__post_init__()
        self.flips: list[SimpleNamespace] = []
        self.generated: list[list[int]] = []

    def generate_mode(self):
        return self._flip("generate")

    def train_mode(self):
        return self._flip("train")

    def _flip(self, mode: str):
        if mode != self.mode:
            self.mode = mode
            blocks = 7 if mode == "generate" else 0
            self.flips.append(SimpleNamespace(direction=mode, bytes_received=3, kv_blocks=blocks, peak_bytes=11))
        return nullcontext()

    @torch.no_grad()
    def generate(self, prompts, params) -> list[SimpleNamespace]:
        if self.mode != "generate":
            raise RuntimeError(f"generate in {self.mode=}")
        self.generated.extend(prompts)
        return [
            self._sample(index, sample, prompt, request)
            for index, (prompt, request) in enumerate(zip(prompts, params, strict=True))
            for sample in range(request.n)
        ]

    def _sample(self, index, sample, prompt, request) -> SimpleNamespace:
        generator = torch.Generator().manual_seed((request.seed + sample) % 2**62)
        tokens, logprobs, finish = [], [], "length"
        while len(tokens) < request.max_tokens:
            last = (tokens or prompt)[-1]
            scores = torch.log_softmax(self.embedding[last] @ self.head.T / (request.temperature or 1.0), -1)
            greedy = request.temperature == 0
            token = int(scores.argmax()) if greedy else int(torch.multinomial(scores.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append(float(scores[token]))
            if token == EOS:
                finish = "stop"
                break
        return SimpleNamespace(
            prompt_index=index,
            sample_index=sample,
            prompt_token_ids=list(prompt),
            token_ids=tokens,
            logprobs=torch.tensor(logprobs),
            text=" ".join(map(str, tokens)),
            finish_reason=finish,
            weights_version=self.weights_version,
        )


class FakeReward:
    """``function(prompt text, completion ids, index column) -> float | None``; remembers what it was asked."""

    def __init__(self, function) -> None:
        self.function = function
        self.asked: list[int] = []

    def score(self, prompts, completions, completion_ids, columns) -> SimpleNamespace:
        self.asked.extend(columns.get("index", []))
        rewards = [self.function(*row) for row in zip(prompts, completion_ids, columns.get("index", []), strict=True)]
        return SimpleNamespace(rewards=rewards, parts={"fake": rewards})


class FakePrompts:
    def __init__(self, count: int) -> None:
        self.rows = [
            SimpleNamespace(token_ids=[3 + i % 7, 4 + i % 5][: 1 + i % 2], text=f"prompt {i}", columns={"index": i})
            for i in range(count)
        ]

    def batch(self, step: int, size: int, seed: int) -> list[SimpleNamespace]:
        return [self.rows[(step * size + i + seed) % len(self.rows)] for i in range(size)]
