"""What a model's forward costs in floating-point operations, counted from its shapes: the numerator of MFU.

Matrix products alone are counted, a multiplication and an addition as two operations, as in the appendix of PaLM
(Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311). Unlike there attention is counted causally, over the keys
that a token sees. What an implementation does besides (recomputed activations or logits, padding) is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid.models.families import head_dim
from hybrid.models.heads import SCORE_HEADS
from hybrid.models.plans import ModelPlan

# How many experts a token goes to, as configurations call it; families that call it otherwise map it to the first.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Operations of a forward, by what there is of each kind. A backward costs twice as many."""

    per_token: int  # the matrices of the body that a token is multiplied by
    per_scored_row: int  # the head, which runs on the rows that are scored
    per_pair: int  # a query and a key that it sees, in one layer: scores and weighted values of all heads
    windows: tuple[int | None, ...]  # for each layer the keys that a token sees, itself included; None: all before it

    def flops(self, lengths: Sequence[int], num_scored: int) -> int:
        """Operations of one forward over sequences of these lengths, ``num_scored`` of whose rows go to the head."""
        num_pairs = sum(_num_pairs(length, window) for window in self.windows for length in lengths)
        return self.per_token * sum(lengths) + self.per_scored_row * num_scored + self.per_pair * num_pairs


def forward_cost(module: PreTrainedModel, plan: ModelPlan | None = None) -> ForwardCost:
    """Count a causal language model's or sequence classifier's matrices.

    Embeddings are looked up and cost nothing. Of experts that lie stacked in one weight, as transformers has them, a
    token's share counts.

    Args:
        plan: has the shapes of the parameters, which while they are sharded do not; by default the parameters do.

    Raises:
        ValueError: the model has no head.
    """
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if plan is not None:
        shapes = {name: layout.shape for name, layout in plan.params.items()}
    config = module.config.get_text_config(decoder=True)
    looked_up = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    head = {id(parameter) for parameter in _head(module).parameters()}  # a tied one is looked up as well
    body = {id(parameter) for parameter in module.base_model.parameters()} - looked_up
    num_body = num_head = 0
    for name, parameter in module.named_parameters():
        if len(shapes[name]) > 1:
            num_head += math.prod(shapes[name]) if id(parameter) in head else 0
            num_body += _active_elements(shapes[name], config) if id(parameter) in body else 0
    key_dim = head_dim(config)
    value_dim = getattr(config, "v_head_dim", None) or key_dim
    return ForwardCost(
        per_token=2 * num_body,
        per_scored_row=2 * num_head,
        per_pair=2 * config.num_attention_heads * (key_dim + value_dim),
        windows=_windows(config),
    )


def _head(module: PreTrainedModel) -> nn.Module:
    heads = (module.get_output_embeddings(), *(getattr(module, name, None) for name in SCORE_HEADS))
    head = next((head for head in heads if isinstance(head, nn.Module)), None)
    if head is None:
        raise ValueError(f"{type(module).__name__} has neither an LM head nor a score head; load it with one of them")
    return head


def _active_elements(shape: tuple[int, ...], config: PreTrainedConfig) -> int:
    """Elements that a token is multiplied by: all, or those of its experts where the first dimension counts experts."""
    names = [name for name in _EXPERTS_PER_TOKEN if getattr(config, name, None) is not None]
    if len(shape) < 3 or not names:
        return math.prod(shape)
    return min(getattr(config, names[0]), shape[0]) * math.prod(shape[1:])


def _windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not kinds:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[: config.num_hidden_layers])


def _num_pairs(length: int, window: int | None) -> int:
    """Of a token and one that it sees, itself or before it."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen
