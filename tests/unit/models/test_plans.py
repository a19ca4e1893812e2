"""Layout plans: each rank's ranges as computed by hand, and what is refused, by name and with what to set."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid.models.families import num_kv_heads
from hybrid.models.plans import ModelPlan, tensor_parallel_plan
from tests.decoders import CUT_FAMILIES, tiny_decoder

SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}


def plan_of(family: str, tp_size: int, **overrides: Any) -> ModelPlan:
    with torch.device("meta"):
        return tensor_parallel_plan(tiny_decoder(family, **{"num_hidden_layers": 1, **overrides}), tp_size)


def skeleton(family: str, **settings: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def rows(plan: ModelPlan, name: str, tp_size: int) -> tuple[int | None, list[tuple[tuple[int, int], ...]]]:
    """The axis of the one weight whose name ends so, and each rank's ranges along it."""
    (layout,) = [layout for full, layout in plan.params.items() if full.endswith(name)]
    return layout.axis, [layout.part_rows(rank, tp_size) for rank in range(tp_size)]


# 4 query heads and 2 key/value heads of 8 elements, hidden 32, 48 neurons, 96 tokens; 4 of each where there are no
# groups. With `SIX_HEADS`, 6 and 2 heads of 8 and hidden 48.
@pytest.mark.parametrize(
    ("family", "tp_size", "overrides", "name", "axis", "expected"),
    [
        ("llama", 2, {}, "q_proj.weight", 0, [((0, 16),), ((16, 32),)]),
        ("llama", 2, {}, "k_proj.weight", 0, [((0, 8),), ((8, 16),)]),
        ("llama", 2, {}, "o_proj.weight", 1, [((0, 16),), ((16, 32),)]),
        ("llama", 2, {}, "down_proj.weight", 1, [((0, 24),), ((24, 48),)]),
        ("llama", 2, {"intermediate_size": 45}, "up_proj.weight", 0, [((0, 23),), ((23, 45),)]),
        ("llama", 2, {"vocab_size": 97}, "embed_tokens.weight", 0, [((0, 49),), ((49, 97),)]),
        ("llama", 2, {"vocab_size": 97}, "lm_head.weight", 0, [((0, 49),), ((49, 97),)]),
        # Two ranks share a key/value head: they all hold it, and divide its query heads.
        ("llama", 4, {}, "q_proj.weight", 0, [((0, 8),), ((8, 16),), ((16, 24),), ((24, 32),)]),
        ("llama", 4, {}, "v_proj.weight", 0, [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]),
        ("llama", 3, SIX_HEADS, "q_proj.weight", 0, [((0, 16),), ((16, 24),), ((24, 48),)]),
        ("llama", 3, SIX_HEADS, "k_proj.weight", 0, [((0, 8),), ((0, 8),), ((8, 16),)]),
        ("llama", 3, SIX_HEADS, "o_proj.weight", 1, [((0, 16),), ((16, 24),), ((24, 48),)]),
        ("llama", 2, {"num_key_value_heads": 1}, "k_proj.weight", 0, [((0, 8),), ((0, 8),)]),
        ("qwen2", 2, {}, "k_proj.bias", 0, [((0, 8),), ((8, 16),)]),
        # A norm of each head is every head's; one over all heads is cut with them.
        ("qwen3", 2, {}, "q_norm.weight", None, [((0, 8),), ((0, 8),)]),
        ("olmo2", 4, {}, "q_norm.weight", 0, [((0, 8),), ((8, 16),), ((16, 24),), ((24, 32),)]),
        ("olmo2", 4, {}, "k_norm.weight", 0, [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]),
        ("cohere", 2, {}, "q_norm.weight", 0, [((0, 2),), ((2, 4),)]),
        # [query | key | value]
        ("phi3", 2, {}, "qkv_proj.weight", 0, [((0, 16), (32, 40), (48, 56)), ((16, 32), (40, 48), (56, 64))]),
        ("phi3", 2, {}, "gate_up_proj.weight", 0, [((0, 24), (48, 72)), ((24, 48), (72, 96))]),
        ("phi3", 2, {}, "down_proj.weight", 1, [((0, 24),), ((24, 48),)]),
        # Conv1D: (in, out)
        ("gpt2", 2, {}, "attn.c_attn.weight", 1, [((0, 16), (32, 48), (64, 80)), ((16, 32), (48, 64), (80, 96))]),
        ("gpt2", 2, {}, "attn.c_attn.bias", 0, [((0, 16), (32, 48), (64, 80)), ((16, 32), (48, 64), (80, 96))]),
        ("gpt2", 2, {}, "attn.c_proj.weight", 0, [((0, 16),), ((16, 32),)]),
        ("gpt2", 2, {}, "mlp.c_fc.weight", 1, [((0, 24),), ((24, 48),)]),
        ("gpt2", 2, {}, "wpe.weight", None, [((0, 256),), ((0, 256),)]),
        # Head by head, 24 rows each
        ("gpt_neox", 3, {}, "query_key_value.weight", 0, [((0, 48),), ((48, 72),), ((72, 96),)]),
        ("gpt_neox", 3, {}, "attention.dense.weight", 1, [((0, 16),), ((16, 24),), ((24, 32),)]),
        ("gpt_bigcode", 2, {}, "c_attn.weight", 0, [((0, 16), (32, 40), (40, 48)), ((16, 32), (32, 40), (40, 48))]),
        ("gpt_bigcode", 2, {"multi_query": False}, "c_attn.weight", 0, [((0, 48),), ((48, 96),)]),
        # 4 blocks of 2 heads
        ("codegen", 2, {"num_attention_heads": 8}, "qkv_proj.weight", 0, [((0, 48),), ((48, 96),)]),
        ("opt", 2, {}, "embed_positions.weight", None, [((0, 258),), ((0, 258),)]),
        ("phi", 2, {}, "lm_head.bias", 0, [((0, 48),), ((48, 96),)]),
    ],
)
def test_ranges_are_those_computed_by_hand(family, tp_size, overrides, name, axis, expected):
    assert rows(plan_of(family, tp_size, **overrides), name, tp_size) == (axis, expected)


