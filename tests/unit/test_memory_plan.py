"""The memory plan of models too large to be here, against sums made by hand; and what it says to mistakes."""

import json
import time
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, LlamaConfig, MambaConfig, T5Config

from hybrid.config import InferenceConfig, OptimConfig, ZeroConfig
from hybrid.memory_plan import _STATE_TENSORS, _num_state_tensors, memory_plan
from hybrid.zero.optimizer import _CLASSES
from hybrid.zero.optimizer import _factory as make_factory
from ops.logprob import linear_logprob_entropy
from scripts import memory_plan as script
from tests.tiny import tiny_config

# Llama 2 70B: attention of 8192 x (8192 + 1024 + 1024 + 8192), MLP of 3 x 8192 x 28672, in 80 layers; two vocabularies.
MATRICES = 80 * (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672) + 2 * 32000 * 8192
NORMS = 161 * 8192
LAYER = 8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672


def llama_70b():
    return LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=32000,
    )


def test_llama_70b_on_64_ranks_by_hand():
    started = time.perf_counter()
    plan = memory_plan(llama_70b(), 64, 8, dtype="bf16", device_memory=80 * 2**30)
    assert time.perf_counter() - started < 20
    assert plan.num_parameters == MATRICES + NORMS == 68_976_648_192
    assert [rank.ranks[:2] for rank in plan.tensor_ranks] == [(t, t + 8) for t in range(8)]
    for rank in plan.tensor_ranks:  # all is divisible, so all ranks are alike
        assert rank.rest.shards == 2 * MATRICES // 64
        assert rank.rest.whole == 2 * NORMS
        assert rank.rest.masters == 4 * (MATRICES + NORMS) // 64
        assert rank.rest.optimizer_state == 8 * (MATRICES + NORMS) // 64
        assert rank.generate.slices == 2 * MATRICES // 8
        assert rank.generate.received == 2 * MATRICES // 8 - 2 * MATRICES // 64
        assert rank.generate.kv_token == 2 * 80 * 128 * 2  # one of 8 heads, keys and values, bf16
        assert rank.generate.kv_block == 16 * rank.generate.kv_token
        free = 80 * 2**30 - rank.rest.total - rank.generate.slices
        assert rank.generate.kv_blocks == int(0.9 * free) // rank.generate.kv_block
        assert rank.generate.kv_pool == rank.generate.kv_blocks * rank.generate.kv_block
    assert plan.of_rank(63) is plan.tensor_ranks[7]


