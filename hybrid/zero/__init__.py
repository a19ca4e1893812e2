"""ZeRO on the ladder SHARD -> SLICE -> FULL: sharded weights, gradients and optimizer state of one module."""
