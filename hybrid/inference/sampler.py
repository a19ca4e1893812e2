"""The next token of each sequence from its row of logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybrid.inference.edits import SequenceEdits
from hybrid.inference.params import SamplingParams
from hybrid.inference.scheduler import Chunk, SampledToken
from hybrid.inference.sequence import Sequence
from ops.sampling import Draw, Sampled, UnsampleableError, sample, uniform
from ops.sampling_cdf import VocabShard
from ops.sampling_edits import LogitEdits


class Sampler:
    """Samples under each sequence's own parameters.

    A token depends on its row of logits, the sequence's parameters, seed and tokens, and on nothing else.

    Args:
        ending_ids: gives the ids that would end a sequence; they have no probability before ``min_tokens``.
        vocab_size: of the model, for refusing ids beyond it; None where it is not known.
        shard: this rank's stretch of the logits, where a tensor group shares them out; every rank of the group samples
            the same sequences and reaches the same tokens.
    """

    def __init__(
        self,
        ending_ids: Callable[[Sequence], list[int]],
        *,
        vocab_size: int | None = None,
        shard: VocabShard | None = None,
    ) -> None:
        self._ending_ids = ending_ids
        self._vocab_size = vocab_size if shard is None else shard.vocab_size
        self._shard = shard

    def require_can_sample(self, params: SamplingParams, prompt_index: int) -> None:
        """Raise ValueError for parameters with ids that the model does not have."""
        if self._vocab_size is not None:
            params.require_in_vocabulary(self._vocab_size, prompt_index)

    def sample(self, chunks: list[Chunk], logits: torch.Tensor) -> list[SampledToken]:
        """One token for each chunk's sequence, and for those that start from its prompt.

        Args:
            chunks: R that reach the end of their sequence.
            logits: (R, vocabulary, or the stretch of it), each chunk's last row.

        Raises:
            ValueError: a sequence's parameters leave it no token; the message names its prompt.
            FloatingPointError: a row has NaN or infinite entries.
        """
        sequences, rows = [], []
        for row, chunk in enumerate(chunks):
            for sequence in (chunk.sequence, *chunk.sequence.siblings):
                sequences.append(sequence)
                rows.append(row)
        if len(rows) != len(chunks):
            logits = logits[rows]
        try:
            sampled = sample(logits, [self._draw(sequence) for sequence in sequences], self._shard)
        except UnsampleableError as error:
            _raise_for(sequences[error.row], error)
        return _tokens(sequences, sampled)

    def _draw(self, sequence: Sequence) -> Draw:
        params = sequence.params
        return Draw(
            uniform=uniform(sequence.seed, sequence.num_completion_tokens),
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=max(0, params.top_k),
            top_p=params.top_p,
            min_p=params.min_p,
            edits=self._edits(sequence),
            num_alternatives=params.logprobs or 0,
            wants_raw=params.raw_logprobs,
        )

    def _edits(self, sequence: Sequence) -> LogitEdits | None:
        """What changes a sequence's logits, None for nothing."""
        params = sequence.params
        is_short = sequence.num_completion_tokens < params.min_tokens
        banned = self._ending_ids(sequence) if is_short else []
        if not SequenceEdits.are_needed(params):
            return LogitEdits(banned=banned) if banned else None
        if sequence.edits is None:
            prompt_ids = sequence.token_ids[: sequence.num_prompt_tokens]
            sequence.edits = SequenceEdits(params, prompt_ids, sequence.completion_ids)
        return sequence.edits.next(banned)


def _raise_for(sequence: Sequence, error: UnsampleableError) -> None:
    """Say whose row it was."""
    where = f"token {sequence.num_completion_tokens} of prompt {sequence.prompt_index}, sample {sequence.order[1]}"
    if error.is_empty:
        raise ValueError(
            f"{where}: every token that may be sampled has no probability (logit -inf); allow more with "
            "allowed_token_ids, or lower min_tokens"
        ) from error
    raise FloatingPointError(f"{where}: the model's logits have NaN or infinite entries") from error


def _tokens(sequences: list[Sequence], sampled: Sampled) -> list[SampledToken]:
    count = len(sequences)
    token_ids, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
    raw = [None] * count if sampled.raw_logprobs is None else sampled.raw_logprobs.tolist()
    ids, values = sampled.alternatives.tolist(), sampled.alternative_logprobs.tolist()
    tokens = []
    for row, sequence in enumerate(sequences):
        top = None
        if sequence.params.logprobs is not None:
            most = zip(ids[row][: sequence.params.logprobs], values[row], strict=False)
            top = {token: logprob for token, logprob in most if logprob > float("-inf")}
            top.setdefault(token_ids[row], logprobs[row])
        raw_logprob = raw[row] if sequence.params.raw_logprobs else None
        tokens.append(SampledToken(sequence, token_ids[row], logprobs[row], top, raw_logprob))
    return tokens
