"""The compiled passes over a vocabulary against torch in fp64."""

from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ops import cpu, sampling_cpu
from ops.sampling_cdf import BLOCK, block_sums, row_maxima

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="there is no C++ compiler")


def random_logits(num_rows, vocab_size, dtype):
    generator = torch.Generator().manual_seed(vocab_size)
    return (4 * torch.randn(num_rows, vocab_size, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 15, 512, 513, 5000])
def test_maxima_and_sums_are_those_of_torch(dtype, vocab_size):
    logits = random_logits(5, vocab_size, dtype)
    logits[1, ::2] = float("-inf")
    logits[1, 0] = 1.0
    divisors = torch.tensor([1.0, 0.3, 2.0, 1e-3, 50.0])
    maxima = row_maxima(logits)
    assert torch.equal(maxima, logits.float().amax(-1))
    sums = block_sums(logits, maxima, divisors)
    exps = ((logits.double() - maxima[:, None].double()) / divisors[:, None].double()).exp()
    expected = torch.stack([block.sum(-1) for block in exps.split(BLOCK, dim=-1)], dim=-1)
    torch.testing.assert_close(sums, expected, rtol=2e-5, atol=1e-30)


def test_a_row_has_the_same_bits_alone_strided_and_in_whatever_company():
    logits = random_logits(8, 3000, torch.bfloat16)
    wide = torch.zeros(8, 4000, dtype=torch.bfloat16)
    wide[:, 500:3500] = logits
    divisors = torch.linspace(0.5, 2, 8)
    sums = block_sums(logits, row_maxima(logits), divisors)
    strided = wide[:, 500:3500]
    assert sampling_cpu.takes(strided)
    assert torch.equal(block_sums(strided, row_maxima(strided), divisors), sums)
    for row in range(8):
        one = slice(row, row + 1)
        assert torch.equal(block_sums(logits[one], row_maxima(logits[one]), divisors[one]), sums[one])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_cannot_be_sampled_from_shows_in_the_sums(bad):
    logits = random_logits(2, 700, torch.float32)
    logits[1, 600] = bad
    sums = block_sums(logits, row_maxima(logits), torch.ones(2))
    assert sums[0].isfinite().all()
    assert not sums[1].sum().isfinite()


def test_exponentials_are_good_to_a_few_ulps():
    """Weights of a whole range of scores, one block at a time: what softmax and sampling both rest on."""
    scores = -torch.linspace(0, 87, BLOCK * 64).view(-1, 1)
    logits = torch.cat([torch.zeros_like(scores), scores], dim=1)
    sums = block_sums(logits, torch.zeros(len(scores)), torch.ones(len(scores)))[:, 0] - 1
    near = scores[:, 0] > -10  # what is left of them when added to 1
    torch.testing.assert_close(sums[near], scores[near, 0].double().exp(), atol=1.2e-7, rtol=3e-7)


@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_floors_leave_what_transformers_warpers_leave(scale):
    """min_p first, then top_k, then top_p of what is left; values far apart and near ones, with ties."""
    logits = scale * torch.randn(40, 3000, generator=torch.Generator().manual_seed(5))
    logits[::2] = logits[::2].bfloat16().float()  # many ties
    logits[3, 100:] = float("-inf")
    draws = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.6, 1.0)
        for top_k, top_p, min_p in (
            *((1, 1.0, 0.0), (50, 1.0, 0.0), (2999, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.3, 0.0), (0, 1e-6, 0.0)),
            *((0, 1.0, 0.1), (0, 1.0, 1.0), (40, 0.8, 0.0), (40, 0.8, 0.01), (0, 0.95, 1e-4), (5000, 0.999, 0.0)),
        )
    ]
    for temperature, top_k, top_p, min_p in draws:
        divisors = torch.full((40,), temperature)
        floors = sampling_cpu.row_floors(logits, divisors, [top_k] * 40, [top_p] * 40, [min_p] * 40)
        kept = logits >= floors[:, None]
        scores = logits.double() / temperature
        if min_p:
            scores = MinPLogitsWarper(min_p)(None, scores)
        if top_k:
            scores = TopKLogitsWarper(min(top_k, 3000))(None, scores)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(None, scores)
        # transformers cuts through ties in no order of its own; a rounding of the mass may move the edge by one.
        least = torch.where(scores.isfinite(), logits, torch.inf).amin(-1, keepdim=True)
        wanted = (logits >= least) & logits.isfinite()
        off = (kept & logits.isfinite() != wanted).sum(-1)
        is_close = off <= (1 if top_p < 1 and scale == 4.0 else 2 if top_p < 1 else 0)
        assert is_close[1::2].all(), (temperature, top_k, top_p, min_p, off)
        assert (off[::2] <= 40).all()
