"""Rewards: the protocol, Python functions, servers, reward models, and sums of them."""

from hybrid.rewards.combined import CombinedReward
from hybrid.rewards.function import FunctionReward
from hybrid.rewards.loading import combine_rewards, load_reward
from hybrid.rewards.model import ModelReward
from hybrid.rewards.protocol import Reward, RewardError, RewardOutput
from hybrid.rewards.remote import RemoteFunction

__all__ = [
    "CombinedReward",
    "FunctionReward",
    "ModelReward",
    "RemoteFunction",
    "Reward",
    "RewardError",
    "RewardOutput",
    "combine_rewards",
    "load_reward",
]
