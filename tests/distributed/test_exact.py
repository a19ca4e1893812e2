"""`InferenceConfig.exact`: what generation reports of its tokens is what training computes of them, bit for bit."""

from __future__ import annotations

import pytest
import torch

from hybrid.config import InferenceConfig, OptimConfig, ZeroConfig
from hybrid.engine import HybridEngine
from hybrid.inference.params import SamplingParams
from hybrid.models.attention import ATTENTION_NAME
from hybrid.parallel import init_parallel
from ops import attention_cpu
from tests.decoders import tiny_decoder
from tests.distributed.test_engine import make_module
from tests.distributed.world import run_world

needs_compiler = pytest.mark.skipif(not attention_cpu.is_available(), reason="there is no C++ compiler")
LENGTHS = (1, 2, 15, 16, 17, 40, 70)


def exact_engine(family, dtype, **inference):
    module = tiny_decoder(family).to(dtype)
    module.set_attn_implementation(ATTENTION_NAME)
    return HybridEngine(
        module,
        None,
        init_parallel(),
        zero=ZeroConfig(stage=3, persistence_threshold=0),
        optim=OptimConfig(learning_rate=1e-3),
        inference=InferenceConfig(exact=True, **inference),
    )


def prompts(vocab_size):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def sampled_log_probs_are_trained_log_probs(family, dtype):
    """Whatever shares a batch on either side, in chunks, preempted, from shared blocks; with gradients and without."""
    # Few tokens a step and few blocks: prompts go in chunks, and sequences are preempted.
    for inference in ({"kv_blocks": 200}, {"kv_blocks": 10, "max_tokens_per_step": 20}):
        engine = exact_engine(family, dtype, **inference)
        given = prompts(engine.config.vocab_size)
        params = [SamplingParams(n=2, max_tokens=9 + 7 * index, ignore_eos=True) for index in range(len(given))]
        for _ in range(2):
            with engine.generate_mode():
                completions = engine.generate(given, params)
            generated = torch.cat([each.logprobs for each in completions])
            trained = engine.logprobs(completions)
            assert torch.equal(trained.logprobs.detach(), generated), (family, dtype)
            with torch.no_grad():
                for each in completions[::3]:
                    assert torch.equal(engine.logprobs([each]).logprobs, each.logprobs)
            engine.backward(trained.logprobs.mean())
            assert engine.step().grad_norm > 0


@needs_compiler
@pytest.mark.parametrize("world_size", [1, 2])
def test_sampled_log_probs_are_trained_log_probs(tmp_path, world_size):
    cases = [(family, dtype) for family in ("llama", "qwen3", "mistral") for dtype in (torch.float32,)]
    for case in cases if world_size == 1 else cases[:1]:
        run_world(sampled_log_probs_are_trained_log_probs, world_size, tmp_path, *case)


def what_cannot_be_exact_says_so():
    mesh = init_parallel()
    exact = InferenceConfig(kv_blocks=8, exact=True)
    for family, changes, words in (
        ("llama", {"block_size": 8}, "a multiple of 16"),
        ("gemma2", {}, "gemma2, which scales or caps its logits"),
    ):
        module = tiny_decoder(family)
        module.set_attn_implementation(ATTENTION_NAME)
        with pytest.raises(ValueError, match=words):
            HybridEngine(module, None, mesh, inference=InferenceConfig(kv_blocks=8, exact=True, **changes))
    with pytest.raises(ValueError, match="exact needs the compiled CPU kernels"):
        HybridEngine(tiny_decoder("llama").double(), None, mesh, inference=exact)


@needs_compiler
def test_what_cannot_be_exact_says_so(tmp_path):
    run_world(what_cannot_be_exact_says_so, 1, tmp_path)


def exact_with_a_tensor_group_is_refused():
    exact = InferenceConfig(kv_blocks=8, exact=True)
    with pytest.raises(ValueError, match="exact needs tp_size=1"):
        HybridEngine(make_module(), None, init_parallel(2), inference=exact)


@needs_compiler
def test_exact_with_a_tensor_group_is_refused(tmp_path):
    run_world(exact_with_a_tensor_group_is_refused, 2, tmp_path)
