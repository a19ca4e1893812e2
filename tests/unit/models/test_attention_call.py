from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid.models.attention import ATTENTION_NAME, RaggedCall, attention_call, hybrid_attention
from hybrid.models.ragged import RaggedBatch
from tests.decoders import FAMILIES, VOCAB_SIZE, assert_equal_gradients, tiny_decoder

LENGTHS = [11, 1, 7, 7, 16]


def random_sequences(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def ragged_logits(model, sequences):
    """(N, V) of the sequences laid end to end."""
    batch = RaggedBatch.from_sequences(sequences)
    with attention_call(RaggedCall(batch.cu_seqlens, batch.max_seqlen)):
        output = model(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False)
    return output.logits[0]


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outside_a_context_it_is_the_eager_model_on_a_padded_batch(family, padding_side):
    sequences = random_sequences()
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if padding_side == "left" else slice(0, len(sequence))
        ids[row, place], mask[row, place] = torch.tensor(sequence), 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits, expected = (
            tiny_decoder(family, attention)(input_ids=ids, attention_mask=mask, position_ids=positions).logits
            for attention in (ATTENTION_NAME, "eager")
        )
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_outside_a_context_transformers_generates_with_it(family):
    ids = torch.tensor([random_sequences([12])[0]])
    outputs = [
        tiny_decoder(family, attention).generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
        for attention in (ATTENTION_NAME, "eager")
    ]
    assert outputs[0].tolist() == outputs[1].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_call_equals_the_eager_model_on_each_sequence_and_its_gradient(family):
    sequences = random_sequences()
    model, eager = tiny_decoder(family), tiny_decoder(family, "eager")
    logits = ragged_logits(model, sequences)
    expected = torch.cat([eager(input_ids=torch.tensor([sequence])).logits[0] for sequence in sequences])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    assert_equal_gradients(logits, model, expected, eager)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_sequence_sees_another(family):
    model = tiny_decoder(family)
    first, second, third = random_sequences([9, 9, 9])
    with torch.no_grad():
        logits = ragged_logits(model, [first, second, third])
        changed = ragged_logits(model, [third, second, first])
    assert torch.equal(logits[9:18], changed[9:18])


def test_a_model_that_goes_around_the_function_is_refused():
    with pytest.raises(RuntimeError, match="no attention layer read the RaggedCall"):
        ragged_logits(tiny_decoder("llama", "eager"), random_sequences())


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "passes s_aux to its attention"),
        ("qwen3_next", {"num_experts": 2, "num_experts_per_tok": 1}, "layers of type linear_attention"),
        ("llama4_text", {"num_local_experts": 2, "attention_chunk_size": 4}, "layers of type chunked_attention"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(family, overrides, message):
    with pytest.raises(ValueError, match=message):
        ragged_logits(tiny_decoder(family, **overrides), random_sequences())


def test_arguments_that_make_no_sense_inside_a_context_are_refused():
    model = tiny_decoder("llama")
    ids = torch.tensor([[3, 4, 5, 6]])
    call = RaggedCall(torch.tensor([0, 4], dtype=torch.int32), 4)
    for arguments, message in (
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "attention_mask hides tokens inside attention_call"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "got an attention mask inside attention_call"),
        ({"position_bias": torch.zeros(1, 4, 4, 4)}, "passes position_bias to its attention"),
        ({"output_attentions": True}, "passes output_attentions"),
    ):
        with pytest.raises(ValueError, match=message), attention_call(call):
            model(input_ids=ids, use_cache=False, **arguments)
    with pytest.raises(ValueError, match="takes \\(1, N\\) tokens"), attention_call(call):
        model(input_ids=ids.expand(2, -1), use_cache=False)
    with pytest.raises(ValueError, match="tokens 0 to 4 and there are 3"), attention_call(call):
        model(input_ids=ids[:, :3], use_cache=False)
    # An exception leaves no context behind.
    model(input_ids=ids, attention_mask=torch.ones(1, 4))


def test_values_that_are_larger_than_keys_are_refused():
    query, value = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 12)
    call = RaggedCall(torch.tensor([0, 4], dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="keys of 8 and values of 12; values may not be larger"), attention_call(call):
        hybrid_attention(torch.nn.Module(), query, query, value, None)


def test_attention_dropout_is_refused_in_training():
    model = tiny_decoder("llama", attention_dropout=0.1)
    ragged_logits(model, random_sequences())
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        ragged_logits(model.train(), random_sequences())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_a_backward_that_recomputes_needs_the_context_again():
    model = tiny_decoder("llama").train()
    plain = ragged_logits(model, random_sequences())
    plain.sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()

    batch = RaggedBatch.from_sequences(random_sequences())
    call = RaggedCall(batch.cu_seqlens, batch.max_seqlen)
    with pytest.raises(RuntimeError, match="must run inside attention_call"):
        ragged_logits(model, random_sequences()).sum().backward()
    model.zero_grad()
    logits = ragged_logits(model, random_sequences())
    with attention_call(call, recompute=True):
        logits.sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "family", ["gemma3_text", "phi3", "olmo2", "granite", "smollm3", "starcoder2", "gpt_neox", "opt", "gpt2"]
)
def test_other_families_run_ragged(family):
    """Nothing that these models hand to their attention is refused by mistake."""
    overrides = {"gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2}, "starcoder2": {"sliding_window": 6}}
    if family == "opt":
        overrides["opt"] = {"ffn_dim": 48, "word_embed_proj_dim": 32}
    options = {"num_key_value_heads": 4} if family in ("olmo2", "gpt_neox", "opt", "gpt2") else {}
    model, eager = (
        tiny_decoder(family, name, **options, **overrides.get(family, {})) for name in (ATTENTION_NAME, "eager")
    )
    sequences = random_sequences()
    with torch.no_grad():
        logits = ragged_logits(model, sequences)
        expected = torch.cat([eager(input_ids=torch.tensor([sequence])).logits[0] for sequence in sequences])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_bloom_which_has_its_own_attention_is_refused():
    config = AutoConfig.for_model("bloom", vocab_size=VOCAB_SIZE, hidden_size=32, n_head=4, n_layer=2)
    model = AutoModelForCausalLM.from_config(config)
    batch = RaggedBatch.from_sequences(random_sequences())
    with (
        pytest.raises(RuntimeError, match="its family must use transformers' attention interface"),
        attention_call(RaggedCall(batch.cu_seqlens, batch.max_seqlen)),
    ):
        model(input_ids=batch.input_ids[None], use_cache=False)
