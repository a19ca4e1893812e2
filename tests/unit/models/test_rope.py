"""RoPE that depends on lengths: each sequence of a batch is rotated as transformers rotates it alone."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid.models.attention import ATTENTION_NAME, PagedCall, RaggedCall, attention_call
from hybrid.models.ragged import RaggedBatch
from hybrid.models.rope import (
    depends_on_length,
    prefix_class,
    require_one_rotation,
    rotate_by_sequence,
    switching_length,
)
from ops.paged import PagedBatch
from tests.decoders import ROPES, VOCAB_SIZE, tiny_decoder

LENGTHS = [5, 40, 16, 17, 24, 25, 5]
LONGROPE = {**ROPES["longrope beyond"][1]["rope_parameters"]}
CASES = {
    **ROPES,
    "longrope beyond, phi3": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24},
    ),
    "longrope with scales of its own": (
        "phimoe",
        {
            "num_local_experts": 2,
            "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
            "original_max_position_embeddings": 24,
        },
    ),
    "longrope in full layers": (
        "gemma3_text",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": LONGROPE,
            },
        },
    ),
    "dynamic, a family's own": (
        "hunyuan_v1_dense",
        {"max_position_embeddings": 16, "rope_parameters": ROPES["dynamic"][1]["rope_parameters"]},
    ),
}
DEPENDENT = [name for name in CASES if "longrope" in name or "dynamic" in name]


def random_sequences(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def ragged_logits(model, sequences):
    batch = RaggedBatch.from_sequences(sequences)
    with torch.no_grad(), attention_call(RaggedCall(batch.cu_seqlens, batch.max_seqlen)):
        return model(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False).logits[0]


def each_alone(family, overrides, sequences):
    """transformers' logits, by a fresh model for each, since a module may keep what a longer sequence set."""
    with torch.no_grad():
        return [
            tiny_decoder(family, "eager", **overrides)(torch.tensor([sequence]), use_cache=False).logits[0]
            for sequence in sequences
        ]


def rotary(model):
    return next(child for child in model.modules() if hasattr(child, "rope_type"))


@pytest.mark.parametrize("case", CASES)
def test_sequences_of_a_batch_are_rotated_as_each_alone(case):
    family, overrides = CASES[case]
    sequences = random_sequences()
    expected = torch.cat(each_alone(family, overrides, sequences))
    model = tiny_decoder(family, **overrides)
    for _ in range(2):  # the second finds what the first left
        torch.testing.assert_close(ragged_logits(model, sequences), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", DEPENDENT)
def test_a_batch_leaves_nothing_behind_in_the_module(case):
    family, overrides = CASES[case]
    model = tiny_decoder(family, **overrides)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ragged_logits(model, random_sequences())
    after = dict(model.named_buffers())
    assert list(after) == list(before)
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())
    (short,) = random_sequences([5])
    with torch.no_grad():
        plain = model(torch.tensor([short]), use_cache=False).logits[0]
    torch.testing.assert_close(plain, each_alone(family, overrides, [short])[0], rtol=1e-4, atol=1e-4)


