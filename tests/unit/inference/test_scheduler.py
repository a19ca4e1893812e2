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


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_requests_that_were_let_in_behind_others_are_never_preempted(block_size):
    """As long as prompts are computed whole: what comes is then known. Three in four trials share prefixes."""
    stem = [1, 2, 3, 4, 5, 6, 7, 8]
    for seed in range(80):
        chance, index = random.Random(seed), 0
        scheduler = make_scheduler(chance.randint(12, 24), block_size, max_tokens_per_step=1000)
        while index < 25 or scheduler.has_work:
            if index < 25 and chance.random() < 0.4:
                length, max_tokens = chance.randint(1, 8), chance.randint(1, 12)
                room = scheduler.pool.num_blocks * block_size
                prompt = [*stem[:length], 100 + index] if seed % 4 else length
                add(scheduler, index, prompt, max_tokens=min(max_tokens, room - length))
                index += 1
            elif scheduler.has_work:
                step = scheduler.schedule()
                assert step.num_preempted == 0
                run(scheduler, step)


@pytest.mark.usefixtures("hopeful")
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


# -- prefixes found again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "num_left"), [(1, 1), (3, 2), (4, 4), (5, 3), (8, 8)])
def test_of_a_prompt_seen_before_the_last_block_with_its_last_token_is_computed(block_size, num_left):
    scheduler = make_scheduler(block_size=block_size)
    for index, expected in enumerate([8, num_left]):
        (sequence,) = add(scheduler, index, list(range(8)), max_tokens=1)
        step = scheduler.schedule()
        assert shape(step) == [(index, expected)]
        run(scheduler, step)
        assert sequence.num_cached_tokens == 8 - expected


def test_prompts_of_one_step_share_what_they_begin_with():
    scheduler = make_scheduler()
    first, second = *add(scheduler, 0, [*range(8), 50]), *add(scheduler, 1, [*range(8), 60, 61])
    step = scheduler.schedule()
    assert shape(step) == [(0, 9), (1, 2)]
    assert first.blocks[:2] == second.blocks[:2]
    run(scheduler, step)


def test_prompts_whose_hashes_collide_are_two_prompts():
    other = 5 + 2**61 - 1
    assert hash((5,) * 8) == hash((other,) * 8)
    scheduler = make_scheduler()
    add(scheduler, 0, [5] * 8)
    add(scheduler, 1, [other] * 8)
    assert shape(scheduler.schedule()) == [(0, 8), (1, 8)]


def test_a_block_that_was_used_again_is_not_found_by_its_old_content():
    scheduler = make_scheduler(num_blocks=3)
    prompts = [list(range(9)), list(range(20, 29)), list(range(9))]
    for index, prompt in enumerate(prompts):
        add(scheduler, index, prompt, max_tokens=1)
        step = scheduler.schedule()
        assert shape(step) == [(index, 9)]
        run(scheduler, step)


