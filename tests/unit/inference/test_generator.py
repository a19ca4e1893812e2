from __future__ import annotations

from itertools import chain, pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybrid.config import InferenceConfig
from hybrid.inference.generator import Generator
from hybrid.inference.params import SamplingParams
from hybrid.models.attention import hybrid_attention
from ops.sampling import sample_seed
from tests.decoders import FAMILIES, VOCAB_SIZE, byte_tokenizer, tiny_decoder

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def random_prompts(lengths):
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = random_prompts([1, 19, 7, 16, 4, 33])


def make_generator(model, *, num_blocks=256, tokenizer=None, eos=(2,), vocab_size=None, **settings):
    config = model.config
    return Generator(
        model,
        tokenizer=tokenizer,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_blocks=num_blocks,
        config=InferenceConfig(**settings),
        eos_token_ids=eos,
        dtype=torch.float32,
        device="cpu",
        weights_version=7,
        vocab_size=vocab_size,
    )


def run(generator, prompts, params, seeds=None):
    params = params if isinstance(params, list) else [params] * len(prompts)
    completions = generator.generate(prompts, params, seeds or range(len(prompts)))
    generator.check()
    return completions


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


class Script(torch.nn.Module):
    """Stands for a model: its logits say what comes after each token id. Attention runs, and changes nothing."""

    def __init__(self, following, vocab_size):
        super().__init__()
        self.logits = torch.full((vocab_size, vocab_size), -30.0)
        for token, scores in following.items():
            for other, score in scores.items():
                self.logits[token, other] = score
        self.config = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=1, head_dim=2)
        self.attention = SimpleNamespace(layer_idx=0)
        self.num_rows = []

    def forward(self, input_ids, position_ids, use_cache, logits_to_keep):
        self.num_rows.append(len(logits_to_keep))
        empty = torch.zeros(1, 1, input_ids.shape[1], 2)
        hybrid_attention(self.attention, empty, empty, empty, None, position_ids=position_ids)
        return SimpleNamespace(logits=self.logits[input_ids[:, logits_to_keep]])


