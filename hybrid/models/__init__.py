"""Hugging Face models: finding and loading them, their layout plans, the registered attention function, their heads."""
