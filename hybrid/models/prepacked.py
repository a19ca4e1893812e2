"""Linear layers whose weights are laid out anew for oneDNN while a model generates on a CPU.

A product with few rows spends much of its time on reordering weights that are the same at every step. Packed once, that
is done once; the packed weights are a copy, and are dropped before anything can change the weights.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hybrid.config import InferenceConfig

_ROWS = 64  # what the packing is tuned for; any number of rows may then be multiplied


class PackedLinears:
    """The plain ``nn.Linear`` layers of a module, which run on packed weights between ``pack`` and ``drop``.

    Results are those of ``F.linear`` to rounding, and in bf16 bit for bit.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [layer for layer in module.modules() if type(layer) is nn.Linear]
        self._packed: list[nn.Linear] = []

    @staticmethod
    def wanted(inference: InferenceConfig, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether generation of these settings packs the weights."""
        # In fp32 packed weights add up in another order than the trainer's.
        is_allowed = inference.prepack_weights and not (inference.exact and dtype == torch.float32)
        return is_allowed and PackedLinears.supports(dtype, device)

    @staticmethod
    def supports(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether weights of a kind can be packed here, and are quicker for it."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return False
        return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    @torch.no_grad()
    def pack(self) -> None:
        """Pack the weights as they are now."""
        for layer in self._layers:
            if layer.weight.numel():  # a tensor rank may have no part of a layer
                packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().contiguous(), _ROWS)
                # An instance's attribute goes before the class's method, and hooks run around either.
                layer.forward = partial(_linear, packed, layer)
                self._packed.append(layer)

    def drop(self) -> None:
        """Let go of the packed weights; layers run on their own again."""
        while self._packed:
            del self._packed.pop().forward


def _linear(packed: torch.Tensor, layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, packed, layer.bias, "none", [], "")
