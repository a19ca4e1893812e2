from __future__ import annotations

import pytest

from hybrid.inference.scheduler import Scheduler


@pytest.fixture
def hopeful(monkeypatch):
    """Admission without foresight, as if all sequences ended early: with few blocks preemption is not rare then."""

    def fits(scheduler, candidate, cached):
        pool = scheduler.pool
        has_room = pool.num_blocks_for(candidate.num_tokens) <= pool.num_free
        return has_room and len(scheduler.running) < scheduler.max_num_seqs

    monkeypatch.setattr(Scheduler, "_fits", fits)
