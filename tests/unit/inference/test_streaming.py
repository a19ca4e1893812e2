"""Streams: their pieces make up what `generate` gives, and they can be ended at any point by anyone."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hybrid.config import InferenceConfig, OptimConfig
from hybrid.engine import HybridEngine, Mode, ModeError
from hybrid.inference.detokenizer import GrowingText
from hybrid.inference.params import SamplingParams
from hybrid.parallel import init_parallel
from tests.decoders import byte_tokenizer, tiny_decoder
from tests.distributed.world import run_world
from tests.tiny import tiny_config, tiny_tokenizer
from tests.unit.inference.test_generator import PROMPTS, Script, make_generator, run, spell, tokens_of

SEEDS = range(len(PROMPTS))


def collect(deltas):
    """What the deltas of each sample add up to, once its completion has come."""
    ids, texts, logprobs, completions = defaultdict(list), defaultdict(str), defaultdict(list), {}
    for delta in deltas:
        key = (delta.prompt_index, delta.sample_index)
        assert key not in completions, "a delta after the last one"
        ids[key] += delta.token_ids
        texts[key] += delta.text
        logprobs[key].append(delta.logprobs)
        if delta.completion is not None:
            completions[key] = delta.completion
    for key, completion in completions.items():
        assert (completion.prompt_index, completion.sample_index) == key
        assert ids[key] == completion.token_ids
        assert texts[key] == completion.text
        assert torch.equal(torch.cat(logprobs[key]), completion.logprobs)
    return completions


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_step": 5}, {"max_num_seqs": 2}])
def test_deltas_add_up_to_what_generate_gives(settings):
    # 96 of the tokenizer's 257 bytes, most of them no characters by themselves.
    model, tokenizer = tiny_decoder("llama"), byte_tokenizer()
    params = [
        SamplingParams(n=2, max_tokens=20, stop=["a", "xy"][: index % 3], min_tokens=index) for index in range(5)
    ] + [SamplingParams(max_tokens=0)]
    expected = run(make_generator(model, tokenizer=tokenizer), PROMPTS, params)
    generator = make_generator(model, tokenizer=tokenizer, **settings)
    completions = collect(generator.stream(PROMPTS, params, SEEDS))
    generator.check()
    assert len(completions) == len(expected) == 11
    for each in expected:
        streamed = completions[each.prompt_index, each.sample_index]
        assert (streamed.token_ids, streamed.text, streamed.finish_reason, streamed.stop_reason) == (
            each.token_ids,
            each.text,
            each.finish_reason,
            each.stop_reason,
        )


def test_each_token_comes_when_it_is_sampled_and_only_once():
    generator = make_generator(tiny_decoder("llama"))
    params = [SamplingParams(n=2, max_tokens=4, ignore_eos=True)] * 2
    seen = []
    for delta in generator.stream(PROMPTS[:2], params, [0, 1]):
        seen.append((generator.stats.steps, delta.prompt_index, delta.sample_index, len(delta.token_ids)))
    assert seen == [(step, prompt, sample, 1) for step in range(1, 5) for prompt in range(2) for sample in range(2)]


@pytest.mark.parametrize(
    ("stop", "pieces", "reason"),
    [
        ((), ["H", "", "", "€", "y", "l", "o"], None),
        (("ylx",), ["H", "", "", "€", "", "", "ylo"], None),  # two letters of it, and then not
        (("€z", "lo"), ["H", "", "", "", "€y", "", ""], "lo"),
        (("€y",), ["H", "", "", "", ""], "€y"),
        (("y", "€yl"), ["H", "", "", "", "€"], "y"),
    ],
)
def test_text_is_held_back_while_it_could_still_change_or_become_a_stop_string(stop, pieces, reason):
    tokenizer = byte_tokenizer()
    script, ids = spell("H€ylo", tokenizer)
    generator = make_generator(script, tokenizer=tokenizer, eos=(0,))
    params = SamplingParams(temperature=0, max_tokens=len(ids), stop=stop)
    deltas = list(generator.stream([[0]], [params], [0]))
    assert [delta.text for delta in deltas] == pieces
    assert deltas[-1].completion.stop_reason == reason
    assert collect(deltas)


def test_a_completion_that_ends_within_a_character_or_a_stop_string_gets_all_of_its_text():
    tokenizer = byte_tokenizer()
    for text, stop, whole in (("a\u20ac", "x", "a\ufffd"), ("abc", "bcd", "abc")):
        script, _ = spell(text, tokenizer)
        generator = make_generator(script, tokenizer=tokenizer, eos=(0,))
        params = SamplingParams(temperature=0, max_tokens=3 if text == "abc" else 2, stop=stop)
        (completion,) = collect(generator.stream([[0]], [params], [0])).values()
        assert completion.text == whole


def fallback_tokenizer():
    """Sentencepiece's way: words open with a mark of their space, and what is no word is bytes, judged run by run."""
    vocab = {"<unk>": 0, "▁Hello": 1, "▁": 2, "▁you": 3, ".": 4, "▁.": 5, **{f"<0x{b:02X}>": 6 + b for b in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TOKENIZERS = {"bytes": byte_tokenizer(), "fallback": fallback_tokenizer()}


def grow(tokenizer, ids, stop):
    """The pieces of a text as its tokens come in, the stop string it ended with, and the whole."""
    growing, pieces, found = GrowingText(tokenizer, stop), [], None
    for end in range(1, len(ids) + 1):
        found = growing.push(ids[:end], may_stop=True)
        if found is not None:
            ids = ids[:end]
            break
        pieces.append(growing.take())
    return pieces, found, growing.finish(ids)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(TOKENIZERS)),
    text=st.text(alphabet="ab .é€\U0001f600", max_size=12),
    stop=st.lists(st.text(alphabet="ab .é€", min_size=1, max_size=4), max_size=2),
)
def test_pieces_of_any_text_are_those_of_the_whole_cut_before_the_first_stop_string(kind, text, stop):
    tokenizer = TOKENIZERS[kind]
    if kind == "bytes":
        ids = tokenizer(text)["input_ids"]
    else:
        ids = [1, *(6 + byte for byte in text.encode()), 5, 3]
    whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    pieces, found, result = grow(tokenizer, ids, stop)
    # The string that is complete first, and of those that are at once the one that begins first.
    ends = [(whole.find(each) + len(each), whole.find(each), each) for each in stop if each in whole]
    assert found == (min(ends)[2] if ends else None)
    assert result == (whole[: min(ends)[1]] if ends else whole)
    assert result.startswith("".join(pieces))


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(sorted(TOKENIZERS)), data=st.data())
def test_pieces_lead_the_whole_for_any_tokens_even_if_they_are_no_text(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(1, len(tokenizer) - 1), max_size=20))
    pieces, _, result = grow(tokenizer, ids, [])
    assert result.startswith("".join(pieces))
    if kind == "bytes":
        assert result == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_text_is_decoded_token_by_token_only_where_it_is_needed(monkeypatch):
    tokenizer = byte_tokenizer()
    decoded, original = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **kw: decoded.append(len(ids)) or original(ids, **kw))
    generator = make_generator(tiny_decoder("llama"), tokenizer=tokenizer)
    run(generator, PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
    assert decoded == [20] * len(PROMPTS)


# -- abort --------------------------------------------------------------------------------------------------------


def test_an_aborted_prompt_ends_as_it_is_and_the_others_go_on():
    model = tiny_decoder("llama")
    params = [SamplingParams(n=2, max_tokens=10, ignore_eos=True)] * 3
    expected = run(make_generator(model), PROMPTS[:3], params)
    for moment in range(12, 18):  # between any two deltas of one step
        generator = make_generator(model)
        deltas = []
        for count, delta in enumerate(generator.stream(PROMPTS[:3], params, [0, 1, 2])):
            deltas.append(delta)
            if count == moment:
                generator.abort(1)
                generator.check()
        completions = collect(deltas)
        generator.check()
        assert generator._scheduler.pool.num_free == 256
        for whole in expected:
            each = completions[whole.prompt_index, whole.sample_index]
            aborted = each.prompt_index == 1
            assert each.finish_reason == ("abort" if aborted else "length")
            assert each.token_ids == whole.token_ids[: 3 if aborted else 10]


def test_everything_can_be_aborted_while_some_wait_and_others_are_being_computed():
    generator = make_generator(tiny_decoder("llama"), max_tokens_per_step=4, block_size=4)
    params = [SamplingParams(n=3, max_tokens=10, ignore_eos=True)] * len(PROMPTS)
    deltas = generator.stream(PROMPTS, params, SEEDS)
    first = next(deltas)
    generator.abort()
    completions = collect([first, *deltas])
    assert len(completions) == 3 * len(PROMPTS)
    assert {each.finish_reason for each in completions.values()} == {"abort"}
    generator.check()
    assert generator._scheduler.pool.num_free == 256
    generator.abort()  # with nothing under way it does nothing


# -- left, interrupted, closed --------------------------------------------------------------------------------------


def works(generator, expected, params):
    generator.check()
    assert generator._scheduler.pool.num_free == 256
    assert not generator._stop._growing
    assert tokens_of(run(generator, PROMPTS, params)) == expected


@pytest.mark.parametrize("leave", ["break", "close", "error", "interrupt", "never read"])
def test_a_stream_left_early_frees_everything(leave):
    model, params = tiny_decoder("llama"), SamplingParams(n=2, max_tokens=10, stop="a")
    expected = tokens_of(run(make_generator(model, tokenizer=byte_tokenizer()), PROMPTS, params))
    generator = make_generator(model, tokenizer=byte_tokenizer())
    deltas = generator.stream(PROMPTS, [params] * len(PROMPTS), SEEDS)
    if leave == "close":
        next(deltas)
        deltas.close()
    elif leave != "never read":
        error = {"error": ZeroDivisionError, "interrupt": KeyboardInterrupt}.get(leave)
        with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt):
            for count, _ in enumerate(generator.stream(PROMPTS, [params] * len(PROMPTS), SEEDS)):
                if count == 7 and error is None:
                    break
                if count == 7:
                    raise error
    works(generator, expected, params)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interruption_within_a_step_ends_the_stream_alone(error, monkeypatch):
    model, params = tiny_decoder("llama"), SamplingParams(n=2, max_tokens=10)
    expected = tokens_of(run(make_generator(model), PROMPTS, params))
    generator = make_generator(model)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[2], "forward", lambda *_, **__: (_ for _ in ()).throw(error))
        deltas = generator.stream(PROMPTS, [params] * len(PROMPTS), SEEDS)
        with pytest.raises(error):
            next(deltas)
    assert list(deltas) == []
    works(generator, expected, params)


