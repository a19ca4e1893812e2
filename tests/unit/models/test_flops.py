"""The cost of a forward against torch's own count of the products that a Hugging Face model runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hybrid.models.flops import ForwardCost, forward_cost
from hybrid.models.plans import tensor_parallel_plan
from tests.tiny import tiny_config

LENGTH = 19

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
# Each with the elements of a query or key head and of a value head.
FAMILIES: dict[str, tuple[PreTrainedConfig, int, int]] = {
    "tied": (tiny_config(), 8, 8),
    "untied": (Qwen3Config(**_SIZES, tie_word_embeddings=False), 10, 10),
    "conv1d and learned positions": (GPT2Config(vocab_size=61, n_embd=24, n_layer=3, n_head=4, n_positions=64), 6, 6),
    "some layers with a window": (Gemma2Config(**_SIZES, sliding_window=5), 10, 10),
    "experts": (MixtralConfig(**_SIZES, num_local_experts=5, num_experts_per_tok=2), 10, 10),
    "experts in some layers": (
        Qwen3MoeConfig(**_SIZES, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=7, mlp_only_layers=[1]),
        10,
        10,
    ),
    "latent attention and a shared expert": (
        DeepseekV3Config(
            **{**_SIZES, "num_key_value_heads": 4, "head_dim": 4},
            q_lora_rank=12,
            kv_lora_rank=9,
            qk_rope_head_dim=4,
            qk_nope_head_dim=6,
            v_head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=11,
            first_k_dense_replace=1,
        ),
        10,
        8,
    ),
}


def build(config: PreTrainedConfig, auto_class: Any = AutoModelForCausalLM) -> Any:
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # one product for each expert, with its own tokens
    return auto_class.from_config(config, attn_implementation="eager").eval()


def counted(model: Any) -> int:
    """What torch counts of a forward over one sequence, without the products that make the rotary angles."""
    ids = torch.arange(LENGTH)[None] % 50
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    rotary = sum(
        sum(by_op.values()) for name, by_op in counter.get_flop_counts().items() if name.endswith(".rotary_emb")
    )
    return counter.get_total_flops() - rotary


def hidden_pairs(windows: tuple[int | None, ...]) -> int:
    """Pairs in all layers whose product eager attention makes and masks, one by one."""
    visible = [
        key <= query and (window is None or key > query - window)
        for window in windows
        for query in range(LENGTH)
        for key in range(LENGTH)
    ]
    return visible.count(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cost_is_what_torch_counts_less_what_is_masked(family: str) -> None:
    config, key_dim, value_dim = FAMILIES[family]
    model = build(config)
    cost = forward_cost(model)
    masked = 2 * config.num_attention_heads * (key_dim + value_dim) * hidden_pairs(cost.windows)
    assert cost.flops([LENGTH], LENGTH) == counted(model) - masked
    assert [window is not None for window in cost.windows] == [
        kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ["full"] * len(cost.windows)
    ]


def test_a_critic_has_a_head_of_one_column() -> None:
    config = tiny_config(num_labels=1)
    model = build(config, AutoModelForSequenceClassification)
    cost = forward_cost(model)
    masked = 4 * 6 * 8 * hidden_pairs(cost.windows)
    assert cost.flops([LENGTH], LENGTH) == counted(model) - masked
    assert cost.per_scored_row == 2 * 48


def test_sequences_do_not_see_one_another_and_only_scored_rows_reach_the_head() -> None:
    cost = ForwardCost(per_token=100, per_scored_row=10_000, per_pair=1, windows=(None, 2))
    assert cost.flops([3, 1], 2) == 400 + 20_000 + (6 + 1) + (5 + 1)
    assert cost.flops([], 0) == 0


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_model_without_its_weights_costs_what_the_whole_one_does(tp_size: int) -> None:
    model = build(tiny_config(tie_word_embeddings=False))
    expected, plan = forward_cost(model), tensor_parallel_plan(model, tp_size)
    for parameter in model.parameters():
        parameter.data = parameter.data.new_empty(0)  # as it is at rest while it is sharded
    assert forward_cost(model, plan) == expected
