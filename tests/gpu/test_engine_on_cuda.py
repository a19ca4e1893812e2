"""The engine on one GPU: the same text as transformers, and a step that trains."""

import dataclasses

import pytest
import torch
from transformers import LlamaForCausalLM

from hybrid.config import InferenceConfig, OptimConfig
from hybrid.engine import HybridEngine
from hybrid.inference.params import SamplingParams
from hybrid.models.attention import ATTENTION_NAME
from hybrid.parallel import init_parallel
from tests.tiny import tiny_config

PROMPTS = [[5, 6, 7], [30, 31, 32, 33, 34], [99]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setenv("HYBRID_DEVICE", "cuda")
    torch.manual_seed(0)
    module = LlamaForCausalLM(tiny_config())
    module.set_attn_implementation(ATTENTION_NAME)
    optim = OptimConfig(learning_rate=1e-3)
    return HybridEngine(module, None, init_parallel(), optim=optim, inference=InferenceConfig(kv_blocks=64))


def reference_tokens(engine):
    reference = LlamaForCausalLM(tiny_config()).to(engine.device)
    reference.load_state_dict(engine.module.state_dict())
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=engine.device)
        output = reference.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
        yield output[0, len(prompt) :].tolist()


@pytest.mark.gpu
def test_recorded_decode_steps_sample_the_same(engine):
    """The same requests often enough for every batch size to be recorded, against a generator that records none."""
    params = [SamplingParams(n=3, max_tokens=20 + 10 * index, ignore_eos=True) for index in range(len(PROMPTS))]
    texts = []
    for records in (True, False):
        engine.inference = dataclasses.replace(engine.inference, cuda_graphs=records)
        with engine.generate_mode():
            for _ in range(3):
                completions = engine.generate(PROMPTS, params, seeds=[1, 2, 3])
                texts.append([each.token_ids for each in completions])
    assert all(text == texts[0] for text in texts)


@pytest.mark.gpu
def test_greedy_text_and_a_step(engine):
    for _ in range(2):
        expected = list(reference_tokens(engine))
        with engine.generate_mode():
            completions = engine.generate(PROMPTS, GREEDY)
        assert [c.token_ids for c in completions] == expected
        with torch.no_grad():
            scores = engine.logprobs(completions)
        behaviour = torch.cat([c.logprobs for c in completions]).to(engine.device)
        torch.testing.assert_close(scores.logprobs, behaviour, atol=1e-4, rtol=0)
        engine.backward(-engine.logprobs(completions).logprobs.mean())
        assert engine.step().grad_norm > 0
    engine.verify()
