"""The hooks of tensor-parallel generation that can be seen without a world: norms over all heads, and local numbers."""

from typing import Any, cast

import pytest
import torch
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from hybrid.layout import ParamLayout, Segment
from hybrid.models.plans import ModelPlan, tensor_parallel_plan
from hybrid.models.tensor_parallel import TensorParallelHooks
from hybrid.parallel import ParallelMesh
from tests.decoders import tiny_decoder


class LoneRank:
    """One rank of a tensor group whose others are not there: it is told their sum."""

    def __init__(self, tp_rank: int, tp_size: int) -> None:
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.sent: torch.Tensor | None = None
        self.total: torch.Tensor | None = None

    def all_reduce(self, tensor: torch.Tensor, axis: str) -> torch.Tensor:
        self.sent = tensor.clone()
        return tensor if self.total is None else self.total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("segment", [Segment(size=48, num_groups=2, units_per_group=3), Segment(size=48, num_groups=2)])
def test_a_cut_norm_equals_the_whole_one(dtype, segment):
    """Three ranks: query heads unequally divided, and key/value heads of which two ranks hold the same."""
    torch.manual_seed(0)
    tp_size, name = 3, "weight"
    whole = Olmo2RMSNorm(48, eps=1e-5).to(dtype)
    with torch.no_grad():
        whole.weight.copy_(torch.randn(48))
    # Scales differ between heads and tokens; the last token is so small that epsilon counts.
    hidden = (torch.randn(7, 48) * torch.logspace(0, 2, 48) * torch.logspace(0, -5, 7)[:, None]).to(dtype)
    expected = whole(hidden)
    plan = ModelPlan(
        params={"norm.weight": ParamLayout(name=name, shape=(48,), axis=0, segments=(segment,))},
        norms={"norm": "variance_epsilon"},
    )
    ranks = []
    for rank in range(tp_size):
        ((start, stop),) = plan.params["norm.weight"].part_rows(rank, tp_size)
        norm = Olmo2RMSNorm(48, eps=1e-5).to(dtype)
        norm.weight.data = whole.weight.data[start:stop]
        mesh = LoneRank(rank, tp_size)
        hooks = TensorParallelHooks(torch.nn.ModuleDict({"norm": norm}), plan, cast("ParallelMesh", mesh))
        hooks.enabled = True
        norm(hidden[:, start:stop])
        ranks.append((norm, mesh, start, stop))
    total = sum(cast("torch.Tensor", mesh.sent) for _, mesh, _, _ in ranks)
    for norm, mesh, start, stop in ranks:
        mesh.total = cast("torch.Tensor", total)
        torch.testing.assert_close(norm(hidden[:, start:stop]), expected[:, start:stop], rtol=1e-5, atol=0.0)
        assert norm.variance_epsilon == 1e-5


def test_local_numbers_hold_while_enabled():
    module = tiny_decoder("phi3", num_hidden_layers=2)
    plan = tensor_parallel_plan(module, 2)
    attentions: list[Any] = [layer.self_attn for layer in module.model.layers]
    config = module.config
    hooks = TensorParallelHooks(module, plan, cast("ParallelMesh", LoneRank(1, 2)))
    for _ in range(2):
        hooks.enabled = True
        hooks.enabled = True
        assert [(a.config.num_attention_heads, a.num_key_value_heads) for a in attentions] == [(2, 1), (2, 1)]
        assert config.num_attention_heads == 4
        hooks.enabled = False
        hooks.enabled = False
        assert all(a.config is config and a.num_key_value_heads == 2 for a in attentions)
