from __future__ import annotations

import pytest
import torch
from torch import nn

from hybrid.models.fused_norms import FusedNorms
from tests.decoders import tiny_decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "qwen3", "olmo2"])
@torch.no_grad()
def test_families_norms_compute_the_same_and_come_back(family, dtype):
    """Weights around 1 and around 0, of the hidden size and of a head, rounded before the weight and after."""
    model = tiny_decoder(family).to(dtype)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.normal_()
    ids = torch.arange(20)[None]
    expected = model(ids).logits
    norms = FusedNorms(model)
    norms.install()
    num_fused = sum("forward" in vars(module) for module in model.modules())
    assert num_fused == sum(type(module).__name__.endswith("RMSNorm") for module in model.modules()) > 0
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-3, rtol=1e-3)
    norms.drop()
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(ids).logits, expected)


@torch.no_grad()
def test_what_computes_anything_else_is_left_alone():
    class SkewedRMSNorm(nn.Module):
        """Looks like the others, and divides by the standard deviation."""

        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, hidden):
            return self.weight * hidden / (hidden.var(-1, keepdim=True) + self.eps).sqrt()

    class BiasedRMSNorm(SkewedRMSNorm):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(16))

    model = nn.Sequential(SkewedRMSNorm(), BiasedRMSNorm(), nn.LayerNorm(16))
    norms = FusedNorms(model)
    norms.install()
    assert not any("forward" in vars(module) for module in model)
