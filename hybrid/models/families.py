"""What the projections of each family's layers are: which of their rows belong to which heads or neurons.

transformers plans most families (``base_model_tp_plan``: module name patterns and a style for each), and that is read
as data. Its styles say neither which heads a row belongs to nor how packed projections are put together, and for some
families they only gather everything again; those, and families without a plan, are in the table here.

What the table can hold has two limits. A family's attention must go through transformers' attention interface, since
what a rank's heads attend to is decided there. And its forward must take its sizes from its weights, or from attributes
that can be set to a rank's numbers meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from transformers import PreTrainedConfig


class Role(Enum):
    """What the rows of a projection belong to (its columns, for OUTPUT and DOWN, which lead back)."""

    QUERY = "query heads"
    KEY_VALUE = "key/value heads"
    QKV = "query, key and value heads, one after the other"
    QKV_BY_HEAD = "query, key and value of a head together, head by head"
    OUTPUT = "query heads, as columns"
    UP = "neurons"
    GATE_UP = "neurons' gates, then neurons"
    DOWN = "neurons, as columns"

    @property
    def is_row_parallel(self) -> bool:
        """Whether its output is a partial sum."""
        return self in (Role.OUTPUT, Role.DOWN)


class Count(Enum):
    """What an attribute of an attention module counts."""

    QUERY_HEADS = "query heads"
    KV_HEADS = "key/value heads"
    QUERIES_PER_KV_HEAD = "query heads of a key/value head"
    QUERY_WIDTH = "elements of all query heads"
    KV_WIDTH = "elements of all key heads"


# Attributes of attention modules by the names that families use. One that starts with ``config.`` is read from the
# configuration in the forward.
HEAD_COUNTS: Mapping[str, Count] = {
    "num_heads": Count.QUERY_HEADS,
    "num_attention_heads": Count.QUERY_HEADS,
    "num_key_value_heads": Count.KV_HEADS,
    "num_key_value_groups": Count.QUERIES_PER_KV_HEAD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Roles by module name pattern, relative to the model's body, ``*`` for a layer's number.

    ``counts`` are attributes besides `HEAD_COUNTS`. ``blocks_attribute`` names the attention module's number of blocks,
    where heads lie in blocks that cannot be cut through.
    """

    roles: Mapping[str, Role]
    counts: Mapping[str, Count] = field(default_factory=dict)
    blocks_attribute: str | None = None


def _layers(prefix: str, **roles: Role) -> dict[str, Role]:
    """Roles of a layer's projections; ``__`` stands for the dot in a name."""
    return {f"{prefix}.*.{name.replace('__', '.')}": role for name, role in roles.items()}


_SEPARATE = {"self_attn__q_proj": Role.QUERY, "self_attn__k_proj": Role.KEY_VALUE, "self_attn__v_proj": Role.KEY_VALUE}
_GATED = {"mlp__gate_proj": Role.UP, "mlp__up_proj": Role.UP, "mlp__down_proj": Role.DOWN}
_GATED_PACKED = {"mlp__gate_up_proj": Role.GATE_UP, "mlp__down_proj": Role.DOWN}
_H_TO_4H = {"mlp__dense_h_to_4h": Role.UP, "mlp__dense_4h_to_h": Role.DOWN}

_LLAMA = _layers("layers", self_attn__o_proj=Role.OUTPUT, **_SEPARATE, **_GATED)
_GLM = _layers("layers", self_attn__o_proj=Role.OUTPUT, **_SEPARATE, **_GATED_PACKED)
_BART = {**_SEPARATE, "self_attn__out_proj": Role.OUTPUT, "fc1": Role.UP, "fc2": Role.DOWN}
_GPT2 = _layers("h", attn__c_attn=Role.QKV, attn__c_proj=Role.OUTPUT, mlp__c_fc=Role.UP, mlp__c_proj=Role.DOWN)

FAMILIES: Mapping[str, Family] = {
    "biogpt": Family(roles=_layers("layers", **_BART)),
    # Its packed projection is laid out in the blocks of the ranks it was trained on, each [query | value | key].
    "codegen": Family(
        roles=_layers(
            "h", attn__qkv_proj=Role.QKV_BY_HEAD, attn__out_proj=Role.OUTPUT, mlp__fc_in=Role.UP, mlp__fc_out=Role.DOWN
        ),
        blocks_attribute="mp_num",
    ),
    "glm": Family(roles=_GLM),
    "glm4": Family(roles=_GLM),
    "gpt2": Family(roles=_GPT2, counts={"split_size": Count.QUERY_WIDTH}),
    # With one key/value head for all; `family_of` knows the other kind.
    "gpt_bigcode": Family(
        roles=_GPT2,
        counts={"embed_dim": Count.QUERY_WIDTH, "kv_dim": Count.KV_WIDTH, "kv_heads": Count.KV_HEADS},
    ),
    "gpt_neox": Family(
        roles=_layers("layers", attention__query_key_value=Role.QKV_BY_HEAD, attention__dense=Role.OUTPUT, **_H_TO_4H)
    ),
    "hunyuan_v1_dense": Family(roles=_LLAMA),
    "olmo2": Family(roles=_LLAMA),
    "olmo3": Family(roles=_LLAMA),
    "opt": Family(roles=_layers("decoder.layers", **_BART)),
    "persimmon": Family(
        roles=_layers("layers", self_attn__query_key_value=Role.QKV_BY_HEAD, self_attn__dense=Role.OUTPUT, **_H_TO_4H)
    ),
    "phi3": Family(
        roles=_layers("layers", self_attn__qkv_proj=Role.QKV, self_attn__o_proj=Role.OUTPUT, **_GATED_PACKED),
        counts={"config.num_attention_heads": Count.QUERY_HEADS},
    ),
    "stablelm": Family(roles=_LLAMA),
}

