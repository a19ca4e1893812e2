"""The Triton kernels compiled, at sizes that the interpreter cannot reach, and inside a CUDA graph."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from ops.attention_triton import paged_attention_triton, write_kv_triton
from tests.unit.ops.test_attention_triton import TOLERANCE, Case, make_case

pytestmark = pytest.mark.gpu

QUERY_LENS = [1, 1, 1, 2, 130, 700]
CONTEXT_LENS = [9, 512, 5000, 1025, 3000, 700]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("group", "head_dim", "block_size"), [(3, 64, 16), (8, 128, 256), (1, 80, 48), (4, 256, 32)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (700, 20.0)])
def test_long_contexts(dtype, group, head_dim, block_size, window, softcap):
    shapes = {"group": group, "kv_heads": 2, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    case = make_case(QUERY_LENS, CONTEXT_LENS, **shapes, padding=5)
    options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    output = case.run(**options)
    torch.testing.assert_close(output[:-5].double(), case.each_alone(**options), rtol=0, atol=TOLERANCE[dtype])
    assert not output[-5:].any()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_what_shares_the_batch_changes_no_bit(dtype):
    case = make_case(QUERY_LENS, CONTEXT_LENS, group=4, kv_heads=2, head_dim=128, dtype=dtype)
    options = {"scale": 0.1, "window": None, "softcap": None}
    together = case.run(**options)
    for index, (start, stop) in enumerate(itertools.pairwise(case.batch.cu_seqlens.tolist())):
        batch = replace(
            case.batch,
            cu_seqlens=torch.tensor([0, stop - start], dtype=torch.int32, device="cuda"),
            context_lens=case.batch.context_lens[index : index + 1].clone(),
            block_tables=case.batch.block_tables[index : index + 1].clone(),
            max_query_len=stop - start,
            max_context_len=CONTEXT_LENS[index],
        )
        alone = replace(case, query=case.query[start:stop].clone(), batch=batch)
        assert torch.equal(alone.run(**options), together[start:stop])


def test_a_captured_graph_is_replayed_over_other_lengths():
    lengths = torch.tensor([1500, 40, 700, 3000, 513, 64], device="cuda", dtype=torch.int32)
    case = make_case([1] * 6, lengths.tolist(), group=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    key = torch.randn(2, 6, 2, 128, device="cuda", dtype=torch.bfloat16)
    caches = (case.key_cache.nan_to_num(), case.value_cache.nan_to_num())
    case = replace(case, key_cache=caches[0], value_cache=caches[1])
    batch = replace(case.batch, max_context_len=4096)
    output = torch.empty_like(case.query)

    def step():
        write_kv_triton(key[0], key[1], *caches, batch)
        paged_attention_triton(case.query, *caches, batch, scale=0.1, out=output)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    # Shorter contexts, and two sequences that have ended: their rows are padding, and their slots take nothing.
    ended = torch.tensor([False] * 4 + [True] * 2, device="cuda")
    batch.context_lens.copy_(torch.where(ended, 0, lengths // 3))
    batch.cu_seqlens.clamp_(max=4)
    batch.slot_blocks.masked_fill_(ended, -1)
    before = [cache.clone() for cache in caches]
    graph.replay()

    expected = run_afresh(case, key, before, batch)
    assert torch.equal(output, expected)
    assert not output[4:].any()
    for cache, wanted in zip(caches, before, strict=True):
        assert torch.equal(cache, wanted)


def run_afresh(case: Case, key, caches, batch):
    """The step outside the graph, by torch's own write; ``caches`` take the keys and values."""
    kept = batch.slot_blocks >= 0
    for cache, tensor in zip(caches, key, strict=True):
        cache.index_put_((batch.slot_blocks[kept], batch.slot_offsets[kept]), tensor[kept])
    exact = replace(batch, max_context_len=int(batch.context_lens.max()))
    return paged_attention_triton(case.query, *caches, exact, scale=0.1)
