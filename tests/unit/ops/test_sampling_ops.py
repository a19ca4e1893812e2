from __future__ import annotations

import itertools

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ops.sampling import Draw, UnsampleableError, _mix64, sample, sample_seed, uniform
from ops.sampling_cdf import block_sums

FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 12, "top_p": 0.9},
    {"min_p": 0.1, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]


def draw(logits, uniforms, **settings):
    sampled = sample(logits, [Draw(uniform=number, **settings) for number in uniforms])
    return sampled.tokens, sampled.logprobs


def warped(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """transformers' log-probs (R, V) of the filtered distribution, in vLLM's order."""
    logits = TemperatureLogitsWarper(temperature)(None, logits.float())
    if min_p:
        logits = MinPLogitsWarper(min_p)(None, logits)
    if top_k:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(None, logits)
    return logits.log_softmax(-1)


def assert_drawn_from(tokens, expected):
    """That (N,) tokens are N draws from the log-probs (V,): chi-squared within four deviations of its mean."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    wanted = expected.double().exp() * len(tokens)
    assert counts[wanted == 0].sum() == 0
    kept = wanted > 0
    chi_squared = ((counts - wanted)[kept] ** 2 / wanted[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    assert chi_squared <= freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("filters", FILTERS)
def test_frequencies_and_logprobs_are_those_of_the_filtered_softmax(filters):
    num_draws = 20_000
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2
    uniforms = [uniform(11, position) for position in range(num_draws)]
    tokens, logprobs = draw(logits.expand(num_draws, -1), uniforms, **filters)
    expected = warped(logits[None], **filters)[0]
    torch.testing.assert_close(logprobs, expected[tokens], rtol=1e-5, atol=2e-6)
    assert_drawn_from(tokens, expected)


def test_a_wide_nucleus_is_the_one_transformers_keeps():
    """Vocabulary over several blocks, and nuclei beyond the first candidates."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.1], [1.0], [6.0]])
    expected = warped(logits, top_p=0.95)
    for number in torch.linspace(0, 0.999, 40).tolist():
        tokens, logprobs = draw(logits, [number] * 3, top_p=0.95)
        torch.testing.assert_close(logprobs, expected.gather(-1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    assert (expected > -torch.inf).sum(-1).tolist()[0] > 4000


def test_a_nucleus_of_all_that_top_k_left_ends():
    """Its sum in fp32 may say that the k tokens hold a little less than a mass next to 1."""
    logits = torch.randn(200, 3000, generator=torch.Generator().manual_seed(0))
    uniforms = [uniform(0, row) for row in range(200)]
    tokens, logprobs = draw(logits, uniforms, top_k=300, top_p=1 - 1e-12)
    expected = warped(logits, top_k=300)
    torch.testing.assert_close(logprobs, expected.gather(-1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 511, 512, 513, 200_000])
def test_block_sums_are_those_of_the_softmax_and_of_each_row_alone(dtype, width):
    logits = (torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)[:, :width]
    before, maxima, divisors = logits.clone(), logits.amax(-1).float(), torch.tensor([1.0, 0.3, 5.0])
    sums = block_sums(logits, maxima, divisors)
    assert sums.shape == (3, -(-width // 512)) and sums.dtype == torch.float64
    expected = (logits.double() / divisors[:, None].double()).logsumexp(-1)
    torch.testing.assert_close(sums.sum(-1).log() + (maxima / divisors).double(), expected, rtol=1e-6, atol=1e-6)
    for row in range(3):
        alone = block_sums(logits[row : row + 1], maxima[row : row + 1], divisors[row : row + 1])
        assert torch.equal(alone[0], sums[row])
    assert torch.equal(logits, before)


def test_rows_with_settings_of_their_own_do_not_touch_each_other():
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    settings = [(0, 0, 1, 0), (1, 0, 1, 0), (0.5, 5, 1, 0), (1, 0, 0.7, 0), (2, 0, 1, 0.3), (0.9, 50, 0.9, 0.1)]
    draws = [
        Draw(uniform=uniform(5, row), temperature=t, top_k=k, top_p=p, min_p=m)
        for row, (t, k, p, m) in enumerate(settings)
    ]
    before = logits.clone()
    together = sample(logits, draws)
    assert torch.equal(logits, before)
    for row, each in enumerate(draws):
        alone = sample(logits[row : row + 1], [each])
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(alone.logprobs[0], together.logprobs[row])
    assert together.tokens[0] == logits[0].argmax()
    torch.testing.assert_close(together.logprobs[0], logits[0].float().log_softmax(-1).max())


def test_a_greedy_row_takes_the_lowest_of_equal_ids_and_heeds_no_filter():
    logits = torch.zeros(2, 1500)
    logits[:, [3, 700, 1400]] = 2.0
    tokens, logprobs = draw(logits, [0.9] * 2, temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)
    assert tokens.tolist() == [3, 3]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 3])


@pytest.mark.parametrize("filters", [*FILTERS, {"temperature": 0.0}])
def test_alternatives_are_the_most_probable_tokens_of_the_distribution_sampled_from(filters):
    logits = torch.randn(4, 900, generator=torch.Generator().manual_seed(2)) * 2
    numbers = [0, 1, 5, 900]
    sampled = sample(logits, [Draw(uniform=0.5, num_alternatives=n, **filters) for n in numbers])
    expected = warped(logits, **filters) if filters.get("temperature") != 0 else logits.log_softmax(-1)
    values, ids = expected.sort(-1, descending=True)
    for row, number in enumerate(numbers):
        wanted = values[row, :number][values[row, :number] > -torch.inf]
        left = sampled.alternative_logprobs[row] > -torch.inf
        assert int(left.sum()) == len(wanted)
        assert sampled.alternatives[row, : len(wanted)].tolist() == ids[row, : len(wanted)].tolist()
        torch.testing.assert_close(sampled.alternative_logprobs[row, : len(wanted)], wanted, rtol=1e-5, atol=1e-5)


def test_raw_logprobs_are_those_of_the_untouched_logits():
    logits = torch.randn(5, 900, generator=torch.Generator().manual_seed(2)).bfloat16() * 2
    settings = [{}, {"temperature": 0.5}, {"temperature": 0.0}, {"top_k": 3}, {"temperature": 2.0, "wants_raw": False}]
    sampled = sample(logits, [Draw(**{"uniform": 0.3, "wants_raw": True, **each}) for each in settings])
    expected = logits.float().log_softmax(-1).gather(-1, sampled.tokens[:, None])[:, 0]
    torch.testing.assert_close(sampled.raw_logprobs[:4], expected[:4], rtol=1e-5, atol=1e-5)
    assert sampled.raw_logprobs[0] == sampled.logprobs[0]
    assert sample(logits, [Draw()] * 5).raw_logprobs is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_broken_logits_are_reported_with_their_row(value, settings):
    logits = torch.zeros(3, 10)
    logits[1, 4] = value
    with pytest.raises(FloatingPointError, match="row 1 of the logits has NaN"):
        draw(logits, [0.5] * 3, **settings)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_row_with_no_token_left_is_reported(settings):
    logits = torch.zeros(3, 10)
    logits[2] = -torch.inf
    with pytest.raises(UnsampleableError, match="row 2 of the logits has only -inf") as error:
        draw(logits, [0.5] * 3, **settings)
    assert (error.value.row, error.value.is_empty) == (2, True)


def test_logits_that_do_not_fit_the_draws_are_refused():
    with pytest.raises(ValueError, match=r"logits are \(2, 10\) and there are 1 draws"):
        sample(torch.zeros(2, 10), [Draw()])


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
