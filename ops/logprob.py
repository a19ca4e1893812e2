"""Log-probabilities and entropy of target tokens straight from hidden states, the LM head included.

The logits of a batch are its largest tensor by far: 16k tokens over a vocabulary of 128k are 8 GiB in fp32, and plain
autograd keeps several of them. Here they exist for a chunk of rows at a time, in the forward and again, recomputed, in
the backward. Where kernels work in the logits' own memory the first chunk, which may be all of a small batch, is kept
from the one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ops import logprob_cpu
from ops.accumulate import accumulate
from ops.sampling_cdf import block_sums, row_maxima, target_logprobs

# Logits alive at once where the caller does not say: 128 MiB in fp32, which still gives the matmul hundreds of rows.
CHUNK_ELEMENTS = 2**25
# Of logits in the compute dtype that kernels work in: as many bytes, in bf16.
CHUNK_ELEMENTS_IN_PLACE = 2**26
# Rows of the weight whose gradient is rounded to bf16 before it is added: few enough to stay in a CPU's cache.
WEIGHT_ROWS_CPU = 1024

# A product with fewer rows adds up in another order (on a CPU, in fp32), and a token's log-prob would depend on how
# many are scored with it.
_FEWEST_ROWS = 16


@dataclass(frozen=True, slots=True)
class _Logits:
    """How a row's logits follow from the head's product: scaled, then soft-capped; then come temperatures."""

    temperature: float
    softcap: float | None
    scale: float

    @property
    def is_plain(self) -> bool:
        """Whether the product is the logits."""
        return self.scale == 1 and self.softcap is None

    def product(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """(C, H), (V, H), (V,) -> (C, V) in the dtype of ``hidden``."""
        num_rows = hidden.shape[0]
        hidden = pad(hidden, (0, 0, 0, max(0, _FEWEST_ROWS - num_rows)))
        return torch.nn.functional.linear(hidden, weight, bias)[:num_rows]

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        """(C, V) -> the logits in fp32, maybe in the product's memory."""
        logits = product.to(_wide(product.dtype))
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """(C, V) what it returned -> the derivative of that over the temperature by the product, (C, V) or a number."""
        slope = self.scale / self.temperature
        if self.softcap is None:
            return slope
        tanh = logits / self.softcap
        return tanh.square_().neg_().add_(1.0).mul_(slope)


