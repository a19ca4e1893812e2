"""The training benchmark: mistakes in its flags, and that every engine it compares computes the same losses."""

from __future__ import annotations

import json

import pytest

from scripts import bench_train
from tests.tiny import save_tiny_llama


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "fsdp2", "--zero_stage", "1"], "--zero_stage is 1; set it to 2 or 3"),
        (["--engine", "deepspeed"], "deepspeed is not installed"),
        (["--seq", "1"], "--seq is 1; set it to at least 2"),
        (["--steps", "0"], "--steps is 0; set it to at least 1"),
        (["--engine", "megatron"], "invalid choice: 'megatron'"),
    ],
)
def test_mistakes(words, message, monkeypatch, capsys):
    monkeypatch.setattr(bench_train, "is_installed", lambda package: False)
    with pytest.raises(SystemExit):
        bench_train.parse(words)
    assert message in capsys.readouterr().err


def test_all_is_no_world_of_its_own(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        bench_train.parse(["--engine", "all"])
    assert "run it without torchrun" in capsys.readouterr().err


def test_peers_that_cannot_run_are_named(monkeypatch):
    monkeypatch.setattr(bench_train, "is_installed", lambda package: False)
    monkeypatch.setattr(bench_train, "run_world", lambda engine, options: {"tokens_per_s": 2.0, "peak_rss_gb": 1.0})
    result = bench_train.compare(bench_train.parse(["--engine", "all", "--zero_stage", "1"]))
    assert set(result["skipped"]) == {"fsdp2", "deepspeed"}
    assert set(result) == {"hybrid", "skipped"}


def test_engines_agree(warm_worlds, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_train, "is_installed", lambda package: False)
    save_tiny_llama(tmp_path)
    bench_train.main(["--engine", "all", "--model", str(tmp_path), "--batch", "2", "--seq", "16", "--steps", "3"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    mine, peer = report["hybrid"], report["fsdp2"]
    assert mine["losses"] == pytest.approx(peer["losses"], abs=2e-4)
    assert len(mine["losses"]) == len(mine["step_s"]) == 3
    assert mine["world_size"] == peer["world_size"] == 2
    assert report["memory_vs_fsdp2"] == pytest.approx(mine["peak_rss_gb"] / peer["peak_rss_gb"], abs=1e-3)
