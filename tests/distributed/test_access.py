"""Weights, masters, gradients and optimizer state by parameter: what is read is a plain loop's, and so is training on
after an edit."""

import pytest
import torch

from hybrid.config import InferenceConfig, OptimConfig, ZeroConfig
from hybrid.engine import HybridEngine
from hybrid.inference.params import SamplingParams
from hybrid.models.attention import ATTENTION_NAME
from hybrid.models.fused_layers import fuse_layers
from hybrid.models.plans import tensor_parallel_plan
from hybrid.parallel import DivergenceError, init_parallel
from hybrid.zero.level import Level, LevelError
from hybrid.zero.model import ShardedModel
from tests.distributed.test_zero import make_model, tokens
from tests.distributed.world import run_world

OPTIM = OptimConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.0)
ALL_MOVE = ZeroConfig(stage=3, persistence_threshold=0)
SOME_PERSIST = ZeroConfig(stage=3, persistence_threshold=100, keep_slices=True)
LAYER = "model.layers.1"
EMBEDDING, QUERY, ROW_PARALLEL = (
    "model.embed_tokens.weight",
    f"{LAYER}.self_attn.q_proj.weight",
    f"{LAYER}.mlp.down_proj.weight",
)
BIAS, NORM = f"{LAYER}.self_attn.k_proj.bias", "model.norm.weight"
BELOW = f"{LAYER}.input_layernorm.weight"  # its gradient comes through QUERY
SAMPLE = [EMBEDDING, QUERY, f"{LAYER}.self_attn.o_proj.weight", ROW_PARALLEL, BIAS, NORM]


def make_sharded(tp_size=1, zero=ALL_MOVE, optim=OPTIM, dtype=torch.float32, **overrides):
    """(module, model): the module whole and then sharded, its masters of more digits than the dtype."""
    mesh = init_parallel(tp_size)
    module = make_model(**overrides)
    plan, weights = tensor_parallel_plan(module, tp_size), Fp32Weights(module)
    module.to(dtype)
    return module, ShardedModel(module, mesh, zero=zero, optim=optim, plan=plan, weights=weights)


class Fp32Weights:
    def __init__(self, module):
        self._weights = {name: p.detach().clone() for name, p in module.named_parameters()}

    def read(self, name, dim, start, stop):
        return self._weights[name].narrow(dim, start, stop - start)


class PlainLoop:
    """One process, all ranks' data, torch's AdamW."""

    def __init__(self, world_size, **overrides):
        self.model, self.world_size = make_model(**overrides), world_size
        fuse_layers(self.model)  # or Adam would make steps of how differently gradients near 0 are rounded
        self.weights = dict(self.model.named_parameters())
        kinds = [[p for p in self.weights.values() if (p.ndim > 1) == decayed] for decayed in (True, False)]
        self.optimizer = torch.optim.AdamW(
            [{"params": kinds[0], "weight_decay": OPTIM.weight_decay}, {"params": kinds[1], "weight_decay": 0.0}],
            lr=OPTIM.learning_rate,
            betas=OPTIM.betas,
            eps=OPTIM.eps,
        )

    def backward(self, micro_batch):
        for rank in range(self.world_size):
            ids = tokens(0, micro_batch, rank)
            (self.model(ids, labels=ids).loss / self.world_size).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def backward(module, model, micro_batch):
    ids = tokens(0, micro_batch, model.mesh.rank)
    model.backward(module(ids, labels=ids).loss)


def at_rest(model):
    """Nothing is handed out, and nothing whole but layers that are kept for reuse."""
    settled = all(group.level is group.resting for group in model.groups if group.plan.unit == "root")
    return settled and not any(group.holders for group in model.groups)


def close(actual, expected, name):
    torch.testing.assert_close(actual, expected, atol=5e-6, rtol=1e-4, msg=lambda text: f"{name}: {text}")


