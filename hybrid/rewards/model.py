"""Rewards that are models: a sequence classifier with one label, its own tokenizer and its own chat template."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from hybrid.data.packing import pack_groups
from hybrid.models.ragged import RaggedBatch
from hybrid.rewards.protocol import RewardOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybrid.zero.model import ShardedModel


class ModelReward:
    """Scores the text of prompt and completion with a reward model, at its last token.

    The actor's token ids mean nothing to another tokenizer, so the text is encoded again: through the reward model's
    chat template where the prompt came as messages and it has one, else as plain text.

    Args:
        model: gives one value per token; forwards may be collective.
        tokenizer: the reward model's own.
        max_tokens_per_microbatch: tokens per forward.
        max_length: tokens a sample may have; of a longer one the beginning is cut off, which is said once.
        end_ids: the ids that end a completion of the actor's. Plain text that ended by one is given this model's
            end-of-sequence token, as in its own training; a chat template writes one itself.
    """

    def __init__(
        self,
        model: ShardedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens_per_microbatch: int = 2048,
        max_length: int | None = None,
        end_ids: Collection[int] = (),
        name: str = "reward_model",
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.max_tokens_per_microbatch, self.max_length = max_tokens_per_microbatch, max_length
        self.end_ids = frozenset(end_ids)
        self._said_cut = False

    def score(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> RewardOutput:
        """Collective where the model is sharded: every rank calls it, also with no samples."""
        messages = columns.get("messages") or [None] * len(prompts)
        ended = [bool(ids) and ids[-1] in self.end_ids for ids in completion_ids]
        sequences = [self._encode(*sample) for sample in zip(prompts, completions, ended, messages, strict=True)]
        rewards = self._values(sequences, _common_beginnings(prompts, sequences))
        return RewardOutput(rewards, {self.name: rewards})

    def _encode(self, prompt: str, completion: str, ended: bool, messages: list[dict[str, Any]] | None) -> list[int]:
        if messages and self.tokenizer.chat_template:
            conversation = [*messages, {"role": "assistant", "content": completion}]
            text = str(self.tokenizer.apply_chat_template(conversation, tokenize=False))
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        else:
            # A prompt out of the actor's chat template may open with the token that this tokenizer would add again.
            text, start = prompt + completion, self.tokenizer.bos_token
            ids = self.tokenizer.encode(text, add_special_tokens=not (start and text.startswith(str(start))))
            end = self.tokenizer.eos_token_id
            if ended and isinstance(end, int) and ids[-1:] != [end]:
                ids.append(end)
        if not ids:
            raise ValueError(f"nothing to score: {prompt=} and {completion=} have no tokens for the reward model")
        if self.max_length is None or len(ids) <= self.max_length:
            return ids
        if not self._said_cut:
            self._said_cut = True
            warnings.warn(
                f"a sample has {len(ids)} tokens for the reward model, which takes {self.max_length}: "
                "of those that are too long the beginning is cut off",
                stacklevel=3,
            )
        return ids[-self.max_length :]

    @torch.no_grad()
    def _values(self, sequences: list[list[int]], num_common: list[int]) -> list[float | None]:
        # A value belongs to the token after its state, so each sequence ends in a token that is never looked at: the
        # state scored is that of the last real token.
        extended = [[*ids, ids[-1]] for ids in sequences]
        lengths = [len(ids) for ids in extended]
        if not self.model.can_share_prefixes:
            num_common = [0] * len(sequences)
        numbers: dict[tuple[int, ...], int] = {}
        beginnings = [tuple(ids[:count]) for ids, count in zip(sequences, num_common, strict=True)]
        numbered = [numbers.setdefault(beginning, len(numbers)) for beginning in beginnings]
        groups = pack_groups(lengths, num_common, numbered, self.max_tokens_per_microbatch)
        mesh = self.model.mesh
        (rounds,) = mesh.reduce_scalars([len(groups)], "max")  # every rank takes part in every forward
        rewards: list[float | None] = [None] * len(sequences)
        with self.model.resident():
            for number in range(int(rounds)):
                group = groups[number] if number < len(groups) else []
                batch = RaggedBatch.from_sequences(
                    [extended[i] for i in group],
                    [1] * len(group),
                    mesh.device,
                    num_shared=[num_common[i] for i in group],
                )
                for index, value in zip(group, self.model.values(batch).tolist(), strict=True):
                    rewards[index] = value
        return rewards


def _common_beginnings(prompts: list[str], sequences: list[list[int]]) -> list[int]:
    """How many first tokens each sequence has in common with all others of its prompt; none where it is the only one.

    Ids are compared, since where a completion's text begins is not where a token does.
    """
    groups: dict[str, list[list[int]]] = {}
    for prompt, ids in zip(prompts, sequences, strict=True):
        groups.setdefault(prompt, []).append(ids)
    common: dict[str, int] = {}
    for prompt, members in groups.items():
        first, last = min(members), max(members)  # what these two have in common all between them have
        differs = (i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
        common[prompt] = next(differs, len(first)) if len(members) > 1 else 0
    return [common[prompt] for prompt in prompts]
