"""What ZeRO computes in and with: dtypes, loss scales, optimizers, frozen parts, snapshots of its state."""

import pytest
import torch
from transformers import get_scheduler

from hybrid.config import OptimConfig, ZeroConfig
from hybrid.models.fused_layers import fuse_layers
from hybrid.parallel import init_parallel
from hybrid.zero.model import ShardedModel
from tests.distributed.sharded import batch, make_model, sharded, tokens, train
from tests.distributed.world import run_world

# -- dtypes ---------------------------------------------------------------------------------------------------------


def fp16_trains_and_skips():
    optim = OptimConfig(learning_rate=1e-3, initial_scale_power=10, loss_scale_window=2, hysteresis=1)
    model = sharded(optim=optim, dtype=torch.float16)
    wide = sharded(optim=optim)
    scale = model.optimizer.loss_scale
    for step in range(3):
        ids = batch(step, model.mesh.rank)
        for each in (model, wide):
            each.backward(each.loss(ids))
        report, expected = model.step(), wide.step()
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=2e-2) and not report.skipped
    assert scale.value == 2**11  # doubled after two good steps
    assert all(group.master.dtype == torch.float32 for group in model.groups)
    # One rank overflows; both skip.
    before = [group.master.data.clone() for group in model.groups]
    version = model.weights_version
    loss = model.loss(batch(3, model.mesh.rank))
    model.backward(loss * (1e38 if model.mesh.rank == 1 else 1.0))
    report = model.step()
    assert report.skipped and scale.value == 2**10 and model.weights_version == version
    assert all(torch.equal(a, g.master) for a, g in zip(before, model.groups, strict=True))
    model.backward(model.loss(batch(3, model.mesh.rank)))
    assert not model.step().skipped
    # As low as it goes, an overflow is something else.
    scale.value = 1.0
    model.backward(model.loss(batch(3, model.mesh.rank)) * float("nan"))
    with pytest.raises(FloatingPointError, match=r"the gradient of \S+ is not finite"):
        model.step()


def test_fp16_scales_its_loss_and_skips_on_every_rank(tmp_path):
    run_world(fp16_trains_and_skips, 2, tmp_path)


def reduce_dtypes():
    norms = [train(sharded(dtype=torch.bfloat16, reduce_dtype=dtype), 1)[0] for dtype in ("auto", "fp32")]
    exact = train(sharded(), 1)[0]
    assert norms == pytest.approx([exact, exact], rel=2e-2)
    model = sharded(dtype=torch.bfloat16, reduce_dtype="fp32")
    seen = []
    original = model.mesh.reduce_scatter
    model.mesh.reduce_scatter = lambda buffer, *a, **k: (seen.append(buffer.dtype), original(buffer, *a, **k))[1]
    train(model, 1)
    assert set(seen) == {torch.float32}


def test_gradients_are_reduced_in_fp32_if_asked(tmp_path):
    run_world(reduce_dtypes, 2, tmp_path)


def wider_checkpoint_reaches_the_masters():
    """bf16 compute from fp32 weights: masters hold what the checkpoint holds."""
    from hybrid.models.source import ModuleWeights

    mesh = init_parallel()
    wide = make_model()
    module = make_model().to(torch.bfloat16)
    model = ShardedModel(module, mesh, zero=ZeroConfig(), optim=OptimConfig(), weights=ModuleWeights(wide))
    expected = dict(make_model().named_parameters())
    for group in model.groups:
        assert group.shard.dtype == torch.bfloat16
        for name, master in group.gather_whole(group.master.data).items():
            assert torch.equal(master, expected[name].data)


def test_masters_keep_the_precision_of_the_checkpoint(tmp_path):
    run_world(wider_checkpoint_reaches_the_masters, 2, tmp_path)


# -- optimizers -----------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": ("momentum=0.9,nesterov=True", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True)),
    "adam": (None, lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.9, 0.95))),
    "rmsprop": (None, lambda p: torch.optim.RMSprop(p, lr=1e-2)),
    "adagrad": (None, lambda p: torch.optim.Adagrad(p, lr=1e-2)),
    "adadelta": (None, lambda p: torch.optim.Adadelta(p, lr=1e-2)),
    "adamax": (None, lambda p: torch.optim.Adamax(p, lr=1e-2, betas=(0.9, 0.95))),
    "nadam": (None, lambda p: torch.optim.NAdam(p, lr=1e-2, betas=(0.9, 0.95))),
    "radam": (None, lambda p: torch.optim.RAdam(p, lr=1e-2, betas=(0.9, 0.95))),
    "asgd": (None, lambda p: torch.optim.ASGD(p, lr=1e-2)),
    "rprop": (None, lambda p: torch.optim.Rprop(p, lr=1e-2)),
}


