from __future__ import annotations

import pytest
import torch

from ops import cpu
from ops.norm import rms_norm, rms_norm_reference


@pytest.mark.parametrize("size", [1, 8, 16, 24, 576, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equals_torch_s_rms_norm(size, dtype):
    generator = torch.Generator().manual_seed(size)
    hidden = torch.randn(3, 5, size, generator=generator).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    wide = torch.nn.functional.rms_norm(hidden.double(), (size,), weight.double(), 1e-6)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-5}[dtype]  # in fp32 inside
    for rounds_first in (True, False):
        output = rms_norm(hidden, weight, 1e-6, rounds_first=rounds_first)
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), wide, atol=tolerance, rtol=tolerance)
    shifted = rms_norm(hidden, weight - 1, 1e-6, offset=1.0)
    torch.testing.assert_close(shifted.double(), wide, atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.skipif(cpu.library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("rounds_first", [True, False])
def test_bf16_rounds_as_the_reference_does(rounds_first):
    """Their sums differ in the last bit of fp32, which 16 bits show in one number of thousands."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((64, 576), (576,)))
    output, expected = (
        function(hidden, weight, 1e-5, rounds_first=rounds_first) for function in (rms_norm, rms_norm_reference)
    )
    assert (output == expected).float().mean() > 0.999


def test_rows_that_are_not_next_to_each_other():
    hidden = torch.randn(4, 6, 32).transpose(0, 1)[:, ::2]
    weight = torch.randn(32)
    torch.testing.assert_close(rms_norm(hidden, weight, 1e-6), rms_norm(hidden.contiguous(), weight, 1e-6))
    across = torch.randn(32, 6).t()
    torch.testing.assert_close(rms_norm(across, weight, 1e-6), rms_norm(across.contiguous(), weight, 1e-6))