def from_locals(model, name, what):
    """A parameter's ``what`` put together from the ranks' own elements, and how often each element is held."""
    layout = next(m.layout for group in model.groups for m in group.members if m.name == name)
    whole, held = torch.full((layout.numel,), torch.nan), torch.zeros(layout.numel)
    for mine, ranges in model.mesh.all_gather_object((model.state.local(name, what), model.state.local_ranges(name))):
        whole[[i for start, stop in ranges for i in range(start, stop)]] = mine
        for start, stop in ranges:
            held[start:stop] += 1
    whole = whole.view(layout.storage_shape)
    return (whole.T if layout.axis == 1 else whole), held


def read_and_edit_like_the_plain_loop(tp_size, settings):
    for zero, tied in settings:
        module, model = make_sharded(tp_size, zero, tie_word_embeddings=tied)
        plain = PlainLoop(model.mesh.world_size, tie_word_embeddings=tied)
        read_like_the_plain_loop(module, model, plain)
        edit_like_the_plain_loop(module, model, plain)


def read_like_the_plain_loop(module, model, plain):
    state, world_size = model.state, model.mesh.world_size
    with pytest.raises(ValueError, match=r"no exp_avg of model\.norm\.weight before the first step"):
        state.full(NORM, "exp_avg")
    with pytest.raises(ValueError, match=r"model\.norm\.weight has no gradient"):
        state.full(NORM, "grad")
    for micro_batch in range(2):
        backward(module, model, micro_batch)
        plain.backward(micro_batch)
        for name in SAMPLE if micro_batch == 0 else SAMPLE[2:]:  # looked at in between, at the end, or both
            close(state.full(name, "grad"), plain.weights[name].grad, name)
    assert model.step().grad_norm == pytest.approx(
        torch.stack([p.grad.norm() for p in plain.weights.values()]).norm().item(), rel=1e-4
    )
    plain.step()
    for name in SAMPLE:
        moments = plain.optimizer.state[plain.weights[name]]
        expected = {"master": plain.weights[name].data, "exp_avg": moments["exp_avg"], "step": moments["step"]}
        for what, tensor in expected.items():
            close(state.full(name, what), tensor, name)
        for what in ("master", "exp_avg"):
            whole, held = from_locals(model, name, what)
            assert torch.equal(whole, state.full(name, what))
            assert held.unique().tolist() == [world_size if model.zero.stage == 0 else 1]


def edit_like_the_plain_loop(module, model, plain):
    state, mesh, version = model.state, model.mesh, model.weights_version
    query = state.full(QUERY) * 1.5 + mesh.rank  # the first rank's counts
    state.set_full(QUERY, query)
    plain.weights[QUERY].data.mul_(1.5)
    astray = mesh.rank if model.zero.stage == 0 else 0  # where all ranks hold the same elements, the first one's count
    state.set_local(BIAS, state.local(BIAS) + 0.25 + astray)
    plain.weights[BIAS].data.add_(0.25)
    state.set_local(ROW_PARALLEL, state.local(ROW_PARALLEL, "exp_avg") * -3, "exp_avg")
    plain.optimizer.state[plain.weights[ROW_PARALLEL]]["exp_avg"].mul_(-3)
    with model.gathered([ROW_PARALLEL, "lm_head"], write=True) as tensors, torch.no_grad():
        tensors[ROW_PARALLEL][:, ::3] = 0.5 * (1 + mesh.rank)
        module.lm_head.weight[5:7] += 1 + mesh.rank
    plain.weights[ROW_PARALLEL].data[:, ::3] = 0.5
    plain.model.lm_head.weight.data[5:7] += 1
    backward(module, model, 2)
    plain.backward(2)
    state.set_full(NORM, state.full(NORM, "grad") * 2, "grad")
    plain.weights[NORM].grad.mul_(2)
    state.set_full(EMBEDDING, torch.zeros(263, 48), "grad")
    plain.weights[EMBEDDING].grad.zero_()
    assert state.full(EMBEDDING, "grad").abs().max() == 0
    model.step()
    plain.step()
    weights = dict(model.state.stream())
    assert weights.keys() == plain.weights.keys()
    for name, weight in weights.items():
        close(weight, plain.weights[name].data, name)
    assert model.weights_version == version + 1  # edits are no steps
    assert at_rest(model)
    for group in model.groups:
        if group.resting is Level.FULL:  # on every rank the same
            assert len(set(mesh.all_gather_object(group.held_checksum()))) == 1
        torch.testing.assert_close(group.shard, group.master.data, rtol=0, atol=0)


