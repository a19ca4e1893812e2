"""Families on tensor ranks: greedy text is transformers', and a step trains as one process does.

A world takes a few seconds to start, so one runs several families; what fails says which one it was.
"""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hybrid.config import InferenceConfig, OptimConfig, ZeroConfig
from hybrid.engine import HybridEngine
from hybrid.inference.params import SamplingParams
from hybrid.models.attention import ATTENTION_NAME
from hybrid.parallel import ParallelMesh, init_parallel
from tests.decoders import ROPES, tiny_decoder
from tests.distributed.world import run_world

PROMPTS = [[5, 17, 33], [60, 8, 8, 21, 40, 11, 3, 70, 9], [12]]  # one longer than the windows
NUM_TOKENS = 12
NUM_LAYERS = 2
MIXED_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
# Three ranks, two key/value heads of three query heads each: two ranks share one, 2 + 1, and the third has the other.
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
# Neither divides over two or four ranks.
ODD_WIDTHS = {"intermediate_size": 45, "vocab_size": 97}
ONE_KV_HEAD = {"num_key_value_heads": 1}

# Whole prompts, and chunks of them; larger worlds, which are slow here, take the first.
INFERENCE = [
    InferenceConfig(kv_blocks=64, block_size=4),
    InferenceConfig(kv_blocks=16, block_size=16, max_tokens_per_step=5),
    InferenceConfig(kv_blocks=4, block_size=256),
]

Case = tuple[str, dict[str, Any]]


def plain(*families: str) -> list[Case]:
    return [(family, {}) for family in families]


# Name: ranks, tensor ranks, and what runs on them.
WORLDS: dict[str, tuple[int, int, list[Case]]] = {
    "1 rank, planned by transformers": (
        1,
        1,
        plain("llama", "mistral", "qwen3", "gemma2", "starcoder2", "phi", "gptj"),
    ),
    "1 rank, planned by the table": (1, 1, plain("gpt2", "gpt_neox", "opt", "phi3", "olmo2", "gpt_bigcode", "codegen")),
    "2 ranks, like llama": (2, 2, plain("llama", "mistral", "qwen2", "qwen3", "smollm3")),
    "2 ranks, scaled and capped": (
        2,
        2,
        [*plain("gemma", "gemma2", "granite", "cohere"), ("gemma3_text", MIXED_LAYERS)],
    ),
    "2 ranks, packed": (2, 2, plain("phi3", "glm4", "gpt_neox", "persimmon", "codegen")),
    "2 ranks, norms over all heads": (2, 2, [("olmo2", {}), ("olmo3", MIXED_LAYERS)]),
    "2 ranks, two-layer perceptrons": (2, 2, plain("starcoder2", "phi", "stablelm", "hunyuan_v1_dense")),
    "2 ranks, learned positions": (2, 2, plain("gpt2", "opt", "biogpt", "gpt_bigcode", "gptj")),
    "1 rank, experts": (1, 1, plain("mixtral", "deepseek_v3", "jetmoe", "minicpm3")),
    "2 ranks, scaled rotations": (
        2,
        2,
        [ROPES[name] for name in ("linear", "llama3", "yarn", "linear in full layers", "longrope within")],
    ),
    "2 ranks, one KV head": (2, 2, [(family, ONE_KV_HEAD) for family in ("llama", "phi3", "olmo2")]),
    "2 ranks, uneven": (
        2,
        2,
        [("qwen2", ODD_WIDTHS), ("phi3", ODD_WIDTHS), ("gpt2", {"n_inner": 45, "vocab_size": 97})],
    ),
    "3 ranks, 2 KV heads": (3, 3, [(family, SIX_HEADS) for family in ("llama", "phi3", "olmo2")]),
    "4 ranks, 2 KV heads": (4, 4, plain("llama", "qwen3", "phi3", "olmo2")),
    "2 replicas of 2 ranks, one KV head": (4, 2, [("llama", ONE_KV_HEAD), ("phi3", ONE_KV_HEAD), ("gpt2", {})]),
}


def greedy(module: PreTrainedModel) -> list[list[int]]:
    return [
        module.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def ranks_equal_one_process(tp_size: int, cases: list[Case]) -> None:
    mesh = init_parallel(tp_size)
    for family, overrides in cases:
        try:
            check_family(mesh, family, overrides)
        except BaseException as error:
            error.add_note(f"the family was {family} {overrides or ''}")
            raise


def check_family(mesh: ParallelMesh, family: str, overrides: dict[str, Any]) -> None:
    overrides = {"num_hidden_layers": NUM_LAYERS, **overrides}
    if len(overrides.get("layer_types", ())) > NUM_LAYERS:
        overrides["layer_types"] = overrides["layer_types"][:NUM_LAYERS]
    engine = HybridEngine(
        tiny_decoder(family, ATTENTION_NAME, **overrides),
        None,
        mesh,
        zero=ZeroConfig(stage=3, persistence_threshold=64),
        optim=OptimConfig(learning_rate=1e-3, max_grad_norm=0.0),
    )
    generated = []
    for inference in INFERENCE if mesh.world_size <= 2 else INFERENCE[:1]:
        engine.inference = inference
        with engine.generate_mode():
            params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            generated.append([c.token_ids for c in engine.generate(PROMPTS, params)])
    ids = torch.tensor([PROMPTS[1]])
    engine.backward(engine.module(ids, labels=ids).loss)
    grads: dict[str, torch.Tensor] = {}
    for group in engine.model.groups:
        assert group.grad is not None
        grads |= group.gather_whole(group.grad)
    if mesh.is_main:
        reference = tiny_decoder(family, "eager", **overrides)
        expected = greedy(reference)
        assert all(tokens == expected for tokens in generated), (generated, expected)
        reference(ids, labels=ids).loss.backward()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)
    engine.step()
    with engine.generate_mode():
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        assert len(engine.generate(PROMPTS, params)) == len(PROMPTS)


@pytest.mark.parametrize("world", WORLDS)
def test_tensor_ranks_equal_one_process(tmp_path, world):
    num_ranks, tp_size, cases = WORLDS[world]
    run_world(ranks_equal_one_process, num_ranks, tmp_path, tp_size, cases)
