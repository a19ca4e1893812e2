"""The real model once: SmolLM2's greedy text in fp32 equals transformers', on 1, 2 and 3 tensor ranks (3 KV groups)."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid.config import InferenceConfig
from hybrid.engine import HybridEngine
from hybrid.inference.params import SamplingParams
from hybrid.models.loading import load_causal_lm, load_tokenizer, resolve_model
from hybrid.parallel import init_parallel
from tests.distributed.world import run_world

NUM_TOKENS = 64
TOPICS = ["the sea", "a small robot", "bread", "prime numbers", "the moon", "winter", "a lost key", "music"]
QUESTIONS = [f"Write a sentence about {topic}." for topic in TOPICS] + [
    f"What is {a} plus {b}? Reply with the number only." for a, b in [(3, 4), (12, 9), (20, 1), (7, 7)]
]
# Plain text as well as chats.
TEXTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "1, 2, 3, 4,"]


@pytest.fixture(scope="module")
def greedy(smollm2, tmp_path_factory):
    """Prompts and transformers' own greedy continuations of them."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
        for q in QUESTIONS
    ]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in chats + TEXTS]
    module = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    # One prompt at a time: padding would be one more thing to compare.
    expected = [
        module.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )[0, len(ids) :].tolist()
        for ids in prompts
    ]
    path = tmp_path_factory.mktemp("greedy") / "greedy.json"
    path.write_text(json.dumps([prompts, expected]))
    return path


def generates(tp_size, model, path):
    prompts, expected = json.loads(path.read_text())
    resolved = resolve_model(str(model))
    engine = HybridEngine(
        load_causal_lm(resolved, "fp32"),
        load_tokenizer(resolved),
        init_parallel(tp_size),
        inference=InferenceConfig(kv_cache_gb=0.25),
    )
    with engine.generate_mode():
        completions = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))
    assert len(completions) == 16
    for completion, tokens in zip(completions, expected, strict=True):
        assert completion.token_ids == tokens
    if tp_size == engine.mesh.world_size:
        assert engine.flips[0].bytes_received == 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_smollm2_generates_what_transformers_does(tmp_path, greedy, smollm2, ranks):
    run_world(generates, ranks, tmp_path, ranks, smollm2, greedy, timeout_s=400)
