"""One copy of an actor's weights, trained as ZeRO shards and sampled from as tensor-parallel slices."""

from __future__ import annotations

import time
from collections.abc import Generator as StepIterator
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid.config import InferenceConfig, OptimConfig, ZeroConfig
from hybrid.deepspeed import HybridConfig
from hybrid.inference.cache import KVCache
from hybrid.inference.exact import require_exact
from hybrid.inference.generator import Delta, Generator, GeneratorStats
from hybrid.inference.params import SamplingParams
from hybrid.inference.requests import Prompts, encode, one_each, require_positions
from hybrid.inference.sequence import Completion
from hybrid.memory_plan import memory_plan
from hybrid.models.families import head_dim
from hybrid.models.heads import TokenScores, exact_forward
from hybrid.models.loading import DType, load_tokenizer, open_causal_lm, resolve_model
from hybrid.models.plans import tensor_parallel_plan
from hybrid.models.prepacked import PackedLinears
from hybrid.models.ragged import RaggedBatch
from hybrid.models.rope import depends_on_length
from hybrid.models.source import WeightSource
from hybrid.models.supported import prepare
from hybrid.models.tensor_parallel import TensorParallelHooks
from hybrid.parallel import ParallelMesh, init_parallel
from hybrid.zero.model import ShardedModel, StepReport
from ops.attention import key_layout


class Mode(Enum):
    """What the actor's weights are laid out for."""

    TRAIN = "train"
    GENERATE = "generate"


class ModeError(RuntimeError):
    """A call that the engine's present mode cannot serve."""


