"""What a request asks of its samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt's completions are sampled and when they end.

    Args:
        n: completions for the prompt; its keys and values are computed once for all of them.
        temperature: divides the logits; 0 takes the most probable token.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the fewest tokens whose probability reaches p; 1 keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
        max_tokens: new tokens at most.
        min_tokens: new tokens before an end-of-sequence id, a stop id or a stop string may end the completion.
        stop: strings that end the completion; its text is cut before them, its tokens are not.
        stop_token_ids: ids that end the completion, besides the model's end-of-sequence ids.
        ignore_eos: sample past end-of-sequence ids.
        seed: makes the samples reproducible; None takes the seed the caller of ``generate`` supplies.

    Raises:
        ValueError: a value is out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 64
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        rules = (
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "finite and 0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]; 1 keeps all tokens"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]; 0 keeps all tokens"),
            ("max_tokens", self.max_tokens >= 0, "0 or more"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens={self.max_tokens}"),
            ("stop", all(stop), "strings that are not empty"),
            ("stop_token_ids", all(token >= 0 for token in self.stop_token_ids), "token ids of 0 or more"),
            ("seed", self.seed is None or 0 <= self.seed < 1 << 64, "from 0 to 2**64 - 1, or None"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; set it to {rule}")
