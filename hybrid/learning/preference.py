"""Learning from pairs: a reward model, or the actor itself by direct preference optimisation.

Losses are sums over pairs divided by the count of the whole step's, over all ranks and micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import logsigmoid

from hybrid.data.conversations import Example, ExampleDataset, Pair
from hybrid.learning.objective import Sums, ragged_batch, shared_out
from hybrid.models.ragged import RaggedBatch
from hybrid.zero.model import ShardedModel

_NUM_BINS = 10


def pairwise_loss(
    chosen: torch.Tensor,  # (P,) scores of the preferred answers
    rejected: torch.Tensor,  # (P,)
    margins: torch.Tensor,  # (P,) by how much the chosen should be ahead, 0 for no such wish
) -> torch.Tensor:
    """(P,) ``-log sigmoid(chosen - rejected - margin)``.

    Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 1; the margin is Llama 2's,
    https://arxiv.org/abs/2307.09288, equation 2.
    """
    return -logsigmoid(chosen - rejected - margins)


def dpo_loss(
    log_ratios: torch.Tensor,  # (P,) beta * (log-ratio of the chosen answer to the reference less the rejected's)
    *,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """(P,) ``-(1 - eps) log sigmoid(h) - eps log sigmoid(-h)`` of the scaled difference h of the answers' log-ratios.

    Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7, with beta 0.1 there; eps is the probability that
    a pair is the wrong way round, https://ericmitchell.ai/cdpo.pdf, equation 3.
    """
    return -(1 - label_smoothing) * logsigmoid(log_ratios) - label_smoothing * logsigmoid(-log_ratios)


class RewardObjective:
    """A model with one score per token learns to score the chosen answer higher, at the last token of each."""

    role = "reward"

    def __init__(self, model: ShardedModel) -> None:
        self.model = model

    def num_tokens(self, example: Pair) -> int:
        return num_tokens(self.model, example) + 2

    def count(self, example: Pair) -> int:
        return 1

    def loss(self, examples: Sequence[Pair], total: float) -> tuple[torch.Tensor, Sums]:
        device = self.model.mesh.device
        # A value belongs to the token after its state, so each sequence ends in one that is never looked at: the state
        # scored is that of the last real token.
        sequences = [[*e.token_ids, e.token_ids[-1]] for pair in examples for e in (pair.chosen, pair.rejected)]
        shared = num_shared(self.model, examples)
        batch = RaggedBatch.from_sequences(sequences, [1] * len(sequences), device, num_shared=shared)
        values = self.model.values(batch)
        chosen, rejected = values.view(-1, 2).unbind(1)  # (P,) each
        margins = torch.tensor([pair.margin for pair in examples], dtype=torch.float32, device=device)
        losses = pairwise_loss(chosen, rejected, margins)
        return losses.sum() / total, preference_sums(losses, chosen, rejected)

    def describe(self, sums: Mapping[str, float], total: float) -> dict[str, float]:
        """See `describe_preferences`."""
        return describe_preferences(sums, total)


class DPOObjective:
    """An actor learns to prefer the chosen answer by more than a frozen reference does; see `dpo_loss`."""

    role = "actor"

    def __init__(self, model: ShardedModel, *, beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        self.model, self.beta, self.label_smoothing = model, beta, label_smoothing

    def num_tokens(self, example: Pair) -> int:
        return num_tokens(self.model, example)

    def count(self, example: Pair) -> int:
        return 1

    def loss(self, examples: Sequence[Pair], total: float) -> tuple[torch.Tensor, Sums]:
        """The pairs must carry a reference (`with_reference`)."""
        answers = answer_logprobs(self.model, examples)  # (P, 2)
        references = [pair.reference for pair in examples]
        if None in references:
            raise ValueError("a pair has no log-probs of the reference; give the dataset them by with_reference")
        reference = torch.tensor(references, dtype=torch.float32, device=answers.device).view(-1, 2)
        chosen, rejected = (self.beta * (answers - reference)).unbind(1)
        losses = dpo_loss(chosen - rejected, label_smoothing=self.label_smoothing)
        return losses.sum() / total, preference_sums(losses, chosen, rejected)

    def describe(self, sums: Mapping[str, float], total: float) -> dict[str, float]:
        """See `describe_preferences`; a score is beta times an answer's log-ratio, DPO's implicit reward."""
        return describe_preferences(sums, total)


def answer_logprobs(model: ShardedModel, pairs: Sequence[Pair]) -> torch.Tensor:
    """(P, 2) log-probs (nats) of the pairs' chosen and rejected answers, summed over their scored tokens."""
    examples: list[Example] = [example for pair in pairs for example in (pair.chosen, pair.rejected)]
    batch = ragged_batch(examples, model.mesh.device, num_shared(model, pairs))
    logprobs = model.logprobs(batch).logprobs  # (R,)
    owner = torch.tensor([i for i, example in enumerate(examples) for _ in range(example.num_scored)])  # (R,)
    return logprobs.new_zeros(len(examples)).index_add(0, owner.to(logprobs.device, torch.int64), logprobs).view(-1, 2)


