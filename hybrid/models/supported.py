"""Which models can run here at all, said by name before any weight is read.

What is asked: every layer is causal self-attention through transformers' attention interface, one call a layer, and
nothing else lets tokens meet; positions are taken from the call. What a flat batch of sequences and paged keys and
values are is then known to `attention` alone. What a module's code does is read from the module and not from a list of
families: new ones appear with every release.
"""

from __future__ import annotations

import inspect
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid.models.attention import LAYER_TYPES
from hybrid.models.heads import SCORE_HEADS
from hybrid.models.rope import rotate_by_sequence

# What cannot be seen from outside the code of a layer's forward.
_KNOWN = {
    "diffllama": "its layers attend twice, with two sets of values",
    "dory": "it goes through some of its layers several times",
    "doge": "its layers weigh keys by a mask that they compute from the values",
}
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def prepare(module: PreTrainedModel) -> None:
    """Make a model that transformers built ready for ``attention_call``.

    Raises:
        ValueError: it cannot run; see `require_supported`.
    """
    require_supported(module)
    rotate_by_sequence(module)


def require_supported(module: PreTrainedModel) -> None:
    """Raise ValueError, with the family's name and the reason, unless sequences laid end to end can run through a model
    and its layers' keys and values can be kept. Parameters may be on meta."""
    reason = _reason(module)
    if reason is not None:
        raise ValueError(
            f"{module.config.model_type}: {reason}, so it can neither be trained nor generate here; "
            "choose another family"
        )


def _reason(module: PreTrainedModel) -> str | None:
    """Why a model cannot run, or None."""
    config = module.config.get_text_config(decoder=True)
    if module.config.model_type in _KNOWN:
        return _KNOWN[module.config.model_type]
    if module.config.is_encoder_decoder:
        return "it is an encoder and a decoder with attention between them"
    if getattr(config, "alibi", False):
        return "it adds a bias to its scores, by distance (alibi), in the mask, which is not made here"
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if kinds:
        return f"its layers are of type {', '.join(sorted(kinds))}, not only {' and '.join(sorted(LAYER_TYPES))}"
    attentions: dict[str, nn.Module] = {
        name: child
        for name, child in module.named_modules()
        if _uses_interface(type(child)) and type(getattr(child, "config", config)) is type(config)
    }
    if not attentions:
        return (
            "none of its layers uses transformers' attention interface (they have attention of their own, or a state "
            "instead of attention)"
        )
    reasons = (
        _reason_of_layers(attentions, config),
        *(_reason_of_attention(child, config) for child in attentions.values()),
        _reason_of_sizes(attentions),
        _reason_of_neighbours(module, attentions),
        _reason_of_positions(module),
        _reason_of_head(module),
    )
    return next((reason for reason in reasons if reason is not None), None)


def _reason_of_layers(attentions: dict[str, nn.Module], config: PreTrainedConfig) -> str | None:
    by_layer: dict[Any, list[str]] = defaultdict(list)
    for name, child in attentions.items():
        by_layer[getattr(child, "layer_idx", None)].append(name)
    if None in by_layer:
        return f"{by_layer[None][0]} has no layer_idx, by which its keys and values are found"
    for layer, names in by_layer.items():
        if len(names) > 1:
            return f"{names[0]} and {names[1]} both attend as layer {layer}"
    missing = sorted(set(range(config.num_hidden_layers)) - by_layer.keys())
    if missing:
        layers = ", ".join(map(str, missing[:4])) + (", ..." if len(missing) > 4 else "")
        return f"its layers {layers} have no causal self-attention through transformers' attention interface"
    return None


def _reason_of_attention(child: Any, config: PreTrainedConfig) -> str | None:
    kind = type(child).__name__
    if "CrossAttention" in kind:
        return f"{kind} attends to something else than the sequence"
    if not getattr(child, "is_causal", True):
        return f"{kind} is bidirectional (a decoder's config has is_decoder=True)"
    sink = next((name for name in vars(child) | child._parameters if "sink" in name and _is_set(child, name)), None)
    if sink is not None:
        return f"{kind} has attention sinks ({sink})"
    layer_types = getattr(config, "layer_types", None)
    has_window = (
        layer_types[child.layer_idx] == "sliding_attention"
        if layer_types
        else getattr(config, "sliding_window", None) is not None
    )
    if has_window and not _passes(type(child), "sliding_window"):
        return f"{kind} has a sliding window that it does not pass to its attention"
    return None


def _reason_of_sizes(attentions: dict[str, nn.Module]) -> str | None:
    for attribute, what in (("head_dim", "elements a head"), ("num_key_value_heads", "key/value heads")):
        sizes = {getattr(child, attribute, None) for child in attentions.values()}
        if len(sizes) > 1:
            return f"its layers differ in {what} ({', '.join(sorted(map(str, sizes)))}), and the KV cache has one shape"
    return None


def _reason_of_neighbours(module: PreTrainedModel, attentions: dict[str, nn.Module]) -> str | None:
    """Convolutions in the layers, which run along the flat axis and over the ends of sequences."""
    stack = next(iter(attentions)).partition(".0.")[0] + "."
    for name, child in module.named_modules():
        if name.startswith(stack) and isinstance(child, nn.Conv1d):
            return f"{name} is a convolution along the sequence"
    return None


def _reason_of_positions(module: PreTrainedModel) -> str | None:
    body = module.base_model
    if "position_ids" not in inspect.signature(type(body).forward).parameters:
        return f"{type(body).__name__} counts positions along the batch and takes no position_ids"
    for child in module.modules():
        if hasattr(type(child), "create_position_ids_from_input_ids"):
            return f"{type(child).__name__} counts positions from its padding id on, differently in generation"
    return None


def _reason_of_head(module: PreTrainedModel) -> str | None:
    """Layers between the body and the logits, which the fused heads of `heads` would leave out."""
    heads = [module.get_output_embeddings(), *(getattr(module, name, None) for name in SCORE_HEADS)]
    known = {id(each) for each in module.base_model.parameters()}
    for head in heads:
        if isinstance(head, nn.Module):
            known |= {id(each) for each in head.parameters(recurse=False)}
    if heads[0] is not None and "logits_to_keep" not in inspect.signature(type(module).forward).parameters:
        return f"{type(module).__name__} gives logits of every token or none, and takes no logits_to_keep"
    for name, parameter in module.named_parameters():
        if id(parameter) not in known:
            return f"{name} lies outside of its body and of the layer that gives logits or scores"
    return None


def _is_set(child: nn.Module, name: str) -> bool:
    return getattr(child, name, None) is not None and getattr(child, name) is not False


def _functions(cls: type[nn.Module]) -> Iterator[types.CodeType]:
    """The code of a module class's own methods, without the decorators around them."""
    for owner in cls.__mro__:
        if owner in (nn.Module, PreTrainedModel):
            return
        for member in vars(owner).values():
            function = inspect.unwrap(member) if callable(member) else member
            if isinstance(function, types.FunctionType):
                yield function.__code__


def _uses_interface(cls: type[nn.Module]) -> bool:
    if issubclass(cls, PreTrainedModel):  # names the interface to look implementations up
        return False
    return any(_INTERFACE in code.co_names for code in _functions(cls))


def _passes(cls: type[nn.Module], argument: str) -> bool:
    """Whether a method calls something with a keyword argument of this name."""
    names = (const for code in _functions(cls) for const in code.co_consts if isinstance(const, tuple))
    return any(argument in each for each in names)
