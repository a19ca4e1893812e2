"""Contracts 2 to 4: greedy text is transformers', the ratio at lr 0 is 1, and flips move what they must, for ever."""

import gc

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from hybrid.config import InferenceConfig, OptimConfig, ZeroConfig
from hybrid.engine import HybridEngine, Mode, ModeError
from hybrid.inference.params import SamplingParams
from hybrid.models.attention import ATTENTION_NAME
from hybrid.parallel import init_parallel
from hybrid.zero.level import LevelError
from tests.distributed.world import run_world
from tests.tiny import tiny_config, tiny_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
GRIDS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2)]


def make_module(**overrides):
    torch.manual_seed(0)
    module = LlamaForCausalLM(tiny_config(**overrides))
    module.set_attn_implementation(ATTENTION_NAME)
    return module


def make_engine(tp_size, *, learning_rate=1e-3, threshold=0, **overrides):
    return HybridEngine(
        make_module(**overrides),
        tiny_tokenizer(),
        init_parallel(tp_size),
        zero=ZeroConfig(stage=3, persistence_threshold=threshold),
        optim=OptimConfig(learning_rate=learning_rate),
        inference=InferenceConfig(kv_blocks=64, block_size=4),
    )


def prompts(count=6):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 263, (length,), generator=generator).tolist() for length in range(3, 3 + count)]


def reference_tokens(module, num_tokens=GREEDY.max_tokens):
    texts = []
    for prompt in prompts():
        output = module.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        texts.append(output[0, len(prompt) :].tolist())
    return texts


def train_once(engine, seed):
    generator = torch.Generator().manual_seed(seed * 100 + engine.mesh.rank)
    ids = torch.randint(3, 263, (2, 8), generator=generator)
    engine.backward(engine.module(ids, labels=ids).loss)
    return engine.step()


def greedy_equals_transformers(tp_size):
    reference = LlamaForCausalLM(tiny_config())
    reference.load_state_dict(make_module().state_dict())
    engine = make_engine(tp_size)
    with engine.generate_mode():
        completions = engine.generate(prompts(), GREEDY)
    assert [c.token_ids for c in completions] == reference_tokens(reference)
    # and again after a step, on the weights of that step
    train_once(engine, 0)
    weights = dict(engine.model.state.stream())
    reference.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    with engine.generate_mode():
        completions = engine.generate(prompts(), GREEDY)
    assert [c.token_ids for c in completions] == reference_tokens(reference)
    assert {c.weights_version for c in completions} == {1}


@pytest.mark.parametrize(("world_size", "tp_size"), GRIDS)
def test_greedy_equals_transformers(tmp_path, world_size, tp_size):
    run_world(greedy_equals_transformers, world_size, tmp_path, tp_size)


def ratio_is_one_and_text_does_not_depend_on_the_grid(tp_size):
    engine = make_engine(tp_size)
    params = SamplingParams(n=2, temperature=0.7, max_tokens=12)
    with engine.generate_mode():
        completions = engine.generate(prompts(), params, seeds=range(len(prompts())))
    with torch.no_grad():
        scores = engine.logprobs(completions, temperature=0.7)
    behaviour = torch.cat([c.logprobs for c in completions])
    torch.testing.assert_close((scores.logprobs - behaviour).exp(), torch.ones_like(behaviour), atol=1e-5, rtol=0)
    return [c.token_ids for c in completions]


def test_ratio_is_one_and_samples_do_not_depend_on_the_grid(tmp_path):
    samples = [
        rank
        for world_size, tp_size in GRIDS
        for rank in run_world(ratio_is_one_and_text_does_not_depend_on_the_grid, world_size, tmp_path, tp_size)
    ]
    assert all(sample == samples[0] for sample in samples)


def samples_by_default_and_by_seed():
    """Tokens of two calls with the engine's own seeds, of two with the same seeds, and of one with others."""
    engine = make_engine(1)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)

    def tokens(seeds=None):
        return [tuple(each.token_ids) for each in engine.generate([[5, 6, 7]] * 2, params, seeds=seeds)]

    with engine.generate_mode():
        return tokens(), tokens(), tokens([7, 8]), tokens([7, 8]), tokens([9, 10])


def test_seeds_calls_and_replicas_differ_unless_they_are_told_the_same(tmp_path):
    ranks = run_world(samples_by_default_and_by_seed, 2, tmp_path)
    by_default = [sample for first, second, *_ in ranks for sample in (*first, *second)]
    assert len(set(by_default)) == 8
    for _, _, one, again, other in ranks:
        assert one == again
        assert len({*one, *other}) == 4
    assert ranks[0][2:] == ranks[1][2:]


def bytes_of_a_flip(tp_size):
    # 4 KV heads and a vocabulary that divides, so that slices are even.
    even = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 264}
    engine = make_engine(tp_size, threshold=100, **even)
    mesh = engine.mesh
    moving = (
        sum(
            p.layout.numel
            for g in engine.model.groups
            if g.layout.num_pieces * g.layout.num_slices > 1
            for p in g.members
            if p.layout.numel > 100
        )
        * 4
    )
    assert moving > 0 or mesh.world_size == 1
    with engine.generate_mode():
        pass
    to_generate, to_train = engine.flips
    assert to_generate.bytes_received == moving // mesh.tp_size - moving // mesh.world_size
    assert to_train.bytes_received == 0
    with engine.train_mode():
        assert len(engine.flips) == 2  # a flip to the mode one is in is none


