from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from ops.swiglu import swiglu

DTYPES = [torch.float32, torch.bfloat16]


def make_mlp(dtype):
    mlp = LlamaMLP(SimpleNamespace(hidden_size=40, intermediate_size=72, hidden_act="silu", mlp_bias=True))
    torch.manual_seed(0)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return mlp.to(dtype)


def fused(mlp, hidden):
    return mlp.down_proj(swiglu(mlp.gate_proj(hidden), mlp.up_proj(hidden)))


def gradients(function, mlp, hidden):
    mlp.zero_grad()
    leaf = hidden.clone().requires_grad_()
    output = function(leaf)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype))
    return [output.detach(), leaf.grad, *(parameter.grad.clone() for parameter in mlp.parameters())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_transformers_mlp_forward_and_backward(dtype):
    mlp, hidden = make_mlp(dtype), torch.randn(3, 70, 40).to(dtype)
    found = gradients(lambda rows: fused(mlp, rows), mlp, hidden)
    # In 16 bits against fp32, which rounds nothing on its way.
    wide = mlp.float()
    for each, other in zip(found, gradients(wide, wide, hidden.float()), strict=True):
        assert each.dtype == dtype
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(each.float(), other, atol=tolerance * other.abs().max().item(), rtol=tolerance)


def test_bf16_has_the_bits_of_torch():
    generator = torch.Generator().manual_seed(0)
    gate, up = (4 * torch.randn(1_000_003, generator=generator).bfloat16() for _ in range(2))
    assert (swiglu(gate, up) == torch.nn.functional.silu(gate) * up).float().mean() > 0.9999


@pytest.mark.parametrize("dtype", DTYPES)
def test_far_from_zero(dtype):
    gate = torch.tensor([0.0, -0.0, 100, -100, -87.5, 1e30, -1e30, float("inf"), float("nan"), 1e-30]).to(dtype)
    found, expected = (
        function(gate.clone().requires_grad_(), torch.full_like(gate, 3))
        for function in (swiglu, lambda gate, up: torch.nn.functional.silu(gate) * up)
    )
    torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_threads_nor_on_the_place(dtype):
    gate, up, grad = (torch.randn(501, 100).to(dtype) for _ in range(3))
    before, results = torch.get_num_threads(), []
    try:
        for num_threads, transposed in ((1, False), (2, False), (2, True)):
            torch.set_num_threads(num_threads)
            leaves = [
                (each.t().contiguous().t() if transposed else each.clone()).requires_grad_() for each in (gate, up)
            ]
            output = swiglu(*leaves)
            output.backward(grad)
            results.append([output, *(leaf.grad for leaf in leaves)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_other_dtypes_and_shapes_are_torch_s():
    gate, up = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    assert torch.equal(swiglu(gate, up), torch.nn.functional.silu(gate) * up)
    assert torch.equal(swiglu(gate.float(), up.float()), torch.nn.functional.silu(gate.float()) * up.float())
