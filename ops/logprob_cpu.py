"""Log-probs, entropies and gradients of plain logits by the kernels of ``ops/cpu/logprob.cpp``; see ``ops.logprob``.

In torch each is several passes over a vocabulary in fp32, which cost as much as the head's products.
"""

from __future__ import annotations

import ctypes

import torch

from ops import cpu
from ops.sampling_cdf import block_sums, row_maxima, target_logprobs
from ops.sampling_cpu import _rows, takes

__all__ = ["logit_gradients", "statistics", "takes"]


def statistics(
    logits: torch.Tensor,  # (C, V) in fp32 or bf16
    targets: torch.Tensor,  # (C,)
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(C,) log-probs of the targets, entropies and log-normalisers of ``logits / temperature``, in fp32."""
    chosen = logits.gather(1, targets[:, None]).squeeze(1).float()
    maxima = row_maxima(logits)
    divisors = torch.full_like(maxima, temperature)
    totals = block_sums(logits, maxima, divisors).cumsum(-1)[:, -1]
    weighted = torch.empty_like(maxima)
    cpu.loaded().entropy_sums(
        *_rows(logits), _pointer(maxima), ctypes.c_float(1 / temperature), _pointer(weighted), torch.get_num_threads()
    )
    log_total = totals.log().float()
    return (
        target_logprobs(chosen, maxima, divisors, totals),
        log_total - weighted / totals.float(),
        maxima / temperature + log_total,
    )


def logit_gradients(
    logits: torch.Tensor,  # (C, V) in fp32 or bf16
    targets: torch.Tensor,  # (C,)
    log_normaliser: torch.Tensor,  # (C,)
    entropy: torch.Tensor,  # (C,)
    grad_logprobs: torch.Tensor | None,  # (C,)
    grad_entropy: torch.Tensor | None,  # (C,)
    temperature: float,
    slope: float,
) -> torch.Tensor:
    """The gradient by what the logits were made from, in the logits' memory; ``slope``: the logits' own by that."""
    nothing = torch.zeros_like(entropy)
    factors = [nothing if each is None else each.float().contiguous() for each in (grad_logprobs, grad_entropy)]
    rows = [each.contiguous() for each in (targets, log_normaliser, entropy)]
    cpu.loaded().logit_gradients(
        *_rows(logits),
        *map(_pointer, (*rows, *factors)),
        ctypes.c_float(1 / temperature),
        ctypes.c_float(slope),
        torch.get_num_threads(),
    )
    return logits


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