@pytest.mark.usefixtures("hopeful")
def test_one_that_was_preempted_finds_what_is_left_of_its_prefix():
    scheduler = make_scheduler(num_blocks=6)
    _, young = add(scheduler, 0, 4, max_tokens=16, n=2)
    starts = []
    while scheduler.has_work:
        was_waiting = young.status is SequenceStatus.WAITING
        step = scheduler.schedule()
        if was_waiting and young.status is SequenceStatus.RUNNING:
            starts.append((young.num_tokens, young.num_computed_tokens))
        run(scheduler, step)
    # It had 13 tokens when it first lost its blocks; the three full ones are there again.
    assert starts[0] == (13, 12)
    assert all(start == (tokens - 1) // 4 * 4 for tokens, start in starts)
    assert young.completion_ids == [7] * 16


# -- equal prompts ----------------------------------------------------------------------------------------------------


def test_requests_with_equal_prompts_compute_it_once():
    scheduler = make_scheduler(max_tokens_per_step=6)
    prompt = list(range(9))
    first = add(scheduler, 0, prompt, max_tokens=5)
    steps = [scheduler.schedule()]
    run(scheduler, steps[0])
    # The prompt is under way by now.
    others = [*add(scheduler, 1, prompt, max_tokens=2, n=2), *add(scheduler, 2, prompt, max_tokens=1)]
    for _ in range(2):
        steps.append(scheduler.schedule())
        run(scheduler, steps[-1])
    assert [shape(step) for step in steps] == [[(0, 6)], [(0, 3)], [(0, 1), (1, 1), (1, 1)]]
    assert [each.num_cached_tokens for each in (*first, *others)] == [0, 9, 9, 9]
    assert [each.num_completion_tokens for each in (*first, *others)] == [2, 2, 2, 1]
    # It is computed, so that the next with this prompt finds blocks instead.
    add(scheduler, 3, prompt)
    assert shape(scheduler.schedule()) == [(0, 1), (3, 1)]


# -- ended in the middle ----------------------------------------------------------------------------------------------


def test_abort_frees_samples_that_wait_for_their_prompt_too():
    scheduler = make_scheduler(max_tokens_per_step=4)
    aborted = add(scheduler, 0, 10, n=3)
    add(scheduler, 1, 3)
    run(scheduler, scheduler.schedule())
    assert scheduler.abort(0) == aborted
    assert {sequence.finish_reason for sequence in aborted} == {"abort"}
    scheduler.check()
    assert shape(scheduler.schedule()) == [(1, 3)]


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_prompt_whose_request_is_aborted_is_computed_for_the_others(num_steps):
    """The next one goes on from the blocks that the first had computed: 4 of its 6 tokens' in whole blocks."""
    scheduler = make_scheduler(max_tokens_per_step=6)
    prompt = list(range(9))
    first = add(scheduler, 0, prompt, n=2)
    others = [*add(scheduler, 1, prompt, max_tokens=2, n=2), *add(scheduler, 2, prompt, max_tokens=2)]
    for _ in range(num_steps):
        run(scheduler, scheduler.schedule())
    assert scheduler.abort(0) == first
    scheduler.check()
    shapes = []
    while scheduler.has_work:
        step = scheduler.schedule()
        shapes.append(shape(step))
        run(scheduler, step)
    started = [[(1, 5)]] if num_steps else [[(1, 6)], [(1, 3)]]
    assert shapes == [*started, [(1, 1), (1, 1), (2, 1)]]
    assert [each.completion_ids for each in others] == [[7, 7]] * 3
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_abort_of_those_that_wait_for_anothers_prompt_leaves_it():
    scheduler = make_scheduler()
    prompt = list(range(9))
    (first,) = add(scheduler, 0, prompt, max_tokens=2)
    waiting = add(scheduler, 1, prompt, n=2)
    (last,) = add(scheduler, 2, prompt, max_tokens=2)
    assert scheduler.abort(1) == waiting
    scheduler.check()
    while scheduler.has_work:
        run(scheduler, scheduler.schedule())
    assert first.completion_ids == last.completion_ids == [7, 7]


@pytest.mark.parametrize("whom", [0, 1, None])
@pytest.mark.usefixtures("hopeful")
def test_abort_of_one_that_was_preempted(whom):
    scheduler = make_scheduler(num_blocks=6)
    # Of two samples one is preempted, and a request waits behind it.
    samples = add(scheduler, 0, 4, max_tokens=16, n=2)
    step = scheduler.schedule()
    while not step.num_preempted:
        run(scheduler, step)
        step = scheduler.schedule()
    run(scheduler, step)
    (other,) = add(scheduler, 1, 4, max_tokens=16)
    assert samples[1].status is other.status is SequenceStatus.WAITING
    expected = {0: samples, 1: [other], None: [*samples, other]}[whom]
    assert scheduler.abort(whom) == expected
    scheduler.check()
    while scheduler.has_work:
        run(scheduler, scheduler.schedule())
    for sequence in (*samples, other):
        assert sequence.finish_reason == ("abort" if sequence in expected else "length")
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_reset_in_the_middle_of_a_step_forgets_everything():
    scheduler = make_scheduler(num_blocks=6)
    prompt = list(range(9))
    for is_interrupted in (True, False):
        samples = add(scheduler, 0, prompt, max_tokens=4, n=2)
        step = scheduler.schedule()
        # Neither the blocks that are indexed already nor the prompt that is under way are those of the next call.
        assert shape(step) == [(0, 9)]
        if is_interrupted:
            scheduler.reset()
            scheduler.check()
            assert scheduler.pool.num_free == 6 and not scheduler.has_work
    run(scheduler, step)
    while scheduler.has_work:
        run(scheduler, scheduler.schedule())
    assert [each.completion_ids for each in samples] == [[7] * 4] * 2


def test_a_transition_that_makes_no_sense_is_refused():
    (sequence,) = add(make_scheduler(), 0, 3)
    sequence.finish("abort")
    with pytest.raises(RuntimeError, match="from FINISHED to RUNNING"):
        sequence.move_to(SequenceStatus.RUNNING)
