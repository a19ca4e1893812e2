"""Decoupled clip and dynamic sampling policy optimisation: GRPO's advantages, PPO's loss with a wider range above.

Yu et al. 2025, https://arxiv.org/abs/2503.14476. Defaults there: clip range 0.2 below and 0.28 above, all tokens
averaged, no KL penalty, groups of 16, groups without spread replaced, and a punishment that grows over the last fifth
of the longest completion.
"""

from __future__ import annotations


def overlong_punishment(num_tokens: int, *, max_tokens: int, buffer: int, penalty: float) -> float:
    """What is added to the reward of a completion of ``num_tokens``: equation 13 of the paper, times ``penalty``.

    0 up to ``max_tokens - buffer``, from there falling in a line to ``-penalty`` at ``max_tokens``.
    """
    if buffer == 0:
        return 0.0
    return -penalty * min(max(num_tokens - (max_tokens - buffer), 0) / buffer, 1.0)
