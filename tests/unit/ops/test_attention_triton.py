"""The Triton kernels, through Triton's interpreter where there is no GPU (see conftest, which asks for it)."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops.attention_torch import paged_attention_torch
from ops.paged import PagedBatch

pytest.importorskip("triton", reason="needs the triton package")

import triton
import triton.language as tl
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from ops import attention_triton
from ops.attention import override_backend, paged_attention, write_kv
from ops.attention_triton import paged_attention_triton, write_kv_triton

HAS_GPU = torch.cuda.is_available()
INTERPRETS = triton.knobs.runtime.interpret
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# Against the sequence alone in fp64; outputs are about 1.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# New tokens and contexts of the sequences.
KINDS = {
    "decode": ([1, 1, 1], [1, 70, 18]),
    "chunk": ([5, 2, 23], [5, 66, 40]),
    "mixed": ([1, 1, 4, 19], [45, 300, 90, 19]),
}


@triton.jit
def _count(out, stop):
    for index in range(0, stop, 1):
        tl.store(out + index, 1)


@pytest.fixture(scope="module")
def interpreter():
    try:
        _count[(1,)](torch.zeros(2, dtype=torch.int32), 2)
    except triton.runtime.errors.InterpreterError as error:  # triton 3.6 with numpy 2.4
        pytest.skip(f"this triton's interpreter cannot run loops with this numpy: {error}")


@pytest.fixture(autouse=True)
def _runs_here(request):
    if INTERPRETS:
        request.getfixturevalue("interpreter")
    elif not HAS_GPU:
        pytest.skip("there is an NVIDIA driver and no GPU that torch can use; set TRITON_INTERPRET=1")


@dataclass(frozen=True, slots=True)
class Case:
    query: torch.Tensor  # (N + padding, q_heads, head_dim)
    key_cache: torch.Tensor  # (num_blocks, block_size, kv_heads, head_dim), NaN where no sequence has a token
    value_cache: torch.Tensor
    batch: PagedBatch
    keys: list[torch.Tensor]  # of each sequence, (context, kv_heads, head_dim)
    values: list[torch.Tensor]

    def run(self, **options):
        return paged_attention_triton(self.query, self.key_cache, self.value_cache, self.batch, **options)

    def reference(self, **options):
        caches = [cache.nan_to_num() for cache in (self.key_cache, self.value_cache)]
        return paged_attention_torch(self.query, *caches, self.batch, **options)

    def each_alone(self, scale, window, softcap):
        """Every sequence by itself, in fp64: SDPA, or transformers' gemma2 for soft caps."""
        bounds = self.batch.cu_seqlens.tolist()
        pieces = []
        for (start, stop), key, value in zip(itertools.pairwise(bounds), self.keys, self.values, strict=True):
            if stop > start:
                pieces.append(attend_alone(self.query[start:stop], key, value, scale, window, softcap))
        return torch.cat(pieces)


def attend_alone(query, key, value, scale, window, softcap):
    """(Q, q_heads, head_dim) fp64 of the last Q tokens of one sequence, from a mask written out."""
    q, k, v = (tensor.double().transpose(0, 1)[None] for tensor in (query, key, value))
    positions = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
    keys = torch.arange(k.shape[2], device=q.device)
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    mask = torch.zeros_like(hidden, dtype=torch.float64).masked_fill_(hidden, float("-inf"))[None, None]
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
    module = nn.Module()
    module.num_key_value_groups = q.shape[1] // k.shape[1]
    return eager_attention_forward(module, q, k, v, mask, 0.0, scale, softcap)[0][0]


