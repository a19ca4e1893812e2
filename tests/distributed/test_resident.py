"""Frozen models rest as shards at every stage, and score a block of micro-batches on weights that are gathered once."""

import warnings
from functools import cache

import pytest
import torch
from transformers import LlamaForCausalLM

from hybrid.config import InferenceConfig, OptimConfig, ZeroConfig
from hybrid.engine import FlipError, HybridEngine
from hybrid.models.plans import tensor_parallel_plan
from hybrid.parallel import DivergenceError, init_parallel
from hybrid.zero.level import Level, LevelError
from hybrid.zero.model import ShardedModel
from tests.distributed.sharded import LAYERS, batch, make_model, tokens
from tests.distributed.test_memory_plan_world import weight_bytes
from tests.distributed.world import run_world
from tests.tiny import tiny_config

MICRO_BATCHES = 4


def make_frozen(stage, tp_size=1, **zero):
    mesh, module = init_parallel(tp_size), make_model()
    settings = ZeroConfig(**{"stage": stage, "persistence_threshold": 0, **zero})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the settings of stage 3 mean something here
        return ShardedModel(module, mesh, zero=settings, plan=tensor_parallel_plan(module, tp_size))


@cache
@torch.no_grad()
def plain_scores(rank):
    torch.manual_seed(0)
    plain = LlamaForCausalLM(tiny_config(num_hidden_layers=LAYERS)).eval()
    batches = [tokens(step, rank) for step in range(MICRO_BATCHES)]
    return [plain(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).flatten() for ids in batches]


@torch.no_grad()
def score(model, step):
    return model.logprobs(batch(step, model.mesh.rank)).logprobs


def check_scores(model):
    for step, expected in enumerate(plain_scores(model.mesh.rank)):
        torch.testing.assert_close(score(model, step), expected, atol=2e-5, rtol=1e-4)


def is_at_rest(model):
    return all(group.level is group.resting and not group.holders for group in model.groups)


def scores_equal_the_plain_modules(tp_size, stages):
    for stage in stages:
        model = make_frozen(stage, tp_size, persistence_threshold=100)
        check_scores(model)
        assert is_at_rest(model)
        with model.resident():
            check_scores(model)
        assert is_at_rest(model)
        check_scores(model)


@pytest.mark.parametrize(("world_size", "tp_size", "stages"), [(2, 1, (0, 1, 2, 3)), (4, 2, (1,))])
def test_scores_are_the_plain_modules_at_every_stage(tmp_path, world_size, tp_size, stages):
    run_world(scores_equal_the_plain_modules, world_size, tmp_path, tp_size, stages)


def what_a_block_holds_and_moves():
    total = sum(parameter.nbytes for parameter in make_model().parameters())
    for stage in (0, 1, 3):
        model = make_frozen(stage)
        mesh, groups = model.mesh, model.groups
        assert all(group.resting is Level.SHARD for group in groups)
        rests = weight_bytes(groups)
        assert rests == total // 2
        before = mesh.bytes_received
        with model.resident():
            for step in range(MICRO_BATCHES):
                score(model, step)
                with model.resident():  # changes nothing
                    pass
                assert weight_bytes(groups) == (rests if stage == 3 else total + rests)
        gathers = MICRO_BATCHES if stage == 3 else 1
        assert mesh.bytes_received - before == gathers * (total - rests)
        assert weight_bytes(groups) == rests and is_at_rest(model)


def test_a_block_gathers_once_and_frees_it_all(tmp_path):
    run_world(what_a_block_holds_and_moves, 2, tmp_path)


def test_one_rank_holds_one_copy_anyhow():
    total = sum(parameter.nbytes for parameter in make_model().parameters())
    for stage in (1, 3):
        model = make_frozen(stage)
        pointers = [parameter.data_ptr() for parameter in model.module.parameters()]
        with model.resident():
            check_scores(model)
            assert weight_bytes(model.groups) == total
        assert [parameter.data_ptr() for parameter in model.module.parameters()] == pointers
        assert weight_bytes(model.groups) == total


# -- what goes wrong ------------------------------------------------------------------------------------------------


def fail(*_):
    raise KeyboardInterrupt


def exceptions_leave_all_at_rest():
    model = make_frozen(1)
    rests = weight_bytes(model.groups)
    # in the middle of a forward, with the next layer under way
    handle = model.module.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt), model.resident():
        score(model, 0)
    handle.remove()
    assert is_at_rest(model) and weight_bytes(model.groups) == rests
    # in a block inside, which the outer one outlives
    with model.resident():
        with pytest.raises(KeyboardInterrupt), model.resident():
            fail()
        received = model.mesh.bytes_received
        check_scores(model)
        check_scores(model)
        assert model.mesh.bytes_received == received + rests  # half of the weights came from the other rank
    # on one rank, after the last forward
    try:
        with model.resident():
            check_scores(model)
            if model.mesh.rank == 1:
                fail()
    except KeyboardInterrupt:
        pass
    assert is_at_rest(model) and weight_bytes(model.groups) == rests
    with model.resident():
        check_scores(model)
    # one rank is not in the block
    call = model.resident().__enter__ if model.mesh.rank == 0 else lambda: score(model, 0)
    with pytest.raises(DivergenceError, match=r"rank 0 in resident\(\) of .*, rank 1 in a forward of"):
        call()
    assert is_at_rest(model)
    check_scores(model)


def test_an_exception_leaves_all_at_rest(tmp_path):
    run_world(exceptions_leave_all_at_rest, 2, tmp_path)


def what_a_block_refuses():
    model = make_frozen(2)
    norm = "model.norm.weight"
    with model.resident():
        score(model, 0)
        with pytest.raises(LevelError, match=r"gathered\(\) inside resident\(\); leave that block first"):
            model.gathered(norm).__enter__()
    with model.gathered(norm, write=True) as tensors:
        tensors[norm].fill_(2.0)
    handle = model.module.model.layers[0].register_forward_hook(lambda *_: model.resident().__enter__())
    with pytest.raises(LevelError, match=r"resident\(\) inside a forward"):
        score(model, 0)
    handle.remove()
    model.settle()
    with model.resident():
        assert torch.isfinite(score(model, 0)).all()

    module = make_model()
    engine = HybridEngine(module, None, model.mesh, zero=ZeroConfig(stage=1), inference=InferenceConfig(kv_blocks=8))
    with engine.model.resident(), pytest.raises(FlipError, match="rolled back to TRAIN"):
        engine.generate_mode()
    with engine.generate_mode(), pytest.raises(LevelError, match="flip to TRAIN first"):
        engine.model.resident().__enter__()


def test_what_does_not_go_with_a_block_is_refused(tmp_path):
    run_world(what_a_block_refuses, 2, tmp_path)


def trained_models_ignore_it():
    mesh = init_parallel()
    for stage in (1, 3):
        model = ShardedModel(make_model(), mesh, zero=ZeroConfig(stage=stage), optim=OptimConfig())
        with model.resident():
            model.backward(model.loss(batch(0, mesh.rank)))
            model.step()
        assert is_at_rest(model)


def test_a_model_that_is_trained_may_have_it_around_a_step(tmp_path):
    run_world(trained_models_ignore_it, 2, tmp_path)