# -- the same tokens as transformers, however they are computed -------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(family):
    eager = tiny_decoder(family, "eager")
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = eager.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, attention_mask=ids * 0 + 1)
        expected.append(output[0, len(prompt) :].tolist())
    assert len(set(chain.from_iterable(expected))) > 5

    model = tiny_decoder(family)
    for block_size in (4, 16):
        for settings in (
            {},
            {"max_tokens_per_step": 5},  # prompts in chunks
            {"max_num_seqs": 2},
        ):
            generator = make_generator(model, block_size=block_size, num_blocks=100, **settings)
            assert tokens_of(run(generator, PROMPTS, GREEDY)) == expected
            assert generator.stats.preemptions == 0
            # Now every full block of the prompts is found again.
            again = run(generator, PROMPTS, GREEDY)
            assert tokens_of(again) == expected
            assert [each.num_cached_tokens for each in again] == [
                (len(prompt) - 1) // block_size * block_size for prompt in PROMPTS
            ]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_preemption_changes_no_token_and_no_logprob(family, block_size, monkeypatch):
    model = tiny_decoder(family)
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True)
    expected = run(make_generator(model, block_size=block_size), PROMPTS, params)
    generator = make_generator(model, block_size=block_size, num_blocks=112 // block_size, max_tokens_per_step=24)
    pool = generator._scheduler.pool
    monkeypatch.setattr(
        generator._scheduler, "_fits", lambda sequence, _: pool.num_blocks_for(sequence.num_tokens) <= pool.num_free
    )
    completions = run(generator, PROMPTS, params)
    assert generator.stats.preemptions > 3
    assert tokens_of(completions) == tokens_of(expected)
    for one, other in zip(completions, expected, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-4)


def test_what_shares_the_batch_changes_no_token():
    model = tiny_decoder("qwen2")
    params = [
        SamplingParams(temperature=0.5 + index / 4, top_k=index * 5, top_p=1 - index / 20, max_tokens=6 + 3 * index)
        for index in range(len(PROMPTS))
    ]
    together = run(make_generator(model), PROMPTS, params)
    backwards = run(
        make_generator(model, max_tokens_per_step=9), PROMPTS[::-1], params[::-1], range(len(PROMPTS))[::-1]
    )
    for index, completion in enumerate(together):
        alone = run(make_generator(model), [PROMPTS[index]], [params[index]], [index])[0]
        assert completion.token_ids == alone.token_ids == backwards[-1 - index].token_ids
        torch.testing.assert_close(completion.logprobs, alone.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", [None, 99])
def test_samples_of_one_prompt_are_those_of_requests_with_their_seeds(seed):
    model = tiny_decoder("mistral")
    params = SamplingParams(n=5, max_tokens=15, ignore_eos=True, seed=seed)
    generator = make_generator(model, block_size=4)
    samples = run(generator, PROMPTS[:3], params, [10, 11, 12])
    assert [(each.prompt_index, each.sample_index) for each in samples] == [(p, s) for p in range(3) for s in range(5)]
    assert len({tuple(each.token_ids) for each in samples}) == 15
    assert generator.stats.computed_tokens == sum(map(len, PROMPTS[:3])) + 15 * 14

    for each in samples:
        base = seed if seed is not None else 10 + each.prompt_index
        assert each.seed == sample_seed(base, each.sample_index)
        alone = SamplingParams(max_tokens=15, ignore_eos=True, seed=each.seed)
        assert tokens_of(run(make_generator(model), [each.prompt_token_ids], alone)) == [each.token_ids]


def test_more_samples_than_seats_and_blocks_are_the_same_samples():
    model = tiny_decoder("llama")
    params = SamplingParams(n=6, max_tokens=10, ignore_eos=True)
    expected = tokens_of(run(make_generator(model), PROMPTS[1:2], params))
    assert tokens_of(run(make_generator(model, max_num_seqs=2), PROMPTS[1:2], params)) == expected
    tight = make_generator(model, block_size=4, num_blocks=9)
    assert tokens_of(run(tight, PROMPTS[1:2], params)) == expected
    assert not tight.stats.preemptions  # each starts when there are blocks for all of it


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_logprobs_are_those_of_the_distribution_sampled_from(filters):
    kinds = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    warp = LogitsProcessorList([kinds[name](value) for name, value in filters.items()])
    eager = tiny_decoder("llama", "eager")
    for each in run(make_generator(tiny_decoder("llama")), PROMPTS, SamplingParams(max_tokens=12, **filters)):
        ids = torch.tensor([each.prompt_token_ids + each.token_ids])
        with torch.no_grad():
            logits = eager(input_ids=ids).logits[0, len(each.prompt_token_ids) - 1 : -1]
        expected = warp(ids, logits).log_softmax(-1).gather(-1, ids[0, -len(each.token_ids) :, None])[:, 0]
        assert each.logprobs.dtype == torch.float32
        torch.testing.assert_close(each.logprobs, expected, rtol=1e-3, atol=1e-4)


def test_greedy_logprobs_are_those_of_temperature_one():
    eager = tiny_decoder("llama", "eager")
    each = run(make_generator(tiny_decoder("llama")), PROMPTS[:1], GREEDY)[0]
    logits = eager(input_ids=torch.tensor([each.prompt_token_ids + each.token_ids])).logits[0]
    expected = logits.log_softmax(-1).max(-1).values[len(each.prompt_token_ids) - 1 : -1]
    torch.testing.assert_close(each.logprobs, expected.detach(), rtol=1e-3, atol=1e-4)


def test_cached_blocks_of_other_weights_are_not_read():
    model = tiny_decoder("llama")
    generator = make_generator(model, block_size=4)
    run(generator, PROMPTS, GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    generator.weights_version += 1
    completions = run(generator, PROMPTS, GREEDY)
    assert tokens_of(completions) == tokens_of(run(make_generator(model), PROMPTS, GREEDY))
    assert {(each.weights_version, each.num_cached_tokens) for each in completions} == {(8, 0)}


def test_the_head_gets_the_sampled_rows_filled_up_to_a_tile():
    script = Script({}, 10)
    run(make_generator(script, max_tokens_per_step=4), [[5] * 10, [6] * 3], SamplingParams(temperature=0, max_tokens=2))
    assert script.num_rows == [16] * 5


# -- when a completion ends -------------------------------------------------------------------------------------------


def test_any_of_several_eos_ids_ends_it_and_is_kept():
    script = Script({5: {6: 9.0}, 6: {3: 9.0}, 7: {4: 9.0}, 3: {8: 9.0}}, 10)
    generator = make_generator(script, eos=(3, 4))
    params = SamplingParams(temperature=0, max_tokens=5)
    first, second = run(generator, [[5], [7]], params)
    assert (first.token_ids, first.finish_reason, first.stop_reason) == ([6, 3], "stop", 3)
    assert (second.token_ids, second.finish_reason, second.stop_reason) == ([4], "stop", 4)

    ignoring = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    completion = run(generator, [[5]], ignoring)[0]
    assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == ([6, 3, 8], "length", None)
    with_stop_id = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, stop_token_ids=[8])
    completion = run(generator, [[5]], with_stop_id)[0]
    assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == ([6, 3, 8], "stop", 8)


def test_min_tokens_takes_the_probability_of_endings_and_says_so():
    script = Script({5: {3: 3.0, 5: 2.0, 6: 2.0}, 6: {3: 9.0}}, 10)
    params = SamplingParams(max_tokens=4, min_tokens=3, stop_token_ids=[6])
    for completion in run(make_generator(script, eos=(3,)), [[5]] * 20, params):
        assert completion.token_ids[:3] == [5, 5, 5]
        torch.testing.assert_close(completion.logprobs[:3], torch.zeros(3))
        assert completion.token_ids[3] in (3, 5, 6)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("n", [1, 3])
def test_no_tokens_and_one_token(max_tokens, n):
    generator = make_generator(tiny_decoder("llama"))
    completions = run(generator, PROMPTS, SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True))
    assert [len(each.token_ids) for each in completions] == [max_tokens] * (len(PROMPTS) * n)
    assert {each.finish_reason for each in completions} == {"length"}
    assert all(each.logprobs.shape == (max_tokens,) and each.text == "" for each in completions)


def spell(text, tokenizer):
    """A script that says ``text`` after ``<end>``; each byte may occur once."""
    ids = tokenizer(text)["input_ids"]
    assert len(set(ids)) == len(ids)
    path = [0, *ids, 0]
    return Script({a: {b: 9.0} for a, b in pairwise(path)}, len(tokenizer)), ids


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens", "reason"),
    [
        ("lo", "Hey é ", 9, "lo"),  # over two tokens
        ("é", "Hey ", 6, "é"),  # one character of two bytes
        (["xyz", " \u20ac", "t\u20ac"], "Hey é lo", 13, " \u20ac"),  # three bytes, behind a space
        ("nothing", "Hey é lo \u20acw", 15, None),
        ("<end>", "Hey é lo \u20acw", 15, "<end>"),  # a special token, which the text does not show
    ],
)
def test_stop_strings(stop, text, num_tokens, reason):
    tokenizer = byte_tokenizer()
    # No byte twice, for the script's sake: the three spaces are different ones.
    say = "Hey é lo \u20acw".replace(" ", "\x01", 1).replace(" ", "\x02", 1).replace(" ", "\x03", 1)
    stop = [stop] if isinstance(stop, str) else stop
    stop = [each.replace(" \u20ac", "\x03\u20ac") for each in stop]
    script, _ = spell(say, tokenizer)
    generator = make_generator(script, tokenizer=tokenizer, eos=(0,))
    params = SamplingParams(temperature=0, max_tokens=20, stop=stop, ignore_eos=reason == "<end>")
    completion = run(generator, [[0]], params)[0]
    spaced = completion.text.replace("\x01", " ").replace("\x02", " ").replace("\x03", " ")
    assert (spaced, len(completion.token_ids)) == (text, num_tokens)
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == (0 if reason is None else reason.replace(" ", "\x03"))


