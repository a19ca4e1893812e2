"""From a checkpoint by ranges, through a training step on shards, to a saved model: as transformers does it.

Every family is saved by transformers, opened by ranges on each rank, trained, and written as shards pass by.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid.config import OptimConfig, ZeroConfig
from hybrid.models.attention import ATTENTION_NAME
from hybrid.models.loading import open_causal_lm, resolve_model
from hybrid.models.plans import tensor_parallel_plan
from hybrid.parallel import init_parallel
from hybrid.zero.model import ShardedModel
from tests.decoders import tiny_decoder
from tests.distributed.world import run_world

FAMILIES = {
    "like llama": ["llama", "mistral", "qwen2", "qwen3", "smollm3"],
    "scaled, capped, normed": ["gemma2", "gemma3_text", "granite", "olmo2"],
    "packed or by table": ["phi3", "gpt_neox", "opt", "gpt2", "starcoder2"],
}
OPTIM = OptimConfig(optimizer="sgd", learning_rate=0.1, max_grad_norm=0.0)


def tokens(rank):
    return torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(rank))


def there_and_back(families, directory: Path):
    mesh = init_parallel(2)
    for family in families:
        source, target = directory / family, directory / f"{family}-trained"
        if mesh.is_main:
            tiny_decoder(family, num_hidden_layers=2).save_pretrained(source, max_shard_size="20KB")
        mesh.barrier()
        opened = open_causal_lm(resolve_model(str(source)), torch.float32)
        assert all(parameter.is_meta for parameter in opened.module.parameters()), f"{family} was loaded whole"
        plan = tensor_parallel_plan(opened.module, 2)
        zero = ZeroConfig(persistence_threshold=64)
        model = ShardedModel(opened.module, mesh, zero=zero, optim=OPTIM, plan=plan, weights=opened.weights)
        ids = tokens(mesh.rank)
        loss = opened.module(ids, labels=ids).loss
        model.backward(loss)
        model.step()
        model.save_pretrained(target, max_shard_bytes=30_000)

        plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
        for rank in range(mesh.world_size):
            ids = tokens(rank)
            theirs = plain(ids, labels=ids).loss
            if rank == mesh.rank:
                assert loss.item() == pytest.approx(theirs.item(), abs=2e-5), family
            (theirs / mesh.world_size).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        saved = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        expected = plain.state_dict()
        assert saved.state_dict().keys() == expected.keys(), family
        for name, weight in saved.state_dict().items():
            close = torch.allclose(weight, expected[name], atol=2e-6, rtol=1e-5)
            assert close, f"{family}: {name} is off by {(weight - expected[name]).abs().max()}"
        for name, weight in model.state.stream():
            assert torch.equal(weight, saved.get_parameter(name)), f"{family}: {name} was not saved as it was trained"
        tied = saved.get_input_embeddings().weight is saved.get_output_embeddings().weight
        assert tied == bool(saved.config.tie_word_embeddings), family


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_saved_is_what_was_trained(tmp_path, kind):
    run_world(there_and_back, 4, tmp_path, FAMILIES[kind], tmp_path)
