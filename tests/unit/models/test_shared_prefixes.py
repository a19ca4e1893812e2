"""Sequences that share a prefix on the flat axis against transformers on each sequence alone."""

from __future__ import annotations

import pytest
import torch

from hybrid.models.attention import RaggedCall, attention_call
from hybrid.models.heads import exact_forward, hidden_states
from hybrid.models.ragged import RaggedBatch
from hybrid.models.recompute import recompute_in_backward
from ops import attention_cpu
from tests.decoders import CUT_FAMILIES, FAMILIES, VOCAB_SIZE, assert_equal_gradients, tiny_decoder


def sequences_of(prefix_lengths, num_continuations):
    """Sequences that begin with prefixes, which take turns, and how many tokens of its prefix each has."""
    generator = torch.Generator().manual_seed(3)

    def tokens(length):
        return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()

    prefixes = [tokens(length) for length in prefix_lengths]
    sequences, shared = [], []
    for turn in range(num_continuations):
        for prefix in prefixes:
            sequences.append(prefix + tokens(1 + (3 * turn + len(prefix)) % 8))
            shared.append(len(prefix))
    # One has its prefix for itself, one shares nothing.
    return [*sequences, tokens(9), tokens(4)], [*shared, 4, 0]


SEQUENCES, SHARED = sequences_of([5, 1, 12], 3)
SPARED = 2 * (5 + 1 + 12)
SCORED = [min(len(s) - 1, len(s) - n + 1) for s, n in zip(SEQUENCES, SHARED, strict=True)]  # one in the prefix too


def logits_and_oracle(model, eager):
    """(R, V) logits of the scored tokens with shared prefixes, and of each sequence alone."""
    batch = RaggedBatch.from_sequences(SEQUENCES, SCORED, num_shared=SHARED)
    assert batch.num_tokens == sum(map(len, SEQUENCES)) - SPARED
    assert batch.target_ids.tolist() == [t for s, n in zip(SEQUENCES, SCORED, strict=True) for t in s[len(s) - n :]]
    with attention_call(RaggedCall(batch.cu_seqlens, batch.max_seqlen, batch.prefixes)):
        output = model(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False)
    alone = [eager(input_ids=torch.tensor([s])).logits[0, -n - 1 : -1] for s, n in zip(SEQUENCES, SCORED, strict=True)]
    return output.logits[0, batch.sources], torch.cat(alone)


@pytest.mark.parametrize("family", CUT_FAMILIES)
def test_scores_are_those_of_each_sequence_alone(family):
    with torch.no_grad():
        logits, expected = logits_and_oracle(tiny_decoder(family), tiny_decoder(family, "eager"))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_each_sequence_alone(family, recompute):
    model, eager = tiny_decoder(family), tiny_decoder(family, "eager")
    if recompute is not None:
        for layer in model.base_model.layers:
            recompute_in_backward(layer, recompute)
    logits, expected = logits_and_oracle(model, eager)
    assert_equal_gradients(logits, model, expected, eager)


@pytest.mark.skipif(not attention_cpu.is_available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_exact_states_have_the_same_bits_shared_or_alone(family, dtype):
    model = tiny_decoder(family).to(dtype)
    with exact_forward():
        together = RaggedBatch.from_sequences(SEQUENCES, SCORED, num_shared=SHARED)
        shared = hidden_states(model, together)[together.sources]
        batches = [RaggedBatch.from_sequences([s], [n]) for s, n in zip(SEQUENCES, SCORED, strict=True)]
        alone = torch.cat([hidden_states(model, batch)[batch.sources] for batch in batches])
    assert torch.equal(shared, alone)


def test_what_only_one_sequence_has_is_not_set_apart():
    batch = RaggedBatch.from_sequences([[3, 4, 5], [6, 4, 5]], num_shared=[2, 2])
    plain = RaggedBatch.from_sequences([[3, 4, 5], [6, 4, 5]])
    assert batch.prefixes is None and batch.cu_seqlens.tolist() == plain.cu_seqlens.tolist() == [0, 3, 6]
    assert batch.sources.tolist() == plain.sources.tolist() == [0, 1, 3, 4]


def test_marks_say_which_tokens_are_scored_in_the_prefix_as_well():
    sequences = [[3, 4, 5, 6], [3, 4, 5, 7, 8]]
    marks = [[False, False, True, True], [False, True, False, False, True]]
    batch = RaggedBatch.from_marked(sequences, marks, num_shared=[3, 3])
    assert batch.input_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 3, 4]
    assert batch.targets.tolist() == [2, 3, 1, 5] and batch.sources.tolist() == [1, 2, 0, 4]


def test_a_sequence_keeps_a_token_of_its_own():
    with pytest.raises(ValueError, match="sequence 1 has 2 tokens and is to share 2"):
        RaggedBatch.from_sequences([[3, 4], [3, 4]], num_shared=[1, 2])
    with pytest.raises(ValueError, match="False for the first"):
        RaggedBatch.from_marked([[3, 4]], [[True, False]])
