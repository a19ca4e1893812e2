"""The fused LM head against torch autograd over the whole (R, V) logits."""

from __future__ import annotations

import pytest
import torch

from ops.logprob import linear_logprob_entropy, linear_logprob_entropy_reference

VARIANTS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 3.0, "temperature": 1.3},
    "scaled": {"logit_scale": 0.25},
    "everything": {"softcap": 2.0, "logit_scale": 1.5, "temperature": 0.8},
}


def _inputs(rows=11, hidden=6, vocab=23, dtype=torch.float64, with_bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(vocab, (rows,), generator=generator)
    return make(rows, hidden), make(vocab, hidden), make(vocab) if with_bias else None, targets


def _run(function, inputs, through, **options):
    """Outputs, and the gradients of a random weighting of the outputs named in ``through``."""
    hidden, weight, bias, targets = inputs
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    logprobs, entropy = function(hidden, weight, targets, bias=bias, **options)
    row_weights = torch.linspace(-1.0, 2.0, targets.numel(), dtype=logprobs.dtype)
    loss = logprobs.new_zeros(())
    if "logprobs" in through:
        loss = loss + (logprobs * row_weights).sum()
    if "entropy" in through:
        loss = loss + (entropy * row_weights.flip(0)).sum()
    return logprobs.detach(), entropy.detach(), torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("through", ["logprobs", "entropy", "logprobs+entropy"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_autograd(variant, through, with_bias):
    inputs = _inputs(with_bias=with_bias)
    expected = _run(linear_logprob_entropy_reference, inputs, through, **VARIANTS[variant])
    for chunk_rows in (1, 4, 11, 100, None):
        actual = _run(linear_logprob_entropy, inputs, through, chunk_rows=chunk_rows, **VARIANTS[variant])
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_gradcheck():
    hidden, weight, bias, targets = _inputs(rows=5, hidden=3, vocab=7, with_bias=True)

    def function(hidden, weight, bias):
        return linear_logprob_entropy(hidden, weight, targets, bias=bias, softcap=2.0, temperature=0.7, chunk_rows=2)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_definition_is_log_softmax_and_categorical_entropy():
    hidden, weight, _, targets = _inputs(dtype=torch.float32)
    logprobs, entropy = linear_logprob_entropy(hidden, weight, targets, temperature=0.5, chunk_rows=3)
    distribution = torch.distributions.Categorical(logits=hidden @ weight.T / 0.5)
    torch.testing.assert_close(logprobs, distribution.log_prob(targets))
    torch.testing.assert_close(entropy, distribution.entropy())


def test_bf16_inputs_give_fp32_scores_and_gradients_in_their_own_dtype():
    inputs = _inputs(rows=64, hidden=32, vocab=101, dtype=torch.bfloat16)
    logprobs, entropy, (grad_hidden, grad_weight) = _run(
        linear_logprob_entropy, inputs, "logprobs+entropy", chunk_rows=5
    )
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16
    # The product is rounded to bf16 in both; the reference's scores differ by the order of fp32 sums alone.
    expected = _run(linear_logprob_entropy_reference, inputs, "logprobs+entropy")
    torch.testing.assert_close((logprobs, entropy), expected[:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((grad_hidden, grad_weight), expected[2], rtol=2e-2, atol=2e-2)


def test_weight_gradient_of_many_chunks_keeps_small_terms():
    """A thousand chunks added up in bf16 would stall once the sum is 256 times a term."""
    rows = 2048
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = linear_logprob_entropy(hidden, weight, torch.zeros(rows, dtype=torch.int64), chunk_rows=2)
    logprobs.sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[0.5], [-0.5]]).bfloat16() * rows)


def test_transposed_weight():
    hidden, weight, _, targets = _inputs()
    storage = weight.detach().t().contiguous().requires_grad_()  # (H, V), seen as (V, H)
    logprobs, entropy = linear_logprob_entropy(hidden, storage.t(), targets, chunk_rows=4)
    (grad,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), storage)
    expected = linear_logprob_entropy_reference(hidden, weight, targets)
    (expected_grad,) = torch.autograd.grad(expected[0].sum() + expected[1].sum(), weight)
    torch.testing.assert_close(grad, expected_grad.t())


def test_no_rows_stay_connected_to_the_inputs():
    hidden, weight, bias, targets = _inputs(rows=0, with_bias=True)
    logprobs, entropy = linear_logprob_entropy(hidden, weight, targets, bias=bias)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 6)
    assert weight.grad is not None and not weight.grad.any()
    assert bias is not None and bias.grad is not None and not bias.grad.any()


def test_frozen_weight_gets_no_gradient():
    hidden, weight, _, targets = _inputs()
    logprobs, _ = linear_logprob_entropy(hidden, weight.detach(), targets, chunk_rows=2)
    logprobs.sum().backward()
    expected = torch.autograd.grad(linear_logprob_entropy_reference(hidden, weight, targets)[0].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected)


def test_never_holds_all_logits():
    """The largest tensor made in forward or backward is a chunk's logits or the weight's gradient."""
    hidden, weight, _, targets = _inputs(rows=512, hidden=4, vocab=64, dtype=torch.float32)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor))
            return out

    with Sizes():
        logprobs, entropy = linear_logprob_entropy(hidden, weight, targets, chunk_rows=8)
        (logprobs.sum() + entropy.sum()).backward()
    assert max(sizes) <= hidden.numel() < 512 * 64


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    logprobs, entropy = linear_logprob_entropy(hidden, weight, torch.tensor([0, 1]))
    (logprobs.sum() + entropy.sum()).backward()
    torch.testing.assert_close((logprobs, entropy), (torch.zeros(2), torch.zeros(2)))
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
    ],
)
def test_bad_options(options, message):
    hidden, weight, _, targets = _inputs()
    with pytest.raises(ValueError, match=message):
        linear_logprob_entropy(hidden, weight, targets, **options)


def test_shapes_that_do_not_fit():
    hidden, weight, _, targets = _inputs()
    with pytest.raises(ValueError, match="do not fit each other"):
        linear_logprob_entropy(hidden, weight, targets[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [4, 11])
def test_a_second_backward_computes_again_what_the_first_used_up(dtype, chunk_rows):
    hidden, weight, _, targets = _inputs(rows=11, hidden=32, vocab=101, dtype=dtype)
    logprobs, entropy = linear_logprob_entropy(hidden, weight, targets, chunk_rows=chunk_rows)
    loss = logprobs.sum() + 0.5 * entropy.sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
