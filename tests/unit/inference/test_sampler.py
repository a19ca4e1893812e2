"""Sequences sampled step by step, beside a plain loop over transformers' processors and vLLM's formulas."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybrid.config import InferenceConfig
from hybrid.inference.edits import TokenCounts
from hybrid.inference.generator import Generator
from hybrid.inference.params import SamplingParams
from hybrid.inference.sampler import Sampler
from hybrid.inference.scheduler import Chunk
from hybrid.inference.sequence import Sequence
from tests.decoders import VOCAB_SIZE, tiny_decoder

WIDTH, EOS = 40, 3
PROMPT = [5, 9, 9, 17]


def make_sequence(params, seed=0, index=0):
    return Sequence(
        order=(index, 0),
        prompt_index=index,
        params=params,
        seed=seed,
        token_ids=list(PROMPT),
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=len(PROMPT) - 1,
    )


def make_sampler(**settings):
    return Sampler(lambda sequence: [EOS, *sequence.params.stop_token_ids], **settings)


def step(sampler, sequences, logits):
    tokens = sampler.sample([Chunk(sequence, 1) for sequence in sequences], logits)
    for token in tokens:
        token.sequence.append(token.token_id, token.logprob, token.top_logprobs, token.raw_logprob)
        token.sequence.num_computed_tokens += 1
    return tokens


def processed(logits, sequence):
    """The log-probs (V,) that a sequence's next token is drawn from."""
    params, ids = sequence.params, torch.tensor([sequence.token_ids])
    processors = LogitsProcessorList()
    if params.allowed_token_ids:
        processors.append(SuppressTokensLogitsProcessor([t for t in range(WIDTH) if t not in params.allowed_token_ids]))
    if sequence.num_completion_tokens < params.min_tokens:
        processors.append(SuppressTokensLogitsProcessor([EOS, *params.stop_token_ids]))
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(token,): b for token, b in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    logits = processors(ids, logits[None].clone())
    for token, count in Counter(sequence.completion_ids).items():
        logits[0, token] -= params.frequency_penalty * count + params.presence_penalty
    warpers = LogitsProcessorList()
    if params.temperature:
        warpers.append(TemperatureLogitsWarper(params.temperature))
        if params.min_p:
            warpers.append(MinPLogitsWarper(params.min_p))
        if params.top_k > 0:
            warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            warpers.append(TopPLogitsWarper(params.top_p))
    return warpers(ids, logits).log_softmax(-1)[0]


PARAMS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.6),
    SamplingParams(frequency_penalty=0.8, temperature=0),
    SamplingParams(presence_penalty=1.5, top_k=8),
    SamplingParams(repetition_penalty=0.8, frequency_penalty=-0.2, presence_penalty=0.4, temperature=1.4, top_p=0.8),
    SamplingParams(logit_bias={7: 5.0, 9: -5.0}, top_k=-1, min_p=0.05),
    SamplingParams(allowed_token_ids=range(2, 20), min_tokens=10, stop_token_ids=[4], frequency_penalty=0.3),
    SamplingParams(temperature=0.3, min_tokens=20),
]


def test_tokens_follow_the_history_of_each_sequence():
    sampler = make_sampler(vocab_size=WIDTH)
    sequences = [make_sequence(params, 20 + index, index) for index, params in enumerate(PARAMS)]
    table = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) * 2
    for _ in range(30):
        logits = table[[sequence.token_ids[-1] for sequence in sequences]]
        expected = [processed(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]
        for token, wanted, each in zip(step(sampler, sequences, logits), expected, sequences, strict=True):
            assert wanted[token.token_id] > -torch.inf
            assert token.logprob == pytest.approx(wanted[token.token_id].item(), rel=1e-4, abs=1e-5)
            if each.params.temperature == 0:
                assert token.token_id == wanted.argmax()
            assert token.top_logprobs is None and token.raw_logprob is None
    assert all(len({*sequence.completion_ids}) > 3 for sequence in sequences)

    # The same whatever shares the batch, and in whatever order.
    for index in (4, 6, 1, 3):
        alone = make_sequence(PARAMS[index], 20 + index)
        for _ in range(30):
            step(sampler, [alone], table[alone.token_ids[-1:]])
        assert alone.token_ids == sequences[index].token_ids
        assert alone.logprobs == sequences[index].logprobs


def test_a_sequence_that_is_taken_up_in_the_middle_has_the_counts_of_all_its_tokens():
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.5)
    sampler, whole = make_sampler(), make_sequence(params, 3)
    table = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) * 2
    for _ in range(12):
        step(sampler, [whole], table[whole.token_ids[-1:]])
    again = make_sequence(params, 3)
    for token in whole.completion_ids[:6]:
        again.append(token, 0.0)
    for _ in range(6):
        step(sampler, [again], table[again.token_ids[-1:]])
    assert again.token_ids == whole.token_ids
    assert again.logprobs[6:] == whole.logprobs[6:]


