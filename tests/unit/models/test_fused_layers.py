from __future__ import annotations

import copy
import inspect
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from hybrid.config import OptimConfig, ZeroConfig
from hybrid.models import fused_layers
from hybrid.models.attention import ATTENTION_NAME, RaggedCall, attention_call
from hybrid.models.fused_layers import fuse_layers
from hybrid.models.ragged import RaggedBatch
from hybrid.parallel import init_parallel
from hybrid.zero.model import ShardedModel
from ops import cpu
from ops.rotary import rotary
from tests.decoders import ROPES, tiny_decoder

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


@pytest.fixture
def rotations(monkeypatch):
    """What the kernel of rotary embeddings is called with; to be cleared of the trials of families' functions."""
    calls = []

    def counted(*args):
        calls.append(args)
        return rotary(*args)

    monkeypatch.setattr(fused_layers, "rotary", counted)
    return calls


@torch.no_grad()
def ragged_logits(model, sequences):
    batch = RaggedBatch.from_sequences(sequences)
    with attention_call(RaggedCall(batch.cu_seqlens, batch.max_seqlen)):
        return model(batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in ("llama", "qwen3", "gemma2", "gemma3_text", "phi3")),
        ("deepseek_v3", {"rope_interleave": False}),  # one head of keys, and a part of each head of queries
    ],
)
def test_rotations_have_the_bits_of_the_family_s_own_function(family, overrides, dtype, rotations, monkeypatch):
    model = tiny_decoder(family, **overrides).to(dtype)
    fuse_layers(model)
    rotations.clear()
    sequences = [[*range(3, 20)], [5], [8, 9]]
    found = ragged_logits(model, sequences)
    assert len(rotations) == 4
    monkeypatch.setattr(fused_layers, "takes_rotary", lambda *_: False)
    assert torch.equal(ragged_logits(model, sequences), found)
    assert len(rotations) == 4


@torch.no_grad()
def test_a_plain_call_of_a_model_rotates_as_ever(rotations):
    model = tiny_decoder("llama", "eager")
    fuse_layers(model)
    rotations.clear()
    model(torch.arange(20)[None])
    model(torch.arange(20)[None, :1])
    assert not rotations


@torch.no_grad()
def test_copies_of_a_model_rotate_as_it_does(rotations):
    model = tiny_decoder("llama")
    fuse_layers(model)
    fuse_layers(model)
    expected = ragged_logits(model, [[*range(3, 20)]])
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        rotations.clear()
        assert torch.equal(ragged_logits(each, [[*range(3, 20)]]), expected)
        assert len(rotations) == 4


def rotation_of_a_file(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + modeling_llama.rotate_half(q) * sin, k * cos + modeling_llama.rotate_half(k) * sin


def test_a_function_of_a_file_is_replaced_once_and_under_its_own_name(monkeypatch):
    """As families had it before transformers 5.25."""
    file = ModuleType("modeling_anything")
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setattr(rotation_of_a_file, "__module__", file.__name__)
    monkeypatch.setattr(rotation_of_a_file, "__qualname__", "apply_rotary_pos_emb")
    file.apply_rotary_pos_emb = rotation_of_a_file
    model = nn.Sequential()
    model.__class__ = type("Model", (nn.Sequential,), {"__module__": file.__name__})
    fuse_layers(model)
    replaced = file.apply_rotary_pos_emb
    fuse_layers(model)
    assert file.apply_rotary_pos_emb is replaced is pickle.loads(pickle.dumps(replaced))
    assert inspect.unwrap(replaced) is rotation_of_a_file is not replaced


@pytest.mark.parametrize(
    ("family", "overrides"), [("cohere", {}), ("glm4", {}), ("gptj", {}), ("phi3", {"partial_rotary_factor": 0.5})]
)
def test_families_that_rotate_otherwise_are_left_alone(family, overrides, rotations):
    """Neighbours in place of halves, or a part of each head."""
    sequences = [[*range(3, 20)], [5], [8, 9]]
    plain = tiny_decoder(family, "eager", **overrides)
    with torch.no_grad():
        expected = torch.cat([plain(torch.tensor([each]), use_cache=False).logits[0] for each in sequences])
    model = tiny_decoder(family, **overrides)
    fuse_layers(model)
    rotations.clear()
    torch.testing.assert_close(ragged_logits(model, sequences), expected, atol=1e-4, rtol=1e-4)
    assert not rotations


@pytest.mark.parametrize("change", ["scaled", "shaped", "named", "wide"])
def test_functions_that_compute_anything_else_are_left_alone(change, rotations, monkeypatch):
    plain = rotation_of_a_file

    def scaled(q, k, cos, sin):
        return tuple(2 * each for each in plain(q, k, cos, sin))

    def shaped(q, k, cos, sin):
        return plain(q.view(1, 4, -1, 8), k, cos, sin)

    def named(x, cos, sin):
        return x

    def wide(q, k, cos, sin):
        return tuple(each.to(q.dtype) for each in plain(*(each.float() for each in (q, k, cos, sin))))

    file = ModuleType("modeling_anything")
    monkeypatch.setitem(sys.modules, file.__name__, file)
    own = {"scaled": scaled, "shaped": shaped, "named": named, "wide": wide}[change]
    vars(file)["apply_rotary_pos_emb"] = own
    model = nn.Sequential()
    model.__class__ = type("Model", (nn.Sequential,), {"__module__": file.__name__})
    fuse_layers(model)
    rotations.clear()
    if change != "wide":
        assert file.apply_rotary_pos_emb is own
        return
    for dtype, num_calls in ((torch.bfloat16, 0), (torch.float32, 1)):  # 16 bits are rounded once, by this one alone
        query, key, cos, sin = torch.randn(4, 5, 16).to(dtype)
        args = query[None, None], key[None, None], cos[None], sin[None]
        with attention_call(RaggedCall(torch.tensor([0, 5], dtype=torch.int32), 5), recompute=True):
            outputs = file.apply_rotary_pos_emb(*args)
        assert len(rotations) == num_calls
        assert all(map(torch.equal, outputs, own(*args)))


@pytest.mark.parametrize("case", ["longrope beyond", "dynamic", "linear in full layers"])
def test_rotations_go_by_the_length_of_each_sequence(case, rotations):
    family, overrides = ROPES[case]
    sequences = [[*range(3, 43)], [5, 6, 7], [*range(20, 37)]]
    with torch.no_grad():
        expected = [
            tiny_decoder(family, "eager", **overrides)(torch.tensor([each]), use_cache=False).logits[0]
            for each in sequences
        ]
    model = tiny_decoder(family, **overrides)
    fuse_layers(model)
    rotations.clear()
    torch.testing.assert_close(ragged_logits(model, sequences), torch.cat(expected), rtol=1e-4, atol=1e-4)
    assert len(rotations) == 4


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
def test_loss_and_gradients_are_those_of_transformers(family, checkpointing, rotations):
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
    rotations.clear()
    loss, gradients = train(model, RaggedBatch.from_sequences(ids.tolist()))
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert len(rotations) == (4 if checkpointing == "none" else 8)  # again where a layer is recomputed
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-5, rtol=2e-4)
