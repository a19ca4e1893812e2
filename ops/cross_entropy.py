"""Cross-entropy of target tokens straight from hidden states, the LM head included, its gradients made on the way.

A weighted sum of negative log-probs has its gradient by the logits as soon as the logits are there: the row's weight
times softmax less one-hot. So each chunk of logits serves the loss and the gradients at once, and the head's product
is not computed again in the backward, which only multiplies what was saved by the gradient of the loss. (Liger Kernel,
https://arxiv.org/abs/2410.10989, fuses the same way.) Where the gradient is not known until the backward, as in a
policy loss, use ``ops.logprob``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from ops.accumulate import accumulate
from ops.logprob import WEIGHT_ROWS_CPU, _chunks, _wide

# Logits alive at once where the caller does not say. On a CPU 64 MiB in fp32 already give the products enough rows; on
# a GPU every chunk passes over the weight and its fp32 gradient once more, which takes a thousand rows to pay for.
_CHUNK_ELEMENTS_CPU = 2**24
_CHUNK_ELEMENTS_GPU = 2**27
_STRETCH = 2**20  # elements of a gradient that are scaled at once


@dataclass(frozen=True, slots=True)
class _Head:
    """A head's parameters, and how logits follow from its product: scaled, then soft-capped."""

    weight: torch.Tensor  # (V, H), in the dtype of the hidden states, as is the bias
    bias: torch.Tensor | None  # (V,)
    scale: float
    softcap: float | None

    def logits(self, hidden: torch.Tensor, product: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """(C, H) -> (C, V), in ``logits`` and by way of ``product``, which may be the same memory."""
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=product)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=product)
        if logits is not product:
            logits.copy_(product)
        if self.softcap is not None:
            logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        elif self.scale != 1.0:
            logits.mul_(self.scale)
        return logits

    def cap_slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """(C, V) derivative of the soft-capped logits by what was capped; None: there is no cap."""
        if self.softcap is None:
            return None
        return logits.div(self.softcap).square_().neg_().add_(1.0)


class _Gradients:
    """The gradients of hidden states, weight and bias, those that are needed, as chunks of rows add to them."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needed: tuple[bool, bool, bool]
    ) -> None:
        # Chunks add up: in bf16 a sum of many would lose its small terms.
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=_wide(bias.dtype)) if bias is not None and needed[2] else None

    def add(self, grad: torch.Tensor, rows: slice, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        """Take in a chunk's gradient by the product (C, V), in the dtype of its hidden states (C, H)."""
        if self.hidden is not None:
            torch.mm(grad, weight, out=self.hidden[rows])
        if self.weight is not None and self.weight.dtype == hidden.dtype:
            self.weight.addmm_(grad.t(), hidden)
        elif self.weight is not None:
            step = WEIGHT_ROWS_CPU if hidden.device.type == "cpu" else len(self.weight)
            for part in _chunks(len(self.weight), step):
                accumulate(self.weight[part], grad[:, part].t() @ hidden)
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)


