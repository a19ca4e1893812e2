"""The cross-entropy of the LM head against torch's own over the whole (R, V) logits, under autograd."""

from __future__ import annotations

import pytest
import torch

from ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

VARIANTS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "scaled": {"logit_scale": 0.25},
    "everything": {"softcap": 2.0, "logit_scale": 1.5},
}
ROWS = 11


def _inputs(rows=ROWS, hidden=6, vocab=23, dtype=torch.float64, with_bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(vocab, (rows,), generator=generator)
    return make(rows, hidden), make(vocab, hidden), make(vocab) if with_bias else None, targets


def _run(function, inputs, upstream=1.0, **options):
    """The loss, and the gradients of ``upstream`` times it."""
    hidden, weight, bias, targets = inputs
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    loss = function(hidden, weight, targets, bias=bias, **options)
    return loss.detach(), torch.autograd.grad(loss * upstream, leaves)


def _scale(kind, rows=ROWS, dtype=torch.float64):
    # One weight is negative (an unlikelihood term), one is zero.
    return 1 / rows if kind == "number" else torch.linspace(-0.5, 2.0, rows, dtype=dtype).round(decimals=1)


@pytest.mark.parametrize("kind", ["number", "rows"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_autograd(variant, kind, with_bias):
    inputs, options = _inputs(with_bias=with_bias), VARIANTS[variant] | {"scale": _scale(kind)}
    expected = _run(linear_cross_entropy_reference, inputs, upstream=-3.0, **options)
    for chunk_rows in (1, 4, 11, 100, None):
        actual = _run(linear_cross_entropy, inputs, upstream=-3.0, chunk_rows=chunk_rows, **options)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["number", "rows"])
def test_matches_finite_differences(kind):
    """What ``gradcheck`` does; that one goes backward through one graph repeatedly, which is refused here."""
    *leaves, targets = _inputs(rows=5, hidden=3, vocab=7, with_bias=True)

    def loss(hidden, weight, bias):
        return linear_cross_entropy(
            hidden, weight, targets, scale=_scale(kind, rows=5), bias=bias, softcap=2.0, logit_scale=0.7, chunk_rows=2
        )

    gradients = torch.autograd.grad(loss(*leaves), leaves)
    for index, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        for position in range(leaf.numel()):
            step = torch.zeros_like(leaf)
            step.view(-1)[position] = 1e-6
            ahead, behind = ([*leaves[:index], leaf + sign * step, *leaves[index + 1 :]] for sign in (1, -1))
            slope = (loss(*ahead) - loss(*behind)) / 2e-6
            torch.testing.assert_close(gradient.view(-1)[position], slope.detach(), rtol=1e-6, atol=1e-8)


def test_a_mean_is_torchs_cross_entropy():
    hidden, weight, _, targets = _inputs(dtype=torch.float32)
    loss = linear_cross_entropy(hidden, weight, targets, scale=1 / ROWS, chunk_rows=3)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, targets))


@pytest.mark.parametrize("kind", ["number", "rows"])
def test_bf16_inputs_give_an_fp32_loss_and_gradients_in_their_own_dtype(kind):
    inputs = _inputs(rows=64, hidden=32, vocab=101, dtype=torch.bfloat16, with_bias=True)
    scale = _scale(kind, rows=64, dtype=torch.float32)
    loss, gradients = _run(linear_cross_entropy, inputs, scale=scale, chunk_rows=5)
    assert loss.dtype == torch.float32
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    # The product is rounded to bf16 in both; the reference's loss differs by the order of fp32 sums alone.
    expected_loss, expected = _run(linear_cross_entropy_reference, inputs, scale=scale)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, expected, rtol=2e-2, atol=2e-2)


def test_bf16_hidden_states_under_an_fp32_weight():
    hidden, weight, _, targets = _inputs(dtype=torch.float32)
    narrow = hidden.detach().bfloat16().requires_grad_()
    linear_cross_entropy(narrow, weight, targets, scale=1.0).backward()
    assert (narrow.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    wide = narrow.detach().float().requires_grad_()
    expected = torch.autograd.grad(linear_cross_entropy_reference(wide, weight, targets, scale=1.0), (wide, weight))
    torch.testing.assert_close((narrow.grad.float(), weight.grad), expected, rtol=5e-2, atol=5e-2)


def test_weight_gradient_of_many_chunks_keeps_small_terms():
    """A thousand chunks added up in bf16 would stall once the sum is 256 times a term."""
    rows = 2048
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(rows, dtype=torch.int64), scale=1.0, chunk_rows=2).backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[-0.5], [0.5]]).bfloat16() * rows)


@pytest.mark.parametrize("as_rows", [False, True])
def test_fp16_gradients_survive_a_small_scale_under_a_loss_scale(as_rows):
    """A millionth of a probability is below fp16's range; the loss scale brings it back up, if it was not lost."""
    hidden, weight, _, targets = _inputs(dtype=torch.float16)
    scale = torch.full((ROWS,), 1e-6) if as_rows else 1e-6
    (linear_cross_entropy(hidden, weight, targets, scale=scale) * 1e6).backward()
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    expected = torch.autograd.grad(linear_cross_entropy_reference(*wide, targets, scale=1.0), wide)
    torch.testing.assert_close((hidden.grad.double(), weight.grad.double()), expected, rtol=1e-2, atol=1e-2)


