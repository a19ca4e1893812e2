from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ops import cpu
from ops.rotary import rotary, rotary_reference, takes

DTYPES = [torch.float32, torch.bfloat16]
needs_kernel = pytest.mark.skipif(cpu.library() is None, reason="there is no C++ compiler")


def make(dtype, size, tokens=37, heads=(3, 2)):
    """Queries and keys as views of packed projections, and halves of cosines and sines that are unlike."""
    generator = torch.Generator().manual_seed(size)
    query, key = (torch.randn(1, tokens, count, size, generator=generator).to(dtype) for count in heads)
    cos, sin = torch.randn(2, 1, tokens, size, generator=generator).to(dtype)
    return query.transpose(1, 2), key.transpose(1, 2), cos, sin


def gradients(function, query, key, cos, sin):
    """The outputs, and the gradients weighed by numbers that say where an element is, the same in each dtype."""
    leaves = [each.detach().requires_grad_() for each in (query, key)]
    outputs = function(*leaves, cos, sin)
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(each.shape, generator=generator).bfloat16().to(each.dtype) for each in outputs]
    torch.autograd.backward(outputs, weights)
    return [*(each.detach() for each in outputs), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("size", [2, 8, 30, 48, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_has_the_bits_of_transformers_function_forward(dtype, size):
    tensors = make(dtype, size)
    expected = apply_rotary_pos_emb(*tensors)
    for function in (rotary, rotary_reference):
        assert all(map(torch.equal, function(*tensors), expected))
    assert all(map(torch.equal, gradients(rotary, *tensors), expected))


@needs_kernel
@pytest.mark.parametrize("size", [2, 30, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_autograd(dtype, size):
    """In 16 bits they are compared with autograd in fp32, which rounds nothing on its way."""
    tensors = make(dtype, size)
    expected = gradients(apply_rotary_pos_emb, *(each.float() for each in tensors))
    for found, other in zip(gradients(rotary, *tensors)[2:], expected[2:], strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, other.to(dtype), atol=1e-6, rtol=1e-6)


@needs_kernel
def test_lays_out_token_by_token():
    tensors = make(torch.float32, 16)
    for outputs in (rotary(*tensors), gradients(rotary, *tensors)):
        assert all(each.transpose(1, 2).is_contiguous() for each in outputs)


def test_tensors_in_any_place():
    query, key, cos, sin = make(torch.bfloat16, 16)
    packed = torch.randn(1, 37, 3, 3, 16).bfloat16()
    spread = (
        packed[:, :, 1].transpose(1, 2),
        packed[:, :, 2, ::2].transpose(1, 2),
        *torch.stack((cos, sin), 2).unbind(2),
    )
    for tensors in (spread, (query.contiguous(), key.contiguous(), cos, sin), make(torch.bfloat16, 16, tokens=0)):
        assert takes(*tensors) == (cpu.library() is not None)
        found, expected = (gradients(function, *tensors) for function in (rotary, apply_rotary_pos_emb))
        assert all(map(torch.equal, found[:2], expected[:2]))
        assert [each.shape for each in found] == [each.shape for each in expected]
        for one, other in zip(found[2:], expected[2:], strict=True):
            torch.testing.assert_close(one, other, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("chosen", [0, 1])
def test_gradients_of_one_output_and_gradients_in_any_place(chosen):
    """What nobody asked after, one number that is expanded, and dimensions that are not next to each other."""
    query, key, cos, sin = make(torch.float32, 16)

    def each_gradient(function):
        for how in (torch.sum, lambda output: (output.transpose(2, 3) * torch.arange(37.0)).sum()):
            leaves = [query.clone().requires_grad_(), key.clone().requires_grad_()]
            how(function(*leaves, cos, sin)[chosen]).backward()
            assert leaves[1 - chosen].grad is None or not leaves[1 - chosen].grad.any()
            yield leaves[chosen].grad

    for found, expected in zip(each_gradient(rotary), each_gradient(apply_rotary_pos_emb), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-6)


def test_needs_no_graph_where_nobody_trains():
    query, key, cos, sin = make(torch.float32, 16)
    assert rotary(query, key, cos, sin)[0].grad_fn is None
    query.requires_grad_()
    with torch.no_grad():
        assert rotary(query, key, cos, sin)[0].grad_fn is None
    rotary(query, key, cos, sin)[0].sum().backward()
    assert query.grad is not None and key.grad is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_threads(dtype):
    tensors, results, before = make(dtype, 48, tokens=501), [], torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append(gradients(rotary, *tensors))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_everything_else_is_torch_s():
    """Two batches, another dtype or two of them, and cosines that are learned."""
    query, key, cos, sin = make(torch.float32, 16)
    batch = tuple(torch.cat((each, 2 * each)) for each in (query, key, cos, sin))
    wide = tuple(each.double() for each in (query, key, cos, sin))
    mixed = query.bfloat16(), key.bfloat16(), cos, sin
    strided = query.repeat_interleave(2, dim=-1)[..., ::2], key, cos, sin
    learned = query, key, cos.clone().requires_grad_(), sin
    for q, k, c, s in (batch, wide, mixed, strided, learned):
        assert not takes(q, k, c, s)
        assert all(map(torch.equal, rotary(q, k, c, s), apply_rotary_pos_emb(q, k, c, s)))
    rotary(*learned)[0].sum().backward()
    assert learned[2].grad is not None
