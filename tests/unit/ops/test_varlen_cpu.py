"""The compiled kernels of training attention against autograd through fp64 attention of each sequence written out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid.models.recompute import recompute_in_backward
from ops import varlen_cpu
from ops.attention_cpu import paged_attention_cpu
from ops.paged import PagedBatch
from ops.prefixes import Prefixes
from ops.varlen_cpu import varlen_attention

pytestmark = pytest.mark.skipif(not varlen_cpu.is_available(), reason="there is no C++ compiler")

LENGTHS = (1, 2, 63, 64, 65, 200)
ALONE = (-1,) * len(LENGTHS)
# A prefix of 63 that one sequence continues, of 65 that two do, of 200 that five do (before it and behind it), and of
# 64 that none does; the parts of the largest tree are added up.
TREES = ((100, 200, 63, 2, 65, 1, 64, 200, 130, 1, 64, 200), (1, -1, -1, 2, -1, 4, 4, 1, 1, 1, -1, 1))


def bounds_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def random_inputs(lengths, heads, head_dim, dtype=torch.float32, seed=0):
    """A query, a key, a value and an output's gradient."""
    generator = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    counts = (q_heads, kv_heads, kv_heads, q_heads)
    return [torch.randn(sum(lengths), count, head_dim, generator=generator).to(dtype) for count in counts]


def attention_of_one(query, key, value, scale, window, softcap):
    """(heads, queries, head_dim); the queries are the last tokens of the keys'."""
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    (num_queries, num_keys), group = (query.shape[1], key.shape[1]), query.shape[0] // key.shape[0]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    if window is not None:
        visible = visible.triu(num_keys - num_queries + 1 - window)
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=True)
    key, value = (tensor.repeat_interleave(group, 0) for tensor in (key, value))
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * scale / softcap)
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value


def oracle(inputs, lengths, prefixes, **options):
    """Outputs and gradients in fp64."""
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in inputs[:3])
    spans = [slice(start, stop) for start, stop in pairwise(bounds_of(lengths).tolist())]
    outputs = []
    for span, prefix in zip(spans, prefixes, strict=True):
        before = slice(0, 0) if prefix == -1 else spans[prefix]
        keys, values = (torch.cat((tensor[before], tensor[span])) for tensor in (key, value))
        outputs.append(attention_of_one(query[span], keys, values, **options).transpose(0, 1))
    output = torch.cat(outputs)
    return (output, *torch.autograd.grad(output, (query, key, value), inputs[3].double()))


def ours(inputs, lengths, prefixes, **options):
    query, key, value = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    indices = None if prefixes is None else torch.tensor(prefixes, dtype=torch.int32)
    output = varlen_attention(query, key, value, bounds_of(lengths), indices, **options)
    return (output, *torch.autograd.grad(output, (query, key, value), inputs[3]))


def check(inputs, lengths, prefixes, scale, window=None, softcap=None):
    options = {"scale": scale, "window": window, "softcap": softcap}
    found = ours(inputs, lengths, prefixes, **options)
    expected = oracle(inputs, lengths, prefixes, **options)
    # In bf16 a result rounds once, and a gradient depends on the rounded output besides.
    tolerance = 1e-5 if inputs[0].dtype == torch.float32 else 1.6e-2
    for name, one, other in zip(("output", "query", "key", "value"), found, expected, strict=True):
        assert one.dtype == inputs[0].dtype and one.is_contiguous()
        size = max(1.0, other.abs().max().item()) if one.dtype == torch.float32 else 1.0
        torch.testing.assert_close(
            one.double(), other, rtol=tolerance, atol=tolerance * size, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (20, None), (100, 3.0), (None, 20.0)])
@pytest.mark.parametrize(("lengths", "prefixes"), [(LENGTHS, ALONE), TREES])
def test_equals_each_sequence_alone(lengths, prefixes, window, softcap):
    check(random_inputs(lengths, (9, 3), 64), lengths, prefixes, 0.2, window, softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3), (2, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 128, 256])
def test_any_heads(head_dim, heads, dtype):
    lengths, prefixes = (70, 1, 65, 130), (-1, 0, 0, -1)
    check(random_inputs(lengths, heads, head_dim, dtype), lengths, prefixes, head_dim**-0.5)


@st.composite
def forests(draw):
    lengths = draw(st.lists(st.integers(0, 140), min_size=1, max_size=7).filter(any))
    roots = [draw(st.booleans()) for _ in lengths]
    candidates = [index for index, root in enumerate(roots) if root]
    prefixes = [-1 if root or not candidates else draw(st.sampled_from(candidates)) for root in roots]
    return lengths, prefixes