def _scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``gradient * factor`` in ``dtype``, in the memory of ``gradient``.

    The factor is applied in fp32: in bf16 its own rounding would bias every element alike. A gradient that is wider
    than ``dtype`` is narrowed where it lies, a stretch at a time and never beyond what has been read, since this is
    when activations take the most memory.
    """
    if gradient.dtype == dtype == _wide(dtype):
        return gradient.mul_(factor)
    if gradient.dtype == dtype:
        return gradient.to(_wide(dtype)).mul_(factor).to(dtype)
    flat = gradient.view(-1)
    narrow = flat.view(dtype)
    for stretch in _chunks(flat.numel(), _STRETCH):
        narrow[stretch] = (flat[stretch] * factor).to(dtype)
    return narrow[: flat.numel()].view(gradient.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, row_weights, factor, scale, softcap, chunk_rows, grad_enabled):
        needed = tuple(grad_enabled and need for need in ctx.needs_input_grad[:3])
        head = _Head(weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype), scale, softcap)
        gradients = _Gradients(hidden, weight, bias, needed)
        loss = _walk(head, hidden, targets, row_weights, chunk_rows, gradients if any(needed) else None)
        # Not by save_for_backward, which would keep them until the backward is over; this one hands them on.
        ctx.gradients = (gradients.hidden, gradients.weight, gradients.bias)
        ctx.factor = factor * scale
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss * factor

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        if ctx.gradients is None:
            raise RuntimeError(
                "a second backward through linear_cross_entropy: its gradients were handed over by the first; "
                "compute the loss again, or add up the losses and go backward once"
            )
        gradients, ctx.gradients = ctx.gradients, None
        factor = grad_loss * ctx.factor
        scaled = [
            None if gradient is None else _scaled(gradient, factor, dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, *(None,) * 7)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    scale: float | torch.Tensor,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Weighted sum of the negative log-probs of the targets: ``sum(scale * -log_softmax(logits)[targets])``.

    The logits are ``softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)``; the product is computed in
    the dtype of ``hidden``, all that follows in fp32 (fp64 if ``hidden`` is). Gradients reach ``hidden``, ``weight``
    and ``bias``, once: they are made in the forward and handed over in the backward. They take memory in between, the
    weight's in fp32, for each of the three that requires one, and none under ``no_grad``. No rows at all give a zero
    that is still connected to the inputs.

    Args:
        hidden: (R, H) hidden states, one row for each target.
        weight: (V, H) the LM head, of any strides.
        targets: (R,) int64 token ids.
        scale: one number (1 / R for a mean), or (R,) the weights of the rows, constants.
        bias: (V,) the LM head's bias.
        softcap: Gemma 2's ``final_logit_softcapping``.
        logit_scale: what a family multiplies its logits by.
        chunk_rows: rows whose logits are alive at once; by default equal chunks of at most 2**24 logits on a CPU and
            2**27 on a GPU.

    Returns:
        A scalar in fp32, in nats.

    Raises:
        ValueError: shapes that do not fit each other, a softcap or chunk_rows that is not positive, or row weights
            that require a gradient.
        RuntimeError: in a second backward through the same graph.
    """
    num_rows = len(targets)
    _check(hidden, weight, targets, scale, softcap)
    if chunk_rows is None:
        limit = _CHUNK_ELEMENTS_CPU if hidden.device.type == "cpu" else _CHUNK_ELEMENTS_GPU
        num_chunks = -(-num_rows // max(1, limit // len(weight)))
        chunk_rows = -(-num_rows // max(1, num_chunks)) or 1
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")
    row_weights, factor = None, scale
    if isinstance(scale, torch.Tensor):
        # Weights of 1 / (number of tokens) would push fp16 gradients under its range, so the largest becomes 1.
        row_weights = scale.to(_wide(hidden.dtype))
        factor = row_weights.abs().amax() if num_rows else row_weights.new_ones(())
        row_weights = row_weights / factor.clamp_min(torch.finfo(factor.dtype).tiny)
    return _LinearCrossEntropy.apply(
        hidden, weight, bias, targets, row_weights, factor, logit_scale, softcap, chunk_rows, torch.is_grad_enabled()
    )


def linear_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    scale: float | torch.Tensor,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """What `linear_cross_entropy` computes, written plainly: all (R, V) logits, and autograd."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(_wide(hidden.dtype)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (torch.nn.functional.cross_entropy(logits, targets, reduction="none") * scale).sum()


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    scale: float | torch.Tensor,
    softcap: float | None,
) -> None:
    num_rows = len(targets)
    fit = hidden.dim() == weight.dim() == 2 and hidden.shape == (num_rows, weight.shape[1]) and targets.dim() == 1
    if not fit:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} do not fit "
            "each other; they are (R, H), (V, H) and (R,)"
        )
    if isinstance(scale, torch.Tensor):
        if scale.shape != (num_rows,):
            raise ValueError(
                f"scale has shape {tuple(scale.shape)} for {num_rows} rows; give a number or ({num_rows},)"
            )
        if scale.requires_grad:
            raise ValueError("scale requires a gradient, but no gradient reaches the rows' weights; detach it")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or None for no cap")


def _walk(
    head: _Head,
    hidden: torch.Tensor,  # (R, H)
    targets: torch.Tensor,  # (R,)
    row_weights: torch.Tensor | None,  # (R,)
    chunk_rows: int,
    gradients: _Gradients | None,
) -> torch.Tensor:
    """The weighted sum over all rows, a chunk of them at a time; ``gradients`` takes in theirs, unless by the scale."""
    # One buffer for all chunks: fresh memory of this size is mapped, and faulted in page by page, every time.
    product = hidden.new_empty(min(chunk_rows, len(hidden)), len(head.weight))  # (C, V)
    wide = product if _wide(hidden.dtype) == hidden.dtype else torch.empty_like(product, dtype=_wide(hidden.dtype))
    total = wide.new_zeros(())
    for rows in _chunks(len(hidden), chunk_rows):
        size = rows.stop - rows.start
        narrow = product[:size]
        logits = head.logits(hidden[rows], narrow, narrow if wide is product else wide[:size])
        slope = head.cap_slope(logits) if gradients is not None else None
        target_logits = logits.gather(1, targets[rows, None]).squeeze(1)
        peak = logits.amax(-1)
        probs = torch.softmax(logits, -1, out=logits)
        # The log-sum-exp by way of the largest probability, which is at least 1 / V and so never underflows.
        nll = (peak - target_logits) - probs.amax(-1).log()
        total += nll.sum() if row_weights is None else nll.dot(row_weights[rows])
        if gradients is None:
            continue
        grad = probs.scatter_add_(1, targets[rows, None], probs.new_full((size, 1), -1.0))
        if row_weights is not None:
            grad.mul_(row_weights[rows, None])
        if slope is not None:
            grad.mul_(slope)
        gradients.add(grad if wide is product else narrow.copy_(grad), rows, hidden[rows], head.weight)
    return total
