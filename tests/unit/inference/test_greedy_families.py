"""Greedy text of every family is that of transformers' ``generate``, token by token, however it is computed."""

from __future__ import annotations

import pytest
import torch

from hybrid.config import InferenceConfig
from hybrid.inference.generator import Generator
from hybrid.inference.params import SamplingParams
from hybrid.models.families import head_dim, num_kv_heads
from tests.decoders import CUT_FAMILIES, MORE_FAMILIES, ROPES, VOCAB_SIZE, tiny_decoder

NUM_TOKENS = 12
MIXED_LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
PLAIN = {family: (family, {}) for family in (*CUT_FAMILIES, *MORE_FAMILIES)}
CASES = {
    **PLAIN,
    "gemma3_text": ("gemma3_text", MIXED_LAYERS),
    "olmo3": ("olmo3", MIXED_LAYERS),
    "qwen2, windows in its last layers": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 6},
    ),
    **{f"RoPE: {name}": case for name, case in ROPES.items()},
}
if "falcon" in MORE_FAMILIES:
    CASES["falcon, a key/value head for each head"] = ("falcon", {"multi_query": False})
    CASES["falcon, groups of heads"] = ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2})


def random_prompts(lengths):
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


# Within and beyond windows of 6, 16 positions, a block.
PROMPTS = random_prompts([1, 27, 7, 33])


def transformers_greedy(family, overrides, prompts=PROMPTS):
    completions = []
    for prompt in prompts:
        model = tiny_decoder(family, "eager", **overrides)  # a fresh one, since some keep what a longer prompt set
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        completions.append(output[0, len(prompt) :].tolist())
    return completions


def make_generator(model, *, num_blocks, **settings):
    config = model.config
    return Generator(
        model,
        tokenizer=None,
        num_layers=config.num_hidden_layers,
        num_kv_heads=num_kv_heads(config),
        head_dim=head_dim(config),
        num_blocks=num_blocks,
        config=InferenceConfig(**settings),
        eos_token_ids=(2,),
        dtype=torch.float32,
        device="cpu",
        weights_version=0,
    )


def greedy(generator, prompts=PROMPTS):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    completions = generator.generate(prompts, [params] * len(prompts), range(len(prompts)))
    generator.check()
    return [completion.token_ids for completion in completions]


@pytest.mark.filterwarnings("ignore:sequences are longer than the model's")  # dynamic RoPE; the test of it is elsewhere
@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_transformers_generate(case):
    family, overrides = CASES[case]
    expected = transformers_greedy(family, overrides)
    assert len({token for tokens in expected for token in tokens}) > 2
    model = tiny_decoder(family, **overrides)
    for block_size, num_blocks in ((16, 40), (256, 8)):
        for max_tokens_per_step in (512, 7):  # whole prompts, and chunks of them beside the others' samples
            generator = make_generator(
                model, num_blocks=num_blocks, block_size=block_size, max_tokens_per_step=max_tokens_per_step
            )
            assert greedy(generator) == expected, (block_size, max_tokens_per_step)


@pytest.mark.filterwarnings("ignore:sequences are longer than the model's")
@pytest.mark.parametrize("rope", ["longrope beyond", "dynamic"])
def test_prompts_of_other_lengths_with_the_same_beginning_share_no_keys_that_were_rotated_otherwise(rope):
    family, overrides = ROPES[rope]
    long = PROMPTS[3]
    prompts = [long[:12], long, long[:12] + long[:15]]
    expected = transformers_greedy(family, overrides, prompts)
    model = tiny_decoder(family, **overrides)
    generator = make_generator(model, num_blocks=100, block_size=4)
    assert [greedy(generator, [prompt])[0] for prompt in prompts] == expected
    assert [greedy(generator, [prompt])[0] for prompt in prompts[::-1]] == expected[::-1]


def test_a_model_that_attends_twice_in_a_layer_is_refused_and_not_wrong():
    """What `hybrid.models.supported` does not know, attention itself finds out."""
    generator = make_generator(tiny_decoder("diffllama"), num_blocks=40, block_size=16)
    with pytest.raises(ValueError, match="DiffLlamaAttention attends twice as layer 0 in one forward pass"):
        greedy(generator)
