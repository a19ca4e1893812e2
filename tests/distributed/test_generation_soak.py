"""A thousand calls of generate with flips and steps between them: memory stays flat and no block is lost."""

import gc
import itertools
import random

from hybrid.inference.params import SamplingParams
from tests.distributed.test_engine import make_engine, train_once
from tests.distributed.world import run_world

NUM_CALLS = 1000
MAX_GROWTH = 6 * 2**20  # less than two pages a call


def draw_requests(chance):
    """Some prompts, some of them equal, begun alike or sampled several times."""
    stem = [chance.randrange(3, 263) for _ in range(12)]
    prompts = [stem[: chance.randint(1, 12)] for _ in range(chance.randint(1, 4))]
    params = [
        SamplingParams(
            n=chance.choice([1, 1, 2, 3]),
            max_tokens=chance.randint(0, 4),
            top_k=chance.choice([0, 5]),
            stop=chance.choice([(), ("ab",)]),
        )
        for _ in prompts
    ]
    return prompts, params


def use(engine, call, chance):
    """One call, in one of the ways that there are; one in four is not read to its end."""
    prompts, params = draw_requests(chance)
    kind = call % 4
    if kind == 0:
        return len(engine.generate(prompts, params)) == sum(each.n for each in params)
    if kind == 1:
        deltas = list(engine.stream(prompts, params))
        return sum(delta.completion is not None for delta in deltas) == sum(each.n for each in params)
    if kind == 2:
        stream = engine.generate_unordered(prompts, params)
        next(stream)
        engine.abort(len(prompts) - 1)
        return sum(1 for _ in stream) == sum(each.n for each in params) - 1
    stream = engine.stream(prompts, params)
    for _ in itertools.islice(stream, 2):
        pass
    stream.close()
    return True


def use_in_generate_mode(engine, call, chance):
    with engine.generate_mode():
        is_complete = use(engine, call, chance)
        scheduler = engine._generator._scheduler
        scheduler.check()
        assert scheduler.pool.num_free == scheduler.pool.num_blocks and not scheduler.has_work
        assert not scheduler._leaders
    engine.flips.clear()
    return is_complete


def a_thousand_calls():
    engine, chance = make_engine(1, threshold=100), random.Random(0)
    checksums, held = engine.verify(), 0
    for call in range(NUM_CALLS):
        if call == NUM_CALLS // 5:  # pools and buffers have found their sizes
            gc.collect()
            held = engine.mesh.memory_in_use()
        assert use_in_generate_mode(engine, call, chance), f"call {call} lost a sample"
        if call % 100 == 99:
            train_once(engine, call)
    gc.collect()
    grown = engine.mesh.memory_in_use() - held
    assert grown < MAX_GROWTH, f"{grown / 2**20:.1f} MiB more after {NUM_CALLS} calls"
    assert engine.weights_version == NUM_CALLS // 100 and engine.verify() != checksums


def test_a_thousand_calls_leave_memory_flat(tmp_path):
    run_world(a_thousand_calls, 1, tmp_path)
