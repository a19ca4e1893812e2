"""The loss scale of fp16: gradients too small for it are lifted into its range, and overflows lower it."""

from __future__ import annotations

from hybrid.config import OptimConfig


class LossScale:
    """What the loss is multiplied by before the backward, and gradients are divided by before the step.

    Dynamic as in DeepSpeed: it starts at ``2 ** initial_scale_power``, is halved when ``hysteresis`` steps in a row
    overflow (each further one halves again) and doubled after ``loss_scale_window`` steps that worked. A
    ``loss_scale`` other than 0 stays as it is, and overflows only skip their step.
    """

    def __init__(self, config: OptimConfig) -> None:
        self._config = config
        self.value = config.loss_scale or float(2**config.initial_scale_power)
        self._dynamic = config.loss_scale == 0
        self._patience = config.hysteresis
        self._good_steps = 0

    def overflowed(self) -> bool:
        """Go down after gradients that are not finite. False: it may go no lower, and something else is wrong."""
        self._good_steps = 0
        if not self._dynamic:
            return True
        if self.value <= self._config.min_loss_scale:
            return False
        if self._patience > 1:
            self._patience -= 1
        else:
            self.value = max(self.value / 2, self._config.min_loss_scale)
        return True

    def worked(self) -> None:
        """A step was made."""
        self._patience = self._config.hysteresis
        self._good_steps += 1
        if self._dynamic and self._good_steps % self._config.loss_scale_window == 0:
            self.value *= 2

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "patience": self._patience, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])
        self._patience, self._good_steps = int(state["patience"]), int(state["good_steps"])
