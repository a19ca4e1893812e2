"""The launcher itself: results by rank, the culprit first, no rank left behind. And what a mesh says of its world."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybrid.parallel import init_parallel
from tests.distributed import world
from tests.distributed.world import WorldError, run_world


def _sum_of_ranks(offset: int) -> tuple[int, float]:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return int(os.environ["RANK"]), value.item()


def _raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("the culprit")
    dist.barrier()


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def _hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def test_returns_results_by_rank(tmp_path: Path) -> None:
    assert run_world(_sum_of_ranks, 2, tmp_path, 10) == [(0, 21.0), (1, 21.0)]


def test_names_the_culprit_first(tmp_path: Path) -> None:
    with pytest.raises(WorldError) as caught:
        run_world(_raise_on_one, 2, tmp_path)
    text = str(caught.value)
    assert text.index("the culprit") < text.index("--- rank 0")
    assert caught.value.exit_codes == [1, 1]


def test_reports_a_rank_that_dies_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"rank 1 died without a word \(exit code 7\)"):
        run_world(_die_on_one, 2, tmp_path)


def test_kills_a_rank_that_outlives_the_others_and_says_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "OUTLIVE_S", 1.0)
    start = time.monotonic()
    with pytest.raises(WorldError, match="hung and was killed") as caught:
        run_world(_hang_on_one, 2, tmp_path, timeout_s=5.0)
    assert "_hang_on_one" in str(caught.value)
    assert time.monotonic() - start < 15


def _exchange() -> tuple[list[tuple[int, int]], int, int]:
    mesh = init_parallel()
    # Rank r has r * s objects for rank s: rank 0 sends nothing and gets nothing, rank 1 has one for itself.
    outgoing = [[(mesh.rank, i, "x" * 1000 * i) for i in range(mesh.rank * s)] for s in range(mesh.world_size)]
    received = [(rank, i, text) for rank, i, text in mesh.exchange_objects(outgoing)]
    num_bytes = mesh.bytes_received
    tensor = torch.linspace(0, 1, 7, dtype=torch.float64)
    (arrived,) = mesh.exchange_objects([[tensor + mesh.rank] if (mesh.rank + 1) % 3 == s else [] for s in range(3)])
    expected = tensor + (mesh.rank - 1) % 3
    assert arrived.dtype == tensor.dtype and torch.equal(arrived, expected)
    assert mesh.exchange_objects([[], [], []]) == []
    with pytest.raises(ValueError, match="outgoing has 2 lists for 3 ranks; give one for each"):
        mesh.exchange_objects([[], []])
    return [(rank, i) for rank, i, text in received if text == "x" * 1000 * i], len(received), num_bytes


def test_objects_reach_the_rank_they_are_for(tmp_path: Path) -> None:
    for rank, (received, count, num_bytes) in enumerate(run_world(_exchange, 3, tmp_path)):
        assert received == [(sender, i) for sender in range(3) for i in range(sender * rank)]
        assert count == len(received)
        sent_here = sum(1000 * i for sender in range(3) if sender != rank for i in range(sender * rank))
        assert sent_here <= num_bytes <= sent_here + 50 * len(received) + 100


def test_alone_objects_stay_where_they_are() -> None:
    thing = object()
    assert init_parallel().exchange_objects([[thing]]) == [thing]
