"""Contract 1: every ZeRO stage, on any grid, trains as a plain PyTorch loop does."""

import pytest
import torch
from transformers import LlamaForCausalLM

from hybrid.config import OptimConfig, ZeroConfig
from hybrid.models.fused_layers import fuse_layers
from hybrid.models.plans import tensor_parallel_plan
from hybrid.parallel import init_parallel
from hybrid.zero.level import Level, LevelError
from hybrid.zero.model import ShardedModel
from tests.distributed.world import run_world
from tests.tiny import tiny_config

STEPS, MICRO_BATCHES = 3, 2
OPTIM = OptimConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5)


def make_model(**overrides):
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(attention_bias=True, **overrides))


def tokens(step, micro_batch, rank):
    generator = torch.Generator().manual_seed(step * 1000 + micro_batch * 100 + rank)
    return torch.randint(3, 263, (2, 9), generator=generator)


def plain_loop(world_size, **overrides):
    """One process, all ranks' data: (final model, losses[step][micro batch][rank], gradient norms)."""
    model = make_model(**overrides)
    fuse_layers(model)  # or Adam would make steps of how differently gradients near 0 are rounded
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIM.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=OPTIM.learning_rate,
        betas=OPTIM.betas,
        eps=OPTIM.eps,
    )
    losses, norms = [], []
    for step in range(STEPS):
        losses.append([])
        for micro_batch in range(MICRO_BATCHES):
            losses[-1].append([])
            for rank in range(world_size):
                ids = tokens(step, micro_batch, rank)
                loss = model(ids, labels=ids).loss
                (loss / world_size / MICRO_BATCHES).backward()
                losses[-1][-1].append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, losses, norms


def train_like_the_plain_loop(tp_size, zero, overrides):
    mesh = init_parallel(tp_size)
    expected, losses, norms = plain_loop(mesh.world_size, **overrides)
    module = make_model(**overrides)
    model = ShardedModel(module, mesh, zero=zero, optim=OPTIM, plan=tensor_parallel_plan(module, tp_size))
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            ids = tokens(step, micro_batch, mesh.rank)
            loss = module(ids, labels=ids).loss
            with torch.no_grad():
                module(ids)  # looks while a graph is alive, and must not disturb it
            model.backward(loss / MICRO_BATCHES)
            assert loss.item() == pytest.approx(losses[step][micro_batch][mesh.rank], abs=2e-5)
        assert model.step().grad_norm == pytest.approx(norms[step], rel=1e-4)
    weights = dict(expected.named_parameters())
    for name, weight in model.state.stream():
        torch.testing.assert_close(weight, weights[name].data, atol=5e-6, rtol=1e-4, msg=name)
    if zero.stage == 3 and mesh.world_size > 1:
        moving = [group for group in model.groups if group.resting is Level.SHARD]
        held = sum(group.shard.numel() for group in moving) * mesh.world_size
        padding = len(moving) * mesh.world_size
        total = sum(p.layout.numel for g in moving for p in g.members)
        # Uneven slices differ between tensor ranks by at most a unit each.
        assert abs(mesh.reduce_scalars([held / mesh.world_size])[0] - total) <= padding
        assert all(p.parameter.numel() == 0 for g in moving for p in g.members)


GRIDS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2)]
EVERYTHING_MOVES = ZeroConfig(stage=3, persistence_threshold=0)
SOME_PERSIST = ZeroConfig(stage=3, persistence_threshold=100, keep_slices=True, prefetch_bucket_size=40_000)


@pytest.mark.parametrize(("world_size", "tp_size"), GRIDS)
@pytest.mark.parametrize("zero", [EVERYTHING_MOVES, SOME_PERSIST], ids=["all move", "some persist"])
def test_stage_3_equals_a_plain_loop(tmp_path, world_size, tp_size, zero):
    overrides = {"tie_word_embeddings": zero is EVERYTHING_MOVES}
    run_world(train_like_the_plain_loop, world_size, tmp_path, tp_size, zero, overrides)


