"""Sampling from stretches of the vocabulary on tensor ranks: the tokens of one process, and the same on every rank."""

import pytest
import torch
from transformers import LlamaForCausalLM

from hybrid.config import InferenceConfig, ZeroConfig
from hybrid.engine import HybridEngine
from hybrid.inference.params import SamplingParams
from hybrid.models.attention import ATTENTION_NAME
from hybrid.parallel import init_parallel
from tests.distributed.world import run_world
from tests.tiny import tiny_config

VOCAB_SIZE = 1301  # does not divide, and is several blocks
PROMPTS = [[5, 17, 33, 1300, 700], [60, 8, 8, 21], [12]]
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(n=2, temperature=0.8, top_k=30, raw_logprobs=True),
    SamplingParams(top_p=0.6, logprobs=3),
    SamplingParams(temperature=2.0, top_p=0.995, min_p=0.001),
    SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.5, logprobs=0),
    SamplingParams(temperature=0.0, repetition_penalty=1.8, raw_logprobs=True),
    SamplingParams(logit_bias={1300: 6.0, 2: 8.0}, min_tokens=6),
    SamplingParams(allowed_token_ids=range(600, 1301, 3), top_k=-1),
]


def make_engine(tp_size, *, tied):
    torch.manual_seed(0)
    config = tiny_config(vocab_size=VOCAB_SIZE, tie_word_embeddings=tied, initializer_range=0.2)
    module = LlamaForCausalLM(config)
    module.set_attn_implementation(ATTENTION_NAME)
    return HybridEngine(
        module,
        None,
        init_parallel(tp_size),
        zero=ZeroConfig(stage=3, persistence_threshold=0),
        inference=InferenceConfig(kv_blocks=128, block_size=4),
    )


def sampled(tp_size, tied):
    """Everything that a rank reports of every completion, and the whole logits of a plain forward."""
    engine = make_engine(tp_size, tied=tied)
    prompts = PROMPTS * 3
    with engine.generate_mode():
        completions = engine.generate(prompts, PARAMS, seeds=range(len(prompts)))
        with torch.no_grad():
            logits = engine.module(torch.tensor([PROMPTS[0]])).logits
        with pytest.raises(ValueError, match=f"prompt 0 has the id {VOCAB_SIZE} and the model's vocabulary"):
            engine.generate([[5]], SamplingParams(stop_token_ids=[VOCAB_SIZE]))
    numbers = [[each.logprobs, each.raw_logprobs, each.top_logprobs] for each in completions]
    return [each.token_ids for each in completions], numbers, logits


@pytest.mark.parametrize("tied", [True, False])
def test_tensor_ranks_sample_what_one_process_does(tmp_path, tied):
    ((tokens, numbers, logits),) = run_world(sampled, 1, tmp_path, 1, tied)
    assert len({tuple(each) for each in tokens}) == len(tokens)
    assert logits.shape == (1, len(PROMPTS[0]), VOCAB_SIZE)
    first, second = run_world(sampled, 2, tmp_path, 2, tied)
    assert first[0] == second[0] == tokens
    torch.testing.assert_close(first[2], logits, rtol=1e-4, atol=1e-4)
    for mine, yours, alone in zip(first[1], second[1], numbers, strict=True):
        assert mine[2] == yours[2]
        assert (mine[2] is None) == (alone[2] is None)
        for top, expected in zip(mine[2] or [], alone[2] or [], strict=True):
            assert top == pytest.approx(expected, rel=1e-3, abs=1e-4)
        for values, same, expected in zip(mine[:2], yours[:2], alone[:2], strict=True):
            if expected is None:
                assert values is None and same is None
            else:
                assert torch.equal(values, same)
                torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-4)
