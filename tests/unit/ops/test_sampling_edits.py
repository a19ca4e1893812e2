"""Masks, biases and penalties: vLLM's meanings, beside transformers' processors where it has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ops.sampling import Draw, sample, uniform
from ops.sampling_edits import LogitEdits, Penalties, edit_logits
from tests.unit.ops.test_sampling_ops import assert_drawn_from

WIDTH = 50


def penalties(prompt, completion, repetition=1.0, frequency=0.0, presence=0.0):
    ids = sorted({*prompt, *completion})
    counts = [completion.count(token) for token in ids]
    return Penalties(repetition, frequency, presence, np.array(ids), np.array(counts))


def penalised(logits, prompt, completion, repetition, frequency, presence):
    """vLLM's definition, one token at a time (docs: "Sampling Parameters"; code: model_executor/layers/utils.py)."""
    logits = logits.clone()
    for token in range(len(logits)):
        if token in prompt or token in completion:
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        logits[token] -= frequency * completion.count(token)
        logits[token] -= presence * (token in completion)
    return logits


@pytest.mark.parametrize("repetition", [1.0, 1.4, 0.7])
@pytest.mark.parametrize(("frequency", "presence"), [(0.0, 0.0), (0.6, 0.0), (0.0, -1.2), (-0.3, 1.5)])
def test_penalties_are_vllms(repetition, frequency, presence):
    logits = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)) * 3
    said = [([1, 5, 5, 9], [5, 7, 7, 7]), ([3], []), None, ([2, 4], [4, 49])]
    edits = [each and LogitEdits(penalties=penalties(*each, repetition, frequency, presence)) for each in said]
    edited = logits.clone()
    edit_logits(edited, edits)
    for row, each in enumerate(said):
        expected = penalised(logits[row], *each, repetition, frequency, presence) if each else logits[row]
        torch.testing.assert_close(edited[row], expected)


def test_edits_are_transformers_in_vllms_order():
    logits = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1)) * 3
    prompt, completion, allowed, banned = [1, 5, 9], [7, 7, 30], range(4, 40), [8, 30]
    bias = {5: 2.5, 7: -1.0, 45: 9.0}
    processors = LogitsProcessorList(
        [
            PrefixConstrainedLogitsProcessor(lambda *_: list(allowed), 1),
            SuppressTokensLogitsProcessor(banned),
            SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            RepetitionPenaltyLogitsProcessor(1.7),
        ]
    )
    expected = processors(torch.tensor([prompt + completion]), logits.clone())
    edits = LogitEdits(
        allowed=np.array(allowed),
        banned=banned,
        biased=np.array(list(bias)),
        biases=np.array(list(bias.values()), np.float32),
        penalties=penalties(prompt, completion, repetition=1.7),
    )
    edited = logits.clone()
    edit_logits(edited, [edits])
    torch.testing.assert_close(edited, expected)
    assert torch.isinf(edited).sum() == WIDTH - 36 + 2


@pytest.mark.parametrize("greedy", [False, True])
def test_frequencies_of_an_edited_and_filtered_row(greedy):
    num_draws = 20_000
    logits = torch.randn(WIDTH, generator=torch.Generator().manual_seed(3)) * 2
    prompt, completion, bias = [0, 1, 2, 3], list(range(20)) * 2, {11: 2.0, 30: -4.0}
    edits = LogitEdits(
        banned=[44],
        biased=np.array(list(bias)),
        biases=np.array(list(bias.values()), np.float32),
        penalties=penalties(prompt, completion, 1.3, 0.2, -0.4),
    )
    biased = logits.clone()
    biased[44] = -torch.inf
    for token, value in bias.items():
        biased[token] += value
    processed = penalised(biased, prompt, completion, 1.3, 0.2, -0.4)[None]
    filters = {"temperature": 1.2, "top_k": 30, "top_p": 0.9}
    expected = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(30)(None, TemperatureLogitsWarper(1.2)(None, processed)))
    if greedy:
        filters, expected, num_draws = {"temperature": 0.0}, processed, 3
    expected = expected.log_softmax(-1)[0]

    draws = [Draw(uniform=uniform(11, place), edits=edits, wants_raw=True, **filters) for place in range(num_draws)]
    sampled = sample(logits.expand(num_draws, -1), draws)
    torch.testing.assert_close(sampled.logprobs, expected[sampled.tokens], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(sampled.raw_logprobs, logits.log_softmax(-1)[sampled.tokens], rtol=1e-5, atol=2e-6)
    if greedy:
        assert sampled.tokens.tolist() == [processed.argmax().item()] * 3
    else:
        assert_drawn_from(sampled.tokens, expected)


def test_edited_rows_and_the_others_are_what_they_are_alone():
    logits = torch.randn(6, 1100, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    before = logits.clone()
    said = penalties([4, 900], [7, 7, 1099], 1.5, 0.5, 0.5)
    settings = [
        {"edits": LogitEdits(allowed=np.array([3, 900]))},
        {},
        {"edits": LogitEdits(penalties=said), "temperature": 0.0},
        {"top_p": 0.6},
        {"edits": LogitEdits(banned=[1], penalties=said), "min_p": 0.02, "temperature": 0.7},
        {"temperature": 0.0},
    ]
    draws = [
        Draw(uniform=uniform(5, row), num_alternatives=row, wants_raw=row % 2 == 0, **each)
        for row, each in enumerate(settings)
    ]
    together = sample(logits, draws)
    assert torch.equal(logits, before)
    for row, each in enumerate(draws):
        alone = sample(logits[row : row + 1], [each])
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(alone.logprobs[0], together.logprobs[row])
        assert torch.equal(alone.alternatives[0], together.alternatives[row, :row])
        assert torch.equal(alone.alternative_logprobs[0], together.alternative_logprobs[row, :row])
        if each.wants_raw:
            assert torch.equal(alone.raw_logprobs[0], together.raw_logprobs[row])
    assert together.tokens[0] in (3, 900)


def test_ids_beyond_the_logits_are_passed_over():
    """A tokenizer may know end-of-sequence ids that the model does not."""
    logits = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))
    edited = logits.clone()
    edit_logits(edited, [LogitEdits(banned=[WIDTH, WIDTH + 7])])
    assert torch.equal(edited, logits)
