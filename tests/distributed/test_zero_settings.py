"""What ZeRO's settings promise: how much is gathered when, how often, and what the backward computes again."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid.zero.level import Level
from tests.distributed.sharded import LAYERS, batch, make_model, sharded, tokens, train
from tests.distributed.world import run_world

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