def optimizers_equal_torch():
    mesh = init_parallel()
    for name, (arguments, factory) in OPTIMIZERS.items():
        plain = make_model()
        fuse_layers(plain)  # rounds as the other does
        optimizer = factory(list(plain.parameters()))
        optim = OptimConfig(optimizer=name, optim_args=arguments, learning_rate=1e-2, max_grad_norm=0.0)
        model = sharded(optim=optim, sub_group_size=1)
        for step in range(2):
            for rank in range(mesh.world_size):
                ids = tokens(step, rank)
                (plain(ids, labels=ids).loss / mesh.world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
            ids = tokens(step, mesh.rank)
            model.backward(model.module(ids, labels=ids).loss)
            model.step()
        expected = dict(plain.named_parameters())
        for parameter, weight in model.state.stream():
            # Signs of gradients near zero are rounding: what divides by their size turns it into a step.
            close = (weight - expected[parameter].data).abs() < 2e-4
            assert close.float().mean() > 0.98, (name, parameter)


def test_elementwise_optimizers_equal_torch(tmp_path):
    run_world(optimizers_equal_torch, 2, tmp_path)


def what_cannot_run_on_shards():
    with pytest.raises(ValueError, match="Adafactor looks at whole matrices"):
        sharded(optimizer=lambda params: torch.optim.Adafactor(params))
    with pytest.raises(ValueError, match=r"optim_args: 'momentun=0.9' is no argument of sgd; write name=value"):
        sharded(optim=OptimConfig(optimizer="sgd", optim_args="momentun=0.9"))
    model = sharded(optimizer=lambda params: torch.optim.SGD(params, lr=0.5))
    assert type(model.optimizer.torch_optimizer) is torch.optim.SGD
    module = make_model().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        ShardedModel(module, init_parallel(), zero=ZeroConfig(), optim=OptimConfig())


def test_optimizers_that_need_whole_matrices_are_refused(tmp_path):
    run_world(what_cannot_run_on_shards, 2, tmp_path)


def schedules_equal_transformers():
    module = make_model()
    for name, text, arguments in [
        ("cosine_with_min_lr", "min_lr_rate=0.1", {"min_lr_rate": 0.1}),
        ("cosine_with_restarts", "num_cycles=2", {"num_cycles": 2}),
        (
            "warmup_stable_decay",
            "num_decay_steps=2,decay_type='cosine'",
            {"num_decay_steps": 2, "decay_type": "cosine"},
        ),
        ("polynomial", "power=2.0,lr_end=1e-5", {"power": 2.0, "lr_end": 1e-5}),
        ("linear", None, {}),
    ]:
        optim = OptimConfig(learning_rate=1e-3, warmup_steps=1, lr_scheduler=name, lr_scheduler_kwargs=text)
        model = sharded(optim=optim)
        with pytest.raises(ValueError, match="needs the number of steps"):
            model.step()
        model.set_schedule(6)
        plain = torch.optim.AdamW(module.parameters(), lr=1e-3)
        schedule = get_scheduler(name, plain, 1, 6, arguments)
        for step in range(4):
            model.backward(model.loss(batch(step, 0)))
            assert model.step().lr == pytest.approx(plain.param_groups[0]["lr"], abs=1e-12), name
            plain.step()
            schedule.step()
    with pytest.raises(ValueError, match=r"lr_scheduler 'polynomial': .* set lr_scheduler_kwargs"):
        sharded(optim=OptimConfig(lr_scheduler="polynomial", lr_scheduler_kwargs="lr_end=1.0")).set_schedule(6)
    with pytest.raises(ValueError, match=r"lr_scheduler_kwargs: 'power=2' is no argument of linear; it takes none"):
        sharded(optim=OptimConfig(lr_scheduler="linear", lr_scheduler_kwargs="power=2")).set_schedule(6)


def test_schedules_equal_transformers(tmp_path):
    run_world(schedules_equal_transformers, 1, tmp_path)


def partly_frozen():
    mesh = init_parallel()
    plain, module = make_model(), make_model()
    for model in (plain, module):
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[1].requires_grad_(False)
        model.model.layers[3].mlp.up_proj.requires_grad_(False)
    model = ShardedModel(module, mesh, zero=ZeroConfig(persistence_threshold=0), optim=OptimConfig(max_grad_norm=0.0))
    for rank in range(mesh.world_size):
        ids = tokens(0, rank)
        (plain(ids, labels=ids).loss / mesh.world_size).backward()
    ids = tokens(0, mesh.rank)
    model.backward(module(ids, labels=ids).loss)
    expected = dict(plain.named_parameters())
    for group in model.groups:
        assert (group.master is not None) == group.trainable
        if group.trainable:
            for name, grad in group.gather_whole(group.grad).items():
                torch.testing.assert_close(grad, expected[name].grad, atol=1e-6, rtol=1e-4, msg=name)
    model.step()


def test_partly_frozen_models_train_the_rest(tmp_path):
    run_world(partly_frozen, 2, tmp_path)


# -- snapshots ------------------------------------------------------------------------------------------------------


def snapshots():
    """The same snapshot twice gives the same weights, and one from before the first step begins the moments anew."""
    model = sharded()

    def snapshot():
        return {name: value.clone() for group in model.optimizer_state() for name, value in group.items()}

    def masters():
        return [group.master.data.clone() for group in model.groups]

    fresh = snapshot()
    train(model)
    first, seen = masters(), snapshot()
    model.load_optimizer_state(fresh, 0)
    train(model)
    assert all(torch.equal(a, b) for a, b in zip(first, masters(), strict=True))
    reruns = []
    for _ in range(2):
        model.load_optimizer_state(seen, 2)
        train(model)
        reruns.append(masters())
    assert all(torch.equal(a, b) for a, b in zip(*reruns, strict=True))
    # A group that never had a gradient has no state to load.
    partial = {name: value for name, value in seen.items() if not name.startswith("model.embed_tokens.weight#")}
    model.load_optimizer_state(partial, 2)
    train(model, 1)


def test_snapshots_load_any_number_of_times(tmp_path):
    run_world(snapshots, 2, tmp_path)
