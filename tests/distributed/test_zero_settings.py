"""What ZeRO's settings promise: how much is gathered when, how often, in what dtype, and by which optimizer."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

import hybrid.parallel
from hybrid.config import OptimConfig, ZeroConfig
from hybrid.models.attention import ATTENTION_NAME
from hybrid.models.plans import tensor_parallel_plan
from hybrid.models.ragged import RaggedBatch
from hybrid.parallel import DivergenceError, init_parallel
from hybrid.zero.level import Level
from hybrid.zero.model import ShardedModel
from tests.distributed.world import WorldError, run_world
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


# -- how often ------------------------------------------------------------------------------------------------------


class Counter:
    """Counts what a model's groups gather and reduce."""

    def __init__(self, model):
        self.gathers, self.reductions = {}, {}
        for group in model.groups:
            if group.resting is Level.SHARD:
                self._count(group, "_fill_slice", self.gathers)
                self._count(group, "start_reduction", self.reductions)

    def _count(self, group, method, counts):
        original = getattr(group, method)

        def counted(*args, **kwargs):
            busy = method != "start_reduction" or group._whole_sum is not None
            counts[group.name] = counts.get(group.name, 0) + busy
            return original(*args, **kwargs)

        setattr(group, method, counted)

    def per_unit(self, model, counts):
        return {g.plan.unit: counts.get(g.name, 0) for g in model.groups if g.resting is Level.SHARD}


def a_step_gathers_twice(tp_size, keep_slices):
    model = sharded(tp_size, keep_slices=keep_slices)
    train(model, 1)
    counter = Counter(model)
    train(model, 1)
    gathers = counter.per_unit(model, counter.gathers)
    last = f"model.layers.{LAYERS - 1}"
    assert gathers.pop("root") == 1  # used at both ends of a pass, so kept between
    assert gathers.pop(last) == 1  # its backward follows its forward at once
    assert set(gathers.values()) == {1 if keep_slices else 2}, gathers
    assert set(counter.per_unit(model, counter.reductions).values()) == {1}


@pytest.mark.parametrize(("world_size", "tp_size", "keep"), [(2, 1, False), (4, 2, False), (4, 2, True)])
def test_a_step_gathers_each_group_in_the_forward_and_once_more_in_the_backward(tmp_path, world_size, tp_size, keep):
    run_world(a_step_gathers_twice, world_size, tmp_path, tp_size, keep)


def one_reduction_a_boundary(stage):
    model = sharded(stage=stage)
    calls = []
    for name in ("reduce_scatter", "start_all_reduce"):
        original = getattr(model.mesh, name)
        setattr(model.mesh, name, lambda *a, _original=original, **k: (calls.append(1), _original(*a, **k))[1])
    for step in range(3):
        model.backward(model.loss(batch(step, model.mesh.rank)) / 3)
    during = len(calls)
    model.step()
    boundary = len(calls) - during - (stage > 0) - (stage < 2)  # the norm's, and who has gradients
    groups = len(model.groups)
    assert (during, boundary) == ((0, groups) if stage < 2 else (3 * groups, 0))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_are_reduced_once_a_step_where_the_stage_allows_it(tmp_path, stage):
    run_world(one_reduction_a_boundary, 2, tmp_path, stage)


