"""A vocabulary in stretches: the same tokens as in one piece, on every rank the same bits, and few collectives."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ops.sampling import Draw, UnsampleableError, sample, uniform
from ops.sampling_cdf import VocabShard
from ops.sampling_edits import LogitEdits, Penalties

WIDTH = 3000
BOUNDS = {
    "two": [0, 1500, WIDTH],
    "three, uneven": [0, 700, 2900, WIDTH],
    "one of them empty": [0, 1024, 1024, WIDTH],
    "the first and the last empty": [0, 0, WIDTH, WIDTH],
}


class Ranks:
    """T threads that stand for the ranks of a tensor group."""

    def __init__(self, bounds):
        self.bounds, self.size = bounds, len(bounds) - 1
        self.barrier = threading.Barrier(self.size)
        self.slots = [None] * self.size
        self.num_gathers = [0] * self.size

    def sample(self, logits, draws):
        """What each rank's call returned."""
        with ThreadPoolExecutor(self.size) as pool:
            calls = [pool.submit(self._run, rank, logits, draws) for rank in range(self.size)]
        return [call.result() for call in calls]

    def _run(self, rank, logits, draws):
        start, stop = self.bounds[rank : rank + 2]
        shard = VocabShard(rank, start, stop, self.bounds[-1], lambda tensor: self._gather(rank, tensor))
        try:
            return sample(logits[:, start:stop].clone(), draws, shard)
        except threading.BrokenBarrierError:
            raise
        except Exception:
            if self.barrier.n_waiting:  # somebody waits for this rank, which will not come
                self.barrier.abort()
            raise

    def _gather(self, rank, tensor):
        self.num_gathers[rank] += 1
        self.slots[rank] = tensor.clone()
        self.barrier.wait(20)
        gathered = torch.stack(self.slots)
        self.barrier.wait(20)
        return gathered


def penalties(ids, counts):
    return Penalties(1.4, 0.3, -0.5, np.array(ids), np.array(counts))


ROWS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "num_alternatives": 5},
    {"top_k": 3},
    {"temperature": 1.5, "top_k": 900, "num_alternatives": 3},
    {"top_p": 0.7},
    {"temperature": 3.0, "top_p": 0.99},  # beyond the first candidates
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "wants_raw": True},
    {"edits": LogitEdits(allowed=np.array([2950, 2999])), "num_alternatives": 4},  # all in the last stretch
    {"edits": LogitEdits(banned=[5], biased=np.array([0, 1600]), biases=np.array([3.0, 6.0], np.float32))},
    {"edits": LogitEdits(penalties=penalties([1, 800, 2990], [2, 0, 1])), "temperature": 0.0, "wants_raw": True},
    {"edits": LogitEdits(penalties=penalties([1499, 1500], [1, 4])), "top_p": 0.5, "temperature": 1.3},
]


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("repeat", range(6))
def test_stretches_give_the_tokens_of_the_whole(bounds, repeat):
    logits = torch.randn(len(ROWS), WIDTH, generator=torch.Generator().manual_seed(repeat)) * 2
    logits = logits.to([torch.float32, torch.bfloat16][repeat % 2])  # the latter with many equal logits
    draws = [Draw(uniform=uniform(repeat, row), **each) for row, each in enumerate(ROWS)]
    whole = sample(logits, draws)
    first, *others = Ranks(bounds).sample(logits, draws)
    assert torch.equal(first.tokens, whole.tokens)
    assert torch.equal(first.alternatives[whole.alternative_logprobs > -torch.inf],
                       whole.alternatives[whole.alternative_logprobs > -torch.inf])  # fmt: skip
    for name in ("logprobs", "raw_logprobs", "alternative_logprobs"):
        torch.testing.assert_close(getattr(first, name), getattr(whole, name), rtol=1e-5, atol=1e-5)
    for other in others:
        for name in ("tokens", "logprobs", "raw_logprobs", "alternatives", "alternative_logprobs"):
            assert torch.equal(getattr(other, name), getattr(first, name))


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_uniforms_at_the_edges_of_stretches_find_a_token(bounds):
    logits = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))
    logits[0, ::3] = -torch.inf
    shares = logits.double().softmax(-1)[0].cumsum(0)
    edges = [shares[bound - 1].item() for bound in bounds if bound] + [0.0, 1 - 2.0**-53]
    numbers = [min(max(edge + step, 0.0), 1 - 2.0**-53) for edge in edges for step in (-1e-16, 0.0, 1e-16)]
    draws = [Draw(uniform=number) for number in numbers]
    first, *others = Ranks(bounds).sample(logits.expand(len(numbers), -1), draws)
    assert torch.isfinite(first.logprobs).all()
    torch.testing.assert_close(first.logprobs, logits.log_softmax(-1)[0, first.tokens], rtol=1e-5, atol=1e-5)
    assert all(torch.equal(other.tokens, first.tokens) for other in others)


def test_of_equal_logits_on_several_ranks_the_lowest_id_is_taken():
    logits = torch.zeros(2, WIDTH)
    logits[0, [1400, 1600, 2950]] = 4.0
    logits[1, [2900, 2999]] = 4.0
    draws = [Draw(temperature=0.0)] * 2
    for bounds in BOUNDS.values():
        for rank in Ranks(bounds).sample(logits, draws):
            assert rank.tokens.tolist() == [1400, 2900] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("settings", "num_gathers"),
    [
        ({}, 2),
        ({"temperature": 0.0}, 1),
        ({"temperature": 0.5, "num_alternatives": 4, "wants_raw": True}, 2),
        ({"edits": LogitEdits(banned=[5])}, 2),
        ({"top_k": 9}, 3),
        ({"min_p": 0.1}, 3),
        ({"top_p": 0.9}, 4),
        ({"top_p": 0.9, "top_k": 50, "min_p": 0.1}, 4),
    ],
)
def test_collectives_are_as_few_as_they_are_said_to_be(settings, num_gathers):
    ranks = Ranks(BOUNDS["two"])
    logits = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)) * 4
    ranks.sample(logits, [Draw(uniform=0.4, **settings)] * 3)
    assert ranks.num_gathers == [num_gathers] * 2


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}])
@pytest.mark.parametrize(("start", "value"), [(0, -torch.inf), (1600, float("nan")), (0, float("inf"))])
def test_every_rank_reports_a_row_that_cannot_be_sampled(settings, start, value):
    logits = torch.zeros(2, WIDTH)
    logits[1, start:] = value
    ranks = Ranks(BOUNDS["three, uneven"])
    with ThreadPoolExecutor(ranks.size) as pool:
        draws = [Draw(uniform=0.5, **settings)] * 2
        calls = [pool.submit(ranks._run, rank, logits, draws) for rank in range(ranks.size)]
    for call in calls:
        error = call.exception()
        assert isinstance(error, UnsampleableError)
        assert (error.row, error.is_empty) == (1, value == -torch.inf)
