from __future__ import annotations

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ops import cpu
from ops.norm import rms_norm, rms_norm_reference


@pytest.mark.parametrize("size", [1, 8, 16, 24, 576, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equals_torch_s_rms_norm(size, dtype):
    generator = torch.Generator().manual_seed(size)
    hidden = torch.randn(3, 5, size, generator=generator).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    wide = torch.nn.functional.rms_norm(hidden.double(), (size,), weight.double(), 1e-6)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-5}[dtype]  # in fp32 inside
    for rounds_first in (True, False):
        output = rms_norm(hidden, weight, 1e-6, rounds_first=rounds_first)
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), wide, atol=tolerance, rtol=tolerance)
    shifted = rms_norm(hidden, weight - 1, 1e-6, offset=1.0)
    torch.testing.assert_close(shifted.double(), wide, atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.skipif(cpu.library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("rounds_first", [True, False])
def test_bf16_rounds_as_the_reference_does(rounds_first):
    """Their sums differ in the last bit of fp32, which 16 bits show in one number of thousands."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((64, 576), (576,)))
    output, expected = (
        function(hidden, weight, 1e-5, rounds_first=rounds_first) for function in (rms_norm, rms_norm_reference)
    )
    assert (output == expected).float().mean() > 0.999


def test_rows_that_are_not_next_to_each_other():
    hidden = torch.randn(4, 6, 32).transpose(0, 1)[:, ::2]
    weight = torch.randn(32)
    torch.testing.assert_close(rms_norm(hidden, weight, 1e-6), rms_norm(hidden.contiguous(), weight, 1e-6))
    across = torch.randn(32, 6).t()
    torch.testing.assert_close(rms_norm(across, weight, 1e-6), rms_norm(across.contiguous(), weight, 1e-6))


def gradients(function, *tensors) -> list[torch.Tensor]:
    """By each of the tensors, weighed by numbers that say where an element is."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    generator = torch.Generator().manual_seed(9)
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    return [leaf.grad for leaf in leaves]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("size", [8, 24, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_transformers_norms(kind, size, dtype):
    """In 16 bits they are compared with autograd in fp32, which rounds nothing on its way."""
    generator = torch.Generator().manual_seed(size)
    hidden = torch.randn(2, 75, size, generator=generator).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    norm, is_llama = kind(size, 1e-6), kind is LlamaRMSNorm
    formula = {"offset": 0.0 if is_llama else 1.0, "rounds_first": is_llama}
    found = gradients(lambda rows, weight: rms_norm(rows, weight, 1e-6, **formula), hidden, weight)
    plain = torch.func.functional_call
    expected = gradients(
        lambda rows, weight: plain(norm, {"weight": weight}, (rows,)).to(dtype).float(), hidden.float(), weight.float()
    )
    for each, other in zip(found, expected, strict=True):
        assert each.dtype == dtype
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(each.float(), other, atol=tolerance * other.abs().max().item(), rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_number_of_threads(dtype):
    hidden, weight = torch.randn(700, 100).to(dtype), torch.randn(100).to(dtype)
    results, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            output = rms_norm(hidden, weight, 1e-6)
            results.append([output, *gradients(lambda rows, weight: rms_norm(rows, weight, 1e-6), hidden, weight)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_gradients_of_rows_and_gradients_in_any_place():
    weight = torch.randn(32)
    hidden = torch.randn(4, 6, 32).transpose(0, 1)

    def gradient(rows, spread):
        leaf = rows.detach().requires_grad_()
        output = rms_norm(leaf, weight, 1e-6)
        (output[0, 0, 0] if spread else output.sum(-1).transpose(0, 1)).sum().backward()
        return leaf.grad

    for spread in (True, False):
        torch.testing.assert_close(gradient(hidden, spread), gradient(hidden.contiguous(), spread))
    rows = hidden.detach().requires_grad_()
    rms_norm(rows, weight, 1e-6).sum().backward()  # one number, expanded
    expected = hidden.detach().clone().requires_grad_()
    rms_norm_reference(expected, weight, 1e-6).sum().backward()
    torch.testing.assert_close(rows.grad, expected.grad)


def test_a_frozen_weight_gets_no_gradient_and_no_grad_no_graph():
    hidden, weight = torch.randn(3, 16, requires_grad=True), torch.randn(16)
    rms_norm(hidden, weight, 1e-6).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert not rms_norm(hidden, weight, 1e-6).requires_grad
