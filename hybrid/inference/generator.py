"""Continuous batching of one replica's prompts: schedule, forward, sample, until every sample has ended."""

from __future__ import annotations

import math
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
from hybrid.inference.graphs import Capture
from hybrid.inference.params import SamplingParams
from hybrid.inference.runner import ModelRunner
from hybrid.inference.sampler import Sampler
from hybrid.inference.scheduler import Scheduler
from hybrid.inference.sequence import Completion, Sequence, SequenceStatus
from hybrid.inference.stop import StopChecker
from hybrid.models.rope import prefix_class, require_one_rotation
from ops.sampling import sample_seed
from ops.sampling_cdf import VocabShard

if TYPE_CHECKING:
    from hybrid.config import InferenceConfig


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to one sample of a stream."""

    prompt_index: int
    sample_index: int
    token_ids: list[int]  # those it sampled; none where a sample ends without another one
    text: str  # what became certain; a sample's texts make up its completion's, and may lag behind its tokens
    logprobs: torch.Tensor  # (len(token_ids),) fp32, as the completion's
    completion: Completion | None  # the whole sample, on its last delta


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
        vocab_size: ids beyond it are refused; None where it is not known.
        vocab_shard: this rank's stretch of the vocabulary, where its module's logits are that and no more.
        capture: `ParallelMesh.capture`, to run decode steps as recordings.
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
        vocab_size: int | None = None,
        vocab_shard: VocabShard | None = None,
        capture: Capture | None = None,
    ) -> None:
        device = torch.device(device)
        pool = BlockPool(num_blocks, config.block_size, weights_version)
        cache = KVCache(num_layers, num_blocks, config.block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
        self._scheduler = Scheduler(
            pool, max_tokens_per_step=config.max_tokens_per_step, max_num_seqs=config.max_num_seqs
        )
        self._model_config = getattr(module, "config", None)
        positions = getattr(self._model_config, "max_position_embeddings", None) or math.inf
        self._runner: ModelRunner | None = ModelRunner(
            module,
            cache,
            device,
            capture=capture,
            max_num_seqs=config.max_num_seqs,
            max_context_len=int(min(positions, num_blocks * config.block_size)),
        )
        self._stop = StopChecker(tokenizer, eos_token_ids)
        self._sampler = Sampler(self._stop.ending_ids, vocab_size=vocab_size, shard=vocab_shard)
        self._vocab_size = vocab_size
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
        requests = self._make_sequences(prompts, params, seeds)
        with closing(self._run(requests)) as steps, self._progress_bar(requests, progress) as show:
            for _ in steps:
                finished = self._take_ended()
                completions += map(self._completion, finished)
                show(len(finished))
        return sorted(completions, key=lambda each: (each.prompt_index, each.sample_index))

    def generate_unordered(
        self, prompts: Seq[list[int]], params: Seq[SamplingParams], seeds: Seq[int]
    ) -> StepIterator[Completion, None, None]:
        """As ``generate``, one completion at a time, each as soon as it has ended."""
        return self._run_unordered(self._make_sequences(prompts, params, seeds))

    def stream(
        self, prompts: Seq[list[int]], params: Seq[SamplingParams], seeds: Seq[int]
    ) -> StepIterator[Delta, None, None]:
        """As ``generate``, a delta for each token: after a step one of each sample that it added to, in their order.

        The requests are checked now and run as the iterator is read. Between deltas ``abort`` may end some. Closing the
        iterator early, an exception or an interrupt frees everything; after ``close`` it raises RuntimeError.
        """
        return self._run_streaming(self._make_sequences(prompts, params, seeds))

    @property
    def kv_bytes(self) -> int:
        """Of the KV pool's tensors."""
        return 0 if self._runner is None else self._runner.cache.num_bytes

    def abort(self, prompt_index: int | None = None) -> None:
        """End the samples of one prompt, or all of them, as they are; the iterator yields them next."""
        self._ended += self._scheduler.abort(prompt_index)

    def check_requests(self, prompts: Seq[list[int]], params: Seq[SamplingParams]) -> None:
        """What ``generate`` checks before it runs anything: ValueError for the first request that could not run."""
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            if not len(prompt):
                raise ValueError(f"prompt {index} is empty; a prompt needs at least one token, such as the model's BOS")
            if self._vocab_size is not None and not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
                outside = next(token for token in prompt if not 0 <= token < self._vocab_size)
                raise ValueError(
                    f"prompt {index} holds the token id {outside} and the model's vocabulary has {self._vocab_size}; "
                    f"pass ids from 0 to {self._vocab_size - 1}"
                )
            self._stop.require_can_check(each)
            self._sampler.require_can_sample(each, index)
            self._scheduler.require_fits(len(prompt), each.max_tokens, index)
            require_one_rotation(self._model_config, len(prompt), each.max_tokens, index)

    def check(self) -> None:
        """Prove that no KV block is lost or held twice (RuntimeError otherwise)."""
        self._scheduler.check()

    def close(self) -> None:
        """Drop the cache's tensors. The generator cannot be used again, and a stream that is open raises if read on."""
        self._runner = None
        self._forget()

    # -- parts ------------------------------------------------------------------------------------------------------

    def _make_sequences(
        self, prompts: Seq[list[int]], params: Seq[SamplingParams], seeds: Seq[int]
    ) -> list[list[Sequence]]:
        """The samples of each prompt, all of them checked before any is run."""
        self._require_ready()
        if not len(prompts) == len(params) == len(seeds):
            raise ValueError(
                f"there are {len(prompts)} prompts, {len(params)} params and {len(seeds)} seeds; "
                "give one of each for every prompt"
            )
        self.check_requests(prompts, params)
        requests = []
        for index, (prompt, each, seed) in enumerate(zip(prompts, params, seeds, strict=True)):
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
                        rotation=prefix_class(self._model_config, len(prompt)),
                    )
                    for sample in range(each.n)
                ]
            )
        self._num_requests += len(requests)
        return requests

    def _require_ready(self) -> None:
        self._require_open()
        if self._is_generating:
            raise RuntimeError("completions are being generated already; exhaust or close() that iterator first")

    def _require_open(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError(
                "the generator is closed and its KV cache is gone, as when an engine leaves GENERATE mode; what was "
                "not read of a stream is lost: read it to its end before the flip"
            )
        return self._runner

    def _forget(self) -> None:
        """Whatever state an interruption left things in: nothing is under way, and every block is free."""
        self._scheduler.reset()
        self._stop.reset()
        self._ended.clear()

    def _run(
        self, requests: list[list[Sequence]], *, follow_text: bool = False
    ) -> StepIterator[list[Sequence], None, None]:
        """Run the requests; yields after each step the sequences that it gave a token. `_take_ended` has the ended."""
        self._require_ready()
        self._is_generating = True
        is_complete = False
        try:
            for sequences in requests:
                self.stats.prompt_tokens += sequences[0].num_prompt_tokens
                if follow_text:
                    self._stop.follow(sequences)
                if sequences[0].params.max_tokens == 0:
                    for sequence in sequences:
                        sequence.finish("length")
                    self._ended += sequences
                else:
                    self._scheduler.add(sequences)
            while self._scheduler.has_work or self._ended:
                yield self._step() if self._scheduler.has_work else []
                self._require_open()
            is_complete = True
        finally:
            if not is_complete:
                self._forget()
            self._is_generating = False

    def _run_unordered(self, requests: list[list[Sequence]]) -> StepIterator[Completion, None, None]:
        with closing(self._run(requests)) as steps:
            for _ in steps:
                for sequence in self._take_ended():
                    yield self._completion(sequence)

    def _run_streaming(self, requests: list[list[Sequence]]) -> StepIterator[Delta, None, None]:
        handed_out: dict[Sequence, tuple[int, int]] = {}  # tokens and characters
        with closing(self._run(requests, follow_text=True)) as steps:
            for grown in steps:
                for sequence in sorted(grown, key=lambda each: each.order):
                    # One that the reader aborts between these deltas is among the ended.
                    if sequence.status is not SequenceStatus.FINISHED:
                        yield self._delta(sequence, handed_out)
                        self._require_open()
                for sequence in self._take_ended():
                    yield self._delta(sequence, handed_out)
                    self._require_open()

    def _step(self) -> list[Sequence]:
        """One step; the sequences that it gave a token."""
        runner, stats = self._require_open(), self.stats
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
        return [token.sequence for token in sampled]

    def _take_ended(self) -> list[Sequence]:
        ended, self._ended = self._ended, []
        return ended

    def _delta(self, sequence: Sequence, handed_out: dict[Sequence, tuple[int, int]]) -> Delta:
        num_tokens, num_characters = handed_out.pop(sequence, (0, 0))
        completion = None
        if sequence.status is SequenceStatus.FINISHED:
            completion = self._completion(sequence)
            text = completion.text[num_characters:]
        else:
            text = self._stop.new_text(sequence)
            handed_out[sequence] = (sequence.num_completion_tokens, num_characters + len(text))
        return Delta(
            prompt_index=sequence.prompt_index,
            sample_index=sequence.order[1],
            token_ids=sequence.token_ids[sequence.num_prompt_tokens + num_tokens :],
            text=text,
            logprobs=torch.tensor(sequence.logprobs[num_tokens:], dtype=torch.float32),
            completion=completion,
        )

    @contextmanager
    def _progress_bar(self, requests: list[list[Sequence]], enabled: bool) -> Iterator[Callable[[int], None]]:
        """Gives what to call after a step with how many samples it ended."""
        started, num_before = time.perf_counter(), self.stats.generated_tokens
        # miniters: steps that end no sample move the bar as well.
        with tqdm(
            total=sum(map(len, requests)), desc="generate", unit="sample", disable=not enabled, leave=False, miniters=0
        ) as bar:

            def show(num_ended: int) -> None:
                if enabled:
                    rate = (self.stats.generated_tokens - num_before) / (time.perf_counter() - started)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                    bar.update(num_ended)

            yield show

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
            top_logprobs=sequence.top_logprobs if sequence.params.logprobs is not None else None,
            raw_logprobs=(
                torch.tensor(sequence.raw_logprobs, dtype=torch.float32) if sequence.params.raw_logprobs else None
            ),
        )
