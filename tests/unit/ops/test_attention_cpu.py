"""The compiled CPU kernels against scaled_dot_product_attention of each sequence alone, and against themselves."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ops import attention_cpu, cpu
from ops.attention import key_layout, override_backend, paged_attention, varlen_attention, write_kv
from ops.paged import PagedBatch

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not attention_cpu.is_available(), reason="there is no C++ compiler")


class Pool:
    """A cache as the engine's, and where some sequences lie in it."""

    def __init__(self, contexts, block_size, kv_heads, head_dim, dtype, shared=()):
        counts = -(-np.array(contexts) // block_size)
        num_blocks = int(counts.sum())
        order = np.random.default_rng(1).permutation(num_blocks)
        self.tables = np.zeros((len(contexts), counts.max()), dtype=np.int64)
        for index, (stop, count) in enumerate(zip(counts.cumsum(), counts, strict=True)):
            self.tables[index, :count] = order[stop - count : stop]
        for target, source, tokens in shared:
            self.tables[target, : tokens // block_size] = self.tables[source, : tokens // block_size]
        self.contexts, self.block_size, self.kv_heads = np.array(contexts), block_size, kv_heads
        shape = (num_blocks, kv_heads, block_size, head_dim)
        self.value = torch.zeros(shape, dtype=dtype).transpose(1, 2)
        self.key = torch.zeros(shape, dtype=dtype).transpose(2, 3).contiguous().permute(0, 3, 1, 2)

    def batch(self, queries, contexts=None, rows=slice(None)):
        contexts = self.contexts[rows] if contexts is None else np.array(contexts)
        return PagedBatch.build(
            np.array(queries),
            contexts,
            self.tables[rows],
            block_size=self.block_size,
            num_kv_heads=self.kv_heads,
            device=CPU,
        )

    def fill(self, sequences):
        """Write whole sequences' (query, key, value)."""
        keys, values = (torch.cat([sequence[index] for sequence in sequences]) for index in (1, 2))
        write_kv(keys, values, self.key, self.value, self.batch(self.contexts))


def random_sequence(length, q_heads, kv_heads, head_dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    heads = (q_heads, kv_heads, kv_heads)
    return [torch.randn(length, count, head_dim, generator=generator).to(dtype) for count in heads]


def alone(query, key, value, scale, window, softcap):
    """(length, q_heads, head_dim) of one whole sequence in fp64."""
    query, key, value = (tensor.double().transpose(0, 1)[None] for tensor in (query, key, value))
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    if softcap is None:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=True)
        return output[0].transpose(0, 1)
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * scale / softcap)
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value)[0].transpose(0, 1)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (100, 30.0), (None, 5.0)])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 16), (64, 16), (80, 32), (128, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_sdpa_of_each_sequence(window, softcap, q_heads, kv_heads, head_dim, block_size, dtype):
    contexts, queries = [1, 40, 300, 5, 90, 200, 129], [1, 1, 1, 5, 70, 130, 2]
    pool = Pool(contexts, block_size, kv_heads, head_dim, dtype)
    sequences = [random_sequence(length, q_heads, kv_heads, head_dim, dtype) for length in contexts]
    pool.fill(sequences)
    new = torch.cat([sequence[0][-count:] for sequence, count in zip(sequences, queries, strict=True)])
    padded = torch.cat([new, torch.full_like(new[:6], float("nan"))])
    scale = head_dim**-0.5
    output = paged_attention(
        padded, pool.key, pool.value, pool.batch(queries), scale=scale, window=window, softcap=softcap
    )
    wanted = torch.cat([alone(*s, scale, window, softcap)[-n:] for s, n in zip(sequences, queries, strict=True)])
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output[: len(new)].double(), wanted, atol=tolerance, rtol=tolerance)
    assert not output[len(new) :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (70, 8.0), (6, None)])
