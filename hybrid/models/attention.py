"""The attention function every model here runs with, registered once under ``ATTENTION_NAME``.

What a forward pass means for attention (sequences laid end to end, or new tokens over KV blocks) is the context it runs
in, ``attention_call``. Outside any context it is the ordinary causal attention of a padded batch, so a plain
``model(...)`` or ``model.generate(...)`` works as ever, and the implementation's name is never switched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ops.attention import paged_attention, varlen_attention, write_kv
from ops.paged import PagedBatch
from ops.prefixes import Prefixes

ATTENTION_NAME = "hybrid"

# Layers whose tokens meet only in this module's function; any other kind would mix the sequences of a flat batch.
LAYER_TYPES = {"full_attention", "sliding_attention"}
# What models hand through to attention that says nothing about who attends to whom.
_HARMLESS = {
    "cache_position",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclass(frozen=True, slots=True)
class RaggedCall:
    """Training and scoring: S sequences laid end to end on one flat axis of N tokens, (1, N) for the model."""

    cu_seqlens: torch.Tensor  # (S + 1,) int32, where each starts; the last entry is N
    max_seqlen: int
    prefixes: Prefixes | None = None  # whose tokens sequences see before their own; None: nobody's


@dataclass(frozen=True, slots=True)
class PagedCall:
    """Generation: N new tokens, (1, N) for the model, over the KV blocks of their sequences."""

    key_cache: torch.Tensor  # (layers, num_blocks, block_size, kv_heads, head_dim), laid out as KVCache does
    value_cache: torch.Tensor  # the same
    batch: PagedBatch  # where the new tokens and their contexts lie
    # (S,) tokens of each sequence's prompt, computed yet or not; for models whose RoPE depends on lengths (see `rope`)
    prompt_lens: torch.Tensor | None = None


@dataclass(slots=True)
class _Active:
    call: RaggedCall | PagedCall
    num_attended: int = 0
    is_rotated_by_sequence: bool = False
    written_layers: set[int] = field(default_factory=set)  # whose keys and values are in the KV blocks already


_active: ContextVar[_Active | None] = ContextVar("attention_call", default=None)


@contextmanager
def attention_call(call: RaggedCall | PagedCall, *, recompute: bool = False) -> Iterator[None]:
    """Run forward passes inside the block as ``call`` says.

    A backward that recomputes activations runs attention again and needs the call again, with ``recompute=True``.
    (A context variable: autograd's own threads, which run the backward of CUDA tensors, do not inherit it.)

    Raises:
        RuntimeError: at the end, if no attention layer ran with it (not checked for ``recompute``): the model goes
            around the registered function, and its sequences would have seen one another.
    """
    active = _Active(call)
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)
    if not active.num_attended and not recompute:
        raise RuntimeError(
            f"no attention layer read the {type(call).__name__}: the model must be loaded with "
            f"attn_implementation={ATTENTION_NAME!r} and its family must use transformers' attention interface"
        )


def current_call() -> RaggedCall | PagedCall | None:
    """What forward passes run as at present; None outside any context."""
    active = _active.get()
    return None if active is None else active.call


def call_to_rotate() -> RaggedCall | PagedCall | None:
    """`current_call`, for a rotary module that tells its sequences apart; attention checks that theirs did."""
    active = _active.get()
    if active is None:
        return None
    active.is_rotated_by_sequence = True
    return active.call


def length_dependent_rope(rope_type: Any) -> bool:
    """Whether a RoPE type of transformers (or one of several, by layer type) chooses its frequencies by the longest
    sequence of a call."""
    kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def hybrid_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    Args:
        module: the attention layer; ``layer_idx`` finds its part of the KV cache.
        query: (batch, q_heads, queries, head_dim).
        key, value: (batch, kv_heads, keys, head_dim).
        attention_mask: (batch, 1, queries, keys), bool or additive; outside any context only.
        sliding_window: keys a query sees, itself included.

    Returns:
        (batch, queries, q_heads, head_dim), and no weights.

    Raises:
        ValueError: something is asked that this function cannot honour.
    """
    _refuse_unknown(module, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    active = _active.get()
    if active is None:
        _refuse_recompute(attention_mask, query, kwargs.get("position_ids"))
        return _plain_attention(
            module, query, key, value, attention_mask, scale, dropout, sliding_window, softcap, causal
        )
    _require_flat(module, query, key, value, attention_mask, dropout, sliding_window, causal)
    if not active.num_attended and not active.is_rotated_by_sequence:
        _refuse_length_dependent_rope(module)
    active.num_attended += 1
    value_dim = value.shape[-1]
    if value_dim < key.shape[-1]:  # as latent attention has it; the cache holds one size
        value = nn.functional.pad(value, (0, key.shape[-1] - value_dim))
    flat_q, flat_k, flat_v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (N, heads, head_dim)
    options = {"scale": scale, "window": sliding_window, "softcap": softcap}
    call = active.call
    if isinstance(call, RaggedCall):
        output = varlen_attention(
            *(flat_q, flat_k, flat_v, call.cu_seqlens, call.max_seqlen),
            prefixes=call.prefixes,
            **options,
        )
    else:
        layer = _layer_to_write(module, active)
        key_cache, value_cache = call.key_cache[layer], call.value_cache[layer]
        write_kv(flat_k, flat_v, key_cache, value_cache, call.batch)
        output = paged_attention(flat_q, key_cache, value_cache, call.batch, **options)
    return output[None, ..., :value_dim], None


def hybrid_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """transformers' mask interface: no mask inside a context, which knows the sequences; SDPA's outside."""
    if _active.get() is None:
        return sdpa_mask(*args, **kwargs)
    padding = kwargs.get("attention_mask")
    if padding is not None and not bool(padding.all()):  # some models make one that hides nothing
        raise ValueError("attention_mask hides tokens inside attention_call, which has no padding; leave it out")
    if kwargs.get("use_vmap"):
        raise ValueError("the model adds its own rule to the causal mask, which attention_call cannot honour")
    kinds = set(getattr(kwargs.get("config"), "layer_types", None) or ()) - LAYER_TYPES
    if kinds:
        raise ValueError(
            f"the model has layers of type {', '.join(sorted(kinds))}, which would mix the sequences of a flat batch; "
            f"only {' and '.join(sorted(LAYER_TYPES))} can be run"
        )
    return None


def _plain_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    dropout: float,
    window: int | None,
    softcap: float | None,
    causal: bool,
) -> tuple[torch.Tensor, None]:
    """Attention of a padded batch, as transformers' SDPA function has it, with softcaps besides."""
    num_queries = query.shape[2]
    if mask is None and causal and num_queries > 1 and (softcap is not None or window is not None):
        # SDPA's mask function returned none: the queries are the first of the keys (see transformers' function).
        key, value = key[:, :, :num_queries], value[:, :, :num_queries]
        visible = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device).tril_()
        if window is not None:
            visible.triu_(1 - window)
        mask = visible[None, None]
    if softcap is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scale, is_causal=causal
        )
        return output, None
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


