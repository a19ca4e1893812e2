"""Contract 7 for what is learnt from examples: the number of ranks changes nothing, nor does one without work."""

import random

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from hybrid.config import OptimConfig, ZeroConfig
from hybrid.data.conversations import Example, ExampleDataset, Pair
from hybrid.learning import DPOObjective, LearningTrainer, RewardObjective, SFTObjective
from hybrid.learning.preference import with_reference
from hybrid.learning_config import LearnConfig
from hybrid.models.attention import ATTENTION_NAME
from hybrid.parallel import init_parallel
from hybrid.zero.model import ShardedModel
from tests.distributed.world import run_world
from tests.tiny import tiny_config

KINDS = ("sft", "reward", "dpo")


def examples(number):
    draw = random.Random(0)
    for length in (draw.randint(2, 12) for _ in range(number)):
        scored = [False] + [True] * (length - 1)
        yield Example([draw.randrange(6, 262) for _ in range(length)], scored)


def make_trainer(kind):
    torch.manual_seed(0)
    family, settings = LlamaForCausalLM, {}
    if kind == "reward":
        family, settings = LlamaForSequenceClassification, {"num_labels": 1}
    module = family(tiny_config(**settings))
    module.set_attn_implementation(ATTENTION_NAME)
    zero = ZeroConfig(stage=3, persistence_threshold=0)
    model = ShardedModel(module, init_parallel(), zero=zero, optim=OptimConfig(learning_rate=1e-3))
    config = LearnConfig(examples_per_step=3, max_tokens_per_microbatch=24)
    if kind == "sft":
        data = ExampleDataset(list(examples(7)))
        return LearningTrainer(SFTObjective(model), data, data, config, num_examples=7)
    pairs = ExampleDataset([Pair(*two) for two in zip(examples(7), list(examples(14))[7:], strict=True)])
    if kind == "reward":
        return LearningTrainer(RewardObjective(model), pairs, pairs, config, num_examples=7)
    pairs = with_reference(pairs, model, 24)
    return LearningTrainer(DPOObjective(model), pairs, pairs, config, num_examples=7)


def learn():
    """Every metric that training decides. The last step has one example, so that most ranks have none."""
    lines = []
    for kind in KINDS:
        trainer = make_trainer(kind)
        trainer.callbacks = [lambda step, metrics: lines.append(metrics)]
        trainer.train(3)
    timed = ("timing_s/", "perf/")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_number_of_ranks_changes_nothing(tmp_path, world_size):
    alone = run_world(learn, 1, tmp_path)[0]
    together = run_world(learn, world_size, tmp_path)
    assert all(lines == together[0] for lines in together)
    for expected, line in zip(alone, together[0], strict=True):
        assert expected.keys() == line.keys()
        for name, value in line.items():
            assert value == pytest.approx(expected[name], rel=2e-3, abs=2e-4), name