class FlipError(RuntimeError):
    """A flip failed and was rolled back; the engine is in the mode it was in before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipReport:
    """What one flip did on this rank.

    ``milliseconds`` is the whole flip and ``climb_milliseconds`` the part before weights are packed and the KV pool is
    built.
    ``bytes_received`` is what the collectives of the climb brought here from other ranks, ``bytes_allocated`` the
    growth of memory across the flip (weights and KV pool), ``peak_bytes`` the process's or device's high-water mark.
    """

    direction: Literal["generate", "train"]
    milliseconds: float
    climb_milliseconds: float
    bytes_received: int
    bytes_allocated: int
    peak_bytes: int
    kv_blocks: int
    kv_bytes: int
    weights_version: int


class _Flip:
    """What `generate_mode` and `train_mode` return: the flip is done, and leaving the ``with`` block undoes it."""

    def __init__(self, engine: HybridEngine, before: Mode) -> None:
        self._engine, self._before = engine, before

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # An exception may be this rank's alone. Dropping slices needs no other rank; gathering them would wait for
        # ranks that know of nothing.
        if kind is None or self._before is Mode.TRAIN:
            self._engine.flip(self._before)


class HybridEngine:
    """An actor: a causal language model that trains and generates on one copy of its weights.

    In TRAIN mode, `logprobs`, `backward` and `step` are data-parallel over all N ranks. In GENERATE mode, `generate`
    runs on tensor-parallel slices: the T ranks of a replica work on the same prompts, and replicas on their own.
    Every rank flips together.

    Args:
        module: the model; its attention implementation must be the registered one (`open_causal_lm` sets it).
        optim: None for a model that only generates and scores.
        weights: where the parameters' values are read from, by the ranges that this rank holds; by default the module.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        mesh: ParallelMesh,
        *,
        zero: ZeroConfig | None = None,
        optim: OptimConfig | None = None,
        inference: InferenceConfig | None = None,
        weights: WeightSource | None = None,
    ) -> None:
        self.mesh, self.tokenizer, self.inference = mesh, tokenizer, inference or InferenceConfig()
        self.config = module.config.get_text_config(decoder=True)
        prepare(module)
        self._plan = tensor_parallel_plan(module, mesh.tp_size)
        self.model = ShardedModel(
            module, mesh, zero=zero or ZeroConfig(), optim=optim, plan=self._plan, weights=weights
        )
        self._tensor_parallel = TensorParallelHooks(module, self._plan, mesh)
        self._packed = PackedLinears(module)
        if self.inference.exact:
            require_exact(module, mesh, self.dtype, self.inference.block_size)
        self.mode = Mode.TRAIN
        self.flips: list[FlipReport] = []
        self._generator: Generator | None = None
        self._num_blocks = 0
        self._calls = 0

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        mesh: ParallelMesh | None = None,
        zero: ZeroConfig | None = None,
        optim: OptimConfig | None = None,
        inference: InferenceConfig | None = None,
        dtype: DType = "auto",
        config: HybridConfig | None = None,
        trains: bool = True,
    ) -> HybridEngine:
        """Load a directory, Hub id or alias; ``optim`` defaults to AdamW with `OptimConfig`'s settings.

        Args:
            trains: False for a model that only generates and scores: no masters, gradients or optimizer state.
            config: all of the others at once, as `HybridConfig.from_deepspeed` reads them.

        Raises:
            ValueError: the model cannot be found or laid out; the message says what to set.
        """
        if optim is not None and not trains:
            raise ValueError("optim is set, and with trains=False there is no optimizer; leave one of the two out")
        resolved = resolve_model(str(model))
        if config is not None:
            if zero or optim or inference or dtype != "auto":
                raise ValueError("config holds zero, optim, inference and dtype; pass either it or them")
            config = config.resolve(hidden_size=resolved.config.get_text_config(decoder=True).hidden_size)
            mesh = mesh or init_parallel(config.parallel.tp_size)
            if mesh.tp_size != config.parallel.tp_size:
                raise ValueError(f"config has tp_size={config.parallel.tp_size} and the mesh {mesh.tp_size}")
            config.check_batch(mesh.world_size)
            zero, optim, inference, dtype = config.zero, config.optim, config.inference, config.dtype
        else:
            optim = optim or OptimConfig()
        mesh = mesh or init_parallel()
        with closing(open_causal_lm(resolved, dtype)) as opened:
            return cls(
                opened.module,
                load_tokenizer(resolved),
                mesh,
                zero=zero,
                optim=optim if trains else None,
                inference=inference,
                weights=opened.weights,
            )

    # What each rank of an engine would hold in each mode, before one is made.
    memory_plan = staticmethod(memory_plan)

    # -- what the engine is ------------------------------------------------------------------------------------

    @property
    def module(self) -> PreTrainedModel:
        """The Hugging Face module, the same object in both modes."""
        return self.model.module

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.groups[0].dtype

    @property
    def weights_version(self) -> int:
        """How many optimizer steps made the present weights; what is cached under another number is never read."""
        return self.model.weights_version

    # -- modes ---------------------------------------------------------------------------------------------------

    def generate_mode(self) -> _Flip:
        """Flip to GENERATE; as a context manager, flip back at its end. No-op in GENERATE."""
        return self._flip(Mode.GENERATE)

    def train_mode(self) -> _Flip:
        """Flip to TRAIN; as a context manager, flip back at its end. No-op in TRAIN."""
        return self._flip(Mode.TRAIN)

    def _flip(self, mode: Mode) -> _Flip:
        before = self.mode
        self.flip(mode)
        return _Flip(self, before)

    def flip(self, mode: Mode) -> None:
        """Go to a mode; a no-op in it. Accumulated gradients survive; a stream that is open ends with GENERATE.

        Raises:
            FlipError: out of memory or a failed collective; the engine is back in TRAIN.
        """
        if mode is self.mode:
            return
        mesh = self.mesh
        if mode is Mode.GENERATE:
            self.model.reduce_gradients()  # those that are whole would be in the way
        mesh.synchronize()
        started, received, held = time.perf_counter(), mesh.bytes_received, mesh.memory_in_use()
        try:
            if mode is Mode.GENERATE:
                self._climb()
                mesh.synchronize()
            climbed, received = time.perf_counter(), mesh.bytes_received - received
            if mode is Mode.GENERATE:
                self._generator = self._build_generator()
            else:
                self._descend()
        except BaseException:
            self._descend()
            self.mode = Mode.TRAIN
            raise
        self.mode = mode
        mesh.synchronize()
        self.flips.append(
            FlipReport(
                direction=mode.value,
                milliseconds=(time.perf_counter() - started) * 1e3,
                climb_milliseconds=(climbed - started) * 1e3,
                bytes_received=received,
                bytes_allocated=max(0, mesh.memory_in_use() - held),
                peak_bytes=mesh.peak_memory(),
                kv_blocks=self._num_blocks if self._generator else 0,
                kv_bytes=self._generator.kv_bytes if self._generator else 0,
                weights_version=self.weights_version,
            )
        )

    def _climb(self) -> None:
        """Every group to SLICE."""
        self.model.settle()
        for group in self.model.groups:
            try:
                group.enter_slice()
            except (RuntimeError, MemoryError) as error:
                raise FlipError(
                    f"the flip to GENERATE failed at {group.members[0].name} and was rolled back to TRAIN: {error}"
                ) from error
        self.model.schedule.generating = True
        self._tensor_parallel.enabled = True

    def _descend(self) -> None:
        """KV pool out first, then the slices that are not shards; from any state, and nothing moves between ranks."""
        if self._generator is not None:
            self._generator.close()
            self._generator = None
        self._packed.drop()
        self._tensor_parallel.enabled = False
        self.model.schedule.generating = False
        self.model.settle()
        self.mesh.make_room()

    def _build_generator(self) -> Generator:
        try:
            if PackedLinears.wanted(self.inference, self.dtype, self.device):
                self._packed.pack()
            self._num_blocks = self._count_blocks()
            return Generator(
                self.module,
                tokenizer=self.tokenizer,
                num_layers=self.config.num_hidden_layers,
                num_kv_heads=self._local_kv_heads,
                head_dim=head_dim(self.config),
                num_blocks=self._num_blocks,
                config=self.inference,
                eos_token_ids=self.eos_token_ids,
                dtype=self.dtype,
                device=self.device,
                weights_version=self.weights_version,
                vocab_size=self.config.vocab_size,
                vocab_shard=self._tensor_parallel.vocab_shard,
                capture=self.mesh.capture if self._records_steps else None,
            )
        except (RuntimeError, MemoryError) as error:
            raise FlipError(f"no KV pool could be built; the flip was rolled back to TRAIN: {error}") from error

    @property
    def _records_steps(self) -> bool:
        if not self.inference.cuda_graphs or depends_on_length(self.module):
            return False
        # On a CPU what is recorded are calls of the compiled kernels; collectives are none.
        has_kernels = key_layout(self.dtype, self.device, self.inference.block_size) == "dim"
        return self.device.type == "cuda" or (has_kernels and self.mesh.tp_size == 1)

    @property
    def _local_kv_heads(self) -> int:
        return self._plan.num_local_kv_heads(self.mesh.tp_rank)

    def _count_blocks(self) -> int:
        """KV blocks that fit this rank, agreed by the tensor group: its ranks must schedule alike."""
        if self.inference.kv_blocks != "auto":
            return self.inference.kv_blocks
        cost = KVCache.block_bytes(
            self.config.num_hidden_layers,
            self.inference.block_size,
            self._local_kv_heads,
            head_dim(self.config),
            self.dtype,
        )
        self.mesh.make_room()
        budget = self.mesh.free_memory() * self.inference.kv_memory_fraction
        if self.device.type == "cpu":
            budget = min(budget, self.inference.kv_cache_gb * 2**30)
        (blocks,) = self.mesh.reduce_scalars([budget // cost], op="min", axis="tensor")
        if blocks < 1:
            raise MemoryError(
                f"{budget / 2**30:.2f} GiB are free for the KV pool, and one block of {self.inference.block_size} "
                f"tokens takes {cost / 2**20:.1f} MiB; free some memory or set a smaller block_size"
            )
        return int(blocks)

    @property
    def generation_stats(self) -> GeneratorStats:
        """What this GENERATE mode has done so far: steps, tokens, cache hits, preemptions, seconds by part.

        Raises:
            ModeError: the engine is not in GENERATE mode.
        """
        if self._generator is None:
            raise ModeError("generation_stats are those of GENERATE mode: ask inside `with engine.generate_mode():`")
        return self._generator.stats

    # -- generation ----------------------------------------------------------------------------------------------

    @property
    def eos_token_ids(self) -> list[int]:
        """Every id that ends a completion: the generation config's and the tokenizer's."""
        generation = getattr(self.module.generation_config, "eos_token_id", None)
        ids = list(generation) if isinstance(generation, (list, tuple)) else [generation]
        if self.tokenizer is not None:
            ids.append(self.tokenizer.eos_token_id)
        return sorted({int(i) for i in ids if i is not None})

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Token ids of prompts given as text, token ids or chat messages (which get the chat template).

        Raises:
            ValueError: text or messages without a tokenizer, or messages without a chat template.
        """
        return encode(prompts, self.tokenizer)

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seeds: Sequence[int] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Sample completions of this replica's prompts; the ranks of a tensor group pass the same ones.

        Args:
            params: one for all prompts, or one each.
            seeds: one each, for params that carry none. Without either, a call's requests are seeded from the number
                of calls so far, the replica and the index: repeatable, and never the same twice.
            progress: show a bar of finished samples and tokens per second, on the first rank for its replica.

        Returns:
            ``n`` completions a prompt, prompts in order.

        Raises:
            ModeError: the engine is not in GENERATE mode.
            ValueError: an empty prompt, a request that cannot fit the model or the pool, or requests that
                differ within a tensor group.
            RuntimeError: a stream is being read.
        """
        generator = self._require_generate("generate")
        requests = self._requests(prompts, params, seeds)
        return generator.generate(*requests, progress=progress and self.mesh.is_main)

    def generate_unordered(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seeds: Sequence[int] | None = None,
    ) -> StepIterator[Completion, None, None]:
        """As `generate`, one completion at a time, each as soon as it has ended. What `stream` says holds here too."""
        return self._require_generate("generate_unordered").generate_unordered(*self._requests(prompts, params, seeds))

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seeds: Sequence[int] | None = None,
    ) -> StepIterator[Delta, None, None]:
        """As `generate`, token by token: after each step a delta of every sample that it added to.

        Requests are checked by the call, and run as the iterator is read, one iterator at a time. The ranks of a tensor
        group read theirs alike, to the same delta. `abort` may end samples in between. Leaving the iterator early, by
        ``break``, ``close()`` or an exception, frees everything. A flip to TRAIN ends it as well, since the cache goes
        with the mode; an iterator that is read on after that raises RuntimeError and says so.
        """
        return self._require_generate("stream").stream(*self._requests(prompts, params, seeds))

    def abort(self, prompt_index: int | None = None) -> None:
        """End the samples of one prompt of the stream being read, or all (None), as they are.

        Their finish reason is "abort"; the stream yields their last deltas next. Samples that have ended are left
        alone. Every rank of a tensor group calls this alike, between the same deltas.
        """
        self._require_generate("abort").abort(prompt_index)

    def check_requests(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> None:
        """What `generate` checks of prompts (token ids) before it runs anything: raises ValueError for the first that
        could not run, by its index."""
        generator, requests = self._require_generate("check_requests"), one_each(params, len(prompts))
        require_positions(prompts, requests, getattr(self.config, "max_position_embeddings", None))
        generator.check_requests(prompts, requests)

    def _require_generate(self, call: str) -> Generator:
        if self._generator is None:
            raise ModeError(f"{call}() works on slices: call it inside `with engine.generate_mode():`")
        return self._generator

    def _requests(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        seeds: Sequence[int] | None,
    ) -> tuple[list[list[int]], list[SamplingParams], list[int]]:
        """Prompts as token ids with their params and seeds, all checked."""
        requests = one_each(params, len(prompts))
        self._calls += 1
        if seeds is None:
            base = (self._calls << 40) + (self.mesh.dp_rank << 32)
            seeds = [base + index for index in range(len(prompts))]
        encoded = self.encode(prompts)
        self._check_same_requests(encoded, requests, seeds)
        self.check_requests(encoded, requests)
        return encoded, requests, list(seeds)

    def _check_same_requests(
        self, prompts: list[list[int]], params: list[SamplingParams], seeds: Sequence[int]
    ) -> None:
        """Ranks of a tensor group that schedule different requests would wait for each other for ever."""
        if self.mesh.tp_size == 1:
            return
        seen = self.mesh.all_gather_object((prompts, params, list(seeds)), axis="tensor")
        if any(other != seen[0] for other in seen):
            raise ValueError(
                "the ranks of a tensor group were given different prompts, params or seeds; "
                "give every rank of a replica (mesh.dp_rank) the same"
            )

    # -- training ------------------------------------------------------------------------------------------------

    def _require_train(self, call: str) -> None:
        if self.mode is not Mode.TRAIN:
            raise ModeError(f"{call}() works on shards: leave generate_mode() or call engine.train_mode() first")

    def logprobs(self, batch: RaggedBatch | Sequence[Completion], *, temperature: float = 1.0) -> TokenScores:
        """Log-probabilities and entropies (R,) of a batch's scored tokens, or of completions' tokens, end to end.

        Completions of one prompt share it: it is computed once.
        """
        self._require_train("logprobs")
        if not isinstance(batch, RaggedBatch):
            own = [len(completion.token_ids) for completion in batch]
            can_share = self.model.can_share_prefixes and all(own)
            batch = RaggedBatch.from_sequences(
                [[*completion.prompt_token_ids, *completion.token_ids] for completion in batch],
                own,
                self.device,
                num_shared=[len(completion.prompt_token_ids) for completion in batch] if can_share else None,
            )
        with exact_forward(self.inference.exact):
            return self.model.logprobs(batch, temperature=temperature)

    def loss(self, batch: RaggedBatch, normalizer: float | None = None) -> torch.Tensor:
        """See `ShardedModel.loss`."""
        self._require_train("loss")
        with exact_forward(self.inference.exact):
            return self.model.loss(batch, normalizer)

    def backward(self, loss: torch.Tensor, reduction: Literal["mean", "sum"] = "mean") -> None:
        """See `ShardedModel.backward`."""
        self._require_train("backward")
        self.model.backward(loss, reduction)

    def step(self) -> StepReport:
        """See `ShardedModel.step`."""
        self._require_train("step")
        return self.model.step()

    def set_schedule(self, total_steps: int | None) -> None:
        """See `ShardedModel.set_schedule`."""
        self.model.set_schedule(total_steps)

    def keep_average(self, decay: float) -> None:
        """See `ShardedModel.keep_average`."""
        self.model.keep_average(decay)

    def save_pretrained(self, directory: str | Path, *, what: Literal["weights", "average"] = "weights") -> None:
        """Write a Hugging Face model directory with its tokenizer; every rank calls this, in either mode.

        See `ShardedModel.save_pretrained`.
        """
        self.model.save_pretrained(directory, self.tokenizer, what=what)

    # -- proof ---------------------------------------------------------------------------------------------------

    def verify(self) -> dict[str, int]:
        """Check that shards, slices and full weights are the same bits on every rank; a collective.

        Slices are compared with the shards they were gathered from and across replicas, full weights across the world.

        Returns:
            checksums of SLICE (this rank's) and FULL.

        Raises:
            RuntimeError: names the first group that differs.
        """
        slices: list[tuple[int, bool]] = []
        with self.generate_mode():
            for group in self.model.groups:
                slices.append((group.held_checksum(), group.shard_matches_slice()))
            if self._generator is not None:
                self._generator.check()
        fulls: list[int] = []
        with self.train_mode():
            for group in self.model.groups:
                group.wait_full()
                fulls.append(group.held_checksum())
                group.release()
        everyone = self.mesh.all_gather_object((slices, fulls))
        replicas = everyone[self.mesh.tp_rank :: self.mesh.tp_size]
        for index, group in enumerate(self.model.groups):
            if not all(rank[0][index][1] for rank in everyone):
                raise RuntimeError(f"{group.name}: a shard differs from the slice gathered from it")
            if len({rank[0][index][0] for rank in replicas}) > 1:
                raise RuntimeError(f"{group.name}: its slice differs between replicas")
            if len({rank[1][index] for rank in everyone}) > 1:
                raise RuntimeError(f"{group.name}: its full weights differ between ranks")
        return {"slice": sum(s for s, _ in slices), "full": sum(fulls)}
