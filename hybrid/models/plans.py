"""How tensor parallelism cuts a model: every parameter's layout, and the modules that need a collective.

The plan is transformers' own (``base_model_tp_plan``), read as data: module name patterns and a style for each. Its
runtime is not used, since that cuts at load, for good.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid.layout import ParamLayout

_COLUMN, _ROW = "colwise", "rowwise"
# Styles that leave a weight whole on every rank. The gradient part of the second does not concern us: training sees
# full weights.
_WHOLE = frozenset({"replicated", "replicated_with_grad_allreduce"})
_ATTENTION_NAME = re.compile(r"attn|attention", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """Layouts by parameter name, and the names of the modules whose output is a partial sum or a partial vocabulary."""

    params: Mapping[str, ParamLayout]
    row_parallel: tuple[str, ...] = ()
    embedding: str | None = None
    lm_head: str | None = None
    # Biases of row-parallel modules: one rank of a tensor group adds them, or the sum would hold them T times.
    row_biases: frozenset[str] = field(default_factory=frozenset)


def num_kv_heads(config: PreTrainedConfig) -> int:
    """Key/value heads of a decoder; as many as query heads where the family has no grouping."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def whole_plan(module: nn.Module) -> ModelPlan:
    """The plan of a model that is never sliced: a tensor group of one, or a model without a generation mode."""
    return ModelPlan(
        params={name: ParamLayout(name=name, shape=tuple(p.shape)) for name, p in module.named_parameters()}
    )


def tensor_parallel_plan(module: PreTrainedModel, tp_size: int) -> ModelPlan:
    """Lay a causal language model out for ``tp_size`` tensor ranks.

    Raises:
        ValueError: the family has no plan, uses a style that cannot be laid out, or has fewer KV heads than ranks.
    """
    if tp_size == 1:
        return whole_plan(module)
    config = module.config.get_text_config(decoder=True)
    kv_groups = num_kv_heads(config)
    if kv_groups < tp_size:
        raise ValueError(
            f"tp_size {tp_size} is more than the {kv_groups} key/value heads of {config.model_type}; "
            f"set --tp_size to at most {kv_groups}"
        )
    styles = _module_styles(module, config, tp_size)
    embedding, lm_head = _vocabulary_modules(module)
    vocabulary = {name for name in (embedding, lm_head) if name}

    params: dict[str, ParamLayout] = {}
    row_biases = set()
    for name, parameter in module.named_parameters():
        owner, _, leaf = name.rpartition(".")
        shape = tuple(parameter.shape)
        style = styles.get(owner)
        if owner in vocabulary:
            params[name] = ParamLayout(name=name, shape=shape, axis=0, num_units=shape[0])
        elif style == _COLUMN:
            params[name] = _cut(name, shape, 0, owner, kv_groups)
        elif style == _ROW and leaf == "weight":
            params[name] = _cut(name, shape, 1, owner, kv_groups)
        else:
            params[name] = ParamLayout(name=name, shape=shape)
            if style == _ROW:
                row_biases.add(name)
    return ModelPlan(
        params=params,
        row_parallel=tuple(sorted(name for name, style in styles.items() if style == _ROW)),
        embedding=embedding,
        lm_head=lm_head,
        row_biases=frozenset(row_biases),
    )


def _cut(name: str, shape: tuple[int, ...], axis: int, owner: str, kv_groups: int) -> ParamLayout:
    units = kv_groups if _ATTENTION_NAME.search(owner) else shape[axis]
    return ParamLayout(name=name, shape=shape, axis=axis, num_units=units)


def _module_styles(module: PreTrainedModel, config: PreTrainedConfig, tp_size: int) -> dict[str, str]:
    """Style of every linear module that the family's plan names."""
    plan: dict[str, str] | None = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"{config.model_type} has no tensor-parallel plan (its config defines no base_model_tp_plan), "
            f"so it cannot be cut over {tp_size} ranks; set --tp_size 1"
        )
    prefix = f"{module.base_model_prefix}." if module.base_model is not module else ""
    patterns = [
        (re.compile(re.escape(prefix + pattern).replace(r"\*", r"\d+")), pattern, style)
        for pattern, style in plan.items()
    ]
    vocabulary = set(_vocabulary_modules(module))
    styles: dict[str, str] = {}
    for name, child in _named_modules(module).items():
        for regex, pattern, style in patterns:
            if not regex.fullmatch(name) or style in _WHOLE or name in vocabulary:
                continue
            if style not in (_COLUMN, _ROW) or not isinstance(child, nn.Linear):
                known = ", ".join(sorted({_COLUMN, _ROW, *_WHOLE}))
                raise ValueError(
                    f"{config.model_type}: {pattern} ({type(child).__name__}) is planned as {style!r}, "
                    f"which cannot be laid out (known: {known}); set --tp_size 1"
                )
            styles[name] = style
    if _ROW not in styles.values():
        raise ValueError(
            f"the tensor-parallel plan of {config.model_type} matches none of its row-parallel modules; set --tp_size 1"
        )
    return styles


def _named_modules(module: nn.Module) -> dict[str, nn.Module]:
    return dict(module.named_modules())


def _vocabulary_modules(module: PreTrainedModel) -> tuple[str | None, str | None]:
    """Names of the input embedding and of the LM head."""
    names = {id(child): name for name, child in _named_modules(module).items()}
    return names.get(id(module.get_input_embeddings())), names.get(id(module.get_output_embeddings()))