def test_two_streams_at_once_are_refused():
    generator = make_generator(tiny_decoder("llama"))
    params = [SamplingParams(max_tokens=5, ignore_eos=True)] * len(PROMPTS)
    unread = generator.stream(PROMPTS, params, SEEDS)
    deltas = generator.stream(PROMPTS, params, SEEDS)
    first = next(deltas)
    for start in (generator.stream, generator.generate, generator.generate_unordered):
        with pytest.raises(RuntimeError, match=r"exhaust or close\(\) that iterator first"):
            start(PROMPTS, params, SEEDS)
    with pytest.raises(RuntimeError, match=r"exhaust or close\(\) that iterator first"):
        next(unread)
    with pytest.raises(RuntimeError, match="cannot change while"):
        generator.weights_version = 9
    assert len(collect([first, *deltas])) == len(PROMPTS)
    generator.check()


def test_a_stream_whose_generator_is_closed_says_so():
    generator = make_generator(tiny_decoder("llama"))
    params = [SamplingParams(max_tokens=5, ignore_eos=True)] * len(PROMPTS)
    unread = generator.stream(PROMPTS, params, SEEDS)
    deltas = generator.stream(PROMPTS, params, SEEDS)
    next(deltas)
    generator.close()
    for stale in (deltas, unread):
        with pytest.raises(RuntimeError, match="is closed .* when an engine leaves GENERATE mode"):
            next(stale)
        assert list(stale) == []


