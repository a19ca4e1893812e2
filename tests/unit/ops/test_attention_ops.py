from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from ops.attention import key_layout, override_backend, paged_attention, varlen_attention, write_kv
from ops.paged import PagedBatch

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
OPTIONS = [(None, None), (5, None), (None, 2.0), (5, 2.0)]


def by_hand(query, key, value, scale, window, softcap):
    """One sequence, token by token and head by head; (length, heads, head_dim)."""
    rows = []
    for position in range(query.shape[0]):
        first = 0 if window is None else max(0, position - window + 1)
        heads = []
        for head in range(query.shape[1]):
            kv_head = head // (query.shape[1] // key.shape[1])
            scores = key[first : position + 1, kv_head] @ query[position, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            heads.append(torch.softmax(scores, 0) @ value[first : position + 1, kv_head])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def flat_qkv(num_tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((num_tokens, HEADS, HEAD_DIM), (num_tokens, KV_HEADS, HEAD_DIM), (num_tokens, KV_HEADS, HEAD_DIM))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize(("window", "softcap"), OPTIONS)
def test_varlen_equals_attention_by_hand_and_its_gradient(window, softcap):
    lengths = [1, 9, 9, 4]
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    inputs = [tensor.requires_grad_() for tensor in flat_qkv(int(bounds[-1]))]
    scale = 1 / math.sqrt(HEAD_DIM)

    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    output = varlen_attention(*inputs, cu_seqlens, max(lengths), scale=scale, window=window, softcap=softcap)
    weights = torch.randn_like(output)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)

    pieces = [
        by_hand(*(tensor[start:stop] for tensor in inputs), scale, window, softcap) for start, stop in pairwise(bounds)
    ]
    expected = torch.cat(pieces)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    # The softmax of the explicit path is in fp32 by design.
    tolerance = 1e-5 if softcap else 1e-10
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4 if softcap else 1e-9, atol=tolerance)


def test_varlen_refuses_bounds_that_are_not_those_of_the_tokens():
    query, key, value = flat_qkv(7)
    with pytest.raises(ValueError, match="tokens 0 to 6 and there are 7"):
        varlen_attention(query, key, value, torch.tensor([0, 3, 6]), 3, scale=1.0)


@pytest.mark.parametrize(("window", "softcap"), OPTIONS)
@pytest.mark.parametrize("block_size", [4, 16])
def test_paged_equals_attention_by_hand(window, softcap, block_size):
    """Decoding, fresh, continued and uneven chunks in one step, over blocks in a random order."""
    contexts = np.array([3, 70, 18, 5, 5, 19, 150, 12, 6])
    queries = np.array([1, 1, 1, 5, 5, 7, 9, 8, 2])
    tables, num_blocks = scattered_blocks(contexts, block_size)
    caches = [
        torch.zeros(num_blocks, KV_HEADS, block_size, HEAD_DIM, dtype=torch.float64).transpose(1, 2) for _ in range(2)
    ]
    build = {"block_size": block_size, "num_kv_heads": KV_HEADS, "device": torch.device("cpu")}
    sequences = [flat_qkv(int(length)) for length in contexts]

    # What was computed before this step, then this step's own tokens.
    past = contexts - queries
    some = past > 0
    before = PagedBatch.build(past[some], past[some], tables[some], **build)
    for batch, parts in (
        (before, [(0, p) for p in past]),
        (PagedBatch.build(queries, contexts, tables, **build), list(zip(past, contexts, strict=True))),
    ):
        flat = [
            torch.cat([sequence[index][a:b] for sequence, (a, b) in zip(sequences, parts, strict=True)])
            for index in range(3)
        ]
        write_kv(flat[1], flat[2], *caches, batch)
    output = paged_attention(flat[0], *caches, batch, scale=0.3, window=window, softcap=softcap)

    expected = torch.cat(
        [by_hand(*sequence, 0.3, window, softcap)[start:] for sequence, start in zip(sequences, past, strict=True)]
    )
    # In fp64 but for the softmax, and the scores of single queries, which are in fp32 by design.
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert 1 < len(batch.groups) < len(contexts)


def scattered_blocks(contexts, block_size):
    """Block tables (S, B) padded with 0, of distinct blocks in a random order, and the number of blocks."""
    counts = -(-contexts // block_size)
    order = iter(np.random.default_rng(0).permutation(int(counts.sum())))
    tables = np.zeros((len(contexts), counts.max()), dtype=np.int64)
    for table, count in zip(tables, counts, strict=True):
        table[:count] = [next(order) for _ in range(count)]
    return tables, int(counts.sum())


def test_backends():
    known = "flash, triton, cpu, reference"
    with pytest.raises(ValueError, match=f"'fast' is unknown; choose one of {known}"), override_backend("fast"):
        pass
    with override_backend("reference"):
        assert key_layout(torch.float32, torch.device("cpu"), 16) == "token"