STAGES = [ZeroConfig(stage=stage) for stage in (0, 1, 2)]


@pytest.mark.parametrize(
    ("world_size", "tp_size", "settings"),
    [
        (1, 1, [(ALL_MOVE, True), (STAGES[0], False)]),
        (2, 1, [*((zero, True) for zero in STAGES), (ALL_MOVE, False)]),
        (2, 2, [(ALL_MOVE, True), (STAGES[1], False)]),
        (3, 3, [(ALL_MOVE, True)]),
        (4, 2, [(STAGES[0], True), (STAGES[2], False), (ALL_MOVE, True), (SOME_PERSIST, False)]),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_state_is_that_of_a_plain_loop_and_so_is_training_after_edits(tmp_path, world_size, tp_size, settings):
    run_world(read_and_edit_like_the_plain_loop, world_size, tmp_path, tp_size, settings)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def narrow_weights_keep_what_their_masters_know(tp_size, dtype):
    for zero in (*STAGES, ALL_MOVE, SOME_PERSIST):
        module, model = make_sharded(tp_size, zero, dtype=dtype)
        state = model.state
        backward(module, model, 0)
        model.step()
        odd = state.full(ROW_PARALLEL)
        odd[0, :3] = torch.tensor([-0.0, float("nan"), 1e-42])
        for what, value in (("exp_avg_sq", state.full(ROW_PARALLEL, "exp_avg_sq")), ("exp_avg", odd), ("master", odd)):
            state.set_full(ROW_PARALLEL, value, what)
            assert torch.equal(bits(state.full(ROW_PARALLEL, what)), bits(value))
            state.set_local(ROW_PARALLEL, state.local(ROW_PARALLEL, what), what)
            assert torch.equal(bits(state.full(ROW_PARALLEL, what)), bits(value))
        before = {name: state.full(name) for name in SAMPLE}
        with model.gathered(LAYER, write=True) as tensors:
            assert all(name.startswith(LAYER) for name in tensors) and len(tensors) == 13
            assert all(tensor.dtype == dtype for tensor in tensors.values())
            tensors[QUERY][1] = 2.0 + 2**-6  # of which bf16 has every digit
        expected = before[QUERY].clone()
        expected[1] = 2.0 + 2**-6
        for name in SAMPLE:
            master = expected if name == QUERY else before[name]
            assert torch.equal(bits(state.full(name)), bits(master)), name
        for name, weight in model.state.stream():
            if name in SAMPLE:
                assert torch.equal(bits(weight), bits(state.full(name).to(dtype))), name
        masters, weights = dict(state.stream("master")), dict(state.stream())
        assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
        assert all(torch.equal(bits(weights[name]), bits(masters[name].to(dtype))) for name in weights)
        only_main = list(state.stream("exp_avg", rank0_only=True))
        assert len(only_main) == (len(weights) if model.mesh.is_main else 0)


@pytest.mark.parametrize(("world_size", "tp_size"), [(2, 1), (4, 2)])
def test_masters_keep_their_digits_and_round_trips_their_bits(tmp_path, world_size, tp_size):
    run_world(narrow_weights_keep_what_their_masters_know, world_size, tmp_path, tp_size, torch.bfloat16)


def fp16_gradients_are_free_of_the_loss_scale():
    optim = OptimConfig(learning_rate=1e-3, max_grad_norm=0.0, loss_scale=1024.0)
    for stage in (1, 3):
        module, model = make_sharded(1, ZeroConfig(stage=stage), optim, torch.float16)
        plain = PlainLoop(model.mesh.world_size)
        backward(module, model, 0)
        plain.backward(0)
        grad = model.state.full(QUERY, "grad")
        torch.testing.assert_close(grad, plain.weights[QUERY].grad, atol=1e-3, rtol=5e-2)
        model.state.set_full(QUERY, grad, "grad")
        assert torch.equal(model.state.full(QUERY, "grad"), grad)
        model.state.set_local(QUERY, model.state.local(QUERY, "grad"), "grad")
        assert torch.equal(dict(model.state.stream("grad"))[QUERY], grad)
        model.step()
        torch.testing.assert_close(model.state.full(QUERY, "exp_avg"), grad * (1 - optim.betas[0]))


def test_fp16_gradients_are_free_of_the_loss_scale(tmp_path):
    run_world(fp16_gradients_are_free_of_the_loss_scale, 2, tmp_path)


def reading_inside_gathered():
    for zero in (STAGES[0], STAGES[2], ALL_MOVE, SOME_PERSIST):
        module, model = make_sharded(1, zero)
        original = dict(make_model().named_parameters())
        ids = tokens(0, 0, model.mesh.rank)
        with model.gathered():
            assert all(group.level is Level.FULL for group in model.groups)
        assert all(group.level is group.resting for group in model.groups)
        pending = module(ids, labels=ids).loss
        with model.gathered() as tensors:
            assert tensors.keys() == original.keys()  # tied weights once
            assert all(torch.equal(tensors[name], original[name]) for name in tensors)
            assert all(tensors[name].data_ptr() == p.data_ptr() for name, p in module.named_parameters())
            model.backward(module(ids, labels=ids).loss)  # whose releases must not free what is handed out
            with model.gathered([QUERY, "lm_head.weight"]) as inner:
                assert torch.equal(inner["lm_head.weight"], original[EMBEDDING])
            assert all(torch.equal(tensors[name], original[name]) for name in tensors)
            model.zero_grad()  # lets go of everything else
            assert all(torch.equal(tensors[name], original[name]) for name in tensors)
            backward(module, model, 0)
            with pytest.raises(LevelError, match=r"step\(\) while gathered\(\) holds"):
                model.step()
            with pytest.raises(LevelError, match=r"gathered\(write=True\) while gathered\(\) holds"):
                model.gathered(NORM, write=True).__enter__()
            with pytest.raises(LevelError, match=r"state\.set_full while gathered\(\) holds"):
                model.state.set_full(NORM, torch.ones(48))
            if zero.stage == 3:
                with pytest.raises(LevelError, match="is held whole"):
                    model.groups[1].enter_slice()
        assert all(tensor.numel() == 0 for tensor in tensors.values())
        model.backward(pending)
        assert at_rest(model)
        model.step()


def test_reading_is_of_the_weights_and_disturbs_no_graph(tmp_path):
    run_world(reading_inside_gathered, 2, tmp_path)


def change_row(tensors, module):
    tensors[QUERY][0] += 1


def change_by_data(tensors, module):
    module.get_parameter(QUERY).data.view(-1)[-1] = 7


def replace_data(tensors, module):
    module.get_parameter(QUERY).data = torch.ones(48, 48)


def stop(tensors, module):
    tensors[QUERY].zero_()
    module.get_parameter(NORM).data.zero_()
    raise KeyboardInterrupt


def nothing_is_written(world_size):
    for zero in (STAGES[0], STAGES[1], ALL_MOVE, SOME_PERSIST):
        module, model = make_sharded(1, zero)
        before = dict(model.state.stream())
        backward(module, model, 0)
        expected = model.state.full(BELOW, "grad")
        cases = (
            (change_row, False, ValueError, "q_proj.weight was changed inside gathered"),
            (change_by_data, False, ValueError, "q_proj.weight was changed inside gathered"),
            (replace_data, False, ValueError, "q_proj.weight was given other memory"),
            (replace_data, True, ValueError, "q_proj.weight was given other memory"),
            (stop, True, KeyboardInterrupt, None),
            (stop, False, KeyboardInterrupt, None),
        )
        for change, write, error, match in cases:
            ids = tokens(0, 0, model.mesh.rank)
            model.zero_grad()
            loss = module(ids, labels=ids).loss
            with pytest.raises(error, match=match), model.gathered(write=write) as tensors:
                change(tensors, module)
            model.backward(loss)  # and the graph is as good as before
            close(model.state.full(BELOW, "grad"), expected, BELOW)
            assert at_rest(model)
            after = dict(model.state.stream())
            assert all(torch.equal(after[name], before[name]) for name in before), change.__name__
            assert all(torch.equal(group.master.data, group.shard) for group in model.groups)
        with pytest.raises(TypeError), model.gathered(NORM, write=True) as tensors:
            tensors[NORM] = torch.ones(48)


@pytest.mark.parametrize("world_size", [1, 2])
def test_exceptions_and_forbidden_changes_leave_the_weights_as_they_were(tmp_path, world_size):
    run_world(nothing_is_written, world_size, tmp_path, world_size)


def writing_makes_graphs_stale():
    for zero in (STAGES[2], ALL_MOVE):
        for write in (write_block, write_master):
            module, model = make_sharded(1, zero)
            backward(module, model, 0)
            kept = model.state.full(QUERY, "grad")
            ids = tokens(0, 1, model.mesh.rank)
            loss = module(ids, labels=ids).loss
            write(model)
            assert torch.equal(model.state.full(QUERY, "grad"), kept)  # gradients stay
            with pytest.raises(LevelError, match="changed the weights since this loss"):
                model.backward(loss)
            backward(module, model, 0)
            model.step()


def write_block(model):
    with model.gathered(QUERY, write=True) as tensors:
        tensors[QUERY].zero_()


def write_master(model):
    model.state.set_full(QUERY, torch.zeros(48, 48))


def test_writing_makes_graphs_stale(tmp_path):
    run_world(writing_makes_graphs_stale, 2, tmp_path)


def what_a_user_gets_wrong():
    module, model = make_sharded(1, STAGES[1])
    state = model.state
    with pytest.raises(ValueError, match=r"did you mean model\.layers\.1"):
        model.gathered("model.layer.1").__enter__()
    with pytest.raises(ValueError, match=r"no parameter 'model\.norm'; did you mean model\.norm\.weight"):
        state.full("model.norm")
    with pytest.raises(ValueError, match=r"has shape \(48,\); it must have \(48, 48\)"):
        state.set_full(QUERY, torch.zeros(48))
    with pytest.raises(ValueError, match=r"has shape \(1,\); it must have"):
        state.set_local(QUERY, torch.zeros(1))
    backward(module, model, 0)
    with pytest.raises(ValueError, match=r"not summed over ranks .* call state\.reduce_gradients\(\)"):
        state.local(QUERY, "grad")
    state.reduce_gradients()
    assert torch.equal(from_locals(model, QUERY, "grad")[0], state.full(QUERY, "grad"))
    model.step()
    with pytest.raises(ValueError, match="'exp_avgs' of .* is unknown; choose master, grad, step, exp_avg, exp_avg_sq"):
        state.full(QUERY, "exp_avgs")
    with pytest.raises(ValueError, match="one number for several parameters"):
        state.set_full(QUERY, torch.zeros(48, 48), "step")
    with pytest.raises(
        DivergenceError, match=r"rank 0 in gathered\(\['model\.norm'\].*rank 1 in gathered\(\['lm_head'\]"
    ):
        model.gathered("lm_head" if model.mesh.rank else "model.norm").__enter__()
    refused = []
    handle = module.model.layers[0].register_forward_hook(lambda *_: refused.append(try_to_write(model)))
    module(tokens(0, 0, 0))
    handle.remove()
    assert "inside a forward or a backward" in refused[0]
    model.schedule.generating = True
    for attempt in (model.gathered(QUERY).__enter__, lambda: state.set_full(QUERY, torch.zeros(48, 48))):
        with pytest.raises(LevelError, match="not to be had in GENERATE mode; flip to TRAIN first"):
            attempt()


def try_to_write(model):
    with pytest.raises(LevelError) as caught:
        model.gathered(NORM, write=True).__enter__()
    return str(caught.value)


def test_what_a_user_gets_wrong_is_said(tmp_path):
    run_world(what_a_user_gets_wrong, 2, tmp_path)


def one_rank_fails_in_its_block():
    _, model = make_sharded(1, SOME_PERSIST)
    before = dict(model.state.stream())
    with pytest.raises(DivergenceError, match=r"rank 0 in the end of gathered.*rank 1 in a step"):
        write_but_on_rank_1(model)
    after = dict(model.state.stream())
    assert all(torch.equal(after[name], before[name]) for name in before)


def write_but_on_rank_1(model):
    try:
        with model.gathered(write=True) as tensors:
            for tensor in tensors.values():
                tensor.zero_()
            if model.mesh.rank == 1:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        model.step()


def test_an_exception_on_one_rank_writes_nothing_on_any(tmp_path):
    run_world(one_rank_fails_in_its_block, 2, tmp_path)


def generation_after_an_edit():
    module = make_model()
    module.set_attn_implementation(ATTENTION_NAME)
    mesh, inference = init_parallel(2), InferenceConfig(kv_blocks=32)
    engine = HybridEngine(module, None, mesh, zero=SOME_PERSIST, optim=OPTIM, inference=inference)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompt, outputs = tokens(0, 0, 0)[0].tolist(), []
    for scale in (1.0, -2.0):
        with engine.model.gathered(ROW_PARALLEL, write=True) as tensors:
            tensors[ROW_PARALLEL].mul_(scale)
        reference = make_model()
        reference.load_state_dict(dict(engine.model.state.stream()), strict=False)
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        with engine.generate_mode():
            assert torch.equal(dict(engine.model.state.stream())[QUERY], reference.get_parameter(QUERY))
            outputs.append(list(engine.generate([prompt], greedy)[0].token_ids))
            with pytest.raises(LevelError, match="flip to TRAIN first"):
                engine.model.gathered(QUERY).__enter__()
        assert outputs[-1] == expected[0, len(prompt) :].tolist()
    assert outputs[0] != outputs[1]


def test_generation_after_an_edit_is_of_the_new_weights(tmp_path):
    run_world(generation_after_an_edit, 4, tmp_path)


def frozen_weights():
    mesh = init_parallel()
    module = make_model()
    for name in (QUERY, BIAS):
        module.get_parameter(name).requires_grad_(False)
    model = ShardedModel(module, mesh, zero=ALL_MOVE, optim=OPTIM)
    with pytest.raises(ValueError, match=r"q_proj\.weight is frozen and has no master; read its weights with gathered"):
        model.state.full(QUERY)
    with model.gathered(QUERY, write=True) as tensors:
        tensors[QUERY].fill_(3.0 + mesh.rank)
    with model.gathered(QUERY) as tensors:
        assert tensors[QUERY].unique().tolist() == [3.0]
    masters = dict(model.state.stream("master"))
    assert masters[QUERY].unique().tolist() == [3.0] and masters.keys() == dict(module.named_parameters()).keys()
    backward(module, model, 0)
    assert dict(model.state.stream("grad")).keys() == masters.keys() - {QUERY, BIAS}
    scoring = ShardedModel(make_model(), mesh, zero=ALL_MOVE)
    with pytest.raises(ValueError, match="built without an optimizer"):
        scoring.state.full(QUERY)
    with scoring.gathered(NORM, write=True) as tensors:
        tensors[NORM].fill_(2.0)
    assert dict(scoring.state.stream())[NORM].unique().tolist() == [2.0]


def test_frozen_weights_have_no_master_and_may_be_written(tmp_path):
    run_world(frozen_weights, 2, tmp_path)
