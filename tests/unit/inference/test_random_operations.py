"""Ten thousand operations on the scheduler and the pool, over a model that knows what each cache slot must hold.

The model keeps, for each token, a hash of everything up to it and of the weights. A step copies, writes and reads the
slots in the order of a forward pass, and every slot that a sequence reads must hold the hash of that sequence's own
prefix: a block shared wrongly, found by a stale key or not copied in time is another hash. The next token is made of
the hash that was read, so that each completion can be compared with that of its request alone.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from hybrid.inference.blocks import BlockPool
from hybrid.inference.params import SamplingParams
from hybrid.inference.scheduler import SampledToken, Scheduler
from hybrid.inference.sequence import Sequence, SequenceStatus

NUM_TOKENS = 3  # a small vocabulary, so that completions share prefixes too
FAULTS = ("schedule", "copy", "write", "sample", "commit")


class Fault(Exception):
    """Stands for whatever may happen in the middle of a step."""


def next_state(state, token):
    return hash((state, token))


def next_token(state, seed):
    return hash((state, seed)) % NUM_TOKENS


def rotation_of(prompt):
    """Stands for RoPE that rotates long prompts in another way."""
    return int(len(prompt) > 9)


def completion_alone(prompt, seed, max_tokens, version):
    state, tokens = hash((version, rotation_of(prompt))), []
    for token in prompt:
        state = next_state(state, token)
    for _ in range(max_tokens):
        tokens.append(next_token(state, seed))
        state = next_state(state, tokens[-1])
    return tokens


class FakeModel:
    """Runs a step on a cache of one hash a slot, as ModelRunner and KVCache do."""

    def __init__(self, pool):
        self.pool = pool
        self.slots = [None] * (pool.num_blocks * pool.block_size)
        self._states = {}  # of each sequence, one a token

    def run(self, step, fault=None):
        if fault == "copy":
            raise Fault
        size = self.pool.block_size
        sources = [self.slots[source * size : (source + 1) * size] for source, _ in step.copies]
        for content, (_, target) in zip(sources, step.copies, strict=True):
            self.slots[target * size : (target + 1) * size] = content
        for index, chunk in enumerate(step.chunks):
            sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
            states = self._states_of(sequence)
            for position in range(start, start + chunk.num_tokens):
                self.slots[self._slot(sequence, position)] = states[position]
            if fault == "write" and index == len(step.chunks) // 2:
                raise Fault
        sampled = []
        for chunk in step.chunks:
            sequence, end = chunk.sequence, chunk.sequence.num_computed_tokens + chunk.num_tokens
            read = [self.slots[self._slot(sequence, position)] for position in range(end)]
            assert read == self._states_of(sequence)[:end], f"{sequence.order} reads what is not its own"
            if chunk.reaches_end:
                everyone = (sequence, *sequence.siblings)
                sampled += [SampledToken(each, next_token(read[-1], each.seed), 0.0) for each in everyone]
        if fault == "sample":
            raise Fault
        return sampled

    def _slot(self, sequence, position):
        size = self.pool.block_size
        return sequence.blocks[position // size] * size + position % size

    def _states_of(self, sequence):
        states = self._states.setdefault(sequence, [])
        state = states[-1] if states else hash((self.pool.weights_version, sequence.rotation))
        for token in sequence.token_ids[len(states) :]:
            states.append(state := next_state(state, token))
        return states


@dataclass
class Request:
    prompt: list[int]
    params: SamplingParams
    seed: int
    sequences: list[Sequence] = field(default_factory=list)


class Trial:
    """A scheduler, its model, the requests under way, and counts of what happened."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.happened = Counter()
        self.num_operations = self.num_requests = self.version = 0
        self.requests = {}  # by prompt index: those that are not over
        self.new_pool()

    def new_pool(self):
        chance = self.chance
        self.version += 1
        pool = BlockPool(chance.randint(8, 24), chance.choice([1, 2, 3, 4]), self.version)
        self.scheduler = Scheduler(
            pool, max_tokens_per_step=chance.randint(2, 14), max_num_seqs=chance.choice([2, 5, 8, 12])
        )
        self.model = FakeModel(pool)
        if chance.random() < 0.5:
            self._admit_without_foresight()
        self.preempted = set()
        self.happened["new pool"] += 1

    def _admit_without_foresight(self):
        """So that preemption is not rare."""
        scheduler, pool = self.scheduler, self.scheduler.pool

        def fits(candidate, cached):
            has_room = pool.num_blocks_for(candidate.num_tokens) <= pool.num_free
            return has_room and len(scheduler.running) < scheduler.max_num_seqs

        scheduler._fits = fits

    # -- operations -------------------------------------------------------------------------------------------------

    def operate(self):
        chance, busy = self.chance, self.scheduler.has_work
        kinds = {"add": 24, "step": 60 * busy, "abort": 5 * busy, "abort all": 0.3 * busy, "fault": 1.5 * busy}
        kinds |= {"close": 0.3 * busy, "new version": 8 * (not busy)}
        kind = chance.choices(list(kinds), list(kinds.values()))[0]
        getattr(self, kind.replace(" ", "_"))()
        self.num_operations += 1
        self.check()

    def add(self):
        chance = self.chance
        params = SamplingParams(n=chance.choice([1, 1, 2, 3, 4]), max_tokens=chance.randint(1, 10))
        request = Request(self._prompt(), params, chance.getrandbits(32))
        if chance.random() < 0.03:
            request.prompt = [0] * (self.scheduler.pool.num_blocks * self.scheduler.pool.block_size + 1)
        try:
            self.scheduler.require_fits(len(request.prompt), params.max_tokens, self.num_requests)
        except ValueError:
            self.happened["refused"] += 1
            return
        self.ask(request)

    def _prompt(self):
        """Equal to one under way, or beginning as others do, or like none."""
        chance = self.chance
        if self.requests and chance.random() < 0.3:
            return list(chance.choice(list(self.requests.values())).prompt)
        stem = [0, 1, 2, 2, 1, 0, 0, 2] * 2
        prompt = stem[: chance.randint(0, 16)] + [chance.randrange(NUM_TOKENS) for _ in range(chance.randint(0, 6))]
        return prompt or [1]

    def ask(self, request):
        index, params = self.num_requests, request.params
        self.num_requests += 1
        request.sequences = [
            Sequence(
                order=(index, sample),
                prompt_index=index,
                params=params,
                seed=request.seed + sample,
                token_ids=list(request.prompt),
                num_prompt_tokens=len(request.prompt),
                rotation=rotation_of(request.prompt),
            )
            for sample in range(params.n)
        ]
        self.requests[index] = request
        self.scheduler.add(request.sequences)
        leader = self.scheduler._leaders[tuple(request.prompt)]
        if leader is not request.sequences[0]:
            self.happened[f"prompt merged with one that is {leader.status.name}"] += 1

    def step(self, fault=None):
        scheduler, before = self.scheduler, list(self.scheduler.running)
        step = self._schedule(fault == "schedule")
        self._observe(step, before)
        assert 0 < step.num_tokens <= scheduler.max_tokens_per_step
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert len({chunk.sequence for chunk in step.chunks}) == len(step.chunks)
        # Those that were just preempted are not let in again by the blocks that they gave up.
        assert not step.num_preempted or {chunk.sequence for chunk in step.chunks} <= set(before)
        sampled = self.model.run(step, fault)
        scheduler.commit(step, self._interrupted(sampled) if fault == "commit" else sampled)
        for token in sampled:
            sequence = token.sequence
            if sequence.status is SequenceStatus.WAITING:
                self.happened["sample that waits for a seat"] += 1
            if sequence.num_remaining_tokens == 0:
                scheduler.finish(sequence, "length")
        self._collect()

    def _schedule(self, is_interrupted):
        pool = self.scheduler.pool
        if not is_interrupted:
            return self.scheduler.schedule()
        take, calls = pool._take, iter(range(self.chance.randint(0, 2)))

        def interrupted():
            if next(calls, None) is None:
                raise Fault
            return take()

        pool._take = interrupted
        try:
            return self.scheduler.schedule()
        finally:
            del pool._take

    def _interrupted(self, sampled):
        yield from sampled[: len(sampled) // 2]
        raise Fault

    def fault(self):
        """An interruption somewhere in a step: everything is forgotten, as the generator does, and asked again."""
        fault = self.chance.choice(FAULTS)
        try:
            self.step(fault)
        except Fault:
            self.happened[f"fault in {fault}"] += 1
            self.scheduler.reset()
            assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
            self._ask_again()

    def abort(self):
        index = self.chance.choice(list(self.requests))
        for sequence in self.requests[index].sequences:
            status = sequence.status.name
            self.happened[f"abort of {status}"] += 1
            if sequence.siblings:
                self.happened[f"abort of {status} leader"] += 1
                self.happened["prompt handed on"] += any(each.prompt_index != index for each in sequence.siblings)
            if status == "WAITING" and sequence in self.preempted:
                self.happened["abort of preempted"] += 1
        ended = self.scheduler.abort(index)
        assert {sequence.prompt_index for sequence in ended} == {index}
        self._collect()
        assert index not in self.requests

    def abort_all(self):
        alive = {each for request in self.requests.values() for each in request.sequences if each.finish_reason is None}
        assert set(self.scheduler.abort(None)) == alive
        assert not self.scheduler.has_work
        self.happened["abort of all"] += 1
        self._collect()
        assert not self.requests

    def new_version(self):
        """What the old weights left in the pool stays there, and must not be found."""
        assert not self.scheduler.has_work
        self.version += 1
        self.scheduler.pool.weights_version = self.version
        self.model._states.clear()
        self.happened["new weights over old blocks"] += len(self.scheduler.pool._key_of_block) > 0

    def close(self):
        """A flip while requests are under way."""
        self.scheduler.reset()
        self.new_pool()
        self.happened["flip under way"] += 1
        self._ask_again()

    def _ask_again(self):
        """Ask what was interrupted anew; leave out what the present pool cannot take."""
        requests, self.requests = self.requests, {}
        for request in requests.values():
            try:
                self.scheduler.require_fits(len(request.prompt), request.params.max_tokens, self.num_requests)
            except ValueError:
                continue
            self.ask(request)

    # -- proof ------------------------------------------------------------------------------------------------------

    def _observe(self, step, before):
        happened, size = self.happened, self.scheduler.pool.block_size
        written = Counter()
        happened["copy"] += len(step.copies)
        for sequence in before:
            if sequence.status is SequenceStatus.WAITING:
                happened["preemption"] += 1
                self.preempted.add(sequence)
        for chunk in step.chunks:
            sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
            happened["chunk of more"] += not chunk.reaches_end
            if sequence not in before and start:
                found = sequence.blocks[: start // size]
                happened["prefix hit"] += 1
                happened["prefix hit after preemption"] += sequence in self.preempted
                happened["prefix of the same step"] += any(written[block] for block in found)
                happened["prefix hit of all but a block"] += sequence.num_tokens - start <= size
            written.update(sequence.blocks[start // size :])

    def _collect(self):
        """Take out the requests that are over, and compare what they got."""
        for index, request in list(self.requests.items()):
            if any(sequence.status is not SequenceStatus.FINISHED for sequence in request.sequences):
                continue
            del self.requests[index]
            for sequence in request.sequences:
                expected = completion_alone(request.prompt, sequence.seed, request.params.max_tokens, self.version)
                if sequence.finish_reason == "abort":
                    expected = expected[: sequence.num_completion_tokens]
                assert sequence.completion_ids == expected
                self.happened[f"ended by {sequence.finish_reason}"] += 1

    def check(self):
        scheduler = self.scheduler
        scheduler.check()
        pool = scheduler.pool
        held = {block for sequence in scheduler.running for block in sequence.blocks}
        cached = pool._key_of_block.keys() - held
        empty = pool._free.keys() - cached
        assert len(held) + len(cached) + len(empty) == pool.num_blocks and pool.num_free == len(cached) + len(empty)
        queued = [*scheduler.waiting, *scheduler.running]
        siblings = [sibling for sequence in queued for sibling in sequence.siblings]
        assert all(sibling.status is SequenceStatus.SIBLING for sibling in siblings)
        alive = [each for request in self.requests.values() for each in request.sequences if each.finish_reason is None]
        assert len(queued) + len(siblings) == len(alive) and {*queued, *siblings} == set(alive)
        assert not any(sequence.blocks for sequence in alive if sequence.status is not SequenceStatus.RUNNING)
        assert {*scheduler._leaders.values()} <= set(queued)


OFTEN = {
    "abort of RUNNING",
    "abort of SIBLING",
    "abort of WAITING",
    "abort of WAITING leader",
    "chunk of more",
    "copy",
    "ended by abort",
    "ended by length",
    "new pool",
    "new weights over old blocks",
    "preemption",
    "prefix hit",
    "prefix hit after preemption",
    "prefix hit of all but a block",
    "prefix of the same step",
    "prompt handed on",
    "prompt merged with one that is WAITING",
    "refused",
    "sample that waits for a seat",
}
SOMETIMES = {
    "abort of RUNNING leader",
    "abort of all",
    "abort of preempted",
    "flip under way",
    "prompt merged with one that is RUNNING",
    *(f"fault in {fault}" for fault in FAULTS),
}


@pytest.mark.parametrize("seed", range(3))
def test_ten_thousand_operations(seed):
    trial = Trial(seed)
    while trial.num_operations < 10_000:
        for _ in range(trial.chance.randint(50, 150)):
            trial.operate()
        while trial.scheduler.has_work:
            trial.step()
            trial.num_operations += 1
            trial.check()
        assert not trial.requests and trial.scheduler.pool.num_free == trial.scheduler.pool.num_blocks
        assert not trial.scheduler._leaders
        if trial.chance.random() < 0.5:
            trial.new_version()
        else:
            trial.new_pool()
    rare = {what: trial.happened[what] for what in OFTEN if trial.happened[what] < 10}
    rare |= {what: trial.happened[what] for what in SOMETIMES if trial.happened[what] < 3}
    assert not rare, trial.happened