def test_local_numbers():
    assert plan_of("llama", 3, **SIX_HEADS).attributes["model.layers.0.self_attn"] == {
        "num_key_value_groups": (2, 1, 3)
    }
    assert plan_of("phi3", 4).attributes["model.layers.0.self_attn"] == {
        "num_key_value_heads": (1, 1, 1, 1),
        "num_key_value_groups": (1, 1, 1, 1),
        "config.num_attention_heads": (1, 1, 1, 1),
    }
    gpt2 = plan_of("gpt2", 3).attributes
    assert gpt2["transformer.h.0.attn"] == {"num_heads": (2, 1, 1), "split_size": (16, 8, 8)}
    assert gpt2["transformer.h.0.attn.c_attn"] == {"nf": (48, 24, 24)}
    assert gpt2["transformer.h.0.mlp.c_fc"] == {"nf": (16, 16, 16)}
    assert "transformer.h.0.attn.c_proj" not in gpt2
    assert plan_of("gpt_bigcode", 2).attributes["transformer.h.0.attn"] == {
        "num_heads": (2, 2),
        "num_key_value_groups": (2, 2),
        "embed_dim": (16, 16),
        "kv_dim": (8, 8),
        "kv_heads": (1, 1),
    }


@pytest.mark.parametrize(
    ("family", "tp_size", "overrides", "expected"),
    [
        ("llama", 1, {}, [2]),
        ("llama", 2, {"num_key_value_heads": 4}, [2, 2]),
        ("gpt2", 3, {}, [2, 1, 1]),
        ("llama", 4, {}, [1, 1, 1, 1]),
        ("gpt_bigcode", 2, {}, [1, 1]),
        ("codegen", 3, {"num_attention_heads": 8}, [4, 2, 2]),
    ],
)
def test_key_value_heads_of_each_rank(family, tp_size, overrides, expected):
    plan = plan_of(family, tp_size, **overrides)
    assert [plan.num_local_kv_heads(rank) for rank in range(tp_size)] == expected


def test_modules_that_need_a_collective():
    plan = plan_of("gpt2", 2)
    assert plan.row_parallel == ("transformer.h.0.attn.c_proj", "transformer.h.0.mlp.c_proj")
    assert plan.row_biases == {"transformer.h.0.attn.c_proj.bias", "transformer.h.0.mlp.c_proj.bias"}
    assert (plan.embedding, plan.lm_head) == ("transformer.wte", "lm_head")
    assert not plan.norms and not plan_of("qwen3", 2).norms and not plan_of("cohere", 2).norms
    assert plan_of("olmo2", 2).norms == {
        "model.layers.0.self_attn.q_norm": "variance_epsilon",
        "model.layers.0.self_attn.k_norm": "variance_epsilon",
    }
    # The one head is whole on every rank, and its norm with it.
    assert list(plan_of("olmo2", 2, num_key_value_heads=1).norms) == ["model.layers.0.self_attn.q_norm"]