class Copied(TorchDispatchMode):
    """Counts elements that are copied, put together or cast."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("copy_", "cat", "clone", "_to_copy", "stack", "contiguous", "split_with_sizes_copy"):
            self.numel += result.numel()
        return result


def nothing_is_packed(tp_size):
    model = sharded(tp_size)
    for group in model.groups:
        if group.resting is not Level.SHARD:
            continue
        layout, index = group.layout, group._slicing.index
        with Copied() as copied:
            group.wait_full()
        pieces = layout.piece_numel(index) if layout.num_pieces > 1 else 0
        slices = layout.slice_offsets(index)[-1] if layout.num_slices > 1 else 0
        assert copied.numel == pieces + slices, group.name  # its own part is put in place, once a level
        group.release()
        group._whole_sum = torch.ones(layout.full_offsets[-1] if layout.num_slices > 1 else layout.slice_numel(0))
        with Copied() as copied:
            group.start_reduction()
            group.finish_reduction()
        assert copied.numel == 0, group.name


@pytest.mark.parametrize(("world_size", "tp_size"), [(2, 1), (2, 2), (4, 2)])
def test_collectives_land_in_place(tmp_path, world_size, tp_size):
    run_world(nothing_is_packed, world_size, tmp_path, tp_size)


def a_module_that_one_rank_runs(stage):
    """The head of the last layer's input on one rank alone: its gradients are summed with zeros."""
    model = sharded(stage=stage)
    ids = tokens(0, 0)
    if model.mesh.rank == 0:
        model.backward(model.module(ids, labels=ids).loss, reduction="sum")
    else:
        hidden = model.module.get_input_embeddings()(ids)
        model.backward(hidden.sum() * 0.0, reduction="sum")
    norm = model.step().grad_norm
    plain = make_model()
    plain(ids, labels=ids).loss.backward()
    grads = [parameter.grad.flatten() for parameter in plain.parameters()]
    assert norm == pytest.approx(torch.cat(grads).norm().item(), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_module_that_ran_on_one_rank_only_is_stepped_everywhere(tmp_path, stage):
    run_world(a_module_that_one_rank_runs, 2, tmp_path, stage)


# -- how much -------------------------------------------------------------------------------------------------------


def live_elements(settings):
    """The most elements gathered at once during a step, and the model's sizes."""
    model = sharded(**settings)
    most = 0
    for group in model.groups:
        original = group.start_full

        def watched(original=original):
            nonlocal most
            original()
            most = max(most, model.schedule.live_numel)

        group.start_full = watched
    norms = train(model)
    layer = max(unit.numel for unit in model.schedule._layers)
    return most, model.schedule._root.numel, layer, norms


def test_live_elements_obey_the_settings(tmp_path):
    def live(**settings):
        return run_world(live_elements, 2, tmp_path, settings)[0]

    in_time, root, layer, norms = live(prefetch_bucket_size=0)
    # Each layer is gathered when its neighbour has been let go, but for the last, which turns around.
    assert in_time == root + layer
    ahead, *_ = live(prefetch_bucket_size=1)
    assert ahead == root + 2 * layer
    three_ahead, *_ = live(prefetch_bucket_size=3 * layer)
    assert three_ahead == root + 4 * layer
    capped, *_, same = live(prefetch_bucket_size=3 * layer, max_live_parameters=root + 2 * layer)
    assert capped == root + 2 * layer and same == pytest.approx(norms, rel=1e-6)
    kept, *_, same = live(max_reuse_distance=10**9)
    assert kept == root + LAYERS * layer and same == pytest.approx(norms, rel=1e-6)
    both, *_, same = live(max_reuse_distance=10**9, max_live_parameters=root + 3 * layer)
    assert both == root + 3 * layer and same == pytest.approx(norms, rel=1e-6)


def reuse_saves_gathers():
    model = sharded(max_reuse_distance=10**9)
    train(model, 1)
    counter = Counter(model)
    model.backward(model.loss(batch(0, model.mesh.rank)))
    model.backward(model.loss(batch(1, model.mesh.rank)))
    model.step()
    gathers = counter.per_unit(model, counter.gathers)
    assert gathers.pop("root") == 2  # the embedding is let go after each backward
    assert set(gathers.values()) == {1}
    assert model.schedule.live_numel == 0  # the step has changed the weights
    train(model, 1)


def test_layers_within_the_reuse_distance_stay_gathered_until_the_step(tmp_path):
    run_world(reuse_saves_gathers, 2, tmp_path)


def order_is_recorded():
    """Layers that run in another order than they are registered in are prefetched in the order in which they run."""
    model = sharded(prefetch_bucket_size=1)
    layers = model.module.model.layers
    model.module.model.layers = torch.nn.ModuleList(reversed(layers))
    for number, layer in enumerate(model.module.model.layers):
        layer.self_attn.layer_idx = number
    train(model, 1)
    assert [unit.module for unit in model.schedule._order] == list(model.module.model.layers)
    with torch.no_grad():
        model.logprobs(batch(0, model.mesh.rank))
    for group in model.groups:  # a flip
        group.enter_slice()
    model.settle()
    assert [unit.module for unit in model.schedule._order] == list(model.module.model.layers)


def test_the_prefetch_order_is_the_one_in_which_layers_ran(tmp_path):
    run_world(order_is_recorded, 2, tmp_path)


# -- activation checkpointing ---------------------------------------------------------------------------------------


def recomputed_equals_kept(tp_size):
    saved, results = {}, {}
    for what in ("none", "selective", "full"):
        model = sharded(tp_size, gradient_checkpointing=what)
        storages = {}

        def pack(tensor, storages=storages):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model.loss(batch(0, model.mesh.rank))
        saved[what] = sum(storages.values())
        model.backward(loss)
        numbers = [loss.item(), model.step().grad_norm]
        ids = tokens(1, model.mesh.rank)
        model.backward(model.module(ids, labels=ids).loss)  # and a plain padded batch
        numbers.append(model.step().grad_norm)
        with torch.no_grad():
            numbers.append(float(model.logprobs(batch(2, model.mesh.rank)).logprobs.sum()))
        results[what] = numbers
    assert results["selective"] == pytest.approx(results["none"], rel=1e-5)
    assert results["full"] == pytest.approx(results["none"], rel=1e-5)
    assert saved["full"] < saved["none"] / 2  # what selective keeps is not autograd's; scripts/bench_train.py measures


@pytest.mark.parametrize(("world_size", "tp_size"), [(1, 1), (2, 1), (2, 2)])
def test_recomputed_activations_give_the_same_gradients(tmp_path, world_size, tp_size):
    run_world(recomputed_equals_kept, world_size, tmp_path, tp_size)


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
        for parameter, weight in model.full_parameters():
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


# -- ranks that part ------------------------------------------------------------------------------------------------


def fewer_micro_batches(model, rank):
    for step in range(2 - rank):
        model.backward(model.loss(batch(step, rank)))
    model.step()


def a_look_on_one_rank(model, rank):
    loss = model.loss(batch(0, rank))
    if rank == 0:
        with torch.no_grad():
            model.logprobs(batch(1, 0))
    model.backward(loss)


def models_in_another_order(model, rank):
    """Two models of one shape: their weights would be gathered from one another, and nothing would seem wrong."""
    other = ShardedModel(make_model(), model.mesh, zero=ZeroConfig(persistence_threshold=64))
    for each in (other, model) if rank else (model, other):
        each.loss(batch(0, rank))


def another_order(model, rank):
    layers = model.module.model.layers
    if rank == 1:
        model.module.model.layers = torch.nn.ModuleList([layers[1], layers[0], *layers[2:]])
    model.backward(model.loss(batch(0, rank)))


def a_layer_less(model, rank):
    layers = model.module.model.layers
    if rank == 1:
        model.module.model.layers = torch.nn.ModuleList([layers[0], *layers[2:]])
    model.backward(model.loss(batch(0, rank)))


def parts(fn, message):
    model = sharded(prefetch_bucket_size=0)
    hybrid.parallel._PATIENCE_S = 0.5
    with pytest.raises(DivergenceError, match=message):
        fn(model, model.mesh.rank)
    # What was reduced from other layers' gradients is dropped, and not applied by the next step.
    assert all(group.grad is None for group in model.groups)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (fewer_micro_batches, "rank 0 in a forward of LlamaForCausalLM#1, rank 1 in a step of LlamaForCausalLM#1"),
        (a_look_on_one_rank, "rank 0 in a forward of .*, rank 1 in a backward of"),
        (
            models_in_another_order,
            "rank 0 in a forward of LlamaForCausalLM#1, rank 1 in a forward of LlamaForCausalLM#2",
        ),
        (another_order, r"rank 0 gathers model\.layers\.0, rank 1 gathers model\.layers\.1.*same order"),
    ],
)
def test_ranks_that_part_are_told_where(tmp_path, fn, message):
    run_world(parts, 2, tmp_path, fn, message)


