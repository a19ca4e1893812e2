"""What a model says about a ragged batch's tokens: their log-probs and entropies, their loss, or their values.

The body of the model runs on the batch's flat token axis; the heads run on the rows that are asked for, no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid.models.attention import RaggedCall, attention_call
from hybrid.models.ragged import RaggedBatch
from ops.cross_entropy import linear_cross_entropy
from ops.logprob import linear_logprob_entropy

# What families call the factor on their logits, and the power it enters with; then who reads a name otherwise.
_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "output_multiplier": 1, "logits_scaling": -1}
_SCALE_EXCEPTIONS = {("hyperclovax", "logits_scaling"): 1, ("mpt", "logit_scale"): 0}
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")

SCORE_HEADS = ("score", "classifier")


# As many rows, or a multiple of them, as products need to have the same bits in each whatever the others are.
_EXACT_ROWS = 16
_is_exact: ContextVar[bool] = ContextVar("exact_forward", default=False)


@contextmanager
def exact_forward(enabled: bool = True) -> Iterator[None]:
    """Inside the block, hidden states have the bits that generation on a CPU gives them, if ``enabled``."""
    token = _is_exact.set(enabled)
    try:
        yield
    finally:
        _is_exact.reset(token)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of each scored token of a batch."""

    logprobs: torch.Tensor  # (R,) fp32, nats
    entropy: torch.Tensor  # (R,) fp32, nats, of the distribution the token was drawn from


@dataclass(frozen=True, slots=True)
class OutputHead:
    """How a causal LM gets logits: ``softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)``."""

    weight: torch.Tensor  # (V, H), the parameter itself, tied or not
    bias: torch.Tensor | None  # (V,)
    scale: float
    softcap: float | None


def token_logprobs(module: PreTrainedModel, batch: RaggedBatch, temperature: float = 1.0) -> TokenScores:
    """Log-prob and entropy of each scored token under a causal LM, its logits divided by ``temperature``.

    Logits exist in chunks of rows, in the forward and in the backward (see ``ops.logprob``).
    """
    rows = hidden_states(module, batch)[batch.sources]  # (R, H)
    head = output_head(module)
    logprobs, entropy = linear_logprob_entropy(
        rows,
        head.weight,
        batch.target_ids,
        temperature=temperature,
        bias=head.bias,
        softcap=head.softcap,
        logit_scale=head.scale,
    )
    return TokenScores(logprobs=logprobs, entropy=entropy)


def token_loss(
    module: PreTrainedModel,
    batch: RaggedBatch,
    row_weights: torch.Tensor | None = None,
    normalizer: float | None = None,
) -> torch.Tensor:
    """Scalar fp32 negative log-likelihood (nats) of the scored tokens under a causal LM: cross-entropy training.

    The head's gradients are made in the forward, a chunk of logits at a time (see ``ops.cross_entropy``), so that there
    is one backward through the result and no more. A batch that scores nothing gives a zero that is still connected to
    the parameters.

    Args:
        row_weights: (R,) factor on each scored token's term, a constant; 1 by default.
        normalizer: what the sum is divided by, such as the number of scored tokens on all ranks; by default the number
            R of this batch's, whatever their weights.

    Raises:
        ValueError: a normalizer that is not positive, or row weights that do not fit or require a gradient.
    """
    if normalizer is not None and not normalizer > 0:
        raise ValueError(f"normalizer is {normalizer}; a sum of losses is divided by something positive")
    rows = hidden_states(module, batch)[batch.sources]  # (R, H)
    head = output_head(module)
    scale = 1.0 / (normalizer or max(1, batch.num_targets))
    return linear_cross_entropy(
        rows,
        head.weight,
        batch.target_ids,
        scale=scale if row_weights is None else row_weights * scale,
        bias=head.bias,
        softcap=head.softcap,
        logit_scale=head.scale,
    )


def token_values(module: PreTrainedModel, batch: RaggedBatch) -> torch.Tensor:
    """(R,) fp32 value of the state before each scored token, under a model with one score per token.

    The state before a token is the hidden row of the token ahead of it, the row that also predicts it.
    """
    rows = hidden_states(module, batch)[batch.sources]  # (R, H)
    return score_head(module)(rows).squeeze(-1).float()


def hidden_states(module: PreTrainedModel, batch: RaggedBatch) -> torch.Tensor:
    """(N, H) last hidden states of the model's body, attention bounded by the batch's sequences."""
    body = module.base_model
    if body is module:
        raise ValueError(
            f"{type(module).__name__} has no body named {module.base_model_prefix!r} under its head; "
            "load it with AutoModelForCausalLM or AutoModelForSequenceClassification"
        )
    exact = _is_exact.get()
    input_ids, position_ids, cu_seqlens = batch.input_ids, batch.position_ids, batch.cu_seqlens
    prefixes = batch.prefixes
    fill = -batch.num_tokens % _EXACT_ROWS if exact else 0
    if fill:  # a sequence of its own, whose rows nobody reads
        input_ids = pad(input_ids, (0, fill))
        position_ids = torch.cat((position_ids, torch.arange(fill, device=position_ids.device)))
        cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[-1:] + fill))
        prefixes = None if prefixes is None else prefixes.with_one_more(fill)
    call = RaggedCall(cu_seqlens=cu_seqlens, max_seqlen=max(batch.max_seqlen, fill), prefixes=prefixes)
    with attention_call(call):
        output = body(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False)
    return output.last_hidden_state[0, : batch.num_tokens]


def output_head(module: PreTrainedModel) -> OutputHead:
    """The LM head's parameters and what the family's config does to its logits.

    Raises:
        ValueError: the model has no output embeddings.
    """
    embeddings = module.get_output_embeddings()
    weight = getattr(embeddings, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise ValueError(f"{type(module).__name__} has no LM head; load it with AutoModelForCausalLM")
    config = module.config.get_text_config()
    return OutputHead(
        weight=weight,
        bias=getattr(embeddings, "bias", None),
        scale=logit_scale(config),
        softcap=next((cap for name in _SOFTCAPS if (cap := getattr(config, name, None)) is not None), None),
    )


def logit_scale(config: PreTrainedConfig) -> float:
    """The factor on a family's logits, 1 where its config names none."""
    scale = 1.0
    for name, power in _SCALES.items():
        factor = getattr(config, name, None)
        power = _SCALE_EXCEPTIONS.get((config.model_type, name), power)
        if factor is not None and power:
            scale *= factor**power
    return scale


def score_head(module: PreTrainedModel) -> nn.Module:
    """The head of a value or reward model, (..., H) -> (..., 1).

    Raises:
        ValueError: the model has no such head, or it has more than one output.
    """
    head = next((head for name in SCORE_HEADS if isinstance(head := getattr(module, name, None), nn.Module)), None)
    if head is None:
        raise ValueError(
            f"{type(module).__name__} has no score head (looked for {', '.join(SCORE_HEADS)}); "
            "load it with AutoModelForSequenceClassification and num_labels=1"
        )
    if module.config.num_labels != 1:
        raise ValueError(
            f"{type(module).__name__} has {module.config.num_labels} outputs per token; a value or reward model has "
            "one, load it with num_labels=1"
        )
    return head