def _refuse_unknown(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise for an argument that changes who attends to whom, or how, and would be dropped here."""
    for name, value in kwargs.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise ValueError(
                f"{type(module).__name__} passes {name} to its attention, which the {ATTENTION_NAME!r} attention "
                f"cannot honour; this model or option is not supported"
            )


def _require_flat(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    window: int | None,
    causal: bool,
) -> None:
    """Raise unless this is causal self-attention of one flat batch without anything a context cannot honour."""
    name = type(module).__name__
    if mask is not None:
        raise ValueError(f"{name} got an attention mask inside attention_call, which has no padding; leave it out")
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{name} got queries {tuple(query.shape)} and keys {tuple(key.shape)} inside attention_call; it takes "
            f"(1, N) tokens, self-attention, and use_cache=False"
        )
    if key.shape[-1] < value.shape[-1]:
        raise ValueError(
            f"{name} has keys of {key.shape[-1]} and values of {value.shape[-1]}; values may not be larger than keys"
        )
    if not causal:
        raise ValueError(f"{name} is not causal, and attention_call is")
    if dropout:
        raise ValueError(
            f"{name} uses {dropout=}, which would make trained and sampled probabilities differ; set the config's "
            f"attention dropout to 0 or call model.eval()"
        )
    if window is None and _is_sliding(module):
        raise ValueError(f"{name} has a sliding window that it does not pass to its attention; it is not supported")


def _refuse_length_dependent_rope(module: nn.Module) -> None:
    """Raise if frequencies would be chosen by the longest sequence of the batch for all of them."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    by_layer = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    if any(length_dependent_rope(each.get("rope_type")) for each in by_layer):
        raise RuntimeError(
            f"the RoPE of {type(module).__name__} depends on a sequence's length, and its rotary module would take the "
            "longest one of the batch; prepare the model with hybrid.models.supported.prepare"
        )


def _is_sliding(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return layer_types[_layer_index(module)] == "sliding_attention"
    return getattr(config, "sliding_window", None) is not None


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise ValueError(f"{type(module).__name__} has no layer_idx, by which its part of the KV cache is found")
    return index


def _layer_to_write(module: nn.Module, active: _Active) -> int:
    """The layer whose part of the KV cache this attention writes: each is written once in a forward pass."""
    layer = _layer_index(module)
    if layer in active.written_layers:
        raise ValueError(
            f"{type(module).__name__} attends twice as layer {layer} in one forward pass, and the KV cache has one "
            "place for it; this model cannot generate"
        )
    active.written_layers.add(layer)
    return layer


def _refuse_recompute(mask: torch.Tensor | None, query: torch.Tensor, positions: torch.Tensor | None) -> None:
    """Raise for a flat batch outside its context, as a backward that recomputes activations would run it.

    A plain call with such positions always has a mask, which transformers derives from them.
    """
    if mask is None and positions is not None and query.shape[0] == 1 and query.shape[2] > 1:
        restarts = positions[..., 1:] != positions[..., :-1] + 1
        if bool(restarts.any()):
            raise RuntimeError(
                "sequences laid end to end reached attention without a mask and outside attention_call; a backward "
                "that recomputes activations must run inside attention_call(call, recompute=True)"
            )


AttentionInterface.register(ATTENTION_NAME, hybrid_attention)
AttentionMaskInterface.register(ATTENTION_NAME, hybrid_mask)