def test_a_long_vocabulary_in_bf16_covers_every_part_of_the_weight():
    inputs = _inputs(rows=40, hidden=4, vocab=2500, dtype=torch.bfloat16)
    _, (_, grad) = _run(linear_cross_entropy, inputs, scale=1.0, chunk_rows=16)
    wide = tuple(None if leaf is None else leaf.detach().float().requires_grad_() for leaf in inputs[:3])
    _, (_, expected) = _run(linear_cross_entropy_reference, (*wide, inputs[3]), scale=1.0)
    torch.testing.assert_close(grad.float(), expected, rtol=3e-2, atol=3e-2)


def test_transposed_weight():
    hidden, weight, _, targets = _inputs()
    storage = weight.detach().t().contiguous().requires_grad_()  # (H, V), seen as (V, H)
    (grad,) = torch.autograd.grad(linear_cross_entropy(hidden, storage.t(), targets, scale=1.0, chunk_rows=4), storage)
    (expected,) = torch.autograd.grad(linear_cross_entropy_reference(hidden, weight, targets, scale=1.0), weight)
    torch.testing.assert_close(grad, expected.t())


@pytest.mark.parametrize("scale", [1.0, torch.zeros(0)])
def test_no_rows_stay_connected_to_the_inputs(scale):
    hidden, weight, bias, targets = _inputs(rows=0, with_bias=True)
    loss = linear_cross_entropy(hidden, weight, targets, scale=scale, bias=bias)
    assert loss.shape == () and loss == 0
    loss.backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 6)
    assert weight.grad is not None and not weight.grad.any()
    assert bias is not None and bias.grad is not None and not bias.grad.any()


def test_rows_that_weigh_nothing():
    hidden, weight, _, targets = _inputs()
    loss = linear_cross_entropy(hidden, weight, targets, scale=torch.zeros(ROWS))
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_what_is_frozen_gets_no_gradient(frozen):
    hidden, weight, _, targets = _inputs()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    if frozen == "both":
        hidden.requires_grad_(False)
    loss = linear_cross_entropy(hidden, weight, targets, scale=1.0, chunk_rows=2)
    expected = linear_cross_entropy_reference(hidden, weight, targets, scale=1.0)
    torch.testing.assert_close(loss, expected)
    assert loss.requires_grad == (frozen != "both")
    trained = [leaf for leaf in (hidden, weight) if leaf.requires_grad]
    if trained:
        torch.testing.assert_close(torch.autograd.grad(loss, trained), torch.autograd.grad(expected, trained))


def _sizes(function):
    """Elements of every tensor made while ``function`` runs."""
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor))
            return out

    with Sizes():
        function()
    return sizes


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_never_holds_all_logits(softcap):
    """The largest tensor made in forward or backward is a chunk's logits or a gradient."""
    hidden, weight, _, targets = _inputs(rows=512, hidden=4, vocab=64, dtype=torch.float32)

    def run():
        linear_cross_entropy(hidden, weight, targets, scale=1.0, softcap=softcap, chunk_rows=8).backward()

    assert max(_sizes(run)) <= hidden.numel() < 512 * 64


def test_without_grad_mode_no_gradient_is_made():
    hidden, weight, _, targets = _inputs(rows=4, hidden=50, vocab=30)
    with torch.no_grad():
        sizes = _sizes(lambda: linear_cross_entropy(hidden, weight, targets, scale=1.0))
        loss = linear_cross_entropy(hidden, weight, targets, scale=1.0)
    # Views of the weight as it is used have its size; nothing of its own size is computed in place or anew.
    assert not loss.requires_grad
    with_grad = _sizes(lambda: linear_cross_entropy(hidden, weight, targets, scale=1.0))
    assert sizes.count(weight.numel()) < with_grad.count(weight.numel())
    assert sizes.count(hidden.numel()) < with_grad.count(hidden.numel())


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4], [1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 1]), scale=torch.tensor([1.0, 1.0, 0.5]))
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(1e4))  # the third target is 2e4 below the peak, and weighs a half
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_a_second_backward_says_so():
    hidden, weight, _, targets = _inputs()
    loss = linear_cross_entropy(hidden, weight, targets, scale=1.0)
    loss.backward(retain_graph=True)
    first = weight.grad.clone()
    with pytest.raises(RuntimeError, match="second backward through linear_cross_entropy"):
        loss.backward()
    torch.testing.assert_close(weight.grad, first, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
        ({"scale": torch.ones(3)}, r"scale has shape \(3,\) for 11 rows"),
        ({"scale": torch.ones(ROWS, requires_grad=True)}, "detach it"),
    ],
)
def test_bad_options(options, message):
    hidden, weight, _, targets = _inputs()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden, weight, targets, **({"scale": 1.0} | options))


def test_shapes_that_do_not_fit():
    hidden, weight, _, targets = _inputs()
    with pytest.raises(ValueError, match="do not fit each other"):
        linear_cross_entropy(hidden, weight, targets[:-1], scale=1.0)
