"""Tiny random decoders in fp32, one per family, and a byte-level tokenizer; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.falcon import modeling_falcon

VOCAB_SIZE = 96
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
    "initializer_range": 0.3,  # wide enough for distributions that are far from flat
}
# Weights of norms and biases that a fresh model has as ones and zeros, under which a wrong one would not be seen.
_SPREAD = 0.1
_NO_GROUPS = {"num_key_value_heads": None, "head_dim": None}  # every query head has a key/value head
_INNER = {**_NO_GROUPS, "intermediate_size": None, "n_inner": 48}

# What a family's configuration says differently from `_SHAPE`; None for what it does not know. These five are those
# that the tests of attention and of the generator go through: what sets one family apart for them is here.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    # Windows alternate with full layers; soft caps low enough to bend the scores.
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "qwen2": {},
    "qwen3": {},
}
# And those that the tests of tensor parallelism add: packed projections, norms over all heads, learned positions.
CUT_FAMILIES: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "biogpt": _NO_GROUPS,
    "codegen": {**_INNER, "rotary_dim": 4},
    "cohere": {"use_qk_norm": True, "head_dim": None},
    "gemma": {},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "glm4": {},
    "gpt2": _INNER,
    "gpt_bigcode": _INNER,
    "gpt_neox": _NO_GROUPS,
    "gptj": {**_INNER, "rotary_dim": 4},
    "granite": {},
    "hunyuan_v1_dense": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 6},
    "opt": {**_NO_GROUPS, "intermediate_size": None, "ffn_dim": 48, "init_std": 0.3},
    "persimmon": _NO_GROUPS,
    "phi": {},
    "phi3": {"sliding_window": 6},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
# And those that one rank runs: experts, and values that are smaller than keys.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **_EXPERTS,
        **_LATENT,
        "head_dim": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "jetmoe": {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": None},
    "minicpm3": {**_LATENT, "head_dim": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": None},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
}
if hasattr(modeling_falcon, "ALL_ATTENTION_FUNCTIONS"):  # since transformers 5.25
    MORE_FAMILIES["falcon"] = {**_NO_GROUPS, "intermediate_size": None, "ffn_hidden_size": 48}
_THETA = {"rope_theta": 100.0}  # low, so that a few dozen tokens turn far
_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0}
# RoPE scalings, by name: the family, and what its configuration says of them. "Within" and "beyond" are said of the
# tests' prompts, the longest of which has 33 tokens.
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **_THETA}}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
                **_THETA,
            }
        },
    ),
    "yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                **_THETA,
            }
        },
    ),
    "linear in full layers": (
        "gemma3_text",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", **_THETA},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            },
        },
    ),
    "longrope within": (
        "phi3",
        {
            "rope_parameters": {"rope_type": "longrope", **_FACTORS, **_THETA},
            "original_max_position_embeddings": 64,
        },
    ),
    "longrope beyond": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "original_max_position_embeddings": 24,
                **_FACTORS,
                **_THETA,
            }
        },
    ),
    "dynamic": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **_THETA}},
    ),
}


def tiny_decoder(family: str, attention: str = "hybrid", **overrides: Any) -> PreTrainedModel:
    """A random model of the family; the same weights for each ``attention``."""
    import hybrid.models.attention  # noqa: F401  registers "hybrid"
    from hybrid.models.rope import rotate_by_sequence

    settings = {**_SHAPE, **CUT_FAMILIES.get(family, {}), **MORE_FAMILIES.get(family, {}), **overrides}
    config = AutoConfig.for_model(family, **{name: value for name, value in settings.items() if value is not None})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += _SPREAD * torch.randn(parameter.shape)
    if attention == "hybrid":
        rotate_by_sequence(model)
    return model


def assert_equal_gradients(logits: Any, model: PreTrainedModel, expected: Any, other: PreTrainedModel) -> None:
    """A random weighting of two models' equal logits gives all of their parameters the same gradient."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, parameter), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad, theirs.grad, rtol=1e-3, atol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
        )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 1 to 256, in the order of ByteLevel's alphabet), and ``<end>`` (id 0)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0} | {letter: index for index, letter in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