@settings(max_examples=40, deadline=None)
@given(
    forest=forests(),
    heads=st.sampled_from([(1, 1), (6, 2), (5, 1)]),
    head_dim=st.sampled_from([8, 24, 32]),
    window=st.one_of(st.none(), st.integers(1, 150)),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 99),
)
def test_any_forest(forest, heads, head_dim, window, softcap, seed):
    lengths, prefixes = forest
    check(random_inputs(lengths, heads, head_dim, seed=seed), lengths, prefixes, 0.3, window, softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_are_free(dtype):
    lengths, prefixes = TREES
    query, key, value, grad = random_inputs(lengths, (4, 2), 24, dtype)
    query, grad = (tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (query, grad))
    key = key.transpose(1, 2).contiguous().transpose(1, 2)  # dimensions of a head are not neighbours
    value = torch.cat((value, value), -1)[..., :24]
    check((query, key, value, grad), lengths, prefixes, 0.2)


def test_a_gradient_that_is_one_number_everywhere():
    lengths, (query, key, value, _) = (5, 70), random_inputs((5, 70), (4, 2), 16)
    check((query, key, value, torch.ones(()).expand(query.shape)), lengths, (-1, -1), 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_do_not_depend_on_the_number_of_threads(dtype):
    lengths, prefixes = TREES
    inputs, before = random_inputs(lengths, (9, 3), 64, dtype), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(ours(inputs, lengths, prefixes, scale=0.1))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_scores_of_any_size_give_numbers():
    lengths, prefixes = (70, 3, 65), (-1, 0, -1)
    query, key, value, grad = random_inputs(lengths, (2, 1), 16)
    inputs = (query * 1e6, key * 1e6, value, grad)
    for window, softcap in ((None, None), (2, None), (None, 50.0)):
        options = {"scale": 1.0, "window": window, "softcap": softcap}
        results = ours(inputs, lengths, prefixes, **options)
        assert all(result.isfinite().all() for result in results)
        expected = oracle(inputs, lengths, prefixes, **options)
        torch.testing.assert_close(results[0].double(), expected[0], rtol=1e-4, atol=1e-4)


def test_without_gradients_the_output_is_the_same():
    lengths, prefixes = TREES
    inputs = random_inputs(lengths, (4, 2), 16)
    with torch.no_grad():
        query, key, value, _ = inputs
        indices = torch.tensor(prefixes, dtype=torch.int32)
        output = varlen_attention(query, key, value, bounds_of(lengths), indices, scale=0.2)
    assert not output.requires_grad
    assert torch.equal(output, ours(inputs, lengths, prefixes, scale=0.2)[0])


def test_the_op_keeps_the_rules_of_operators():
    query, key, value, _ = (tensor.requires_grad_() for tensor in random_inputs((3, 2), (4, 2), 16))
    arguments = (query, key, value, bounds_of((3, 2)), torch.tensor([-1, 0], dtype=torch.int32), 0.2, 2, None)
    torch.library.opcheck(
        torch.ops.hybrid.varlen_attention,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


class Layer(nn.Module):
    def forward(self, query, key, value, cu_seqlens):
        return varlen_attention(query * 2, key, value, cu_seqlens, scale=0.2)


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("what", "runs"), [("selective", 1), ("full", 2)])
def test_selective_recomputation_keeps_the_result(what, runs):
    lengths = (70, 5)
    *inputs, grad = random_inputs(lengths, (4, 2), 16)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    layer = Layer()
    expected = torch.autograd.grad(layer(*inputs, bounds_of(lengths)), inputs, grad)
    recompute_in_backward(layer, what)
    with Calls() as calls:
        found = torch.autograd.grad(layer(*inputs, bounds_of(lengths)), inputs, grad)
    assert calls.names.count("varlen_attention") == runs
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("lengths", "prefixes", "message"),
    [
        ((3, 3), None, "cu_seqlens spans tokens 0 to . and there are 5"),
        ((7, -2), None, "cu_seqlens spans tokens 0 to . and there are 5"),
        ((3, 2), (-1,), "give one each"),
    ],
)
def test_sequences_that_are_none_are_refused(lengths, prefixes, message):
    query, key, value, _ = random_inputs((5,), (4, 2), 16)
    indices = None if prefixes is None else torch.tensor(prefixes, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        varlen_attention(query, key, value, bounds_of(lengths), indices, scale=0.2)


@pytest.mark.parametrize(
    ("indices", "message"), [((-1, 2), "sequence 1 goes on from 2"), ((1, 0), "sequence 0 goes on from 1")]
)
def test_prefixes_that_are_none_are_refused(indices, message):
    with pytest.raises(ValueError, match=message):
        Prefixes.build((3, 2), indices)


def test_takes():
    query, key, value, _ = random_inputs((5,), (4, 2), 16)
    assert varlen_cpu.takes(query, key, value)
    assert varlen_cpu.takes(query.bfloat16(), key.bfloat16(), value.bfloat16())
    assert not varlen_cpu.takes(query.bfloat16(), key, value)
    assert not varlen_cpu.takes(query.double(), key.double(), value.double())
    assert not varlen_cpu.takes(query, key, value[..., :8])
    assert not varlen_cpu.takes(query.to("meta"), key.to("meta"), value.to("meta"))
    assert not varlen_cpu.takes(*(torch.zeros(2, 1, 272) for _ in range(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 50}, {"softcap": 3.0}, {"window": 7, "softcap": 3.0}])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (5, 1)])
def test_a_token_has_the_bits_that_attention_over_kv_blocks_gives_it(dtype, options, heads):
    lengths = (40, 1, 24, 100, 64, 65, 3, 130)
    indices = (-1, 0, 0, 0, -1, 4, 4, -1)
    query, key, value, _ = random_inputs(lengths, heads, 20, dtype)
    options = {"scale": 0.3, "window": None, "softcap": None} | options
    bounds = bounds_of(lengths)
    output = varlen_attention(query, key, value, bounds, torch.tensor(indices, dtype=torch.int32), **options)
    for sequence, prefix in enumerate(indices):
        rows = [r for s in (prefix, sequence) if s >= 0 for r in range(bounds[s], bounds[s + 1])]
        length, own = len(rows), lengths[sequence]
        cache = torch.zeros(2, -(-length // 16), 16, heads[1], 20, dtype=dtype)
        cache[0].flatten(0, 1)[:length], cache[1].flatten(0, 1)[:length] = key[rows], value[rows]
        turned = cache[0].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # keys dimension by dimension
        table = np.arange(cache.shape[1])[None]
        batch = PagedBatch.build(
            *(np.array([own]), np.array([length]), table), block_size=16, num_kv_heads=heads[1], device=query.device
        )
        paged = paged_attention_cpu(query[rows[length - own :]], turned, cache[1], batch, **options)
        assert torch.equal(output[bounds[sequence] : bounds[sequence + 1]], paged), (sequence, prefix)
