"""What a request asks of its samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# vLLM's bound: so low a temperature is meant as none.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt's completions are sampled and when they end. Names and meanings are vLLM's.

    Logits are changed in this order: allowed ids, ids that may not end it yet, bias, repetition penalty, frequency and
    presence penalties, temperature, min_p, top_k, top_p.

    Args:
        n: completions for the prompt; its keys and values are computed once for all of them.
        temperature: divides the logits; 0, and anything under 1e-5, takes the most probable token, the lowest id of
            several.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the fewest tokens whose probability reaches p, of those that min_p and top_k leave; 1 keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
        repetition_penalty: divides positive logits of tokens in the prompt or the completion, and multiplies negative
            ones; 1 for none.
        presence_penalty: taken from the logits of tokens in the completion; 0 for none.
        frequency_penalty: taken from the logit of a token for each time it is in the completion; 0 for none.
        max_tokens: new tokens at most.
        min_tokens: new tokens before an end-of-sequence id, a stop id or a stop string may end the completion.
        stop: strings that end the completion; its text is cut before them, its tokens are not.
        stop_token_ids: ids that end the completion, besides the model's end-of-sequence ids.
        ignore_eos: sample past end-of-sequence ids.
        seed: makes the samples reproducible; None takes the seed the caller of ``generate`` supplies.
        logprobs: report this many of the most probable tokens at each place, besides the sampled one; None for no
            such report.
        raw_logprobs: report the sampled tokens' log-probs under the model's own distribution too: temperature 1,
            nothing masked, biased, penalised or filtered.
        logit_bias: added to the logits of these ids.
        allowed_token_ids: no other ids are sampled; None allows all.

    Raises:
        ValueError: a value is out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 64
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    raw_logprobs: bool = False
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(self.allowed_token_ids)))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.max_tokens is None:  # in vLLM: up to the model's last position
            raise ValueError("max_tokens=None is not allowed; set it to the number of new tokens there may be")
        for name, holds, rule in self._rules():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; set it to {rule}")

    def _rules(self) -> list[tuple[str, bool, str]]:
        bias, allowed = self.logit_bias or {}, self.allowed_token_ids
        return [
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "finite and 0 (greedy) or more"),
            ("top_k", self.top_k >= -1, "1 or more, or to 0 or -1 (all tokens)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]; 1 keeps all tokens"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]; 0 keeps all tokens"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "finite and more than 0; 1 is none"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]; 0 is none"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]; 0 is none"),
            ("max_tokens", self.max_tokens >= 0, "0 or more"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens={self.max_tokens}"),
            ("stop", all(self.stop), "strings that are not empty"),
            ("stop_token_ids", all(token >= 0 for token in self.stop_token_ids), "token ids of 0 or more"),
            ("seed", self.seed is None or 0 <= self.seed < 1 << 64, "from 0 to 2**64 - 1, or None"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "0 or more, or None"),
            (
                "logit_bias",
                all(token >= 0 and math.isfinite(value) for token, value in bias.items()),
                "finite numbers by token ids of 0 or more; -100 all but forbids a token",
            ),
            (
                "allowed_token_ids",
                allowed is None or (len(allowed) > 0 and min(allowed) >= 0),
                "one or more token ids of 0 or more, or None (all tokens)",
            ),
        ]

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def require_in_vocabulary(self, vocab_size: int, prompt_index: int) -> None:
        """Raise ValueError for an id that the model does not have."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for name, ids in named.items():
            outside = next((token for token in ids if token >= vocab_size), None)
            if outside is not None:
                raise ValueError(
                    f"{name} of prompt {prompt_index} has the id {outside} and the model's vocabulary has "
                    f"{vocab_size}; set ids from 0 to {vocab_size - 1}"
                )
