"""DeepSpeed's JSON, read into this engine's configurations. Imports no torch."""

from hybrid.deepspeed.config import HybridConfig
from hybrid.deepspeed.flags import DeepSpeedArguments, deepspeed_presets, learning_presets

__all__ = ["DeepSpeedArguments", "HybridConfig", "deepspeed_presets", "learning_presets"]