@pytest.mark.parametrize("family", CUT_FAMILIES)
@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_every_rank_has_whole_heads_and_all_ranks_have_everything(family, tp_size):
    plan = plan_of(family, tp_size)
    for layout in plan.params.values():
        parts = [layout.part_rows(rank, tp_size) for rank in range(tp_size)]
        held = {row for part in parts for start, stop in part for row in range(start, stop)}
        assert held == set(range(layout.shape[layout.axis or 0])), layout.name
        assert all(stop > start for part in parts for start, stop in part), layout.name


def test_one_rank_is_never_refused():
    for family in ("bloom", "mixtral", "mamba"):
        module = skeleton(family, vocab_size=96, hidden_size=32, num_hidden_layers=1)
        assert all(layout.axis is None for layout in tensor_parallel_plan(module, 1).params.values())


TINY = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("family", "tp_size", "overrides", "message"),
    [
        ("llama", 8, {}, "tp_size 8 is more than the 4 query heads of llama; set --tp_size to at most 4"),
        (
            "llama",
            4,
            {"intermediate_size": 3},
            "tp_size 4 is more than the 3 neurons of model.layers.0.mlp.gate_proj of llama; set --tp_size to at most 3",
        ),
        (
            "phi3",
            4,
            {"intermediate_size": 3},
            "tp_size 4 is more than the 3 neurons of model.layers.0.mlp.gate_up_proj of phi3; "
            "set --tp_size to at most 3",
        ),
        (
            "llama",
            4,
            {"vocab_size": 3},
            "tp_size 4 is more than the 3 rows of model.embed_tokens.weight of llama; set --tp_size to at most 3",
        ),
        (
            "codegen",
            8,
            {"num_attention_heads": 8},
            "tp_size 8 is more than the 4 blocks of heads of codegen; set --tp_size to at most 4",
        ),
        (
            "codegen",
            2,
            {"num_attention_heads": 6, "hidden_size": 48},
            "codegen: 6 heads do not lie in 4 whole blocks, so it cannot be cut over 2 ranks; set --tp_size 1",
        ),
        (
            "stablelm",
            2,
            {"qk_layernorm": True},
            "stablelm: model.layers.0.self_attn.q_layernorm.norms.0.weight of shape (8,) lies beside heads that are "
            "cut, and it is not known which of them it belongs to, so it cannot be cut over 2 ranks; set --tp_size 1",
        ),
    ],
)
def test_sizes_that_cannot_be_cut_are_refused(family, tp_size, overrides, message):
    with pytest.raises(ValueError) as refusal:
        plan_of(family, tp_size, **overrides)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            "bloom",
            "bloom computes its attention itself instead of through transformers' attention interface, "
            "so it cannot be cut over 2 ranks; set --tp_size 1",
        ),
        (
            "bitnet",
            "bitnet has no tensor-parallel plan (its config defines no base_model_tp_plan), "
            "so it cannot be cut over 2 ranks; set --tp_size 1",
        ),
        ("mixtral", "mixtral is planned as a mixture of experts, which cannot be cut over 2 ranks; set --tp_size 1"),
        (
            "qwen3_5_text",
            "qwen3_5_text: layers.*.linear_attn.in_proj_qkv is planned as 'colwise_gather_output', which cannot be "
            "laid out (known: colwise, embedding_rowwise, replicated, replicated_with_grad_allreduce, rowwise); "
            "set --tp_size 1",
        ),
        (
            "minicpm3",
            "minicpm3: layers.*.self_attn.q_b_proj is planned as 'colwise', and it is not known which heads its rows "
            "belong to (known: q_proj, k_proj, v_proj); set --tp_size 1",
        ),
        (
            "gpt_oss",
            "gpt_oss is planned as a mixture of experts, which cannot be cut over 2 ranks; set --tp_size 1",
        ),
    ],
)
def test_families_that_cannot_be_laid_out_are_refused(family, message):
    with pytest.raises(ValueError) as refusal:
        tensor_parallel_plan(skeleton(family, **TINY), 2)
    assert str(refusal.value) == message


def test_a_count_that_is_not_the_models_is_refused():
    module = tiny_decoder("opt", num_hidden_layers=1)
    module.model.decoder.layers[0].self_attn.num_heads = 5
    with pytest.raises(ValueError, match="self_attn.num_heads is 5, not the 4 query heads"):
        tensor_parallel_plan(module, 2)


def test_one_query_for_all_is_one_key_value_head():
    assert num_kv_heads(AutoConfig.for_model("gpt_bigcode", multi_query=True)) == 1
    assert num_kv_heads(AutoConfig.for_model("gpt_bigcode", multi_query=False)) == 12
