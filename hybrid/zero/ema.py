"""The exponential moving average of a model's weights, kept beside its masters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

AVERAGE = "average"
"""What the average is called among a group's optimizer state, in checkpoints too."""


class WeightAverage:
    """``average = decay * average + (1 - decay) * master``, for each master after each step, in fp32.

    It begins as a copy of the masters, lies where they do and is sharded as they are: 4 bytes for each element of a
    rank's masters, and nothing is gathered for it. As in DeepSpeed-Chat (``--enable_ema``, decay 0.992), and as torch's
    ``AveragedModel`` with ``get_ema_multi_avg_fn``.

    Raises:
        ValueError: ``decay`` is not in [0, 1).
    """

    def __init__(self, masters: Iterable[nn.Parameter], decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(
                f"decay={decay} of the weights' average must be at least 0 and less than 1; set 0.992 or so"
            )
        self.decay = decay
        self._averages = {master: master.detach().clone() for master in masters}

    def update(self) -> None:
        """Take the masters in, once a step."""
        for master, average in self._averages.items():
            average.lerp_(master.detach(), 1 - self.decay)

    def of(self, master: nn.Parameter) -> torch.Tensor:
        """The average of a master, of its shape; the tensor itself."""
        return self._averages[master]

    def restart(self, master: nn.Parameter) -> None:
        """Begin a master's average anew, at what it is now."""
        self._averages[master].copy_(master.detach())
