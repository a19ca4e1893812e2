from __future__ import annotations

import itertools

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ops.sampling import _mix64, sample, sample_seed, uniform

FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]


def draw(logits, uniforms, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    num_rows = logits.shape[0]
    return sample(
        logits, [temperature] * num_rows, [top_k] * num_rows, [top_p] * num_rows, [min_p] * num_rows, uniforms
    )


def warped(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """transformers' log-probs (R, V) of the filtered distribution."""
    logits = TemperatureLogitsWarper(temperature)(None, logits.float())
    if top_k:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(None, logits)
    if min_p:
        logits = MinPLogitsWarper(min_p)(None, logits)
    return logits.log_softmax(-1)


@pytest.mark.parametrize("filters", FILTERS)
def test_frequencies_and_logprobs_are_those_of_the_filtered_softmax(filters):
    num_draws = 20_000
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2
    uniforms = [uniform(11, position) for position in range(num_draws)]
    tokens, logprobs = draw(logits.expand(num_draws, -1), uniforms, **filters)

    expected = warped(logits[None], **filters)[0]
    torch.testing.assert_close(logprobs, expected[tokens], rtol=1e-5, atol=2e-6)
    counts = torch.bincount(tokens, minlength=50).double()
    wanted = expected.double().exp() * num_draws
    assert counts[wanted == 0].sum() == 0
    kept = wanted > 0
    chi_squared = ((counts - wanted)[kept] ** 2 / wanted[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5


def test_a_wide_nucleus_is_the_one_transformers_keeps():
    """Vocabulary over several blocks, and nuclei beyond the first candidates."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.1], [1.0], [6.0]])
    expected = warped(logits, top_p=0.95)
    for number in torch.linspace(0, 0.999, 40).tolist():
        tokens, logprobs = draw(logits, [number] * 3, top_p=0.95)
        torch.testing.assert_close(logprobs, expected.gather(-1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    assert (expected > -torch.inf).sum(-1).tolist()[0] > 4000


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
def test_a_token_without_probability_is_never_chosen(number):
    logits = torch.full((4, 1300), float("-inf"))
    alive = [0, 511, 512, 1299]
    logits[range(4), alive] = torch.tensor([0.0, -50.0, 3.0, 1e4])
    tokens, logprobs = draw(logits, [number] * 4)
    assert tokens.tolist() == alive
    assert logprobs.tolist() == [0.0] * 4


def test_a_block_whose_sum_was_rounded_up_still_gives_a_token_of_its_own():
    generator = torch.Generator().manual_seed(0)
    num_tried = 0
    while num_tried < 20:
        logits = torch.full((1, 1024), float("-inf"))
        logits[0, :300] = torch.randn(300, generator=generator)
        logits[0, 1023] = 1.0
        weights = (logits - logits.max()).exp()
        rounded, exact = weights[0, :512].sum().double(), weights[0, :512].double().sum()
        if rounded <= exact:
            continue
        total = rounded + weights[0, 1023].double()
        token, _ = draw(logits, [((rounded + exact) / 2 / total).item()])
        assert token.item() == 299
        num_tried += 1


def test_rows_with_settings_of_their_own_do_not_touch_each_other():
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    settings = [(0, 0, 1, 0), (1, 0, 1, 0), (0.5, 5, 1, 0), (1, 0, 0.7, 0), (2, 0, 1, 0.3), (0.9, 50, 0.9, 0.1)]
    uniforms = [uniform(5, row) for row in range(6)]
    together = sample(logits, *map(list, zip(*settings, strict=True)), uniforms)
    for row, (temperature, top_k, top_p, min_p) in enumerate(settings):
        token, logprob = draw(logits[row : row + 1], uniforms[row : row + 1], temperature, top_k, top_p, min_p)
        assert (token.item(), logprob.item()) == (together[0][row].item(), together[1][row].item())
    assert together[0][0] == logits[0].argmax()
    torch.testing.assert_close(together[1][0], logits[0].float().log_softmax(-1).max())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_logits_are_reported_with_their_row(value):
    logits = torch.zeros(3, 10)
    logits[1, 4] = value
    with pytest.raises(FloatingPointError, match="row 1"):
        draw(logits, [0.5] * 3)


def test_uniform_numbers_are_splitmix64s():
    # The first output of splitmix64 for the seed 1234567, as published with the reference implementation's ports.
    assert _mix64(1234567 + 0x9E3779B97F4A7C15) == 6457827717110365317
    numbers = torch.tensor([[uniform(seed, t) for t in range(200)] for seed in range(200)], dtype=torch.float64)
    assert numbers.unique().numel() == numbers.numel()
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers, bins=50, min=0, max=1)
    assert ((counts - 800) ** 2 / 800).sum() < 49 + 4 * 98**0.5
    # Neighbouring seeds and positions are not correlated.
    for first, second in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])):
        assert torch.corrcoef(torch.stack((first.flatten(), second.flatten())))[0, 1].abs() < 0.02


def test_sample_seeds_differ_and_the_first_is_the_requests_own():
    seeds = [sample_seed(seed, index) for seed, index in itertools.product(range(50), range(50))]
    assert len(set(seeds)) == len(seeds)
    assert sample_seed(17, 0) == 17
    assert all(0 <= seed < 1 << 64 for seed in seeds)