def test_a_stop_string_before_min_tokens_does_not_count_and_is_kept():
    tokenizer = byte_tokenizer()
    script, ids = spell("abcdefgh", tokenizer)
    generator = make_generator(script, tokenizer=tokenizer, eos=(0,))
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=4, stop=["bc", "fg"])
    completion = run(generator, [[0]], params)[0]
    assert (completion.text, completion.token_ids, completion.stop_reason) == ("abcde", ids[:7], "fg")


def test_a_stop_string_that_was_complete_before_min_tokens_is_not_found_later():
    tokenizer = byte_tokenizer()
    script, ids = spell("abcdefgh", tokenizer)
    generator = make_generator(script, tokenizer=tokenizer, eos=(0,))
    params = SamplingParams(temperature=0, max_tokens=6, min_tokens=4, stop=["bc", "long enough to look back"])
    completion = run(generator, [[0]], params)[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("abcdef", ids[:6], "length")


def test_an_unfinished_character_at_the_end_is_shown_as_one():
    tokenizer = byte_tokenizer()
    script, _ = spell("a\u20ac", tokenizer)
    generator = make_generator(script, tokenizer=tokenizer, eos=(0,))
    completion = run(generator, [[0]], SamplingParams(temperature=0, max_tokens=2, stop="x"))[0]
    assert completion.text == "a\ufffd" and completion.finish_reason == "length"


# -- being asked wrongly, stopped, interrupted ------------------------------------------------------------------------


def test_bad_requests_are_refused_before_anything_runs():
    generator = make_generator(tiny_decoder("llama"), num_blocks=4, block_size=4, vocab_size=VOCAB_SIZE)
    for prompts, params, message in (
        ([[3], []], [SamplingParams(max_tokens=1)] * 2, "prompt 1 is empty"),
        ([[3], [4] * 15], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)], "prompt 1 needs 5 KV blocks"),
        ([[3]], [SamplingParams(max_tokens=1)] * 2, "1 prompts, 2 params"),
        ([[3]], [SamplingParams(max_tokens=1, stop="a")], "needs a tokenizer"),
        ([[3], [5, VOCAB_SIZE]], [SamplingParams(max_tokens=1)] * 2, "prompt 1 holds the token id 96 and the model's"),
        ([[3, -1]], [SamplingParams(max_tokens=1)], "prompt 0 holds the token id -1"),
    ):
        with pytest.raises(ValueError, match=message):
            generator.generate(prompts, params, [0] * len(prompts))
    assert generator.stats.steps == 0
    assert run(generator, [], []) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("max_tokens", -1),
        ("min_tokens", 65),
        ("stop", ("a", "")),
        ("stop_token_ids", (-1,)),
        ("seed", -1),
        ("seed", 1 << 64),
    ],
)
def test_parameters_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}="):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("where", ["forward", "sample", "commit", "extend"])
def test_an_interruption_anywhere_leaves_it_usable(error, where, monkeypatch):
    model = tiny_decoder("llama")
    generator = make_generator(model, block_size=4)
    params = SamplingParams(n=2, max_tokens=10)
    expected = tokens_of(run(make_generator(model), PROMPTS, params))
    owner, name = {
        "forward": (model.model.layers[2], "forward"),
        "sample": (generator._sampler, "sample"),
        "commit": (generator._scheduler, "_index_full_blocks"),
        "extend": (generator._scheduler.pool, "_take"),
    }[where]
    original, calls = getattr(owner, name), iter(range(1000))

    def interrupted(*args, **kwargs):
        if next(calls) == 5:
            raise error
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(error):
            generator.generate(PROMPTS, [params] * len(PROMPTS), range(len(PROMPTS)))
    generator.check()
    assert generator._scheduler.pool.num_free == 256
    assert tokens_of(run(generator, PROMPTS, params)) == expected
    # The context was left as well: a plain call is ordinary causal attention.
    ids = torch.tensor([PROMPTS[1]])
    torch.testing.assert_close(model(ids).logits, tiny_decoder("llama", "eager")(ids).logits, rtol=1e-4, atol=1e-4)


