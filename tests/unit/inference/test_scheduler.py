from __future__ import annotations

import random

import pytest

from hybrid.inference.blocks import BlockPool
from hybrid.inference.params import SamplingParams
from hybrid.inference.scheduler import SampledToken, Scheduler
from hybrid.inference.sequence import Sequence, SequenceStatus


def make_scheduler(num_blocks=64, block_size=4, max_tokens_per_step=32, max_num_seqs=8):
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(pool, max_tokens_per_step=max_tokens_per_step, max_num_seqs=max_num_seqs)


def add(scheduler, index, prompt, max_tokens=8, n=1):
    """Queue a request of ``prompt`` tokens that no other has (an int), or of these tokens."""
    tokens = [1000 * (index + 1) + place for place in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(n=n, max_tokens=max_tokens)
    sequences = [Sequence((index, sample), index, params, 0, list(tokens), len(tokens)) for sample in range(n)]
    scheduler.require_fits(len(tokens), max_tokens, index)
    scheduler.add(sequences)
    return sequences


def run(scheduler, step, token=7):
    """Compute a step: every sequence that reaches its end samples ``token``, and ends at its max_tokens."""
    sampled = [
        SampledToken(sequence, token, 0.0)
        for chunk in step.chunks
        if chunk.reaches_end
        for sequence in (chunk.sequence, *chunk.sequence.siblings)
    ]
    scheduler.commit(step, sampled)
    for each in sampled:
        if each.sequence.num_remaining_tokens == 0:
            scheduler.finish(each.sequence, "length")
    scheduler.check()


def shape(step):
    return [(chunk.sequence.order[0], chunk.num_tokens) for chunk in step.chunks]


def test_running_sequences_first_then_prompts_in_order_and_in_chunks():
    scheduler = make_scheduler(max_tokens_per_step=10)
    for index, length in enumerate([4, 13, 3]):
        add(scheduler, index, length)
    shapes = []
    for _ in range(4):
        step = scheduler.schedule()
        shapes.append(shape(step))
        run(scheduler, step)
    assert shapes == [[(0, 4), (1, 6)], [(0, 1), (1, 7), (2, 2)], [(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 1), (2, 1)]]


def test_no_more_than_max_num_seqs_run():
    scheduler = make_scheduler(max_num_seqs=3)
    for index in range(5):
        add(scheduler, index, 2, max_tokens=2 + index)
    sizes = []
    while scheduler.has_work:
        step = scheduler.schedule()
        sizes.append(len(step.chunks))
        run(scheduler, step)
    assert max(sizes) == 3 and scheduler.pool.num_free == 64


def test_samples_share_the_prompt_and_copy_its_tail():
    scheduler = make_scheduler()
    samples = add(scheduler, 0, 6, n=3)
    step = scheduler.schedule()
    assert shape(step) == [(0, 6)]
    run(scheduler, step)
    assert [sequence.num_tokens for sequence in samples] == [7, 7, 7]
    assert scheduler.pool.num_free == 62
    step = scheduler.schedule()
    assert shape(step) == [(0, 1)] * 3
    # Two take copies; the third keeps the block, which is then its own.
    assert len(step.copies) == 2 and {source for source, _ in step.copies} == {samples[2].blocks[1]}
    run(scheduler, step)


def test_admission_sees_the_future_peak():
    """Two that each need 5 of 8 blocks in the end do not run together; two that need 3 do."""
    for max_tokens, together in ((17, 1), (9, 2)):
        scheduler = make_scheduler(num_blocks=8)
        for index in range(2):
            add(scheduler, index, 3, max_tokens=max_tokens)
        assert len(scheduler.schedule().chunks) == together


def test_admission_counts_on_blocks_of_sequences_that_end_before():
    """The short one's blocks are free again when the long one is at its longest."""
    scheduler = make_scheduler(num_blocks=10)
    add(scheduler, 0, 12, max_tokens=2)
    add(scheduler, 1, 4, max_tokens=28)
    num_steps = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step.num_preempted == 0
        if num_steps == 0:
            assert len(step.chunks) == 2
        run(scheduler, step)
        num_steps += 1


def test_the_youngest_is_preempted_and_computed_again():
    scheduler = make_scheduler(num_blocks=6)
    samples = add(scheduler, 0, 4, max_tokens=16, n=3)
    preempted = set()
    while scheduler.has_work:
        before = [sequence for sequence in samples if sequence.status is SequenceStatus.RUNNING]
        step = scheduler.schedule()
        waiting = [sequence for sequence in before if sequence.status is SequenceStatus.WAITING]
        running = [sequence for sequence in before if sequence.status is SequenceStatus.RUNNING]
        assert len(waiting) == step.num_preempted
        assert all(young.order > old.order for young in waiting for old in running)
        preempted |= {sequence.order for sequence in waiting}
        run(scheduler, step)
    assert preempted
    assert [sequence.num_completion_tokens for sequence in samples] == [16] * 3
    assert scheduler.pool.num_free == 6


def test_more_samples_than_seats_all_run():
    scheduler = make_scheduler(max_num_seqs=2)
    samples = add(scheduler, 0, 6, max_tokens=5, n=5)
    while scheduler.has_work:
        step = scheduler.schedule()
        assert len(step.chunks) <= 2
        run(scheduler, step)
    assert [sequence.num_completion_tokens for sequence in samples] == [5] * 5


def test_a_request_that_can_never_fit_is_refused():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.require_fits(10, 7, 0)
    with pytest.raises(ValueError, match=r"prompt 3 needs 5 KV blocks \(10 prompt tokens and max_tokens=8, 4"):
        scheduler.require_fits(10, 8, 3)


def test_a_prompt_seen_before_is_not_computed_again_but_for_its_last_token():
    scheduler = make_scheduler()
    for index, expected in enumerate([8, 4]):
        (sequence,) = add(scheduler, index, list(range(8)), max_tokens=1)
        step = scheduler.schedule()
        assert shape(step) == [(index, expected)]
        run(scheduler, step)
        assert sequence.num_cached_tokens == 8 - expected


def test_abort_frees_samples_that_wait_for_their_prompt_too():
    scheduler = make_scheduler(max_tokens_per_step=4)
    aborted = add(scheduler, 0, 10, n=3)
    add(scheduler, 1, 3)
    run(scheduler, scheduler.schedule())
    assert scheduler.abort(0) == aborted
    assert {sequence.finish_reason for sequence in aborted} == {"abort"}
    scheduler.check()
    assert shape(scheduler.schedule()) == [(1, 3)]


@pytest.mark.parametrize("seed", range(6))
def test_random_operations(seed):
    """Add, abort, step with samples and preemption: every sequence ends as it should and no block is lost."""
    chance = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=chance.randint(12, 16), block_size=chance.choice([1, 2]), max_tokens_per_step=7, max_num_seqs=5
    )
    if seed % 2:
        # Admission without foresight, so that many are preempted.
        pool = scheduler.pool
        scheduler._fits = lambda sequence, _: pool.num_blocks_for(sequence.num_tokens) <= pool.num_free
    everyone, num_preempted, index = [], 0, 0
    while index < 300 or scheduler.has_work:
        roll = chance.random()
        if roll < 0.3 and index < 300:
            length, max_tokens = chance.randint(1, 6), chance.randint(1, 6)
            prompt = [chance.randint(0, 1) for _ in range(length)]
            everyone += add(scheduler, index, prompt, max_tokens=max_tokens, n=chance.choice([1, 1, 3, 7]))
            index += 1
        elif roll < 0.33:
            scheduler.abort(chance.randint(0, index))
        elif scheduler.has_work:
            step = scheduler.schedule()
            num_preempted += step.num_preempted
            assert 0 < step.num_tokens <= 7
            run(scheduler, step, token=chance.randint(0, 1))
        scheduler.check()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    for sequence in everyone:
        assert sequence.status is SequenceStatus.FINISHED
        assert sequence.finish_reason == "abort" or sequence.num_remaining_tokens == 0
    assert num_preempted or not seed % 2


def test_a_transition_that_makes_no_sense_is_refused():
    (sequence,) = add(make_scheduler(), 0, 3)
    sequence.finish("abort")
    with pytest.raises(RuntimeError, match="from FINISHED to RUNNING"):
        sequence.move_to(SequenceStatus.RUNNING)