def test_counts_are_those_of_the_completion_and_list_the_prompt():
    counts = TokenCounts([4, 4, 8], [8, 2])
    counts.add(2)
    ids, times = counts.arrays()
    assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == {4: 0, 8: 1, 2: 2}
    counts.add(11)  # what was handed out holds nothing
    assert len(ids) == 3


def test_prompts_are_named_whose_parameters_leave_no_token():
    sampler = make_sampler()
    fine = make_sequence(SamplingParams(), index=0)
    stuck = make_sequence(SamplingParams(allowed_token_ids=[EOS], min_tokens=2), index=6)
    with pytest.raises(ValueError, match=r"^token 0 of prompt 6, sample 0: every token that may be sampled"):
        step(sampler, [fine, stuck], torch.zeros(2, WIDTH))
    broken = torch.zeros(2, WIDTH)
    broken[0, 2] = torch.nan
    with pytest.raises(FloatingPointError, match=r"^token 0 of prompt 0, sample 0: the model's logits have NaN"):
        step(sampler, [fine, fine], broken)


# -- what a completion reports ----------------------------------------------------------------------------------------


def make_generator(**settings):
    model = tiny_decoder("llama")
    config = model.config
    return Generator(
        model,
        tokenizer=None,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_blocks=64,
        config=InferenceConfig(block_size=4, **settings),
        eos_token_ids=(2,),
        dtype=torch.float32,
        device="cpu",
        weights_version=0,
        vocab_size=VOCAB_SIZE,
    )


def logits_of(completion):
    """(tokens, V) that transformers gives for a completion's places."""
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
    with torch.no_grad():
        return tiny_decoder("llama", "eager")(input_ids=ids).logits[0, len(completion.prompt_token_ids) - 1 : -1]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_a_completion_reports_the_most_probable_tokens_and_raw_logprobs(temperature):
    asking = SamplingParams(n=2, temperature=temperature, max_tokens=8, ignore_eos=True, logprobs=3, raw_logprobs=True)
    silent = SamplingParams(n=2, temperature=temperature, max_tokens=8, ignore_eos=True)
    completions = make_generator().generate([PROMPT, PROMPT[:2]], [asking, silent], [1, 2])
    for completion in completions[2:]:
        assert completion.top_logprobs is None and completion.raw_logprobs is None
    for completion in completions[:2]:
        logits = logits_of(completion)
        sampled = torch.tensor(completion.token_ids)[:, None]
        raw = logits.log_softmax(-1).gather(-1, sampled)[:, 0]
        torch.testing.assert_close(completion.raw_logprobs, raw, rtol=1e-3, atol=1e-4)
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
        values, ids = logprobs.topk(3)
        assert completion.top_logprobs is not None and len(completion.top_logprobs) == 8
        for place, top in enumerate(completion.top_logprobs):
            wanted = dict(zip(ids[place].tolist(), values[place].tolist(), strict=True))
            token = completion.token_ids[place]
            wanted.setdefault(token, logprobs[place, token].item())
            assert list(top) == list(wanted)
            assert top == pytest.approx(wanted, rel=1e-3, abs=1e-4)
            assert top[token] == completion.logprobs[place].item()


def test_no_alternatives_report_the_sampled_token_alone():
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0)
    completion = make_generator().generate([PROMPT], [params], [1])[0]
    expected = [{t: p} for t, p in zip(completion.token_ids, completion.logprobs.tolist(), strict=True)]
    assert completion.top_logprobs == expected


def test_greedy_with_a_repetition_penalty_is_transformers_generate():
    model = tiny_decoder("llama", "eager")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, repetition_penalty=1.3)
    prompts = [PROMPT, [6, 7], [8] * 9]
    completions = make_generator(max_tokens_per_step=5).generate(prompts, [params] * 3, [0] * 3)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=1.3,
            attention_mask=ids * 0 + 1,
        )
        assert completion.token_ids == output[0, len(prompt) :].tolist()


def test_ids_beyond_the_vocabulary_are_refused_before_anything_runs():
    generator = make_generator()
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, logit_bias={VOCAB_SIZE: 1.0})]
    with pytest.raises(ValueError, match=f"logit_bias of prompt 1 has the id {VOCAB_SIZE}"):
        generator.generate([PROMPT, PROMPT], params, [0, 0])
    assert generator.stats.steps == 0
