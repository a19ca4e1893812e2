"""Learning from examples: supervised fine-tuning, reward models, direct preference optimisation."""

from hybrid.learning.objective import Objective
from hybrid.learning.preference import DPOObjective, RewardObjective, dpo_loss, pairwise_loss
from hybrid.learning.sft import SFTObjective
from hybrid.learning.trainer import LearningTrainer

__all__ = [
    "DPOObjective",
    "LearningTrainer",
    "Objective",
    "RewardObjective",
    "SFTObjective",
    "dpo_loss",
    "pairwise_loss",
]
