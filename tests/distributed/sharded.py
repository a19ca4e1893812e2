"""A tiny llama under ZeRO, and the data that every test trains it on."""

import torch
from transformers import LlamaForCausalLM

from hybrid.config import OptimConfig, ZeroConfig
from hybrid.models.attention import ATTENTION_NAME
from hybrid.models.plans import tensor_parallel_plan
from hybrid.models.ragged import RaggedBatch
from hybrid.parallel import init_parallel
from hybrid.zero.model import ShardedModel
from tests.tiny import tiny_config

LAYERS = 6


def make_model(**overrides):
    torch.manual_seed(0)
    config = tiny_config(num_hidden_layers=LAYERS, **overrides)
    return LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION_NAME)


def sharded(tp_size=1, optim=None, dtype=torch.float32, optimizer=None, **zero):
    mesh = init_parallel(tp_size)
    module = make_model().to(dtype)
    settings = ZeroConfig(**{"stage": 3, "persistence_threshold": 64, **zero})
    plan = tensor_parallel_plan(module, tp_size)
    optim = optim or OptimConfig(learning_rate=1e-3)
    return ShardedModel(module, mesh, zero=settings, optim=optim, plan=plan, optimizer=optimizer)


def tokens(step, rank, seed=0):
    generator = torch.Generator().manual_seed(seed + step * 100 + rank)
    return torch.randint(3, 263, (2, 9), generator=generator)


def batch(step, rank):
    return RaggedBatch.from_sequences(tokens(step, rank).tolist())


def train(model, steps=2):
    norms = []
    for step in range(steps):
        model.backward(model.loss(batch(step, model.mesh.rank)))
        norms.append(model.step().grad_norm)
    return norms
