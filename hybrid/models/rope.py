"""Rotary embeddings whose frequencies depend on how long a sequence is, for batches of many sequences.

transformers' types "dynamic" and "longrope" choose one set of frequencies for a whole call, by its largest position,
and keep what they chose. On a flat axis one long sequence would change all others. Here each token is rotated as
transformers does it for its sequence alone:

- training and scoring: by the length of its whole sequence;
- generation, as ``generate`` does with a batch of one: a prompt's tokens by the length of the prompt, and each later
  token by the length up to itself. Keys in the cache are never rotated again.

Every other type has the same frequencies at any length, and its modules are left alone. So are these ones outside
``attention_call``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hybrid.models.attention import PagedCall, RaggedCall, call_to_rotate, length_dependent_rope

_STATE = ("max_seq_len_cached", "attention_scaling")


def rotate_by_sequence(module: nn.Module) -> None:
    """Have every rotary module in ``module`` whose RoPE depends on lengths tell sequences apart inside
    ``attention_call``. Idempotent."""
    for child in list(module.modules()):
        if length_dependent_rope(getattr(child, "rope_type", None)) and not isinstance(child, _BySequence):
            # A class of its own and not a bound function: a copy of the module is then as good as the module.
            child.__class__ = _by_sequence(type(child))


def depends_on_length(module: nn.Module) -> bool:
    """Whether a model has such a RoPE: its forward then reads lengths on the host, so no CUDA graph may hold it."""
    return any(length_dependent_rope(getattr(child, "rope_type", None)) for child in module.modules())


def switching_length(config: PreTrainedConfig | None) -> int | None:
    """The length past which "longrope" takes other frequencies for all of a sequence's tokens; None for other types.

    A generation must not cross it: what is in the cache was rotated by the short ones (transformers' Phi-3 throws its
    cache away there and starts again), and training scores the whole by the long ones, so tokens sampled before it
    would have other probabilities than the trainer gives them.
    """
    lengths = [
        each["original_max_position_embeddings"]
        for each in _rope_parameters(config)
        if each.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)


def require_one_rotation(
    config: PreTrainedConfig | None, num_prompt_tokens: int, max_tokens: int, prompt_index: int
) -> None:
    """Raise ValueError for a request that would cross the length at which the model's frequencies change."""
    limit = switching_length(config)
    if limit is not None and num_prompt_tokens <= limit < num_prompt_tokens + max_tokens:
        raise ValueError(
            f"prompt {prompt_index} has {num_prompt_tokens} tokens and with max_tokens={max_tokens} may pass {limit}, "
            "where the model's longrope changes the frequencies of all its tokens; keep the two together within "
            f"{limit} or give a longer prompt"
        )


def prefix_class(config: PreTrainedConfig | None, num_prompt_tokens: int) -> int:
    """What KV blocks of equal tokens must agree in besides, to be equal: prompts of two lengths may be rotated
    differently. 0 for every prompt of a model whose RoPE does not depend on lengths."""
    for each in _rope_parameters(config):
        kind = each.get("rope_type") or ""
        if kind == "longrope" and num_prompt_tokens > each["original_max_position_embeddings"]:
            return 1
        if config is not None and "dynamic" in kind and num_prompt_tokens > config.max_position_embeddings:
            return num_prompt_tokens
    return 0


def _rope_parameters(config: PreTrainedConfig | None) -> list[dict[str, Any]]:
    """One for all layers, or one for each type of layer; none for what is no model of transformers."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return []
    return [each for each in parameters.values() if isinstance(each, dict)] or [parameters]


class _BySequence:
    """Goes in front of a rotary module's own class."""

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        call = call_to_rotate()
        layer_type = args[0] if args else kwargs.get("layer_type")
        kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
        if call is None or not length_dependent_rope(kind):
            return own(x, position_ids, *args, **kwargs)
        is_longrope = kind == "longrope"
        limit = _limit(self, layer_type, is_longrope)
        lengths = _lengths(call, position_ids.flatten(0, -2)[0])
        if isinstance(call, PagedCall):
            _warn_or_refuse(call, lengths, limit, is_longrope)
        # Lengths between which nothing changes are one: below the limit, and for longrope beyond it.
        lengths = lengths.clamp(min=limit, max=limit + 1 if is_longrope else None)
        rotate = functools.partial(own, x)
        return _rotate_each(self, rotate, position_ids, lengths, layer_type, *args, **kwargs)


