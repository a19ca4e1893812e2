from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from hybrid.config import OptimConfig, ZeroConfig
from hybrid.models.attention import ATTENTION_NAME
from hybrid.models.fused_layers import fuse_layers
from hybrid.models.ragged import RaggedBatch
from hybrid.parallel import init_parallel
from hybrid.zero.model import ShardedModel
from ops import cpu
from tests.decoders import tiny_decoder

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="there is no C++ compiler")
NORMS = {"llama": 9, "gemma2": 17, "gemma3_text": 25, "qwen3": 17, "olmo2": 17}
MLPS = {"llama": 4, "gemma2": 0, "gemma3_text": 0, "qwen3": 4, "olmo2": 4}  # gemma's activation is another


def spread_norms(model):
    """Weights of norms as random as the others, under which a wrong one would be seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", NORMS)
@torch.no_grad()
def test_families_compute_the_same(family, dtype):
    """Weights around 1 and around 0, of the hidden size and of a head, rounded before the weight and after."""
    model = spread_norms(tiny_decoder(family).to(dtype))
    ids = torch.arange(20)[None]
    expected = model(ids).logits
    assert fuse_layers(model) == fuse_layers(model) == NORMS[family] + MLPS[family]
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_copies_go_by_their_own_weights(copied):
    model = tiny_decoder("llama")
    fuse_layers(model)
    norm, mlp = model.model.layers[0].input_layernorm, model.model.layers[0].mlp
    hidden = torch.randn(3, 32)
    for module in (norm, mlp):
        other = copied(module)
        assert type(other) is type(module)
        expected = module(hidden)
        torch.testing.assert_close(other(hidden), expected, rtol=0, atol=0)
        for name, parameter in list(other.named_parameters()):
            owner = other.get_submodule(name.rpartition(".")[0])
            owner._parameters = dict(owner._parameters)
            owner._parameters[name.rpartition(".")[2]] = nn.Parameter(2 * parameter)
        if copied is not copy.copy or module is norm:  # a shallow copy shares its projections
            assert not torch.equal(other(hidden), expected)
            assert torch.equal(module(hidden), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_alone_are_needed(dtype):
    with torch.device("meta"):
        model = tiny_decoder("qwen3").to(dtype)
    assert fuse_layers(model) == NORMS["qwen3"] + MLPS["qwen3"]


@torch.no_grad()
def test_what_computes_anything_else_is_left_alone():
    class SkewedRMSNorm(nn.Module):
        """Looks like the others, and divides by the standard deviation."""

        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, hidden):
            return self.weight * hidden / (hidden.var(-1, keepdim=True) + self.eps).sqrt()

    class BiasedRMSNorm(SkewedRMSNorm):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(16))

    class ScaledMLP(LlamaMLP):
        def forward(self, x):
            return 0.5 * super().forward(x)

    class SizedMLP(LlamaMLP):
        def forward(self, x):
            return super().forward(x.view(-1, self.hidden_size))

    class RoutedMLP(LlamaMLP):
        def forward(self, x, weights):
            return super().forward(x) * weights

    config = SimpleNamespace(hidden_size=16, intermediate_size=32, hidden_act="silu", mlp_bias=False)
    gelu = SimpleNamespace(**vars(config) | {"hidden_act": "gelu"})
    mlps = [ScaledMLP(config), SizedMLP(config), RoutedMLP(config), LlamaMLP(gelu)]
    model = nn.Sequential(SkewedRMSNorm(), BiasedRMSNorm(), nn.LayerNorm(16), *mlps)
    assert fuse_layers(model) == 0
    replaced = LlamaMLP(config)
    replaced.forward = lambda x: x
    assert fuse_layers(replaced) == 0
    assert fuse_layers(LlamaMLP(config)) == 1


def train(model, batch):
    """The loss of a batch, and its gradients by name."""
    loss = model.loss(batch)
    model.backward(loss)
    model.reduce_gradients()
    gradients = {}
    for group in model.groups:
        group.finish_reduction()
        gradients |= {name: each.clone() for name, each in group.gather_whole(group.grad).items()}
    return loss.item(), gradients


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_loss_and_gradients_are_those_of_transformers(family, checkpointing):
    module = spread_norms(tiny_decoder(family))
    module.set_attn_implementation("eager")
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    plain = copy.deepcopy(module)
    expected = plain(ids, labels=ids).loss
    expected.backward()
    module.set_attn_implementation(ATTENTION_NAME)
    zero = ZeroConfig(gradient_checkpointing=checkpointing)
    model = ShardedModel(module, init_parallel(), zero=zero, optim=OptimConfig())
    assert "_FusedNorm" in {base.__name__ for child in module.modules() for base in type(child).__mro__}
    loss, gradients = train(model, RaggedBatch.from_sequences(ids.tolist()))
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-5, rtol=2e-4)