# Their attention is their own, not one of transformers' attention interface.
_OWN_ATTENTION = frozenset({"bloom", "gpt_neo", "mpt", "xglm"})

_COLUMN, _ROW = "colwise", "rowwise"
# Styles that leave a weight whole on every rank. The gradient part of the second does not concern us: training sees
# full weights.
_WHOLE = ("replicated", "replicated_with_grad_allreduce")
_EMBEDDING = "embedding_rowwise"  # of the vocabulary, which the model itself says which modules hold
_ATTENTION_NAME = re.compile(r"attn|attention", re.IGNORECASE)
_ATTENTION_ROLES = {"q_proj": Role.QUERY, "k_proj": Role.KEY_VALUE, "v_proj": Role.KEY_VALUE}


def num_kv_heads(config: PreTrainedConfig) -> int:
    """Key/value heads of a decoder; as many as query heads where the family has no grouping."""
    if config.model_type == "gpt_bigcode":  # counts them when it is made, from other heads if it is told its own later
        return 1 if config.multi_query else config.num_attention_heads
    if config.model_type == "jetmoe":  # each head once for every expert that a token goes to
        return config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_dim(config: PreTrainedConfig) -> int:
    """Elements of a query or key head; values have as many or, in latent attention, fewer."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def family_of(config: PreTrainedConfig, tp_size: int) -> Family:
    """The roles of a family's projections, from the table or else from transformers' plan.

    Raises:
        ValueError: there is neither, or the plan cannot be used; the message says why.
    """
    kind = config.model_type
    known = FAMILIES.get(kind)
    if kind == "gpt_bigcode" and not getattr(config, "multi_query", True):
        return Family(roles={**_GPT2, "h.*.attn.c_attn": Role.QKV_BY_HEAD}, counts={"kv_heads": Count.KV_HEADS})
    if known is not None:
        return known
    if kind in _OWN_ATTENTION:
        raise ValueError(
            f"{kind} computes its attention itself instead of through transformers' attention interface, "
            f"so it cannot be cut over {tp_size} ranks; set --tp_size 1"
        )
    plan: dict[str, str] | None = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"{kind} has no tensor-parallel plan (its config defines no base_model_tp_plan), "
            f"so it cannot be cut over {tp_size} ranks; set --tp_size 1"
        )
    by_experts: dict[str, str] = getattr(config, "base_model_ep_plan", None) or {}  # since 5.25 some are in this alone
    if any("expert" in word for item in (plan | by_experts).items() for word in item):
        raise ValueError(
            f"{kind} is planned as a mixture of experts, which cannot be cut over {tp_size} ranks; set --tp_size 1"
        )
    roles = {pattern: _role(kind, pattern, style) for pattern, style in plan.items()}
    return Family(roles={pattern: role for pattern, role in roles.items() if role is not None})


def _role(kind: str, pattern: str, style: str) -> Role | None:
    """What a style of transformers' plan means for a module; None leaves it whole."""
    leaf = pattern.rpartition(".")[2]
    if style in _WHOLE or (style == _EMBEDDING and "*" not in pattern):
        return None
    if style not in (_COLUMN, _ROW):
        known = ", ".join(sorted((_COLUMN, _ROW, _EMBEDDING, *_WHOLE)))
        raise ValueError(
            f"{kind}: {pattern} is planned as {style!r}, which cannot be laid out (known: {known}); set --tp_size 1"
        )
    if not _ATTENTION_NAME.search(pattern):
        return Role.UP if style == _COLUMN else Role.DOWN
    if style == _ROW:
        return Role.OUTPUT
    if leaf not in _ATTENTION_ROLES:
        raise ValueError(
            f"{kind}: {pattern} is planned as {style!r}, and it is not known which heads its rows belong to "
            f"(known: {', '.join(_ATTENTION_ROLES)}); set --tp_size 1"
        )
    return _ATTENTION_ROLES[leaf]
