"""What a caller asks for, as the generator takes it: prompts as token ids, one set of parameters for each."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex, cast

from transformers import PreTrainedTokenizerBase

from hybrid.inference.params import SamplingParams

Prompts = Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[dict[str, str]]]


def encode(prompts: Prompts, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """Token ids of prompts given as text, token ids or chat messages (which get the chat template).

    Raises:
        ValueError: text or messages without a tokenizer, or messages without a chat template.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts is one string ({prompts[:40]!r}); pass a list of prompts")
    encoded = []
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and all(hasattr(token, "__index__") for token in prompt):
            # numpy's and torch's integers too
            encoded.append([operator.index(cast("SupportsIndex", token)) for token in prompt])
            continue
        if tokenizer is None:
            raise ValueError(f"prompt {index} is text, and this engine has no tokenizer; pass token ids")
        if isinstance(prompt, str):
            # Text that brings its beginning-of-sequence token along gets no second one.
            bos = tokenizer.bos_token
            has_bos = bool(bos) and prompt.startswith(str(bos))
            encoded.append(tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"])
        elif tokenizer.chat_template is None:
            raise ValueError(f"prompt {index} is messages, and the tokenizer has no chat template; pass text")
        else:
            messages = cast("list[dict[str, str]]", prompt)
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            # The template writes the special tokens itself; the tokenizer must not write them again.
            encoded.append(tokenizer(cast("str", text), add_special_tokens=False)["input_ids"])
    return encoded


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """One set of parameters for each prompt, from one for all, one each, or none at all (the defaults)."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} params for {num_prompts} prompts; pass one for all or one each")
    return list(params)


def require_positions(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], max_positions: int | None
) -> None:
    """Raise ValueError for a request past the model's last position, where it would ramble or crash and say neither."""
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        if max_positions is not None and len(prompt) + each.max_tokens > max_positions:
            room = max_positions - len(prompt)
            cure = f"max_tokens={room} at most" if room > 0 else "a smaller max_tokens"
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens, which with max_tokens={each.max_tokens} is more than "
                f"the model's {max_positions} positions; shorten the prompt or set {cure}"
            )