def wait_for_one_another():
    model = sharded(prefetch_bucket_size=0)
    hybrid.parallel._PATIENCE_S = 0.5
    a_layer_less(model, model.mesh.rank)


def test_ranks_that_wait_for_one_another_do_not_hang(tmp_path):
    where = r"rank 0 at move 7, which gathers model\.layers\.5 of .*, rank 1 at a backward of .* after 6 moves"
    with pytest.raises(WorldError, match=where):
        run_world(wait_for_one_another, 2, tmp_path)


def same_action_after_other_moves():
    """One rank runs the first layer, the other the last: both are then at their backward, and wait for gathers."""
    model = sharded()
    hybrid.parallel._PATIENCE_S = 0.3
    layers, rank = model.module.model.layers, model.mesh.rank
    hidden = torch.randn(1, 5, 48, requires_grad=True)
    positions = torch.arange(5)[None]
    rope = model.module.model.rotary_emb(hidden, positions)
    layer = layers[-1 if rank else 0]
    model.backward(layer(hidden, position_embeddings=rope, position_ids=positions).sum())


def test_the_same_call_after_other_gathers_does_not_hang(tmp_path):
    with pytest.raises(WorldError, match=r"DivergenceError"):
        run_world(same_action_after_other_moves, 2, tmp_path)


