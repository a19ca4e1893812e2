from __future__ import annotations

import pytest
import torch
from torch import nn

from hybrid.models.prepacked import PackedLinears
from tests.decoders import tiny_decoder

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_packed_layers_compute_the_same_and_let_go(dtype):
    if not PackedLinears.supports(dtype, CPU):
        pytest.skip(f"oneDNN does not take {dtype} here")
    model = tiny_decoder("qwen2").to(dtype)  # its projections have biases
    ids = torch.arange(40)[None]
    expected = model(ids).logits
    packed = PackedLinears(model)
    packed.pack()
    assert "forward" in vars(model.lm_head)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    torch.testing.assert_close(model(ids).logits, expected, atol=tolerance, rtol=tolerance)
    packed.drop()
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(ids).logits, expected)


@torch.no_grad()
def test_packed_weights_are_a_copy_of_the_moment():
    """What is packed must be dropped before weights change: nothing else would notice."""
    model = nn.Sequential(nn.Linear(32, 32))
    packed = PackedLinears(model)
    packed.pack()
    model[0].weight.zero_()
    model[0].bias.zero_()
    assert model(torch.ones(16, 32)).any()
    packed.drop()
    assert not model(torch.ones(16, 32)).any()


def test_what_is_no_plain_linear_layer_is_left_alone():
    class Scaled(nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    model = nn.Sequential(Scaled(16, 16), nn.Linear(16, 16), nn.Linear(16, 0))
    packed = PackedLinears(model)
    packed.pack()
    assert ["forward" in vars(layer) for layer in model] == [False, True, False]


def test_devices_and_dtypes_that_are_not_packed():
    assert not PackedLinears.supports(torch.float32, torch.device("cuda"))
    assert not PackedLinears.supports(torch.float64, CPU)