def make_case(
    query_lens,
    context_lens,
    *,
    group=2,
    kv_heads=1,
    head_dim=16,
    block_size=16,
    dtype=torch.float32,
    padding=0,
    layout=(0, 2, 1, 3),  # order of the caches' axes in memory
):
    """Sequences in blocks of a random order. A sequence's tensors depend on its place alone."""
    query_lens, context_lens = np.array(query_lens), np.array(context_lens)
    counts = -(-context_lens // block_size)
    order = np.random.default_rng(0).permutation(int(counts.sum()))
    tables = np.zeros((len(counts), counts.max()), dtype=np.int64)
    for table, count, stop in zip(tables, counts, np.cumsum(counts), strict=True):
        table[:count] = order[stop - count : stop]
    places = {"block_size": block_size, "num_kv_heads": kv_heads, "device": DEVICE}
    batch = PagedBatch.build(query_lens, context_lens, tables, **places)

    queries, caches, dense = [], [], ([], [])
    shape = np.array((int(counts.sum()), block_size, kv_heads, head_dim))
    for _ in range(2):
        memory = torch.full(tuple(shape[list(layout)]), float("nan"), dtype=dtype, device=DEVICE)
        caches.append(memory.permute(*np.argsort(layout)))
    for index, (num_queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        generator = torch.Generator().manual_seed(index)
        positions = np.arange(context)
        for cache, tensors in zip(caches, dense, strict=True):
            tensor = torch.randn(context, kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
            cache[tables[index, positions // block_size], positions % block_size] = tensor
            tensors.append(tensor)
        queries.append(torch.randn(num_queries, kv_heads * group, head_dim, generator=generator))
    queries.append(torch.full((padding, kv_heads * group, head_dim), 7.0))
    return Case(torch.cat(queries).to(DEVICE, dtype), *caches, batch, *dense)


def covering(strength, **factors):
    """Few of the factors' combinations, among which every choice of ``strength`` factors takes all its values."""
    combinations = list(itertools.product(*factors.values()))
    random.Random(0).shuffle(combinations)
    axes = list(itertools.combinations(range(len(factors)), strength))
    seen, kept = set(), []
    for least in (len(axes) * 2 // 3, len(axes) // 3, 1):  # those that add most come first
        for values in combinations:
            new = {(axis, tuple(values[i] for i in axis)) for axis in axes} - seen
            if len(new) >= least:
                seen |= new
                kept.append(values)
    return kept


@pytest.mark.parametrize(
    ("kind", "group", "window", "softcap", "block_size", "head_dim", "dtype"),
    covering(
        3 if INTERPRETS else 2,  # on a GPU each is compiled
        kind=list(KINDS),
        group=[1, 3, 8],
        window=[None, 3, 40],
        softcap=[None, 2.0],
        block_size=[16, 32, 256],
        head_dim=[16, 64, 80, 128],
        dtype=list(TOLERANCE),
    ),
)
def test_paged_equals_the_reference_and_each_sequence_alone(kind, group, window, softcap, block_size, head_dim, dtype):
    case = make_case(
        *KINDS[kind],
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        padding=3,
        kv_heads=2 // group + 1,
    )
    options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    output = case.run(**options)
    assert output.dtype == dtype
    assert not output[-3:].any()
    close = {"rtol": 0, "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(output[:-3].double(), case.each_alone(**options), **close)
    torch.testing.assert_close(output, case.reference(**options), **close)


@pytest.fixture
def small_splits(monkeypatch):
    if not INTERPRETS:
        return  # a compiled kernel refuses other constants, and the tests hold all the same
    monkeypatch.setattr(attention_triton, "_MIN_SPLIT", tl.constexpr(64))
    monkeypatch.setattr(attention_triton, "_MAX_SPLITS", tl.constexpr(4))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_splits")
def test_contexts_are_split(window, dtype):
    """Into as many splits as there may be and no more, among them contexts of just one split and just over."""
    case = make_case([1, 1, 1, 1, 9], [64, 65, 256, 700, 30], dtype=dtype, group=3, kv_heads=2)
    options = {"scale": 0.25, "window": window, "softcap": None}
    output = case.run(**options).double()
    torch.testing.assert_close(output, case.each_alone(**options), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.float32), (50, torch.bfloat16)])
@pytest.mark.usefixtures("small_splits")
def test_what_shares_the_batch_changes_no_bit(window, dtype):
    query_lens, context_lens = [1, 7, 1, 1, 40], [20, 150, 320, 130, 40]
    options = {"scale": 0.25, "window": window, "softcap": None}
    shapes = {"group": 3, "kv_heads": 2, "dtype": dtype}
    case = make_case(query_lens, context_lens, **shapes)
    together = case.run(**options)
    bounds = case.batch.cu_seqlens.tolist()
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        places = (case.batch.context_lens, case.batch.block_tables)
        alone = replace(
            case,
            query=case.query[start:stop],
            batch=replace(
                case.batch,
                cu_seqlens=torch.tensor([0, stop - start], dtype=torch.int32, device=DEVICE),
                context_lens=places[0][index : index + 1],
                block_tables=places[1][index : index + 1],
                max_query_len=stop - start,
                max_context_len=context_lens[index],
            ),
        )
        assert torch.equal(alone.run(**options), together[start:stop])


def test_bounds_may_exceed_the_lengths_and_sequences_may_be_empty():
    """As in a captured graph, whose grid was made for the longest."""
    case = make_case([1, 1, 3], [33, 5, 30], padding=4)
    options = {"scale": 0.25, "window": None, "softcap": None}
    expected = case.run(**options)
    empty = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    batch = replace(
        case.batch,
        cu_seqlens=torch.cat([case.batch.cu_seqlens, empty + 5]),
        context_lens=torch.cat([case.batch.context_lens, empty]),
        block_tables=F.pad(case.batch.block_tables, (0, 3, 0, 2)),
        max_query_len=60,
        max_context_len=2000,
    )
    assert torch.equal(replace(case, batch=batch).run(**options), expected)


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 3, 1), (2, 0, 1, 3)])
def test_any_strides(layout):
    case = make_case([1, 6, 1], [40, 50, 17], group=2, kv_heads=2, layout=layout)
    options = {"scale": 0.25, "window": None, "softcap": None}
    fused = torch.randn(len(case.query), 9, 16, device=DEVICE)  # as queries are cut from one projection of q, k and v
    fused[:, 2:6] = case.query
    out = torch.full((4, len(case.query), 16), float("nan"), device=DEVICE).transpose(0, 1)
    assert replace(case, query=fused[:, 2:6]).run(**options, out=out) is out
    torch.testing.assert_close(out.double(), case.each_alone(**options), rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_write_kv(dtype):
    case = make_case([1, 6, 3], [40, 50, 17], kv_heads=3, head_dim=24, dtype=dtype)
    # Rows past the slots are padding; a slot without a block is the padding of a captured graph.
    key, value = torch.randn(2, 24, 12, 3, device=DEVICE).to(dtype).permute(0, 2, 3, 1)
    case.batch.slot_blocks[2] = -1
    kept = [index for index in range(10) if index != 2]
    caches = [cache.nan_to_num().contiguous() for cache in (case.key_cache, case.value_cache)]
    expected = [cache.clone() for cache in caches]
    slots = (case.batch.slot_blocks[kept], case.batch.slot_offsets[kept])
    for cache, tensor in zip(expected, (key, value), strict=True):
        cache.index_put_(slots, tensor[kept])
    write_kv_triton(key, value, *caches, case.batch)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"head_dim": 272}, {}, "head_dim is 272 and the Triton kernel takes at most 256"),
        ({"dtype": torch.float64}, {}, "torch.float64 and torch.float64; they must be of one dtype"),
        ({}, {"window": 0}, "window is 0 and must be at least 1"),
        ({}, {"softcap": 0.0}, "softcap is 0.0 and must be positive"),
        ({}, {"out": torch.zeros(1, 2, 3)}, r"out is \(1, 2, 3\) and must have the shape of query"),
    ],
)
def test_refusals(changes, options, message):
    case = make_case([1], [3], **changes)
    with pytest.raises(ValueError, match=message):
        case.run(scale=1.0, **options)


