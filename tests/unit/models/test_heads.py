"""Log-probs and values of packed sequences against transformers' own heads, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hybrid.models.attention import ATTENTION_NAME
from hybrid.models.heads import logit_scale, output_head, score_head, token_logprobs, token_loss, token_values
from hybrid.models.ragged import RaggedBatch

_TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# What a family does to its logits is exaggerated, so that leaving it out would show.
FAMILIES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 0.5, "sliding_window": 64},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.25},
    "phi": {"num_key_value_heads": 4},  # its LM head has a bias
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61},
    "gpt_neox": {},
}
SEQUENCES = [[5, 6, 7, 8, 9, 10], [11, 12], [13], [14, 15, 16, 17]]
SCORED = [3, 1, 0, 3]


def _make(family: str, auto_class=AutoModelForCausalLM, attention: str = ATTENTION_NAME, **extra):
    settings = FAMILIES[family]
    tiny = {} if family == "gpt2" else _TINY
    config = AutoConfig.for_model(family.split("-")[0], **(tiny | settings | extra))
    torch.manual_seed(0)
    module = auto_class.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 1.0))
    return module


def _oracle(module, family, temperature=1.0):
    """(R,) log-probs and entropies from transformers' logits of each sequence alone, eager attention."""
    reference = _make(family, attention="eager")
    reference.load_state_dict(module.state_dict())
    logprobs, entropy = [], []
    for sequence, count in zip(SEQUENCES, SCORED, strict=True):
        logits = reference(torch.tensor([sequence])).logits[0, len(sequence) - 1 - count : -1]
        if not count:
            continue
        distribution = torch.distributions.Categorical(logits=logits / temperature)
        logprobs.append(distribution.log_prob(torch.tensor(sequence[-count:])))
        entropy.append(distribution.entropy())
    return reference, torch.cat(logprobs), torch.cat(entropy)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_entropy_match_transformers(family, temperature):
    module = _make(family)
    scores = token_logprobs(module, RaggedBatch.from_sequences(SEQUENCES, SCORED), temperature)
    _, logprobs, entropy = _oracle(module, family, temperature)
    torch.testing.assert_close((scores.logprobs, scores.entropy), (logprobs, entropy), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama-tied", "gemma2", "granite", "phi"])
def test_gradients_match_transformers(family):
    module = _make(family)
    scores = token_logprobs(module, RaggedBatch.from_sequences(SEQUENCES, SCORED), 0.7)
    (scores.logprobs.sum() + 0.5 * scores.entropy.sum()).backward()
    reference, logprobs, entropy = _oracle(module, family, 0.7)
    (logprobs.sum() + 0.5 * entropy.sum()).backward()
    for (name, parameter), expected in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad, expected.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "granite", "cohere", "phi"])
def test_loss_and_its_gradients_match_transformers(family):
    """Both a mean, and row weights over a normalizer."""
    row_weights = torch.linspace(0.5, 2.0, sum(SCORED))
    module = _make(family)
    batch = RaggedBatch.from_sequences(SEQUENCES, SCORED)
    losses = token_loss(module, batch), token_loss(module, batch, row_weights, normalizer=20.0)
    sum(losses).backward()
    reference, logprobs, _ = _oracle(module, family)
    expected = -logprobs.mean(), -(logprobs * row_weights).sum() / 20
    sum(expected).backward()
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for (name, parameter), other in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_loss_is_transformers_loss_from_labels():
    sequence = [5, 6, 7, 8, 9, 10, 11, 12]
    ids = torch.tensor([sequence])
    expected = _make("llama", attention="eager")(ids, labels=ids).loss
    loss = token_loss(_make("llama").bfloat16(), RaggedBatch.from_sequences([sequence]))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=3e-2, atol=3e-2)
    loss = token_loss(_make("llama"), RaggedBatch.from_sequences([sequence]))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_a_normalizer_of_nothing():
    with pytest.raises(ValueError, match="normalizer is 0"):
        token_loss(_make("llama"), RaggedBatch.from_sequences(SEQUENCES), normalizer=0.0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2", "gpt_neox"])
def test_values_are_the_score_of_the_row_before_each_token(family):
    module = _make(family, AutoModelForSequenceClassification, num_labels=1)
    values = token_values(module, RaggedBatch.from_sequences(SEQUENCES, SCORED))
    reference = _make(family, AutoModelForSequenceClassification, attention="eager", num_labels=1)
    reference.load_state_dict(module.state_dict())
    expected = []
    for sequence, count in zip(SEQUENCES, SCORED, strict=True):
        for end in range(len(sequence) - count, len(sequence)):
            # transformers scores a sequence at its last token: here, the one before the token to come.
            expected.append(reference(torch.tensor([sequence[:end]])).logits[0, 0])
    torch.testing.assert_close(values, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert values.dtype == torch.float32


def test_bf16_scores_are_fp32():
    batch = RaggedBatch.from_sequences(SEQUENCES, SCORED)
    scores = token_logprobs(_make("llama").bfloat16(), batch)
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    assert (
        token_values(_make("llama", AutoModelForSequenceClassification, num_labels=1).bfloat16(), batch).dtype
        == torch.float32
    )


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_batch_of_nothing_reaches_every_parameter(family):
    empty = RaggedBatch.from_sequences([])
    actor = _make(family)
    scores = token_logprobs(actor, empty)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    learner = _make(family)
    loss = token_loss(learner, empty)
    loss.backward()
    assert loss == 0
    critic = _make(family, AutoModelForSequenceClassification, num_labels=1)
    token_values(critic, empty).sum().backward()
    for module in (actor, learner, critic):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None and not parameter.grad.any(), name


def test_output_head_reads_the_family():
    assert output_head(_make("gemma2")).softcap == 0.5
    assert output_head(_make("granite")).scale == pytest.approx(1 / 3)
    assert output_head(_make("cohere")).scale == 0.25
    assert output_head(_make("phi")).bias is not None
    tied = _make("llama-tied")
    assert output_head(tied).weight is tied.get_input_embeddings().weight
    plain = output_head(_make("llama"))
    assert (plain.scale, plain.softcap, plain.bias) == (1.0, None, None)


def test_families_that_read_a_name_otherwise():
    config = AutoConfig.for_model("granite", logits_scaling=4.0)
    assert logit_scale(config) == 0.25
    config.model_type = "hyperclovax"
    assert logit_scale(config) == 4.0
    mpt = AutoConfig.for_model("mpt")
    mpt.logit_scale = "inv_sqrt_d_model"
    assert logit_scale(mpt) == 1.0


def test_models_without_the_head_asked_for():
    actor, critic = _make("llama"), _make("llama", AutoModelForSequenceClassification, num_labels=1)
    with pytest.raises(ValueError, match="AutoModelForSequenceClassification and num_labels=1"):
        score_head(actor)
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        output_head(critic)
    with pytest.raises(ValueError, match="has 3 outputs per token"):
        score_head(_make("llama", AutoModelForSequenceClassification, num_labels=3))
    with pytest.raises(ValueError, match="has no body"):
        token_values(actor.model, RaggedBatch.from_sequences(SEQUENCES))
