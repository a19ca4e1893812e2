"""Reinforcement learning: records, advantages, KL and losses as pure functions, then rollouts and the trainers."""