def num_shared(model: ShardedModel, pairs: Sequence[Pair]) -> list[int]:
    """How many of the first tokens of each chosen and each rejected answer are computed once for both of them: all that
    they have in common, prompts above all."""
    return [count for pair in pairs for count in 2 * (_num_common(model, pair),)]


def num_tokens(model: ShardedModel, pair: Pair) -> int:
    """Tokens of a pair that a forward computes."""
    return len(pair.chosen.token_ids) + len(pair.rejected.token_ids) - _num_common(model, pair)


def _num_common(model: ShardedModel, pair: Pair) -> int:
    if not model.can_share_prefixes:
        return 0
    chosen, rejected = pair.chosen.token_ids, pair.rejected.token_ids
    most = min(len(chosen), len(rejected)) - 1  # the last token is an answer's own
    return next((i for i in range(most) if chosen[i] != rejected[i]), most)


def with_reference(dataset: ExampleDataset[Pair], model: ShardedModel, max_tokens: int) -> ExampleDataset[Pair]:
    """``dataset`` with the log-probs that ``model`` gives its answers now; every rank calls this.

    They are all that is needed of a reference, so it is asked once and need not be kept.
    """
    found: dict[int, tuple[float, float]] = {}
    objective = DPOObjective(model)
    with model.resident(), torch.no_grad():
        for members in shared_out(model.mesh, objective, dataset.rows, max_tokens):
            answers = answer_logprobs(model, [dataset.rows[i] for i in members]).tolist()
            found |= {index: (chosen, rejected) for index, (chosen, rejected) in zip(members, answers, strict=True)}
    for share in model.mesh.all_gather_object(found):
        found |= share
    rows = [dataclasses.replace(pair, reference=found[index]) for index, pair in enumerate(dataset.rows)]
    return ExampleDataset(rows, num_dropped=dataset.num_dropped, num_truncated=dataset.num_truncated)


def preference_sums(losses: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor) -> Sums:
    """What `describe_preferences` needs, of (P,) losses and scores."""
    chosen, rejected = chosen.detach(), rejected.detach()
    margins = chosen - rejected
    confidence = torch.sigmoid(margins.abs())  # of the answer that the model prefers, in [0.5, 1)
    correct = (margins.sign() + 1) / 2
    bins = ((confidence - 0.5) * 2 * _NUM_BINS).long().clamp(0, _NUM_BINS - 1)
    gaps = confidence.new_zeros(_NUM_BINS).index_add(0, bins, confidence - correct)
    sums = {
        "loss": losses.detach().sum(),
        "accuracy": correct.sum(),
        "margin": margins.sum(),
        "chosen": chosen.sum(),
        "rejected": rejected.sum(),
        "brier": (1 - torch.sigmoid(margins)).square().sum(),
    }
    return sums | {f"gap/{number}": gap for number, gap in enumerate(gaps)}


def describe_preferences(sums: Mapping[str, float], total: float) -> dict[str, float]:
    """``loss``, ``accuracy``, mean ``margin`` of chosen over rejected and their mean scores; and of the probability
    ``sigmoid(margin)`` the ``brier`` score, and ``ece``, the expected calibration error over ten bins of confidence
    (Guo et al. 2017, https://arxiv.org/abs/1706.04599). A tie counts half."""
    means = {name: value / total for name, value in sums.items() if not name.startswith("gap/")}
    means["ece"] = sum(abs(value) for name, value in sums.items() if name.startswith("gap/")) / total
    return means
