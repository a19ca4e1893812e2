from __future__ import annotations

import pytest
import torch

from ops.accumulate import accumulate


@pytest.mark.parametrize("shape", [(), (1,), (15,), (16,), (33,), (7, 5), (300, 301)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float32,) * 2, (torch.bfloat16,) * 2])
def test_the_bits_are_those_of_torch(shape, dtypes):
    generator = torch.Generator().manual_seed(0)
    total, part = (torch.randn(shape, generator=generator).to(dtype) for dtype in dtypes)
    expected = total + part.to(total.dtype)
    accumulate(total, part)
    assert torch.equal(total, expected)


def test_views_and_pieces():
    total, part = torch.zeros(6, 8), torch.ones(6, 8, dtype=torch.bfloat16)
    accumulate(total[2:4], part[:2])
    accumulate(total[:, 3:5], part[:, :2])
    assert total.sum(1).tolist() == [2, 2, 8 + 2, 8 + 2, 2, 2]
    accumulate(total, part[0])  # broadcast, as add_ does
    assert total[0].tolist() == [1, 1, 1, 2, 2, 1, 1, 1]
