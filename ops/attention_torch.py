"""The plain-torch attention: SDPA where it can say what is asked, explicit scores where it cannot (softcaps)."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from ops.paged import PagedBatch, PagedGroup
from ops.prefixes import Prefixes


def varlen_attention_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefixes: Prefixes | None = None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """See ``ops.attention.varlen_attention``. Neighbours of one length, and of one prefix, are attended in one call."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != query.shape[0]:
        raise ValueError(
            f"cu_seqlens spans tokens {bounds[0]} to {bounds[-1]} and there are {query.shape[0]}; "
            "it must start at 0 and end at the number of tokens"
        )
    prefix_of = [-1] * (len(bounds) - 1) if prefixes is None else prefixes.indices.tolist()
    kinds = [(stop - start, prefix) for (start, stop), prefix in zip(pairwise(bounds), prefix_of, strict=True)]
    outputs, index = [], 0
    while index < len(kinds):
        (length, prefix), stop = kinds[index], index + 1
        while stop < len(kinds) and kinds[stop] == kinds[index]:
            stop += 1
        rows = slice(bounds[index], bounds[stop])
        # (run, length, heads, head_dim) -> (run, heads, length, head_dim), views
        run_q, run_k, run_v = (
            tensor[rows].unflatten(0, (stop - index, length)).transpose(1, 2) for tensor in (query, key, value)
        )
        if prefix == -1:
            output = _causal_attention(run_q, run_k, run_v, scale, window, softcap)
        else:
            before = slice(bounds[prefix], bounds[prefix + 1])
            run_k, run_v = (
                torch.cat((tensor[before].transpose(0, 1).expand(len(run), -1, -1, -1), run), dim=2)
                for tensor, run in ((key, run_k), (value, run_v))
            )
            output = _continued_attention(run_q, run_k, run_v, scale, window, softcap)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        index = stop
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def paged_attention_torch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """See ``ops.attention.paged_attention``. Blocks are gathered into a rectangle for each group of sequences."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    output[batch.num_tokens :] = 0
    for group in batch.groups:
        rows = query[group.first_row : group.last_row] if group.padded_rows is None else query[group.padded_rows]
        # For one query each, scores written out over fp32 keys are quicker on the CPU than SDPA while contexts are
        # short, and no slower when they are long; they take a soft cap besides.
        explicit = group.num_queries == 1 and (softcap is not None or not query.is_cuda)
        keys = batch.gathered("key", key_cache, group, torch.float32 if explicit else key_cache.dtype)
        values = batch.gathered("value", value_cache, group, value_cache.dtype)
        attend = _attend_one_each if explicit else _attend_group
        result = attend(rows, keys, values, group, scale, window, softcap)
        output[group.first_row : group.last_row] = result if group.kept_rows is None else result[group.kept_rows]
    return output


def _attend_one_each(
    rows: torch.Tensor,  # (G, q_heads, head_dim)
    keys: torch.Tensor,  # (G, kv_heads, L, head_dim) fp32
    values: torch.Tensor,  # (G, kv_heads, L, head_dim)
    group: PagedGroup,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """A query for each sequence; its heads of a KV group are the rows of one product, which reads the keys once."""
    query = rows.view(len(rows), keys.shape[1], -1, keys.shape[3]).float()
    scores = torch.matmul(query, keys.transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    weights = torch.softmax(scores.add_(group.mask(window, torch.float32)), dim=-1).to(values.dtype)
    return torch.matmul(weights, values).view(rows.shape)


def _attend_group(
    rows: torch.Tensor,  # (G * Q, q_heads, head_dim)
    keys: torch.Tensor,  # (G, kv_heads, L, head_dim)
    values: torch.Tensor,
    group: PagedGroup,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    num_heads, head_dim = rows.shape[1:]
    mask = group.mask(window, rows.dtype)
    if group.num_queries == 1:
        query = rows.view(group.num_sequences, keys.shape[1], -1, head_dim)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale).reshape(rows.shape)
    query = rows.view(group.num_sequences, group.num_queries, num_heads, head_dim).transpose(1, 2)
    if group.is_fresh:
        keys, values = keys[:, :, : group.num_queries], values[:, :, : group.num_queries]
        output = _causal_attention(query, keys, values, scale, window, softcap)
    else:
        output = _masked_attention(query, keys, values, mask, scale, softcap)
    return output.transpose(1, 2).reshape(rows.shape)


def _causal_attention(
    query: torch.Tensor,  # (batch, q_heads, length, head_dim)
    key: torch.Tensor,  # (batch, kv_heads, length, head_dim)
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of whole sequences from their first token; (batch, q_heads, length, head_dim)."""
    length = query.shape[2]
    if softcap is None and (window is None or length <= window):
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return _continued_attention(query, key, value, scale, window, softcap)


def _continued_attention(
    query: torch.Tensor,  # (batch, q_heads, queries, head_dim)
    key: torch.Tensor,  # (batch, kv_heads, keys, head_dim), the last of which are the queries' own
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    num_queries, num_keys = query.shape[2], key.shape[2]
    first = num_keys - num_queries  # the first query's own key
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril_(first)
    if window is not None:
        visible.triu_(first + 1 - window)
    mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, float("-inf"))
    return _masked_attention(query, key, value, mask, scale, softcap)


def _masked_attention(
    query: torch.Tensor,  # (batch, q_heads, queries, head_dim)
    key: torch.Tensor,  # (batch, kv_heads, keys, head_dim)
    value: torch.Tensor,
    mask: torch.Tensor,  # broadcasts to (batch, 1, queries, keys), additive
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    if softcap is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    folded = query.unflatten(1, (key.shape[1], -1))  # (batch, kv_heads, q_heads / kv_heads, queries, head_dim)
    mask = mask if mask.dim() == 2 else mask[:, :, None]
    return _explicit_attention(folded, key[:, :, None], value[:, :, None], mask, scale, softcap).flatten(1, 2)


def _explicit_attention(
    query: torch.Tensor,  # (..., queries, head_dim)
    key: torch.Tensor,  # (..., keys, head_dim)
    value: torch.Tensor,
    mask: torch.Tensor,  # broadcasts to (..., queries, keys), additive
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Scores written out, softmax in fp32, in the order of transformers' eager attention."""
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value)
