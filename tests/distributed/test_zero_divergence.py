"""Ranks that part, and calls that are interrupted: errors that say where, and nothing half done."""

import pytest
import torch
import torch.distributed as dist

import hybrid.parallel
from hybrid.config import OptimConfig, ZeroConfig
from hybrid.parallel import DivergenceError
from hybrid.zero.model import ShardedModel
from tests.distributed.sharded import batch, make_model, sharded, tokens
from tests.distributed.world import WorldError, run_world

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