class _LinearLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, to_logits, chunk_rows, keeps_chunk):
        logprobs = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden.dtype))
        entropy = torch.empty_like(logprobs)
        log_normaliser = torch.empty_like(logprobs)
        cast_weight = weight.to(hidden.dtype)
        ctx.first_product = None
        for rows in _chunks(hidden.shape[0], chunk_rows):
            product = to_logits.product(hidden[rows], cast_weight, bias)
            if to_logits.is_plain and logprob_cpu.takes(product):
                found = logprob_cpu.statistics(product, targets[rows], to_logits.temperature)
                if keeps_chunk and rows.start == 0:
                    ctx.first_product = product
            else:
                found = _statistics(to_logits(product), targets[rows], to_logits.temperature)
            logprobs[rows], entropy[rows], log_normaliser[rows] = found
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, log_normaliser)
        ctx.to_logits, ctx.chunk_rows = to_logits, chunk_rows
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets, entropy, log_normaliser = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 7
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = _WeightGradient(weight, hidden) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=_wide(bias.dtype)) if need_bias else None
        cast_weight = weight.to(hidden.dtype)
        for rows in _chunks(hidden.shape[0], ctx.chunk_rows):
            # Its memory becomes the gradient's, so a second backward computes it again.
            product, ctx.first_product = ctx.first_product, None
            if product is None:
                product = ctx.to_logits.product(hidden[rows], cast_weight, bias)
            grad = _product_gradient(
                product,
                ctx.to_logits,
                targets[rows],
                log_normaliser[rows],
                entropy[rows],
                None if grad_logprobs is None else grad_logprobs[rows],
                None if grad_entropy is None else grad_entropy[rows],
            )
            if grad_hidden is not None:
                torch.mm(grad, cast_weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.add(grad, rows)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.total(),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


class _WeightGradient:
    """The sum of ``grad.T @ hidden`` over chunks of rows: in bf16 a sum of many would lose its small terms, so that it
    is in fp32 as soon as there is a second."""

    def __init__(self, weight: torch.Tensor, hidden: torch.Tensor) -> None:
        self._weight, self._hidden = weight, hidden
        self._sum: torch.Tensor | None = None

    def add(self, grad: torch.Tensor, rows: slice) -> None:
        hidden = self._hidden[rows]
        if rows == slice(0, len(self._hidden)):
            self._sum = grad.t() @ hidden
            return
        if self._sum is None:
            self._sum = torch.zeros_like(self._weight, dtype=_wide(self._weight.dtype))
        if self._sum.dtype == grad.dtype:
            self._sum.addmm_(grad.t(), hidden)
            return
        step = WEIGHT_ROWS_CPU if hidden.device.type == "cpu" else len(self._weight)
        for part in _chunks(len(self._weight), step):
            accumulate(self._sum[part], grad[:, part].t() @ hidden)

    def total(self) -> torch.Tensor:
        return torch.zeros_like(self._weight) if self._sum is None else self._sum.to(self._weight.dtype)


def linear_logprob_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each row's target, and the entropy of each row's distribution over the vocabulary.

    The distribution is ``softmax(softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature)``.
    The product is computed in the dtype of ``hidden``, all that follows in fp32 (fp64 if ``hidden`` is). Gradients
    reach ``hidden``, ``weight`` and ``bias`` through both outputs. No rows at all give two empty results that are still
    connected to the inputs.

    Args:
        hidden: (R, H) hidden states, one row for each target.
        weight: (V, H) the LM head, of any strides.
        targets: (R,) int64 token ids.
        temperature: divides the logits; the sampler's, if the log-probs are to be those that were sampled from.
        bias: (V,) the LM head's bias.
        softcap: Gemma 2's ``final_logit_softcapping``.
        logit_scale: what a family multiplies its logits by.
        chunk_rows: rows whose logits are alive at once; by default equal chunks of at most 2**25 logits, 2**26
            where kernels on a CPU work in their memory.

    Returns:
        ``logprobs`` (R,) and ``entropy`` (R,) in nats, fp32.

    Raises:
        ValueError: shapes that do not fit each other, or a temperature, softcap or chunk_rows that is not positive.
    """
    num_rows, vocab_size = hidden.shape[0], weight.shape[0]
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != (num_rows,):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} do not fit "
            "each other; they are (R, H), (V, H) and (R,)"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs need a positive one (1.0 for greedy sampling)")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or None for no cap")
    to_logits = _Logits(temperature, softcap, logit_scale)
    if chunk_rows is None:
        is_in_place = to_logits.is_plain and logprob_cpu.takes(hidden)
        limit = CHUNK_ELEMENTS_IN_PLACE if is_in_place else CHUNK_ELEMENTS
        num_chunks = -(-num_rows // max(1, limit // vocab_size))
        chunk_rows = -(-num_rows // max(1, num_chunks)) or 1
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")
    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    keeps_chunk = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return _LinearLogprobEntropy.apply(hidden, weight, bias, targets, to_logits, chunk_rows, keeps_chunk)


def linear_logprob_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `linear_logprob_entropy` computes, written plainly: all (R, V) logits, and autograd."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(_wide(hidden.dtype)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


def _statistics(
    logits: torch.Tensor,  # (C, V), overwritten
    targets: torch.Tensor,  # (C,)
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(C,) log-probs of the targets, entropies and log-normalisers of ``logits / temperature``.

    Log-probs are rounded as a sampler's are, so that equal logits have equal log-probs in generation and in training.
    """
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    if logits.dtype == torch.float32:
        maxima = row_maxima(logits)
        divisors = torch.full_like(maxima, temperature)
        totals = block_sums(logits, maxima, divisors).cumsum(-1)[:, -1]
        logprobs, log_total = target_logprobs(chosen, maxima, divisors, totals), totals.log().float()
        # Subtracting each row's peak first keeps the exponentials finite and the entropy free of cancellation.
        logits.sub_(maxima[:, None]).div_(temperature)
        exps = logits.exp()
        total = totals.float()
    else:
        maxima = logits.amax(-1)
        logits.sub_(maxima[:, None]).div_(temperature)
        exps = logits.exp()
        total = exps.sum(-1)
        log_total = total.log()
        logprobs = (chosen - maxima) / temperature - log_total
    entropy = log_total - exps.mul_(logits).sum(-1) / total
    return logprobs, entropy, maxima / temperature + log_total


def _product_gradient(
    product: torch.Tensor,  # (C, V), overwritten
    to_logits: _Logits,
    targets: torch.Tensor,  # (C,)
    log_normaliser: torch.Tensor,  # (C,)
    entropy: torch.Tensor,  # (C,)
    grad_logprobs: torch.Tensor | None,  # (C,)
    grad_entropy: torch.Tensor | None,  # (C,)
) -> torch.Tensor:
    """(C, V) gradient by the head's product, in its dtype."""
    temperature = to_logits.temperature
    if to_logits.is_plain and logprob_cpu.takes(product):
        grads = (log_normaliser, entropy, grad_logprobs, grad_entropy)
        return logprob_cpu.logit_gradients(product, targets, *grads, temperature, 1 / temperature)
    logits = to_logits(product)
    slope = to_logits.slope(logits)
    logprobs = logits.div_(temperature).sub_(log_normaliser[:, None])
    return _logits_gradient(logprobs, targets, entropy, grad_logprobs, grad_entropy).mul_(slope).to(product.dtype)


def _logits_gradient(
    logprobs: torch.Tensor,  # (C, V), overwritten
    targets: torch.Tensor,  # (C,)
    entropy: torch.Tensor,  # (C,)
    grad_logprobs: torch.Tensor | None,  # (C,)
    grad_entropy: torch.Tensor | None,  # (C,)
) -> torch.Tensor:
    """(C, V) gradient by the logits: ``g * (onehot - p)`` of the log-prob, ``-g * p * (log p + H)`` of the entropy."""
    probs = logprobs.exp()
    if grad_entropy is None:
        grad = probs
        if grad_logprobs is not None:
            grad = probs.mul_(-grad_logprobs[:, None])
    else:
        grad = logprobs.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_logprobs is not None:
            grad.sub_(grad_logprobs[:, None])
        grad.mul_(probs)
    if grad_logprobs is not None:
        grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
    return grad


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, chunk_rows):
        yield slice(start, min(start + chunk_rows, num_rows))