def test_completions_come_one_by_one_as_they_end():
    tokenizer = byte_tokenizer()
    path = [1, 2, 3, 4, 0]
    script = Script({a: {b: 9.0} for a, b in pairwise(path)}, len(tokenizer))
    generator = make_generator(script, tokenizer=tokenizer, eos=(0,))
    params = SamplingParams(temperature=0, max_tokens=9)
    steps = [
        (generator.stats.steps, each.prompt_index, each.token_ids)
        for each in generator.generate_unordered([[1], [3], [4], [2]], [params] * 4, range(4))
    ]
    assert steps == [(1, 2, [0]), (2, 1, [4, 0]), (3, 3, [3, 4, 0]), (4, 0, [2, 3, 4, 0])]
    generator.check()


# -- the engine -----------------------------------------------------------------------------------------------------

TEXTS = ["Hello", "One, two", "é"]
PARAMS = SamplingParams(n=2, max_tokens=12, stop=["q", "zz"])


def make_engine(tp_size=1):
    torch.manual_seed(0)
    module = LlamaForCausalLM(tiny_config())
    module.set_attn_implementation("hybrid")
    return HybridEngine(
        module, tiny_tokenizer(), init_parallel(tp_size), inference=InferenceConfig(kv_blocks=64, block_size=4)
    )


def streams_like_generate(tp_size):
    engine = make_engine(tp_size)
    with engine.generate_mode():
        expected = engine.generate(TEXTS, PARAMS, seeds=[1, 2, 3])
        completions = collect(engine.stream(TEXTS, PARAMS, seeds=[1, 2, 3]))
        unordered = {
            (c.prompt_index, c.sample_index): c for c in engine.generate_unordered(TEXTS, PARAMS, seeds=[1, 2, 3])
        }
        for each in expected:
            key = (each.prompt_index, each.sample_index)
            assert completions[key].token_ids == unordered[key].token_ids == each.token_ids
            assert completions[key].text == unordered[key].text == each.text
        aborted = []
        for count, delta in enumerate(engine.stream(TEXTS, PARAMS, seeds=[1, 2, 3])):
            aborted.append(delta)
            if count == 8:
                engine.abort(1)
        assert {key[0] for key, each in collect(aborted).items() if each.finish_reason == "abort"} <= {1}
        with (
            pytest.raises(ValueError, match="were given different prompts") if tp_size > 1 else contextlib.nullcontext()
        ):
            engine.stream([[5 + engine.mesh.rank]], PARAMS)
        engine._generator.check()
    return [each.token_ids for each in expected], [delta.token_ids for delta in aborted]