def a_failing_rank_is_not_waited_for():
    model = sharded()
    if dist.get_rank() == 1:
        raise KeyError("this rank's own")
    model.backward(model.loss(batch(0, 0)))


def test_a_failing_rank_ends_the_world(tmp_path):
    with pytest.raises(WorldError, match="this rank's own"):
        run_world(a_failing_rank_is_not_waited_for, 2, tmp_path)


# -- what is interrupted, and what is loaded -------------------------------------------------------------------------


def interrupts():
    model = sharded(optim=OptimConfig(learning_rate=1e-3), dtype=torch.bfloat16, sub_group_size=1)
    layer = model.module.model.layers[2]
    handle = layer.register_forward_pre_hook(lambda *_: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        model.module(tokens(0, 0))
    handle.remove()
    with torch.no_grad():
        model.module(tokens(0, 0))
    assert not model.schedule.computing and model.schedule.live_numel <= model.schedule._layers[-1].numel
    # In the middle of a step: some masters have moved, so nothing may go on as if none or all had.
    model.backward(model.loss(batch(0, 0)))
    steps = iter(range(3))
    step = model.optimizer.torch_optimizer.step
    model.optimizer.torch_optimizer.step = lambda: (
        step() if next(steps, None) is not None else exec("raise KeyboardInterrupt")
    )
    state = {name: value.clone() for group in model.optimizer_state() for name, value in group.items()}
    with pytest.raises(KeyboardInterrupt):
        model.step()
    model.optimizer.torch_optimizer.step = step
    with pytest.raises(RuntimeError, match="a step was interrupted when some weights had changed"):
        model.backward(model.loss(batch(0, 0)))
    model.load_optimizer_state(state, 0)
    model.backward(model.loss(batch(0, 0)))
    model.step()


def test_interrupts_leave_nothing_held_and_nothing_half_stepped(tmp_path):
    run_world(interrupts, 1, tmp_path)
    run_world(interrupts, 2, tmp_path)


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