def test_a_token_has_the_same_bits_whatever_is_attended_beside_it(dtype, window, softcap):
    """In a chunk, in another one, decoding alone, beside samples that share its prompt, and laid end to end."""
    options = {"scale": 0.2, "window": window, "softcap": softcap}
    contexts = [210, 210, 210, 33]
    pool = Pool(contexts, 16, 3, 24, dtype, shared=[(1, 0, 160), (2, 0, 160)])
    prompt = random_sequence(160, 9, 3, 24, dtype)
    rests = [random_sequence(50, 9, 3, 24, dtype, seed=seed) for seed in (1, 2, 3)]
    sequences = [[torch.cat(pair) for pair in zip(prompt, rest, strict=True)] for rest in rests]
    sequences.append(random_sequence(33, 9, 3, 24, dtype))
    pool.fill(sequences)
    query = torch.cat([sequence[0] for sequence in sequences])
    bounds = np.concatenate(([0], np.cumsum(contexts)))
    whole = paged_attention(query, pool.key, pool.value, pool.batch(contexts), **options)

    lasts = torch.from_numpy(bounds[1:] - 1)
    decoding = paged_attention(query[lasts], pool.key, pool.value, pool.batch([1] * 4), **options)
    assert torch.equal(decoding, whole[lasts])
    alone = [
        paged_attention(query[last, None], pool.key, pool.value, pool.batch([1], rows=slice(i, i + 1)), **options)
        for i, last in enumerate(lasts)
    ]
    assert torch.equal(torch.cat(alone), decoding)
    for start, stop in pairwise([0, 1, 17, 63, 150, 210]):
        batch = pool.batch([stop - start], [stop], slice(0, 1))
        chunk = paged_attention(query[start:stop], pool.key, pool.value, batch, **options)
        assert torch.equal(chunk, whole[start:stop])
    cu_seqlens = torch.from_numpy(bounds).int()
    tensors = [torch.cat([sequence[index] for sequence in sequences]) for index in range(3)]
    assert torch.equal(varlen_attention(*tensors, cu_seqlens, 210, **options), whole)


@pytest.mark.parametrize("window", [None, 6, 65])
def test_scores_far_under_zero(window):
    """Rows beside others that see a tile which they do not must not take its nothing for a score of 0."""
    query, key, value = random_sequence(150, 4, 2, 16, torch.float32)
    query, key = -3 - query.abs(), 4 + key.abs()
    pool = Pool([150], 16, 2, 16, torch.float32)
    pool.fill([(query, key, value)])
    output = paged_attention(query, pool.key, pool.value, pool.batch([150]), scale=1.0, window=window)
    torch.testing.assert_close(output.double(), alone(query, key, value, 1.0, window, None), atol=3e-4, rtol=3e-4)
    last = paged_attention(query[149:], pool.key, pool.value, pool.batch([1]), scale=1.0, window=window)
    assert torch.equal(last[0], output[149])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_reads_and_writes_the_same_cache(dtype):
    contexts, queries = [40, 70, 300], [1, 30, 300]
    pools = [Pool(contexts, 16, 2, 16, dtype) for _ in range(2)]
    sequences = [random_sequence(length, 4, 2, 16, dtype) for length in contexts]
    new = torch.cat([sequence[0][-count:] for sequence, count in zip(sequences, queries, strict=True)])
    outputs = []
    for pool, name in zip(pools, ("cpu", "reference"), strict=True):
        with override_backend(name):
            pool.fill(sequences)
            outputs.append(paged_attention(new, pool.key, pool.value, pool.batch(queries), scale=0.25))
    assert torch.equal(pools[0].key, pools[1].key)
    assert torch.equal(pools[0].value, pools[1].value)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(outputs[0], outputs[1], atol=tolerance, rtol=tolerance)


def test_layouts():
    assert key_layout(torch.bfloat16, CPU, 32) == "dim"
    assert key_layout(torch.bfloat16, CPU, 8) == "token"  # no whole vectors of keys
    assert key_layout(torch.float64, CPU, 16) == "token"


def test_without_a_compiler_one_warning_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    cpu.library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="plain torch, which is slower"):
            assert cpu.library() is None
        monkeypatch.setenv("HYBRID_CPU_KERNELS", "0")
        cpu.library.cache_clear()
        assert cpu.library() is None
    finally:
        cpu.library.cache_clear()
