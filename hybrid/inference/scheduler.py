"""What the next step computes: pure Python on sequences, no tensors, no clocks, no chance.

Every rank of a tensor group runs its own copy on the same requests and reaches the same decisions.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from hybrid.inference.blocks import BlockPool
from hybrid.inference.sequence import FinishReason, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that a step computes: the ``num_tokens`` after its computed ones."""

    sequence: Sequence
    num_tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether its last token's logits are the sequence's next token."""
        return self.sequence.num_computed_tokens + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass."""

    chunks: list[Chunk]
    copies: list[tuple[int, int]]  # (source, target) blocks, to be copied before anything is written
    num_preempted: int

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    sequence: Sequence
    token_id: int
    logprob: float
    top_logprobs: dict[int, float] | None = None  # what its sequence's parameters ask for besides
    raw_logprob: float | None = None


class Scheduler:
    """Continuous batching under a token budget.

    Each step takes running sequences first, oldest first, then waiting ones first come first served, long prompts in
    chunks. Out of blocks, the youngest running sequence is preempted: it loses its blocks and is computed again later.
    A waiting sequence is admitted when the pool can take it even if every running one, it included, runs to its
    ``max_tokens``, so that preemption is rare.

    Args:
        pool: the KV blocks.
        max_tokens_per_step: tokens a step computes at most.
        max_num_seqs: sequences that run at once at most.
    """

    def __init__(self, pool: BlockPool, *, max_tokens_per_step: int, max_num_seqs: int) -> None:
        self.pool = pool
        self.max_tokens_per_step = max_tokens_per_step
        self.max_num_seqs = max_num_seqs
        self.waiting: list[Sequence] = []  # both oldest first
        self.running: list[Sequence] = []
        # Whoever computes a prompt that is not computed yet; all that have the same prompt start from it.
        self._leaders: dict[tuple[int, ...], Sequence] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def require_fits(self, num_prompt_tokens: int, max_tokens: int, prompt_index: int) -> None:
        """Raise ValueError for a request that could not finish with the whole pool to itself."""
        # The last token is sampled and never computed.
        num_blocks = self.pool.num_blocks_for(num_prompt_tokens + max_tokens - 1)
        if num_blocks > self.pool.num_blocks:
            raise ValueError(
                f"prompt {prompt_index} needs {num_blocks} KV blocks ({num_prompt_tokens} prompt tokens and "
                f"max_tokens={max_tokens}, {self.pool.block_size} to a block) and the cache has "
                f"{self.pool.num_blocks}; shorten the prompt, lower max_tokens or give the KV cache more memory"
            )

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the samples of one prompt: one computes it, the others start from there.

        Requests with equal prompts, of whatever parameters, are one prompt as long as none has computed it.
        """
        for sequence in sequences:
            leader = self._leaders.setdefault(tuple(sequence.token_ids), sequence)
            if leader is sequence:
                insort(self.waiting, sequence, key=_age)
            else:
                sequence.status = SequenceStatus.SIBLING
                leader.siblings.append(sequence)

    # -- one step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Choose the next step's chunks and give them their blocks."""
        chunks: list[Chunk] = []
        copies: list[tuple[int, int]] = []
        budget = self.max_tokens_per_step
        num_preempted = 0
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            num_preempted += self._make_room(sequence, num_tokens)
            if sequence.status is not SequenceStatus.RUNNING:
                break  # it was itself the youngest
            chunks.append(self._take(sequence, num_tokens, copies))
            budget -= num_tokens
            index += 1
        while self.waiting and budget > 0 and not num_preempted:
            sequence = self.waiting[0]
            cached = self.pool.match(sequence.token_ids, sequence.num_tokens - 1, sequence.rotation)
            if self.running and not self._fits(sequence, cached):
                break
            del self.waiting[0]
            self._admit(sequence, cached)
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            chunks.append(self._take(sequence, num_tokens, copies))
            budget -= num_tokens
        if not chunks:
            raise RuntimeError(
                f"nothing can run: {len(self.waiting)} waiting, {len(self.running)} running, "
                f"{self.pool.num_free} of {self.pool.num_blocks} KV blocks free"
            )
        return Step(chunks, copies, num_preempted)

    def commit(self, step: Step, sampled: Iterable[SampledToken]) -> None:
        """Take in what a step computed: counts, new tokens, and samples that start here."""
        starting: list[Sequence] = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens += chunk.num_tokens
            if sequence.num_computed_tokens == sequence.num_prompt_tokens and not sequence.num_completion_tokens:
                starting.append(sequence)
        for leader in starting:
            self._leaders.pop(tuple(leader.token_ids), None)
            self._start_siblings(leader)
        for token in sampled:
            token.sequence.append(token.token_id, token.logprob, token.top_logprobs, token.raw_logprob)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence, wherever it is, and free its blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.forget_computed()
        sequence.finish(reason, stop_reason)

    def abort(self, prompt_index: int | None) -> list[Sequence]:
        """End every sample of one prompt, or of all (None); the sequences it ended, oldest first."""
        found: list[Sequence] = []
        for sequence in (*self.running, *self.waiting):
            everyone = (sequence, *sequence.siblings)
            ended = [each for each in everyone if prompt_index is None or each.prompt_index == prompt_index]
            found += ended
            if sequence in ended:
                sequence.siblings = []
                self._lead_on([each for each in everyone if each not in ended], sequence)
            elif ended:
                sequence.siblings = [each for each in sequence.siblings if each not in ended]
        for sequence in found:
            self.finish(sequence, "abort")
        return sorted(found, key=_age)

    def reset(self) -> None:
        """Forget every sequence and every block's content, whatever state an interruption left them in."""
        self.waiting.clear()
        self.running.clear()
        self._leaders.clear()
        self.pool.reset()

    def check(self) -> None:
        """Prove that no block is lost or held twice and that every sequence is where its status says."""
        self.pool.check(sequence.blocks for sequence in self.running)
        for status, queue in ((SequenceStatus.WAITING, self.waiting), (SequenceStatus.RUNNING, self.running)):
            for sequence in queue:
                if sequence.status is not status:
                    raise RuntimeError(f"sequence {sequence.order} is {sequence.status.name} among the {status.name}")
                if not sequence.num_computed_tokens < sequence.num_tokens:
                    raise RuntimeError(
                        f"sequence {sequence.order} has {sequence.num_computed_tokens} computed of "
                        f"{sequence.num_tokens} tokens; one must be left to compute"
                    )
            if sorted(queue, key=_age) != queue:
                raise RuntimeError(f"the {status.name} sequences are not in their order")

    # -- parts ------------------------------------------------------------------------------------------------------

    def _take(self, sequence: Sequence, num_tokens: int, copies: list[tuple[int, int]]) -> Chunk:
        start = sequence.num_computed_tokens
        copy = self.pool.extend(sequence.blocks, start, start + num_tokens)
        if copy is not None:
            copies.append(copy)
        # Found from now on, by prompts of this very step too: each layer writes all keys before it reads any.
        self._index_full_blocks(sequence, start + num_tokens)
        return Chunk(sequence, num_tokens)

    def _make_room(self, sequence: Sequence, num_tokens: int) -> int:
        """Preempt the youngest until a running sequence's chunk fits, itself in the end; how many were preempted."""
        start = sequence.num_computed_tokens
        num_preempted = 0
        while self.pool.num_new_blocks(sequence.blocks, start, start + num_tokens) > self.pool.num_free:
            victim = self.running.pop()
            self.pool.release(victim.blocks)
            victim.forget_computed()
            victim.move_to(SequenceStatus.WAITING)
            insort(self.waiting, victim, key=_age)
            num_preempted += 1
            if victim is sequence:
                break
        return num_preempted

    def _admit(self, sequence: Sequence, cached: list[int]) -> None:
        """Start a waiting sequence behind the blocks that hold its first tokens already."""
        self.pool.share(cached)
        sequence.blocks.extend(cached)
        sequence.num_computed_tokens = len(cached) * self.pool.block_size
        sequence.num_indexed_blocks = len(cached)
        sequence.content_id = self.pool.content_of(cached[-1]) if cached else None
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.move_to(SequenceStatus.RUNNING)
        insort(self.running, sequence, key=_age)

    def _start_siblings(self, leader: Sequence) -> None:
        """Let those that wait for a prompt run from it now that it is computed; they share its blocks.

        Those that do not fit wait; they compute what the pool cannot find again once they run.
        """
        for sibling in leader.siblings:
            sibling.num_cached_tokens = leader.num_prompt_tokens
            if self._fits(sibling, leader.blocks):
                self.pool.share(leader.blocks)
                sibling.blocks.extend(leader.blocks)
                sibling.num_computed_tokens = leader.num_computed_tokens
                sibling.num_indexed_blocks = leader.num_indexed_blocks
                sibling.content_id = leader.content_id
                sibling.move_to(SequenceStatus.RUNNING)
                insort(self.running, sibling, key=_age)
            else:
                sibling.move_to(SequenceStatus.WAITING)
                insort(self.waiting, sibling, key=_age)
        leader.siblings = []

    def _lead_on(self, siblings: list[Sequence], former: Sequence) -> None:
        """Have the first of those that waited for a prompt compute it, since ``former`` will not."""
        key = tuple(former.token_ids)
        if self._leaders.get(key) is former:
            del self._leaders[key]
        if siblings:
            leader, *leader.siblings = siblings
            leader.move_to(SequenceStatus.WAITING)
            insort(self.waiting, leader, key=_age)
            self._leaders[key] = leader

    def _index_full_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        size = self.pool.block_size
        for number in range(sequence.num_indexed_blocks, num_tokens // size):
            tokens = tuple(sequence.token_ids[number * size : (number + 1) * size])
            sequence.content_id = self.pool.index(
                sequence.blocks[number], sequence.content_id, tokens, sequence.rotation
            )
            sequence.num_indexed_blocks += 1

    def _fits(self, candidate: Sequence, cached: Seq[int]) -> bool:
        """Whether a sequence has a seat, and blocks even if it and all that run go to their ``max_tokens``.

        Those that wait for a leader's prompt are not asked for: each is, when it could start.

        Args:
            cached: the blocks it would start from; the last of them may be partly filled, and is copied then.
        """
        if len(self.running) >= self.max_num_seqs:
            return False
        pool, size = self.pool, self.pool.block_size
        found = set(cached)
        copied = len(cached) * size > candidate.num_tokens
        num_used = pool.num_blocks - pool.num_free - pool.num_held(cached)
        num_used += pool.num_blocks_for(candidate.num_tokens) + copied
        freed = pool.num_blocks_for(candidate.num_tokens) - pool.num_held(cached) + copied
        # Of each: tokens still to be written (the last is sampled and never computed), and blocks freed then.
        futures = [(candidate.num_remaining_tokens - 1, freed)]
        for sequence in self.running:
            # What it still takes for the tokens it has, a copy of a shared tail included.
            num_used += pool.num_new_blocks(sequence.blocks, sequence.num_computed_tokens, sequence.num_tokens)
            # What it shares is freed by the last that holds it, which may be long after.
            shared = pool.num_shared(sequence.blocks, found)
            futures.append((sequence.num_remaining_tokens - 1, pool.num_blocks_for(sequence.num_tokens) - shared))
        # All sample a token a step, so those with less to come have ended when one reaches its last token. Walking
        # from the one that lasts longest, `num_alive` are left with `num_kept` blocks besides what they grew by.
        futures.sort(reverse=True)
        num_freed = sum(freed for _, freed in futures)
        num_kept = num_used - num_freed
        for num_alive, (remaining, freed) in enumerate(futures, 1):
            num_kept += freed
            if num_kept + num_alive * (1 + remaining // size) > pool.num_blocks:
                return False
        return True


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
