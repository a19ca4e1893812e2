"""What shares a request's steps, blocks and prompt changes none of its tokens, and no bit of its log-probs in fp32.

Pairs of runs. The oracle of each is the request by itself, in a generator of its own with room for everything.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.inference.params import SamplingParams
from ops import attention_cpu
from ops.attention import override_backend
from ops.sampling import sample_seed
from tests.decoders import tiny_decoder
from tests.unit.inference.test_generator import make_generator, random_prompts, run

FAMILIES = ("llama", "gemma2")  # gemma2 with a window of 6 in every other layer, and soft caps

FRESH = random_prompts([1, 5, 15, 16, 17, 31, 33, 50])
# And prompts that begin with one, two or three blocks of another.
PROMPTS = [*FRESH, FRESH[7] + FRESH[1], FRESH[7][:40] + FRESH[2], FRESH[6][:32] + FRESH[0], FRESH[5][:16] + FRESH[3]]
MAX_TOKENS = [20, 1, 24, 8, 17, 2, 18, 12, 14, 6, 16, 3]
PARAMS = [SamplingParams(max_tokens=max_tokens, ignore_eos=True) for max_tokens in MAX_TOKENS]
SEEDS = list(range(100, 100 + len(PROMPTS)))

model = functools.cache(tiny_decoder)


@functools.cache
def alone(family, index, sample=0):
    """A request by itself, of one sample."""
    seeds = [sample_seed(SEEDS[index], sample)]
    return run(make_generator(model(family)), [PROMPTS[index]], [PARAMS[index]], seeds)[0]


def require_same(completion, expected):
    """Equal tokens and log-probs: to the bit where the kernels promise it."""
    assert completion.token_ids == expected.token_ids
    if attention_cpu.is_available():
        assert torch.equal(completion.logprobs, expected.logprobs)
    else:
        torch.testing.assert_close(completion.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)


def require_as_alone(family, generator, indices, n=1):
    """Run requests together and compare each of their samples with itself alone."""
    params = [replace(PARAMS[index], n=n) for index in indices]
    completions = run(generator, [PROMPTS[i] for i in indices], params, [SEEDS[i] for i in indices])
    assert len(completions) == n * len(indices)
    for completion in completions:
        require_same(completion, alone(family, indices[completion.prompt_index], completion.sample_index))
    return completions


EVERYONE = list(range(len(PROMPTS)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"max_tokens_per_step": 5},
        {"block_size": 32},
        {"block_size": 64, "max_tokens_per_step": 20},
    ],
    ids=str,
)
def test_order_batch_size_chunk_size_and_block_size(family, sizes):
    for order in (EVERYONE, EVERYONE[::-1]):
        generator = make_generator(model(family), **sizes)
        require_as_alone(family, generator, order)
        assert generator.stats.preemptions == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_compiled_kernels_the_tokens_are_the_same(family):
    expected = [alone(family, index).token_ids for index in EVERYONE]
    with override_backend("reference"):
        for sizes in ({}, {"max_num_seqs": 3, "max_tokens_per_step": 20}):
            completions = run(make_generator(model(family), **sizes), PROMPTS, PARAMS, SEEDS)
            assert [each.token_ids for each in completions] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_hits(family):
    generator = make_generator(model(family))
    first = require_as_alone(family, generator, EVERYONE)
    assert [each.num_cached_tokens for each in first] == [0] * 8 + [48, 32, 32, 16]
    again = require_as_alone(family, generator, EVERYONE)
    assert [each.num_cached_tokens for each in again] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 4}, {"max_tokens_per_step": 23}], ids=str)
def test_forks(family, sizes):
    generator = make_generator(model(family), **sizes)
    require_as_alone(family, generator, EVERYONE, n=3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("hopeful")
def test_preemption(family):
    generator = make_generator(model(family), num_blocks=8)
    require_as_alone(family, generator, [6, *EVERYONE], n=3)
    assert generator.stats.preemptions >= 5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [{}, {"max_tokens_per_step": 16}, {"max_num_seqs": 2}], ids=str)
def test_equal_prompts_become_one(family, sizes):
    """Whatever their parameters: here lengths, temperatures, filters and numbers of samples differ."""
    prompt = PROMPTS[7]
    params = [
        SamplingParams(max_tokens=9, ignore_eos=True),
        SamplingParams(max_tokens=1, ignore_eos=True),
        SamplingParams(n=2, max_tokens=20, ignore_eos=True, temperature=0.6, top_k=12),
        SamplingParams(max_tokens=14, ignore_eos=True, temperature=0),
        SamplingParams(max_tokens=30, ignore_eos=True, top_p=0.8, presence_penalty=1.0),
    ]
    generator = make_generator(model(family), **sizes)
    # Another request between them, and one that ends at once.
    mixed = [*params[:2], PARAMS[4], *params[2:]]
    together = run(generator, [*[prompt] * 2, PROMPTS[4], *[prompt] * 3], mixed)
    if "max_num_seqs" not in sizes:
        num_completed = sum((each.max_tokens - 1) * each.n for each in mixed)
        assert generator.stats.computed_tokens == len(prompt) + len(PROMPTS[4]) + num_completed
    apart = [
        run(make_generator(model(family)), [prompt if index != 2 else PROMPTS[4]], [each], [index])
        for index, each in enumerate(mixed)
    ]
    for one, other in zip(together, [each for request in apart for each in request], strict=True):
        require_same(one, other)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_mix(family, data):
    """Several calls on one generator, of whatever requests and sizes."""
    indices = st.lists(st.sampled_from(EVERYONE), min_size=1, max_size=6)
    generator = make_generator(
        model(family),
        # At least 5: what the longest request needs.
        num_blocks=data.draw(st.integers(5, 40), "blocks"),
        max_num_seqs=data.draw(st.integers(1, 12), "seats"),
        max_tokens_per_step=data.draw(st.integers(4, 120), "budget"),
    )
    for _ in range(data.draw(st.integers(1, 2), "calls")):
        require_as_alone(family, generator, data.draw(indices, "requests"), data.draw(st.integers(1, 4), "n"))


def test_rows_that_fill_up_a_step_write_nothing():
    """16 rows are computed for a prompt of 5 tokens; only its slots change."""
    generator = make_generator(model("llama"), num_blocks=4)
    cache = generator._require_open().cache
    with torch.no_grad():
        for tensor in (cache.key, cache.value):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    before = cache.key.clone(), cache.value.clone()
    prompt = PROMPTS[1]
    completion = run(generator, [prompt], SamplingParams(max_tokens=3, temperature=0))[0]
    assert len(completion.token_ids) == 3
    for tensor, old in zip((cache.key, cache.value), before, strict=True):
        changed = (tensor != old).flatten(3).any(-1)  # (layers, blocks, block_size)
        assert changed.flatten(1).sum(-1).tolist() == [len(prompt) + 2] * len(changed)
        (block,) = changed.any(0).any(-1).nonzero()[0]
        assert changed[:, block, : len(prompt) + 2].all()
