"""Tiny random decoders in fp32, one per family, and a byte-level tokenizer; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

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
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    # Windows alternate with full layers; soft caps low enough to bend the scores.
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "qwen2": {},
    "qwen3": {},
}


def tiny_decoder(family: str, attention: str = "hybrid", **overrides: Any) -> PreTrainedModel:
    """A random model of the family; the same weights for each ``attention``."""
    import hybrid.models.attention  # noqa: F401  registers "hybrid"

    config = AutoConfig.for_model(family, **{**_SHAPE, **FAMILIES.get(family, {}), **overrides})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 1 to 256, in the order of ByteLevel's alphabet), and ``<end>`` (id 0)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0} | {letter: index for index, letter in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