def test_refuses_heads_that_do_not_divide():
    case = make_case([1], [3], group=3, kv_heads=2)
    with pytest.raises(ValueError, match="query's heads must be a multiple of key's"):
        replace(case, query=case.query[:, :5]).run(scale=1.0)


def test_only_its_own_import_needs_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "ops.attention_triton")
    with pytest.raises(ImportError):
        importlib.import_module("ops.attention_triton")


def test_the_dispatch_reaches_them():
    """`ops.attention`'s calls under the override give what they give by themselves, a cache by dimensions included."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(19, heads, 16, generator=generator).to(DEVICE) for heads in (4, 2))
    cache = torch.zeros(3, 2, 16, 16, device=DEVICE)
    tables = np.array([[2, 0], [1, 0]])
    lengths = np.array([17, 2])
    batch = PagedBatch.build(lengths, lengths, tables, block_size=16, num_kv_heads=2, device=DEVICE)
    outputs = []
    for name in ("triton", "reference"):
        for keys in (cache.clone().transpose(1, 2), cache.clone().permute(0, 3, 1, 2)):
            values = cache.clone().transpose(1, 2)
            with override_backend(name):
                write_kv(key, -key, keys, values, batch)
                outputs.append(paged_attention(query, keys, values, batch, scale=0.25))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=1e-5, rtol=1e-5)
