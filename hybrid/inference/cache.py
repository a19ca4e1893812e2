"""The KV cache's tensors."""

from __future__ import annotations

import math

import numpy as np
import torch

from ops.attention import key_layout


class KVCache:
    """Keys and values of every layer in fixed-size blocks.

    ``key`` and ``value`` are (layers, num_blocks, block_size, kv_heads, head_dim). In memory a block keeps the tokens
    of one head together, (layers, num_blocks, kv_heads, block_size, head_dim): gathered blocks are then contiguous by
    head, which SDPA on the CPU reads a third faster, and kernels that take strides see the shape they expect. Keys lie
    (layers, num_blocks, kv_heads, head_dim, block_size) instead where ``ops.attention.key_layout`` says so.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_dim: the shape; ``num_kv_heads`` is this rank's.
        dtype, device: of the model's keys and values.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        device = torch.device(device)
        by_token = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        by_dim = (num_layers, num_blocks, num_kv_heads, head_dim, block_size)
        self.keys_by_dim = key_layout(dtype, device, block_size) == "dim"
        keys = _zeros(by_dim if self.keys_by_dim else by_token, dtype, device)
        values = _zeros(by_token, dtype, device)
        self._memory = (keys, values)
        self.key = keys.permute(0, 1, 4, 2, 3) if self.keys_by_dim else keys.transpose(2, 3)
        self.value = values.transpose(2, 3)

    @staticmethod
    def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block, keys and values of all layers."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.key.nbytes + self.value.nbytes

    @property
    def block_size(self) -> int:
        return self.key.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[3]

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, ``(source, target)`` each, in every layer; all sources are read before any is written."""
        if not copies:
            return
        sources, targets = torch.tensor(copies, device=self.key.device).unbind(-1)
        for tensor in self._memory:
            blocks = tensor.flatten(2)  # whole ones, as they lie in memory
            blocks.index_copy_(1, targets, blocks.index_select(1, sources))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because a masked key's weight of 0 times a NaN left in fresh memory would be NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for pages that are zero already, and gets each when it is first touched: a pool that is
    # made anew at every flip then costs what is used of it. torch.zeros would write every byte.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
