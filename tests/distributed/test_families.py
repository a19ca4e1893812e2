"""Families beyond llama on two tensor ranks: greedy text is transformers', and a step trains as one process does."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid.config import InferenceConfig, OptimConfig, ZeroConfig
from hybrid.engine import HybridEngine
from hybrid.inference.params import SamplingParams
from hybrid.models.attention import ATTENTION_NAME
from hybrid.parallel import init_parallel
from tests.decoders import tiny_decoder
from tests.distributed.world import run_world

PROMPTS = [[5, 17, 33], [60, 8, 8, 21, 40, 11, 3, 70, 9], [12]]  # one longer than the windows of mistral and gemma2
FAMILIES = ["mistral", "qwen2", "qwen3", "gemma", "gemma2", "granite", "starcoder2", "gpt_neox", "phi"]


def make(family: str, attention: str) -> PreTrainedModel:
    if family != "gpt_neox":
        return tiny_decoder(family, attention)
    # Its configuration knows no key/value heads, which the other families share.
    config = AutoConfig.for_model(
        family, vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    config.initializer_range, config.eos_token_id, config.bos_token_id = 0.3, 2, 1
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def greedy(module: PreTrainedModel, num_tokens: int) -> list[list[int]]:
    return [
        module.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def two_ranks_equal_one_process(family: str) -> None:
    reference = make(family, "eager")
    engine = HybridEngine(
        make(family, ATTENTION_NAME),
        None,
        init_parallel(2),
        zero=ZeroConfig(stage=3, persistence_threshold=64),
        optim=OptimConfig(learning_rate=1e-3, max_grad_norm=0.0),
        inference=InferenceConfig(kv_blocks=64, block_size=4),
    )
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with engine.generate_mode():
        assert [c.token_ids for c in engine.generate(PROMPTS, params)] == greedy(reference, 12)
    ids = torch.tensor([PROMPTS[1]])
    reference(ids, labels=ids).loss.backward()
    engine.backward(engine.module(ids, labels=ids).loss)
    expected = dict(reference.named_parameters())
    for group in engine.model.groups:
        assert group.grad is not None
        for name, grad in group.gather_whole(group.grad).items():
            torch.testing.assert_close(grad, expected[name].grad, atol=1e-5, rtol=1e-4, msg=name)
    engine.step()
    with engine.generate_mode():
        assert len(engine.generate(PROMPTS, params)) == len(PROMPTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_tensor_ranks_equal_one_process(tmp_path, family):
    run_world(two_ranks_equal_one_process, 2, tmp_path, family)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gpt2", "gpt2 has no tensor-parallel plan"),
        ("phi3", r"phi3: layers\.\*\.\w+\.\w+ \(Linear\) is planned as '\w+', which cannot be laid out"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(family, message):
    from hybrid.models.plans import tensor_parallel_plan

    config = AutoConfig.for_model(family, vocab_size=96, hidden_size=32, num_attention_heads=4, pad_token_id=0)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=message + r".*set --tp_size 1"):
        tensor_parallel_plan(module, 2)
