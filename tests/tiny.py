"""Models small enough to run in milliseconds, saved as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def tiny_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE, **special: Any) -> PreTrainedTokenizerFast:
    """One token a byte, and the special tokens: 262 ids. ``special`` overrides pad_token, eos_token, bos_token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"pad_token": "<|pad|>", "eos_token": "<|end|>", "bos_token": "<|bos|>", **special},
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS[3:]})
    fast.chat_template = chat_template
    return fast


def tiny_config(**overrides: Any) -> LlamaConfig:
    """6 query heads and 3 KV heads of 8, so that 2 tensor ranks get uneven shares; an odd vocabulary; tied."""
    settings = {
        "vocab_size": 263,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        # Wide enough for tokens to differ clearly in probability, so that greedy choices do not hang on rounding.
        "initializer_range": 0.1,
    }
    return LlamaConfig(**{**settings, **overrides})


def save_tiny_llama(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    torch.manual_seed(seed)
    LlamaForCausalLM(tiny_config(**overrides)).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def save_tiny_reward_model(directory: Path, *, seed: int = 1, num_labels: int = 1, **overrides: Any) -> Path:
    torch.manual_seed(seed)
    LlamaForSequenceClassification(tiny_config(num_labels=num_labels, **overrides)).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory
