"""Tapes: the calls of a computation, made again over what its tensors hold by then."""

from __future__ import annotations

import weakref

import pytest
import torch

from ops import tape
from ops.norm import rms_norm


@torch.no_grad()
def test_a_tape_runs_over_what_its_tensors_hold_by_then():
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(6, 32, generator=generator), torch.randn(32, generator=generator)
    index, table = torch.tensor([2, 0, 1]), torch.randn(4, 32, generator=generator)
    written = torch.zeros(6, 64)

    def compute():
        first, second = rms_norm(rows.view(2, 3, 32), weight, 1e-5).flatten(0, 1).chunk(2)
        looked_up = torch.nn.functional.embedding(index, table).add_(first)
        written[:3].copy_(torch.cat([looked_up, second], dim=-1))  # in place, of what stays
        return torch.where(written[:3] > 0, written[:3], -1.0).sum(-1)

    launch = tape.record(compute)
    assert torch.equal(launch(), compute())
    for _ in range(2):
        rows.normal_(generator=generator)
        weight.normal_(generator=generator)
        index.random_(0, 4, generator=generator)
        found = launch()
        seen = written.clone()
        assert torch.equal(found, compute())
        assert torch.equal(seen, written)


@torch.no_grad()
def test_a_tape_lets_go_of_what_it_has_read():
    made, alive = [], []

    @tape.recordable
    def kernel(rows):
        alive.append(sum(each() is not None for each in made))
        output = rows + 1
        made.append(weakref.ref(output))
        return output

    def compute():
        rows = torch.zeros(3)
        for _ in range(5):
            rows = kernel(rows)
        return rows

    launch = tape.record(compute)
    assert torch.equal(launch(), torch.full((3,), 5.0))
    assert alive[5:] == [0, 1, 1, 1, 1]  # what the recording made is gone, and of a launch there is the last alone


@pytest.mark.parametrize(
    "compute",
    [
        lambda rows: rows * 2 if rows.sum() > 0 else rows,
        lambda rows: rows[rows > 0],
        lambda rows: rows * rows.max().item(),
        lambda rows: rows.nonzero(),
    ],
)
def test_what_goes_by_numbers_is_refused(compute):
    rows = torch.ones(3)
    with pytest.raises(tape.NotRecordable):
        tape.record(lambda: compute(rows))
    assert torch.equal(rms_norm(rows, rows, 0.0), rows)  # nothing is recorded any more


def test_models_that_ask_are_told_that_they_are_traced():
    seen = []

    def compute():
        seen.append(torch.compiler.is_compiling())
        return torch.zeros(1)

    tape.record(compute)()
    assert seen == [True]
    assert not torch.compiler.is_compiling()