def test_the_engine_streams_what_it_generates_on_one_rank_and_two(tmp_path):
    alone = streams_like_generate(1)
    assert run_world(streams_like_generate, 2, tmp_path, 2) == [alone, alone]


def test_a_flip_ends_an_open_stream_which_says_so():
    engine = make_engine()
    with engine.generate_mode():
        expected = tokens_of(engine.generate(TEXTS, PARAMS, seeds=[1, 2, 3]))
    for leave in ("error", "end", "flip"):
        with contextlib.suppress(ZeroDivisionError), engine.generate_mode():
            deltas = engine.stream(TEXTS, PARAMS)
            next(deltas)
            if leave == "error":
                raise ZeroDivisionError
            if leave == "flip":
                engine.train_mode()
        assert engine.mode is Mode.TRAIN
        # A plain call is causal attention again.
        ids = torch.tensor([[5, 9, 7, 11]])
        eager = LlamaForCausalLM(tiny_config())
        eager.load_state_dict(engine.module.state_dict())
        torch.testing.assert_close(engine.module(ids).logits, eager(ids).logits, rtol=1e-5, atol=1e-5)
        with engine.generate_mode():
            with pytest.raises(RuntimeError, match="read it to its end before the flip"):
                next(deltas)
            assert tokens_of(engine.generate(TEXTS, PARAMS, seeds=[1, 2, 3])) == expected
            engine._generator.check()


def test_an_interrupt_while_a_stream_is_read_leaves_an_engine_that_works():
    engine = make_engine()
    with engine.generate_mode():
        expected = tokens_of(engine.generate(TEXTS, PARAMS, seeds=[1, 2, 3]))
        with contextlib.suppress(KeyboardInterrupt):
            for _ in engine.stream(TEXTS, PARAMS):
                raise KeyboardInterrupt
        assert engine._generator._scheduler.pool.num_free == 64
        assert tokens_of(engine.generate(TEXTS, PARAMS, seeds=[1, 2, 3])) == expected


def test_what_the_engine_refuses_and_what_just_fits():
    engine = make_engine()
    for call in (engine.stream, engine.generate, engine.generate_unordered):
        with pytest.raises(ModeError, match=f"{call.__name__}.. works on slices: call it inside"):
            call(TEXTS)
    with pytest.raises(ModeError, match="abort"):
        engine.abort()
    engine.inference = InferenceConfig(kv_blocks=140, block_size=4)
    with engine.generate_mode():
        for call in (engine.stream, engine.generate, engine.generate_unordered):
            with pytest.raises(ValueError, match="prompt 1 is empty"):
                call(["a", ""], PARAMS)
            with pytest.raises(ValueError, match="2 params for 3 prompts; pass one for all"):
                call(TEXTS, [PARAMS] * 2)
            with pytest.raises(ValueError, match="shorten the prompt or set max_tokens=11 at most"):
                call([[5] * 501], PARAMS)
            with pytest.raises(ValueError, match="shorten the prompt or set a smaller max_tokens"):
                call([[5] * 512], PARAMS)
            with pytest.raises(ValueError, match="token id 263 and the model's vocabulary has 263"):
                call([[263]], PARAMS)
        (completion,) = engine.generate([[5] * 500], SamplingParams(max_tokens=12, ignore_eos=True))
        assert len(completion.token_ids) == 12
        (completion,) = engine.generate([[5] * 512], SamplingParams(max_tokens=0))
        assert completion.token_ids == []


def test_text_that_brings_its_bos_gets_no_second_one():
    engine = make_engine()
    template = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    engine.tokenizer.backend_tokenizer.post_processor = template
    plain, marked = engine.encode(["ab", "<|bos|>ab"])
    assert plain[0] == 1 and len(plain) == 3
    assert marked == plain


def test_an_engine_that_only_generates_has_no_optimizer(tiny_llama):
    with pytest.raises(ValueError, match="with trains=False there is no optimizer"):
        HybridEngine.from_pretrained(tiny_llama, optim=OptimConfig(), trains=False)
    engine = HybridEngine.from_pretrained(tiny_llama, trains=False)
    assert engine.model.optimizer is None
    assert not any(parameter.requires_grad for parameter in engine.module.parameters())
    with engine.generate_mode():
        messages = [{"role": "user", "content": "Hi"}]
        assert len(engine.generate([messages], PARAMS)) == 2
    assert HybridEngine.from_pretrained(tiny_llama).model.optimizer is not None
