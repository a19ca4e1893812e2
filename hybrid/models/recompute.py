"""Activation checkpointing: a layer keeps less for its backward, and computes the rest again there."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import Cache

from hybrid.models.attention import attention_call, current_call

# What costs time to compute again: products and attention. Everything else reads memory as fast as it would be saved.
_EXPENSIVE = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear")
_ATTENTION = ("attention", "flash_attn")


def recompute_in_backward(layer: nn.Module, what: Literal["selective", "full"]) -> None:
    """Have a layer recompute its activations: ``full`` from its inputs; ``selective`` from its products' results.

    Its ``forward`` is wrapped, and not its call: hooks around the layer run once, in the forward. The recomputation
    reads the flat batch by the same `attention_call` as the forward did.
    """
    forward = layer.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args = tuple(_without_cache(layer, value) for value in args)
        kwargs = {name: _without_cache(layer, value) for name, value in kwargs.items()}
        call = current_call()

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            again = nullcontext() if call is None else attention_call(call, recompute=True)
            if what == "full":
                return nullcontext(), again
            keeping, using = create_selective_checkpoint_contexts(_policy)
            return keeping, _both(again, using)

        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=contexts,
            preserve_rng_state=layer.training,  # dropout, which evaluation mode has none of
            **kwargs,
        )

    layer.forward = wrapped


def _without_cache(layer: nn.Module, value: Any) -> Any:
    """An argument of a layer, or None for a key/value cache: a recomputation would add its tokens a second time."""
    if not isinstance(value, Cache):
        return value
    if value.get_seq_length():
        raise ValueError(
            f"{type(layer).__name__} recomputes its activations and cannot go on from a key/value cache that holds "
            "tokens; run it under torch.no_grad() or set gradient_checkpointing=none"
        )
    return None


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.overloadpacket.__name__ if hasattr(op, "overloadpacket") else str(op)
    keeps = name in _EXPENSIVE or any(part in name for part in _ATTENTION)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class _both(ExitStack):
    """Two contexts as one."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._contexts = contexts

    def __enter__(self) -> Any:
        super().__enter__()
        for context in self._contexts:
            self.enter_context(context)
        return self