@pytest.mark.parametrize(("world_size", "tp_size"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_0_to_2_equal_a_plain_loop(tmp_path, world_size, tp_size, stage):
    run_world(train_like_the_plain_loop, world_size, tmp_path, tp_size, ZeroConfig(stage=stage), {})


def bf16_has_fp32_masters():
    mesh = init_parallel()
    module = make_model()
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    model = ShardedModel(module, mesh, zero=EVERYTHING_MOVES, optim=OPTIM)
    ids = tokens(0, 0, mesh.rank)
    model.backward(module(ids, labels=ids).loss)
    model.step()
    optimizer = model.optimizer
    assert optimizer is not None
    for group in model.groups:
        assert group.shard.dtype == torch.bfloat16 and group.master.dtype == torch.float32
        assert optimizer.torch_optimizer.state[group.master]["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(group.shard, group.master.data.bfloat16())
    assert module.model.rotary_emb.inv_freq.dtype == torch.float32


def test_bf16_weights_have_fp32_masters_and_moments(tmp_path):
    run_world(bf16_has_fp32_masters, 2, tmp_path)


def frozen_model_has_no_optimizer_memory():
    module = make_model()
    model = ShardedModel(module, init_parallel(), zero=EVERYTHING_MOVES)
    module(tokens(0, 0, 0))  # grad mode is on, and nothing must stay gathered for a backward that cannot come
    assert all(group.master is None and group.level is Level.SHARD for group in model.groups)
    with pytest.raises(ValueError, match="without an optimizer"):
        model.step()


def test_a_model_without_optimizer_rests_at_shard(tmp_path):
    run_world(frozen_model_has_no_optimizer_memory, 2, tmp_path)


def nan_gradient_is_named_and_changes_nothing():
    mesh = init_parallel()
    module = make_model()
    model = ShardedModel(module, mesh, zero=EVERYTHING_MOVES, optim=OPTIM)
    before = [group.shard.clone() for group in model.groups]
    ids = tokens(0, 0, mesh.rank)
    factor = float("nan") if mesh.rank == 1 else 1.0
    hidden = torch.randn(*ids.shape, module.config.hidden_size, requires_grad=True)
    positions = torch.arange(ids.shape[1])[None]
    rope = module.model.rotary_emb(hidden, positions)
    model.backward(module.model.layers[1](hidden, position_embeddings=rope, position_ids=positions).sum() * factor)
    with pytest.raises(FloatingPointError, match=r"the gradient of model\.layers\.1\..* is not finite"):
        model.step()
    assert all(torch.equal(a, g.shard) for a, g in zip(before, model.groups, strict=True))


def test_a_nan_gradient_is_reported_by_name(tmp_path):
    run_world(nan_gradient_is_named_and_changes_nothing, 2, tmp_path)


def test_backward_at_the_wrong_level_names_the_group(tmp_path):
    run_world(backward_at_shard, 2, tmp_path)


def backward_at_shard():
    model = ShardedModel(make_model(), init_parallel(), zero=EVERYTHING_MOVES, optim=OPTIM)
    with pytest.raises(LevelError, match=r"model\.layers\.0\[.*\] takes part in a backward at SHARD"):
        model.groups[1].begin_backward()


def awkward_orders_of_calls():
    """Graphs that overlap, flips and looks between forward and backward, and errors in the middle."""
    mesh = init_parallel()
    module = make_model()
    model = ShardedModel(module, mesh, zero=EVERYTHING_MOVES, optim=OPTIM)
    first, second = tokens(0, 0, mesh.rank), tokens(0, 1, mesh.rank)

    def loss(ids):
        return module(ids, labels=ids).loss

    def norm():
        return model.step().grad_norm

    before = [group.shard.clone() for group in model.groups]

    def rewind():
        for group, shard in zip(model.groups, before, strict=True):
            group.master.data.copy_(shard)

    model.backward(loss(first))
    model.backward(loss(second))
    expected = norm()
    rewind()
    # two graphs alive at once, and the whole model gathered in between
    one, two = loss(first), loss(second)
    assert len(dict(model.state.stream())) == len(dict(module.named_parameters()))
    model.backward(one)
    model.backward(two)
    assert norm() == pytest.approx(expected, rel=1e-5)
    rewind()
    # a flip's worth of levels between forward and backward, and between two backwards
    one = loss(first)
    model.settle()
    model.backward(one)
    for group in model.groups:
        group.enter_slice()
    model.settle()
    model.backward(loss(second))
    assert norm() == pytest.approx(expected, rel=1e-5)
    rewind()
    # an interrupt in a forward, then as if nothing had been
    handle = module.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss(first)
    handle.remove()
    model.zero_grad()
    assert all(group.level is group.resting for group in model.groups)
    # an error in a backward leaves no part of its gradients
    one = loss(first)
    one.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.backward(one)
    model.backward(loss(first))
    model.backward(loss(second))
    assert norm() == pytest.approx(expected, rel=1e-5)
    # what would be silently wrong
    with pytest.raises(ValueError, match=r"without a backward\(\)"):
        model.step()
    with pytest.raises(LevelError, match=r"instead of loss\.backward\(\)"):
        loss(first).backward()
    model.zero_grad()
    stale = loss(first)
    model.backward(loss(second))
    model.step()
    with pytest.raises(LevelError, match="changed the weights since this loss"):
        model.backward(stale)


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("world_size", [1, 2])
def test_awkward_orders_of_calls(tmp_path, world_size):
    run_world(awkward_orders_of_calls, world_size, tmp_path)


def accumulation_keeps_fp32(stage):
    """Many micro-batches in bf16: what is summed must not be rounded to bf16 each time."""
    ids, norms = tokens(0, 0, 0), []
    for micro_batches in (1, 64):
        module = make_model()
        for parameter in module.parameters():
            parameter.data = parameter.data.bfloat16()
        model = ShardedModel(module, init_parallel(), zero=ZeroConfig(stage=stage), optim=OPTIM)
        for _ in range(micro_batches):
            model.backward(module(ids, labels=ids).loss / micro_batches)
        norms.append(model.step().grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=2e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_are_summed_in_fp32(tmp_path, stage):
    run_world(accumulation_keeps_fp32, 2, tmp_path, stage)