@functools.cache
def _by_sequence(cls: type[nn.Module]) -> type[nn.Module]:
    # Under its own name, which transformers and reprs go by.
    return type(cls.__name__, (_BySequence, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _rotate_each(
    module: Any,
    rotate: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    position_ids: torch.Tensor,
    lengths: torch.Tensor,
    layer_type: str | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the module's own forward (cosines and sines, or one complex tensor) for each length, on its tokens.

    A last position is added that tells the module the length, and its part of the output is dropped.
    """
    output: list[torch.Tensor] = []
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero().squeeze(-1)
        last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
        with _FreshState(module, layer_type):
            part = rotate(torch.cat((position_ids[..., rows], last), dim=-1), *args, **kwargs)
        parts = [part] if isinstance(part, torch.Tensor) else list(part)
        if not output:
            output = [each.new_empty(*each.shape[:-2], len(lengths), each.shape[-1]) for each in parts]
        for whole, each in zip(output, parts, strict=True):
            whole.index_copy_(-2, rows, each[..., :-1, :])
    return tuple(output) if len(output) > 1 else output[0]


class _FreshState:
    """What a rotary module was made with, for one forward; afterwards it is what it was before."""

    def __init__(self, module: nn.Module, layer_type: str | None) -> None:
        self.module = module
        self.prefix = "" if layer_type is None else f"{layer_type}_"

    def __enter__(self) -> None:
        module, prefix = self.module, self.prefix
        names = {*_STATE, *(prefix + name for name in _STATE)}
        self.attributes = {name: value for name, value in vars(module).items() if name in names}
        self.buffers = dict(module._buffers)
        original = getattr(module, f"{prefix}original_inv_freq")
        # A copy, since longrope writes into it.
        module.register_buffer(f"{prefix}inv_freq", original.clone(), persistent=False)
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)

    def __exit__(self, *_: object) -> None:
        module = self.module
        module._buffers.clear()
        module._buffers.update(self.buffers)
        for name in {*_STATE, *(self.prefix + name for name in _STATE)} - self.attributes.keys():
            vars(module).pop(name, None)
        vars(module).update(self.attributes)


def _limit(module: Any, layer_type: str | None, is_longrope: bool) -> int:
    """The longest sequence that has the frequencies the module was made with."""
    if not is_longrope:
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    return (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]


def _lengths(call: RaggedCall | PagedCall, position_ids: torch.Tensor) -> torch.Tensor:
    """(N,) the length by which each token is rotated; rows past the last sequence's are nobody's."""
    if isinstance(call, RaggedCall):
        sizes = call.cu_seqlens.diff().long()
        lengths = sizes.repeat_interleave(sizes)
    else:
        if call.prompt_lens is None:
            raise RuntimeError("PagedCall has no prompt_lens, by which the RoPE of this model rotates its prompts")
        sizes = call.batch.cu_seqlens.diff().long()
        prompts = call.prompt_lens.to(sizes).repeat_interleave(sizes)
        lengths = torch.maximum(prompts, position_ids[: len(prompts)] + 1)
    return torch.cat((lengths, position_ids[len(lengths) :] + 1))


def _warn_or_refuse(call: PagedCall, lengths: torch.Tensor, limit: int, is_longrope: bool) -> None:
    """Where a sequence, as it grows, leaves the frequencies behind that its cached keys were rotated by."""
    if call.prompt_lens is None or not bool((lengths > limit).any()):
        return
    sizes = call.batch.cu_seqlens.diff().long()
    prompts = call.prompt_lens.to(sizes).repeat_interleave(sizes)
    crossing = prompts[(prompts <= limit) & (lengths[: len(prompts)] > limit)]
    if is_longrope and len(crossing):
        raise ValueError(
            f"a sequence with a prompt of {int(crossing[0])} tokens has grown past {limit}, where longrope changes the "
            "frequencies of all its tokens; lower max_tokens or give a longer prompt"
        )
    if not is_longrope:
        warnings.warn(
            f"sequences are longer than the model's {limit} positions, where its dynamic RoPE rotates each new token "
            "by the length so far and a trainer by the whole length: their probabilities will differ; keep prompt and "
            f"max_tokens within {limit} to train on what is sampled",
            stacklevel=2,
        )
