"""Continuous batching of one replica's prompts: schedule, forward, sample, until every sample has ended."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Generator as StepIterator
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from hybrid.inference.blocks import BlockPool
from hybrid.inference.cache import KVCache
from hybrid.inference.params import SamplingParams
from hybrid.inference.runner import ModelRunner
from hybrid.inference.sampler import Sampler
from hybrid.inference.scheduler import Scheduler
from hybrid.inference.sequence import Completion, Sequence, SequenceStatus
from hybrid.inference.stop import StopChecker
from ops.sampling import sample_seed

if TYPE_CHECKING:
    from hybrid.config import InferenceConfig


@dataclass(slots=True)
class GeneratorStats:
    """Totals since the generator was made."""

    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0  # each prompt once, whatever its n
    cached_tokens: int = 0  # of those, found in the cache
    computed_tokens: int = 0  # rows that went through the model: prompts, samples and recomputation
    preemptions: int = 0
    # By part: schedule, forward, sample. CUDA kernels run on after their forward, into sample.
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start


class Generator:
    """Generates with a module over a paged KV cache.

    With tensor parallelism every rank of a group has one and is given the same requests; all decide alike, since
    nothing here depends on clocks, memory or chance.

    Args:
        module: see ModelRunner.
        tokenizer: transformers'; None gives completions without text.
        num_layers: attention layers.
        num_kv_heads: this rank's.
        head_dim: of keys and values.
        num_blocks: KV blocks to allocate.
        config: block size, tokens per step, sequences at once.
        eos_token_ids: each of them ends a completion.
        dtype, device: of the module's keys and values.
        weights_version: of the module's weights. Change the attribute when they change, and nothing that the old
            ones computed is read again.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        *,
        tokenizer: Any,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        config: InferenceConfig,
        eos_token_ids: Seq[int],
        dtype: torch.dtype,
        device: torch.device | str,
        weights_version: int,
    ) -> None:
        device = torch.device(device)
        pool = BlockPool(num_blocks, config.block_size, weights_version)
        cache = KVCache(num_layers, num_blocks, config.block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
        self._scheduler = Scheduler(
            pool, max_tokens_per_step=config.max_tokens_per_step, max_num_seqs=config.max_num_seqs
        )
        self._runner: ModelRunner | None = ModelRunner(module, cache, device)
        self._stop = StopChecker(tokenizer, eos_token_ids)
        self._sampler = Sampler(self._stop.ending_ids)
        self._ended: list[Sequence] = []  # finished, and not yet handed out
        self._is_generating = False
        self._num_requests = 0
        self.stats = GeneratorStats()

    @property
    def weights_version(self) -> int:
        return self._scheduler.pool.weights_version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        if self._is_generating:
            raise RuntimeError("weights_version cannot change while completions are being generated")
        self._scheduler.pool.weights_version = version

    def generate(
        self,
        prompts: Seq[list[int]],
        params: Seq[SamplingParams],
        seeds: Seq[int],
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete every prompt.

        Args:
            prompts: token ids.
            params: one for each prompt.
            seeds: one for each prompt, used where its params have none.
            progress: show a bar of finished samples.

        Returns:
            the completions, ordered by prompt, then sample.

        Raises:
            ValueError: a prompt is empty or cannot fit into the cache, or the lengths of the arguments differ.
        """
        completions: list[Completion] = []
        num_samples = sum(each.n for each in params)
        with (
            closing(self.stream(prompts, params, seeds)) as steps,
            tqdm(total=num_samples, desc="generate", unit="sample", disable=not progress, leave=False) as bar,
        ):
            for finished in steps:
                completions += finished
                bar.update(len(finished))
        return sorted(completions, key=lambda each: (each.prompt_index, each.sample_index))

    def stream(
        self, prompts: Seq[list[int]], params: Seq[SamplingParams], seeds: Seq[int]
    ) -> StepIterator[list[Completion], None, None]:
        """As ``generate``, one step at a time: yields after each the completions that it finished, maybe none.

        Between steps ``abort`` may end some. Closing the iterator early, an exception or an interrupt frees everything.
        """
        if self._runner is None:
            raise RuntimeError("the generator is closed; make another one")
        return self._steps(self._make_sequences(prompts, params, seeds))

    def abort(self, prompt_index: int | None = None) -> None:
        """End the samples of one prompt, or all of them, as they are; the iterator yields them next."""
        self._ended += self._scheduler.abort(prompt_index)

    def check(self) -> None:
        """Prove that no KV block is lost or held twice (RuntimeError otherwise)."""
        self._scheduler.check()

    def close(self) -> None:
        """Drop the cache's tensors. The generator cannot be used again."""
        if self._is_generating:
            raise RuntimeError("the generator is in use; exhaust or close its iterator first")
        self._runner = None

    # -- parts ------------------------------------------------------------------------------------------------------

    def _make_sequences(
        self, prompts: Seq[list[int]], params: Seq[SamplingParams], seeds: Seq[int]
    ) -> list[list[Sequence]]:
        """The samples of each prompt, all of them checked before any is run."""
        if not len(prompts) == len(params) == len(seeds):
            raise ValueError(
                f"there are {len(prompts)} prompts, {len(params)} params and {len(seeds)} seeds; "
                "give one of each for every prompt"
            )
        requests = []
        for index, (prompt, each, seed) in enumerate(zip(prompts, params, seeds, strict=True)):
            if not len(prompt):
                raise ValueError(f"prompt {index} is empty; a prompt needs at least one token, such as the model's BOS")
            self._stop.require_can_check(each)
            self._scheduler.require_fits(len(prompt), each.max_tokens, index)
            base = seed if each.seed is None else each.seed
            requests.append(
                [
                    Sequence(
                        order=(self._num_requests + index, sample),
                        prompt_index=index,
                        params=each,
                        seed=sample_seed(base, sample),
                        token_ids=list(prompt),
                        num_prompt_tokens=len(prompt),
                    )
                    for sample in range(each.n)
                ]
            )
        self._num_requests += len(requests)
        return requests

    def _steps(self, requests: list[list[Sequence]]) -> StepIterator[list[Completion], None, None]:
        if self._is_generating:
            raise RuntimeError("completions are being generated already; exhaust or close that iterator first")
        self._is_generating = True
        is_complete = False
        try:
            for sequences in requests:
                self.stats.prompt_tokens += sequences[0].num_prompt_tokens
                if sequences[0].params.max_tokens == 0:
                    for sequence in sequences:
                        sequence.finish("length")
                    self._ended += sequences
                else:
                    self._scheduler.add(sequences)
            while self._scheduler.has_work or self._ended:
                if self._scheduler.has_work:
                    self._step()
                yield self._hand_out()
            is_complete = True
        finally:
            if not is_complete:
                # An interrupt may have struck between any two lines, so what is left is forgotten and not unwound.
                self._scheduler.reset()
                self._stop.reset()
                self._ended.clear()
            self._is_generating = False

    def _step(self) -> None:
        runner, stats = self._runner, self.stats
        if runner is None:
            raise RuntimeError("the generator was closed while it was generating")
        with stats.timed("schedule"):
            step = self._scheduler.schedule()
        with stats.timed("forward"):
            chunks, logits = runner.run(step)
        with stats.timed("sample"):
            sampled = self._sampler.sample(chunks, logits) if chunks else []
        with stats.timed("schedule"):
            self._scheduler.commit(step, sampled)
            for token in sampled:
                stopped = self._stop.check(token.sequence)
                if stopped is not None:
                    self._scheduler.finish(token.sequence, *stopped)
                    self._ended.append(token.sequence)
        stats.steps += 1
        stats.generated_tokens += len(sampled)
        stats.computed_tokens += step.num_tokens
        stats.preemptions += step.num_preempted

    def _hand_out(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return [self._completion(sequence) for sequence in ended]

    def _completion(self, sequence: Sequence) -> Completion:
        if sequence.status is not SequenceStatus.FINISHED or sequence.finish_reason is None:
            raise RuntimeError(f"sequence {sequence.order} is handed out as {sequence.status.name}")
        num_cached = sequence.num_cached_tokens or 0
        if sequence.order[1] == 0:
            self.stats.cached_tokens += num_cached
        return Completion(
            prompt_index=sequence.prompt_index,
            sample_index=sequence.order[1],
            prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens],
            token_ids=sequence.completion_ids,
            logprobs=torch.tensor(sequence.logprobs, dtype=torch.float32),
            text=self._stop.text(sequence),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            seed=sequence.seed,
            num_cached_tokens=num_cached,
            weights_version=self.weights_version,
        )