def test_close_drops_the_cache():
    generator = make_generator(tiny_decoder("llama"))
    run(generator, PROMPTS, GREEDY)
    generator.close()
    generator.close()
    with pytest.raises(RuntimeError, match="is closed"):
        generator.generate(PROMPTS, [GREEDY] * len(PROMPTS), range(len(PROMPTS)))


def test_stats_count_what_was_done():
    generator = make_generator(tiny_decoder("llama"), block_size=4)
    for _ in range(2):
        generator.generate([PROMPTS[3]], [SamplingParams(n=3, max_tokens=5, ignore_eos=True)], [0], progress=True)
    stats = generator.stats
    assert (stats.steps, stats.generated_tokens, stats.prompt_tokens, stats.cached_tokens) == (10, 30, 32, 12)
    assert stats.computed_tokens == 16 + 4 + 2 * 3 * 4
    assert set(stats.seconds) == {"schedule", "forward", "sample"}


def test_the_progress_bar_counts_samples_and_tokens(capsys):
    generator = make_generator(tiny_decoder("llama"))
    params = [SamplingParams(n=3, max_tokens=100, ignore_eos=True)] * 2
    generator.generate(PROMPTS[:2], params, [0, 1])
    assert capsys.readouterr().err == ""
    generator.generate(PROMPTS[:2], params, [0, 1], progress=True)
    bar = capsys.readouterr().err
    assert "0/6" in bar and "tokens/s" in bar
