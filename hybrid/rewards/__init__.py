"""Rewards: the protocol, Python functions, and reward models."""

from hybrid.rewards.function import FunctionReward, load_reward
from hybrid.rewards.model import ModelReward
from hybrid.rewards.protocol import Reward, RewardError, RewardOutput

__all__ = ["FunctionReward", "ModelReward", "Reward", "RewardError", "RewardOutput", "load_reward"]