def test_a_copy_rotates_by_itself():
    family, overrides = CASES["dynamic"]
    model = tiny_decoder(family, **overrides)
    other = copy.deepcopy(model)
    rotary(model).original_inv_freq.zero_()
    sequences = random_sequences()
    expected = torch.cat(each_alone(family, overrides, sequences))
    torch.testing.assert_close(ragged_logits(other, sequences), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_modules_whose_frequencies_are_fixed_are_left_alone(case):
    family, overrides = CASES[case]
    model, plain = tiny_decoder(family, **overrides), tiny_decoder(family, "eager", **overrides)
    assert depends_on_length(model) == (case in DEPENDENT)
    assert (type(rotary(model)) is type(rotary(plain))) == (case not in DEPENDENT)
    assert isinstance(rotary(model), type(rotary(plain)))
    before = type(rotary(model))
    rotate_by_sequence(model)
    assert type(rotary(model)) is before


def test_a_model_that_was_not_prepared_is_refused():
    family, overrides = CASES["longrope beyond"]
    config = tiny_decoder(family, "eager", **overrides).config
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    with pytest.raises(RuntimeError, match="RoPE of LlamaAttention depends on a sequence's length"):
        ragged_logits(model, random_sequences())


# -- generation -------------------------------------------------------------------------------------------------------


def paged_logits(model, chunks, prompt_lens):
    """Logits of new tokens: ``chunks`` are each sequence's tokens and how many of them are cached (and not here)."""
    config = model.config
    cache = torch.zeros(config.num_hidden_layers, len(chunks), config.num_key_value_heads, 64, config.head_dim)
    batch = PagedBatch.build(
        np.array([len(tokens) - start for tokens, start in chunks]),
        np.array([len(tokens) for tokens, _ in chunks]),
        np.arange(len(chunks))[:, None],
        block_size=64,
        num_kv_heads=config.num_key_value_heads,
        device=torch.device("cpu"),
    )
    ids = torch.tensor([token for tokens, start in chunks for token in tokens[start:]])
    call = PagedCall(cache.transpose(2, 3), cache.clone().transpose(2, 3), batch, prompt_lens)
    with torch.no_grad(), attention_call(call):
        return model(input_ids=ids[None], position_ids=batch.position_ids[None], use_cache=False).logits[0]


@pytest.mark.filterwarnings("ignore:sequences are longer than the model's")
@pytest.mark.parametrize("case", ["longrope beyond", "dynamic"])
def test_a_part_of_a_prompt_is_rotated_by_the_length_of_the_whole(case):
    family, overrides = CASES[case]
    long, short = random_sequences([40, 7])
    expected = torch.cat([logits[:10] for logits in each_alone(family, overrides, [long, short])])
    model = tiny_decoder(family, **overrides)
    logits = paged_logits(model, [(long[:10], 0), (short, 0)], torch.tensor([40, 7]))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="PagedCall has no prompt_lens"):
        paged_logits(model, [(long[:10], 0)], None)


def test_longrope_is_not_crossed_in_silence():
    model = tiny_decoder(CASES["longrope beyond"][0], **CASES["longrope beyond"][1])
    (tokens,) = random_sequences([25])
    with pytest.raises(ValueError, match="a prompt of 24 tokens has grown past 24, where longrope changes"):
        paged_logits(model, [(tokens, 24)], torch.tensor([24]))
    assert switching_length(model.config) == 24
    require_one_rotation(model.config, 14, 10, 0)
    require_one_rotation(model.config, 25, 100, 0)
    for num_prompt_tokens, max_tokens in ((14, 11), (24, 1)):
        with pytest.raises(ValueError, match=f"prompt 3 has {num_prompt_tokens} .* together within 24"):
            require_one_rotation(model.config, num_prompt_tokens, max_tokens, 3)
    assert [prefix_class(model.config, length) for length in (1, 24, 25, 40)] == [0, 0, 1, 1]


def test_dynamic_beyond_its_positions_warns_that_a_trainer_would_differ():
    family, overrides = CASES["dynamic"]
    model = tiny_decoder(family, **overrides)
    long, short = random_sequences([17, 16])
    with pytest.warns(UserWarning, match="longer than the model's 16 positions, where its dynamic RoPE"):
        paged_logits(model, [(long, 0)], torch.tensor([17]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paged_logits(model, [(short, 0)], torch.tensor([16]))
    assert switching_length(model.config) is None
    require_one_rotation(model.config, 10, 100, 0)
    assert [prefix_class(model.config, length) for length in (1, 16, 17, 40)] == [0, 0, 17, 40]


def test_other_types_have_neither_classes_nor_limits():
    for case in ("linear", "llama3", "yarn", "linear in full layers"):
        config = tiny_decoder(CASES[case][0], **CASES[case][1]).config
        require_one_rotation(config, 10, 1000, 0)
        assert switching_length(config) is None
        assert prefix_class(config, 1000) == 0