def test_peak_of_llama_70b_by_hand():
    settings = {"dtype": "bf16", "device_memory": 80 * 2**30}
    peak = memory_plan(llama_70b(), 64, 8, zero=ZeroConfig(prefetch_bucket_size=0), **settings).worst.peak
    # Nothing is gathered ahead: the vocabularies and one layer, and the slice that it is gathered from.
    assert peak.gathered_numel == 2 * 32000 * 8192 + LAYER
    assert peak.gathered == 2 * (peak.gathered_numel + LAYER // 8)
    ahead = memory_plan(llama_70b(), 64, 8, **settings).worst.peak
    assert ahead.gathered_numel == peak.gathered_numel + LAYER
    # A layer ahead is more than a smaller limit leaves room for.
    narrow = memory_plan(llama_70b(), 64, 8, zero=ZeroConfig(max_live_parameters=2 * 10**9), **settings).worst.peak
    assert narrow.gathered_numel == peak.gathered_numel
    frozen = memory_plan(llama_70b(), 64, 8, optim=None, **settings).worst
    assert frozen.rest.masters == frozen.rest.optimizer_state == frozen.peak.gradients == 0
    assert frozen.peak.gathered == ahead.gathered


def test_stages_on_8_ranks_by_hand():
    config, matrices = LlamaConfig(num_hidden_layers=2), 2 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096
    everything = matrices + 5 * 4096
    by_stage = [memory_plan(config, 8, zero=ZeroConfig(stage=stage), dtype="bf16").worst for stage in (0, 1, 2, 3)]
    assert [rank.rest.whole for rank in by_stage] == [2 * everything] * 3 + [2 * 5 * 4096]
    assert [rank.rest.shards for rank in by_stage] == [0, 0, 0, 2 * matrices // 8]
    assert [rank.rest.masters for rank in by_stage] == [4 * everything] + [4 * everything // 8] * 3
    assert [rank.rest.optimizer_state for rank in by_stage] == [8 * everything] + [8 * everything // 8] * 3
    assert [rank.peak.gathered > 0 for rank in by_stage] == [False] * 3 + [True]
    # Whole in fp32 until the step, which adds to a whole sum at stage 0 and to a shard at stage 1.
    gradients = [rank.peak.gradients for rank in by_stage]
    assert gradients[0] >= gradients[1] >= 4 * everything > gradients[2] >= 4 * everything // 8
    fp32 = memory_plan(config, 8, dtype=torch.float32).worst
    assert fp32.rest.masters == 0
    assert fp32.rest.shards == 4 * matrices // 8


def test_uneven_ranks_and_the_worst_one():
    plan = memory_plan(tiny_config(), 2, 2, dtype="fp32", zero=ZeroConfig(persistence_threshold=100))
    first, second = plan.tensor_ranks  # 2 and 1 of 3 key/value heads
    assert (first.generate.kv_token, second.generate.kv_token) == (2 * 2 * 2 * 8 * 4, 2 * 2 * 1 * 8 * 4)
    assert first.generate.kv_blocks == second.generate.kv_blocks == 2**30 // first.generate.kv_block
    assert first.rest.shards > second.rest.shards
    assert first.generate.slices == first.generate.received == 0  # the shard is the slice
    assert plan.worst is first


STATE_ARGUMENTS = [
    ("adam", "amsgrad=True"),
    ("adamw", "amsgrad=True"),
    ("adamw", "amsgrad=False"),
    ("sgd", "momentum=0.9,nesterov=True"),
    ("sgd", "momentum=0.0"),
    ("rmsprop", "centered=True,momentum=0.9"),
]


@pytest.mark.parametrize(("name", "arguments"), [*((name, None) for name in _CLASSES), *STATE_ARGUMENTS])
def test_state_tensors_are_those_that_torch_keeps(name, arguments):
    config = OptimConfig(optimizer=name, optim_args=arguments)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = make_factory(config)([{"params": [parameter]}])
    parameter.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state[parameter].values()
    shaped = [value for value in state if isinstance(value, torch.Tensor) and value.shape == parameter.shape]
    assert _num_state_tensors(config) == len(shaped)
    assert _STATE_TENSORS.keys() == _CLASSES.keys()


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operations make, now and at most."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.most = {}, 0, 0

    def _freed(self, key):
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not torch.is_tensor(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_is_what_the_logprobs_work_with(dtype):
    config = tiny_config(vocab_size=5000, hidden_size=96)
    planned = memory_plan(config, 1, dtype=dtype, max_tokens_per_microbatch=300).worst.head
    hidden = torch.randn(300, 96).to(dtype).requires_grad_()
    weight = torch.randn(5000, 96).to(dtype).requires_grad_()
    with Allocations() as allocations:
        logprobs, _ = linear_logprob_entropy(hidden, weight, torch.arange(300))
        torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert 0.9 * planned <= allocations.most <= 1.05 * planned


def test_from_a_file_or_a_directory_without_weights(tmp_path):
    llama_70b().save_pretrained(tmp_path)
    expected = memory_plan(llama_70b(), 8, 8, dtype="bf16")
    assert memory_plan(tmp_path, 8, 8, dtype="bf16") == expected
    assert memory_plan(str(tmp_path / "config.json"), 8, 8, dtype="bf16") == expected


def test_the_configuration_is_left_alone():
    config = tiny_config()
    before = config.to_dict()
    memory_plan(config, 4, 2, dtype="bf16")
    assert config.to_dict() == before


def test_a_pool_that_is_set_and_one_that_does_not_fit():
    config, inference = tiny_config(), InferenceConfig(kv_blocks=7, block_size=8)
    generate = memory_plan(config, 1, dtype="fp32", inference=inference).worst.generate
    assert (generate.kv_blocks, generate.max_tokens, generate.kv_pool) == (7, 56, 7 * 8 * 2 * 2 * 3 * 8 * 4)
    assert memory_plan(config, 1, dtype="fp32", device_memory=1000).worst.generate.kv_blocks == 0


@pytest.mark.parametrize(
    ("model", "grid", "message"),
    [
        (tiny_config(), (4, 3), "tp_size=3 does not divide the world of 4 ranks; set --tp_size to one of 1, 2, 4"),
        (tiny_config(), (0, 1), "world_size=0 is too small"),
        (tiny_config(), (8, 8), "tp_size 8 is more than the 6 query heads of llama; set --tp_size to at most 6"),
        (T5Config(), (1, 1), "t5 has no causal language model"),
        (MambaConfig(), (1, 1), "mamba: .* so it can neither be trained nor generate here"),
        (GPT2Config(), (2, 0), "tp_size=0 is too small"),
        ("/nowhere/at-all", (1, 1), "there is no such directory; a memory plan needs no more of it"),
        (__file__, (1, 1), "is no configuration of a model"),
    ],
)
def test_mistakes(model, grid, message):
    with pytest.raises(ValueError, match=message):
        memory_plan(model, *grid)


def test_script(tmp_path, capsys):
    tiny_config().save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--world_size", "4", "--tp_size", "2", "--dtype", "fp32", "--zero_stage", "2"]
    script.main([*words, "--gpu_memory_gb", "1", "--kv_block_size", "8", "--no_optim"])
    *table, last = capsys.readouterr().out.splitlines()
    text = "\n".join(table)
    assert "most: tensor rank 0" in text
    assert "Not counted: activations" in text
    assert "with 1 GiB, generation leaves" in text
    plan = json.loads(last)
    expected = memory_plan(
        tiny_config(),
        4,
        2,
        dtype="fp32",
        zero=ZeroConfig(stage=2),
        optim=None,
        inference=InferenceConfig(block_size=8),
        device_memory=2**30,
    )
    assert plan == json.loads(json.dumps(expected.to_dict()))
    assert plan["tensor_ranks"][1]["train_total"] == expected.tensor_ranks[1].train_total


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world_size", "4", "--tp_size", "3"], "error: tp_size=3 does not divide the world of 4 ranks"),
        (["--world_size", "8", "--tp_size", "8"], "error: tp_size 8 is more than the 6 query heads of llama"),
        (["--modle", "x"], "error: unknown flag --modle; did you mean --model?"),
    ],
)
def test_mistakes_of_the_script(words, message, tmp_path, capsys):
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        script.main(["--model", str(tmp_path), *words])
    assert message in capsys.readouterr().err
