"""DeepSpeed's JSON, read into this engine's configurations. Imports no torch."""

from hybrid.deepspeed.config import DeepSpeedArguments, HybridConfig, deepspeed_presets

__all__ = ["DeepSpeedArguments", "HybridConfig", "deepspeed_presets"]
