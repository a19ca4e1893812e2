"""The average of the weights is torch's AveragedModel on a plain loop, at every stage and grid, and after a resume."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM

from hybrid.checkpoint import load_checkpoint, save_checkpoint
from hybrid.config import InferenceConfig, OptimConfig, ZeroConfig
from hybrid.engine import HybridEngine
from hybrid.models.attention import ATTENTION_NAME
from hybrid.models.fused_layers import fuse_layers
from hybrid.models.plans import tensor_parallel_plan
from hybrid.parallel import init_parallel
from hybrid.zero.model import ShardedModel
from tests.distributed import sharded as tiny
from tests.distributed.test_checkpoint import make, train
from tests.distributed.test_zero import make_model, tokens
from tests.distributed.world import run_world

DECAY = 0.8
OPTIM = OptimConfig(learning_rate=1e-2, max_grad_norm=0.0)
NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
FROZEN = "model.layers.0.mlp.up_proj.weight"


def plain_loop(world_size, **overrides):
    """One process, all ranks' data, averaged from after the first step on: (average, weights)."""
    model = make_model(**overrides)
    fuse_layers(model)  # or Adam would make steps of how differently gradients near 0 are rounded
    model.get_parameter(FROZEN).requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=OPTIM.learning_rate, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=0.0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(4):
        for rank in range(world_size):
            ids = tokens(step, 0, rank)
            (model(ids, labels=ids).loss / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)  # whose first call copies
    return dict(average.module.named_parameters()), dict(model.named_parameters())


def averages_like_the_plain_loop(tp_size, cases):
    for zero, tied in cases:
        mesh, overrides = init_parallel(tp_size), {"tie_word_embeddings": tied}
        module = make_model(**overrides)
        module.get_parameter(FROZEN).requires_grad_(False)
        model = ShardedModel(module, mesh, zero=zero, optim=OPTIM, plan=tensor_parallel_plan(module, tp_size))
        received = []
        for step in range(4):
            ids = tokens(step, 0, mesh.rank)
            model.backward(module(ids, labels=ids).loss)
            before = mesh.bytes_received
            model.step()
            received.append(mesh.bytes_received - before)
            if step == 0:
                model.keep_average(DECAY)
        assert len(set(received)) == 1  # nothing travels for the average
        expected, weights = plain_loop(mesh.world_size, **overrides)
        found = dict(model.state.stream("average"))
        assert found.keys() == expected.keys()
        for name, average in found.items():
            assert average.dtype == torch.float32
            torch.testing.assert_close(average, expected[name].data, atol=1e-5, rtol=1e-4, msg=name)
        assert (found[QUERY] - weights[QUERY].data).abs().max() > 1e-3
        assert torch.equal(model.state.full(QUERY, "average"), found[QUERY])
        for group in model.groups:
            if group.master is not None:
                assert model.optimizer.state(group)["average"].shape == group.master.shape


def stage(number, **settings):
    return ZeroConfig(stage=number, **settings)


def test_the_average_is_torchs_on_one_rank():
    averages_like_the_plain_loop(1, [(stage(0), True), (stage(3), False)])


@pytest.mark.parametrize(
    ("world_size", "tp_size", "cases"),
    [
        (2, 1, [(stage(0), True), (stage(1), True), (stage(2), False), (stage(3, persistence_threshold=100), True)]),
        (4, 2, [(stage(3, persistence_threshold=0), True), (stage(1), False)]),
    ],
)
def test_the_average_is_torchs(tmp_path, world_size, tp_size, cases):
    run_world(averages_like_the_plain_loop, world_size, tmp_path, tp_size, cases)


# -- checkpoints ----------------------------------------------------------------------------------------------------


def interrupted(tp_size, directory):
    model = make(tp_size, 3)
    model.keep_average(DECAY)
    train(model, range(2))
    save_checkpoint(directory, {"actor": model}, {}, model.mesh)
    train(model, range(2, 4))
    return dict(model.state.stream("average"))


def resumed(tp_size, stage, directory):
    model = make(tp_size, stage)
    model.keep_average(DECAY)
    load_checkpoint(directory, {"actor": model})
    train(model, range(2, 4))
    return dict(model.state.stream("average"))


@pytest.mark.filterwarnings("ignore:persistence_threshold changes nothing")
def test_resuming_on_another_grid_equals_going_on(tmp_path):
    directory = tmp_path / "checkpoint-2"
    expected = run_world(interrupted, 2, tmp_path, 2, directory)[0]
    for found in (resumed(1, 0, directory), *run_world(resumed, 4, tmp_path, 2, 1, directory)):
        for name, average in found.items():
            torch.testing.assert_close(average, expected[name], atol=2e-6, rtol=1e-5, msg=name)


