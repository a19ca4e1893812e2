"""Contract 6 for the engine: interrupted and resumed, on another grid and at another stage, equals uninterrupted."""

import pytest
import torch

from hybrid.checkpoint import drop_old_checkpoints, find_checkpoints, load_checkpoint, save_checkpoint
from hybrid.config import OptimConfig, ZeroConfig
from hybrid.models.plans import tensor_parallel_plan
from hybrid.parallel import init_parallel
from hybrid.zero.model import ShardedModel
from tests.distributed.test_zero import make_model, tokens
from tests.distributed.world import run_world

OPTIM = OptimConfig(learning_rate=1e-3, warmup_steps=2, lr_scheduler="cosine")


def make(tp_size, stage):
    mesh = init_parallel(tp_size)
    module = make_model()
    zero = ZeroConfig(stage=stage, persistence_threshold=100)
    model = ShardedModel(module, mesh, zero=zero, optim=OPTIM, plan=tensor_parallel_plan(module, tp_size))
    model.set_schedule(total_steps=6)
    return model


def train(model, steps):
    """The same global batch at any world size: 4 rows, dealt out."""
    for step in steps:
        rows = torch.cat([tokens(step, 0, row) for row in range(4)])
        mine = rows.chunk(model.mesh.world_size)[model.mesh.rank]
        model.backward(model.module(mine, labels=mine).loss)
        model.step()


def weights(model):
    return dict(model.state.stream())


def interrupted(tp_size, directory):
    model = make(tp_size, 3)
    train(model, range(2))
    save_checkpoint(directory, {"actor": model}, {"global_step": 2}, model.mesh)
    train(model, range(2, 4))
    return weights(model)


def resumed(tp_size, stage, directory):
    model = make(tp_size, stage)
    assert load_checkpoint(directory, {"actor": model}) == {"global_step": 2}
    assert model.weights_version == 2
    train(model, range(2, 4))
    return weights(model)


def test_resuming_on_another_grid_equals_going_on(tmp_path):
    directory = tmp_path / "run" / "checkpoint-2"
    expected = run_world(interrupted, 2, tmp_path, 2, directory)[0]
    assert find_checkpoints(directory.parent) == [directory]
    for world_size, tp_size, stage in [(2, 2, 3), (1, 1, 3), (4, 2, 3), (2, 1, 1), (2, 1, 0)]:
        for found in run_world(resumed, world_size, tmp_path, tp_size, stage, directory):
            for name, weight in found.items():
                torch.testing.assert_close(weight, expected[name], atol=2e-6, rtol=1e-5, msg=name)


def test_what_is_no_checkpoint_of_these_models_is_refused(tmp_path):
    model = make(1, 3)
    with pytest.raises(ValueError, match=r"is no checkpoint \(it has no state\.json\)"):
        load_checkpoint(tmp_path, {"actor": model})
    save_checkpoint(tmp_path / "checkpoint-1", {"actor": model}, {}, model.mesh)
    with pytest.raises(ValueError, match="holds no critic; it has actor"):
        load_checkpoint(tmp_path / "checkpoint-1", {"critic": model})
    other = ShardedModel(make_model(hidden_size=24), model.mesh, zero=ZeroConfig(), optim=OPTIM)
    with pytest.raises(ValueError, match="resume with the model that was saved"):
        load_checkpoint(tmp_path / "checkpoint-1", {"actor": other})


def test_only_complete_checkpoints_are_found_and_old_ones_dropped(tmp_path):
    for step in (2, 10, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "state.json").touch()
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-12.partial").mkdir()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-9", "checkpoint-10"]
    drop_old_checkpoints(tmp_path, 2)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
