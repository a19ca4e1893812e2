"""Prompts: where they come from, how they become tokens, and how sequences are packed."""

from hybrid.data.prompts import Prompt, PromptDataset, load_prompts

__all__ = ["Prompt", "PromptDataset", "load_prompts"]