def test_a_checkpoint_with_an_average_that_is_not_kept_and_the_reverse(tmp_path, recwarn):
    plain, averaging = make(1, 3), make(1, 3)
    averaging.keep_average(DECAY)
    for model, name in ((plain, "plain"), (averaging, "averaging")):
        train(model, range(1))
        save_checkpoint(tmp_path / name, {"actor": model}, {}, model.mesh)
    load_checkpoint(tmp_path / "plain", {"actor": plain})
    load_checkpoint(tmp_path / "averaging", {"actor": averaging})
    assert not [warning for warning in recwarn if "average" in str(warning.message)]
    train(averaging, range(1, 3))
    with pytest.warns(UserWarning, match="holds no average of the weights; the one that is kept begins at the weights"):
        load_checkpoint(tmp_path / "plain", {"actor": averaging})
    assert torch.equal(averaging.state.full(QUERY, "average"), plain.state.full(QUERY))
    with pytest.warns(UserWarning, match=r"left out, since this model keeps none; call keep_average\(decay\) before"):
        load_checkpoint(tmp_path / "averaging", {"actor": plain})
    with pytest.raises(ValueError, match=r"no average of the weights is kept; call keep_average\(decay\)"):
        plain.state.full(QUERY, "average")
    train(plain, range(1, 2))


# -- models ---------------------------------------------------------------------------------------------------------


def save_both(directory):
    mesh = init_parallel(2)
    module = make_model()
    module.to(torch.bfloat16).set_attn_implementation(ATTENTION_NAME)
    engine = HybridEngine(
        module,
        None,
        mesh,
        zero=ZeroConfig(persistence_threshold=100),
        optim=OPTIM,
        inference=InferenceConfig(kv_blocks=8),
    )
    engine.keep_average(DECAY)
    for step in range(3):
        ids = tokens(step, 0, mesh.rank)
        engine.backward(module(ids, labels=ids).loss)
        engine.step()
    engine.save_pretrained(directory / "weights")
    with engine.generate_mode():
        engine.save_pretrained(directory / "average", what="average")
    return dict(engine.model.state.stream("average"))


def test_the_average_is_saved_as_a_model(tmp_path):
    averages = run_world(save_both, 2, tmp_path, tmp_path)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "average")
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    assert model.dtype == torch.bfloat16 and averages.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, averages[name].bfloat16()), name
    assert not torch.equal(model.get_parameter(QUERY), weights.get_parameter(QUERY))


# -- one rank -------------------------------------------------------------------------------------------------------


def test_a_step_that_fp16_skips_leaves_it_alone():
    optim = OptimConfig(learning_rate=1e-2, initial_scale_power=10, hysteresis=1)
    model = tiny.sharded(optim=optim, dtype=torch.float16)
    model.keep_average(DECAY)
    tiny.train(model, 1)
    before = dict(model.state.stream("average"))
    model.backward(model.loss(tiny.batch(1, 0)) * 1e38)
    assert model.step().skipped
    assert all(torch.equal(average, before[name]) for name, average in model.state.stream("average"))
    tiny.train(model, 1)
    assert not torch.equal(model.state.full(QUERY, "average"), before[QUERY])


def test_edits_of_masters_leave_it_and_it_can_be_edited():
    model = tiny.sharded()
    model.keep_average(0.0)
    average = model.state.full(NORM, "average")
    model.state.set_full(NORM, torch.full((48,), 3.0))
    with model.gathered(QUERY, write=True) as tensors:
        tensors[QUERY].zero_()
    assert torch.equal(model.state.full(NORM, "average"), average)
    model.state.set_full(NORM, torch.zeros(48), "average")
    assert model.state.full(NORM).unique().tolist() == [3.0]
    assert model.state.full(NORM, "average").unique().tolist() == [0.0]
    tiny.train(model, 1)  # with decay 0 the average is the last masters
    assert torch.equal(model.state.full(NORM, "average"), model.state.full(NORM))


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(ValueError, match="must be at least 0 and less than 1"):
        tiny.sharded().keep_average(decay)


def test_what_a_user_gets_wrong_is_said(tmp_path):
    model = tiny.sharded()
    with pytest.raises(ValueError, match="no average of the weights is kept"):
        model.save_pretrained(tmp_path / "model", what="average")
    with pytest.raises(ValueError, match="what='master' cannot be saved as a model; choose weights or average"):
        model.save_pretrained(tmp_path / "model", what="master")
    assert not (tmp_path / "model").exists()
    model.keep_average(0.9)
    model.keep_average(0.9)
    with pytest.raises(ValueError, match=r"is kept with decay=0\.9, and decay=0\.5 would be another one"):
        model.keep_average(0.5)
    with pytest.raises(ValueError, match="no exp_avg of .* before the first step"):
        model.state.full(NORM, "exp_avg")
    frozen = ShardedModel(make_model(), model.mesh, zero=ZeroConfig())
    with pytest.raises(ValueError, match="there is nothing to average"):
        frozen.keep_average(0.9)
    with pytest.raises(ValueError, match="no average of the weights is kept"):
        next(frozen.state.stream("average"))
