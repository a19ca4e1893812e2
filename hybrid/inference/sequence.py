"""One sample on its way: its tokens, how far its keys and values reach, and what it becomes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch

from hybrid.inference.edits import SequenceEdits
from hybrid.inference.params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class SequenceStatus(Enum):
    """Where a sequence is. ``Sequence.move_to`` knows which step follows which."""

    SIBLING = "sibling"  # waits for sample 0 of its request to compute the prompt; holds no blocks
    WAITING = "waiting"  # in the queue; holds no blocks
    RUNNING = "running"  # holds blocks for what is computed
    FINISHED = "finished"


_FOLLOWING = {
    SequenceStatus.SIBLING: {SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.FINISHED},
    SequenceStatus.WAITING: {SequenceStatus.RUNNING, SequenceStatus.FINISHED},
    SequenceStatus.RUNNING: {SequenceStatus.WAITING, SequenceStatus.FINISHED},  # WAITING: preempted
    SequenceStatus.FINISHED: set(),
}


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample."""

    prompt_index: int
    sample_index: int
    prompt_token_ids: list[int]
    token_ids: list[int]  # as sampled, with a sampled end-of-sequence id
    logprobs: torch.Tensor  # (len(token_ids),) fp32, under the distribution sampled from (greedy: temperature 1)
    text: str  # decoded without special tokens, cut before a stop string
    finish_reason: FinishReason
    stop_reason: int | str | None  # the id or the string that stopped it
    seed: int  # asked for with n=1, it gives this completion again
    num_cached_tokens: int  # prompt tokens whose keys and values were there already
    weights_version: int
    # For each token, if its params asked for `logprobs`: the most probable ids, the most probable first, and itself.
    top_logprobs: list[dict[int, float]] | None = None
    # (len(token_ids),) fp32, under the model's own distribution, if its params asked for `raw_logprobs`
    raw_logprobs: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one sample.

    Between steps ``num_computed_tokens < num_tokens``: a step computes some of the tokens between them, and the one
    that computes the last appends a token. Chunked prompts, prefix hits, decoding and recomputation after a preemption
    are this one rule.
    """

    order: tuple[int, int]  # (request, sample): the older sequence has the lower one
    prompt_index: int
    params: SamplingParams
    seed: int
    token_ids: list[int]  # prompt and completion
    num_prompt_tokens: int
    rotation: int = 0  # what KV blocks of equal tokens must agree in besides (see `rope.prefix_class`)
    status: SequenceStatus = SequenceStatus.WAITING
    siblings: list[Sequence] = field(default_factory=list)  # samples that start from this one's prompt
    blocks: array[int] = field(default_factory=lambda: array("q"))
    num_computed_tokens: int = 0
    num_indexed_blocks: int = 0  # leading blocks whose content the pool knows
    content_id: int | None = None  # the pool's name for the content of those blocks, None before the first
    num_cached_tokens: int | None = None  # None until it first runs
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)  # stays empty if not asked for, as the next
    raw_logprobs: list[float] = field(default_factory=list)
    edits: SequenceEdits | None = None  # made by the sampler, for parameters that change logits at every step
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens it may still sample."""
        return self.params.max_tokens - self.num_completion_tokens

    @property
    def completion_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def move_to(self, status: SequenceStatus) -> None:
        if status not in _FOLLOWING[self.status]:
            raise RuntimeError(f"sequence {self.order} cannot go from {self.status.name} to {status.name}")
        self.status = status

    def append(
        self,
        token_id: int,
        logprob: float,
        top_logprobs: dict[int, float] | None = None,
        raw_logprob: float | None = None,
    ) -> None:
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if top_logprobs is not None:
            self.top_logprobs.append(top_logprobs)
        if raw_logprob is not None:
            self.raw_logprobs.append(raw_logprob)
        if self.edits is not None:
            self.edits.add(token_id)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.move_to(SequenceStatus.FINISHED)
        self.finish_reason, self.stop_reason = reason, stop_reason

    def forget_computed(self) -> None:
        """Nothing of it is in the cache any more; everything is computed again."""
        self.blocks = array("q")
        self.num_computed_tokens = self.num_indexed_blocks = 0
        self.content_id = None