@pytest.mark.parametrize(("world_size", "tp_size"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_a_flip_receives_its_slice_less_its_shard(tmp_path, world_size, tp_size):
    run_world(bytes_of_a_flip, world_size, tmp_path, tp_size)


def many_flips(tp_size, count):
    engine = make_engine(tp_size, threshold=100)
    held = []
    for flip in range(count):
        with engine.generate_mode():
            engine.generate(prompts(2), SamplingParams(max_tokens=3))
        train_once(engine, flip)
        if flip % 10 == 9:
            engine.verify()
            engine.flips.clear()
            gc.collect()
            held.append(psutil.Process().memory_info().rss)
    assert engine.weights_version == count
    assert held[-1] - held[len(held) // 2] < 8 * 2**20, held


@pytest.mark.parametrize(("world_size", "tp_size"), [(1, 1), (2, 1), (2, 2)])
def test_a_hundred_flips_with_steps_between(tmp_path, world_size, tp_size):
    run_world(many_flips, world_size, tmp_path, tp_size, 100)


def saved_model_generates_the_same(tp_size, directory):
    engine = make_engine(tp_size)
    train_once(engine, 0)
    with engine.generate_mode():
        expected = [c.token_ids for c in engine.generate(prompts(), GREEDY)]
        engine.save_pretrained(directory)
        assert engine.mode is Mode.GENERATE
    if engine.mesh.is_main:
        loaded = LlamaForCausalLM.from_pretrained(directory)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert reference_tokens(loaded) == expected


@pytest.mark.parametrize(("world_size", "tp_size"), [(1, 1), (2, 2), (4, 2)])
def test_a_saved_model_generates_the_same_text(tmp_path, world_size, tp_size):
    run_world(saved_model_generates_the_same, world_size, tmp_path, tp_size, tmp_path / "saved")


def wrong_modes():
    engine = make_engine(2)
    with pytest.raises(ModeError, match="call it inside `with engine.generate_mode"):
        engine.generate(prompts(), GREEDY)
    with engine.generate_mode():
        with pytest.raises(ModeError, match=r"step\(\) works on shards"):
            engine.step()
        with pytest.raises(ValueError, match="were given different prompts"):
            engine.generate([[5 + engine.mesh.rank]], GREEDY)
    assert engine.mode is Mode.TRAIN


def test_calls_in_the_wrong_mode_and_split_tensor_groups_are_refused(tmp_path):
    run_world(wrong_modes, 2, tmp_path)


def plain_forward_is_causal_in_train():
    engine = make_engine(2)
    reference = LlamaForCausalLM(tiny_config())
    reference.load_state_dict(make_module().state_dict())
    ids = torch.tensor([prompts()[-1]])
    with pytest.raises(ZeroDivisionError), engine.generate_mode():
        raise ZeroDivisionError
    with torch.no_grad():
        torch.testing.assert_close(engine.module(ids).logits, reference(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_plain_forward_is_causal_after_an_exception_in_generation(tmp_path):
    run_world(plain_forward_is_causal_in_train, 2, tmp_path)


def flip_that_fails():
    engine = make_engine(2)
    broken = engine.model.groups[1]
    original, broken.enter_slice = broken.enter_slice, _out_of_memory
    with pytest.raises(
        RuntimeError, match=r"failed at model\.layers\.0\..* and was rolled back to TRAIN: out of memory"
    ):
        engine.generate_mode()
    broken.enter_slice = original
    assert engine.mode is Mode.TRAIN
    train_once(engine, 0)
    engine.verify()


def gradients_survive_a_flip(tp_size):
    norms = []
    for flips in (False, True):
        engine = make_engine(tp_size)
        for seed in (0, 1):
            generator = torch.Generator().manual_seed(seed * 100 + engine.mesh.rank)
            ids = torch.randint(3, 263, (2, 8), generator=generator)
            engine.backward(engine.module(ids, labels=ids).loss)
            if flips:
                with engine.generate_mode():
                    engine.generate(prompts(2), GREEDY)
                engine.verify()
        norms.append(engine.step().grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


@pytest.mark.parametrize(("world_size", "tp_size"), [(1, 1), (2, 2), (4, 2)])
def test_accumulated_gradients_survive_a_flip(tmp_path, world_size, tp_size):
    run_world(gradients_survive_a_flip, world_size, tmp_path, tp_size)


def interrupted_flip():
    engine = make_engine(2)
    original, engine._count_blocks = engine._count_blocks, _interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate_mode()
    engine._count_blocks = original
    assert engine.mode is Mode.TRAIN
    with engine.generate_mode():
        assert engine.generate(prompts(2), GREEDY)
        with pytest.raises(LevelError, match="not to be had in GENERATE mode"):
            engine.model.values(None)
        assert engine.generate(prompts(2), GREEDY)  # and it did no harm
    with pytest.raises(ValueError, match="prompts is one string"), engine.generate_mode():
        engine.generate("abc")
    with pytest.raises(ValueError, match="more than the model's 512 positions"), engine.generate_mode():
        engine.generate([[5] * 10], SamplingParams(max_tokens=510))


def _interrupt():
    raise KeyboardInterrupt


def test_an_interrupted_flip_leaves_an_engine_that_works(tmp_path):
    run_world(interrupted_flip, 2, tmp_path)


def _out_of_memory():
    raise RuntimeError("out of memory")


def test_a_failed_flip_rolls_back_and_names_the_parameter(tmp_path):
    run_world(flip_that_fails, 2, tmp_path)


def test_heads_that_tensor_ranks_share_do_not_move_at_a_flip(tmp_path):
    run_world(four_ranks_share_three_heads, 4, tmp_path)


def four_ranks_share_three_heads():
    engine = make_engine(4)
    with engine.generate_mode():
        pass
    engine.verify()
    moved = [group for group in engine.model.groups if group.flip_bytes]
    assert all("norm" in member.name for group in moved for member in group.members)
    assert [flip.bytes_received for flip in engine.flips[:2]] == [sum(group.flip_bytes for group in moved), 0]
