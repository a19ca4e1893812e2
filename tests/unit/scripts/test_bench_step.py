"""The benchmark of on-policy steps: mistakes in its flags, and that a step is the step it says it is."""

from __future__ import annotations

import json

import pytest

from scripts import bench_step
from tests.tiny import tiny_tokenizer

SMALL = ("--dtype", "fp32", "--num_prompts", "3", "--num_samples", "2", "--new_tokens", "5", "--steps", "1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_samples", "1"], "--num_samples is 1; set it to at least 2"),
        (["--terms", "5", "3"], "--terms is 5 3; the first is at least 1, the second no less"),
        (["--steps", "0"], "--steps is 0; set it to at least 1"),
        (["--engine", "trl", "--ranks", "3"], "3 ranks of 16 samples (--peer_batch) do not divide the 64"),
        (["--engine", "all", "--peer_ranks", "3"], "3 ranks of 16 samples (--peer_batch) do not divide the 64"),
        (["--engine", "verl"], "invalid choice: 'verl'"),
        (["--algorithm", "ppo"], "invalid choice: 'ppo'"),
    ],
)
def test_mistakes(words, message, capsys):
    with pytest.raises(SystemExit):
        bench_step.parse(words)
    assert message in capsys.readouterr().err


def test_all_is_no_world_of_its_own(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        bench_step.parse(["--engine", "all"])
    assert "run it without torchrun" in capsys.readouterr().err


def test_hybrid_makes_exactly_the_tokens(tiny_llama, capsys):
    bench_step.main(["--model", str(tiny_llama), "--threads", "1", *SMALL])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    check(report, "hybrid")
    assert {"flip_to_generate", "flip_to_train"} <= report["parts_s"].keys()


def test_trl_makes_exactly_the_tokens(tiny_llama, capsys):
    pytest.importorskip("trl")
    bench_step.main(["--model", str(tiny_llama), "--threads", "1", "--engine", "trl", "--peer_batch", "3", *SMALL])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    check(report, "trl")


def check(report, engine):
    assert (report["engine"], report["samples"], len(report["all_step_s"])) == (engine, 6, 1)
    assert (report["shortest_completion"], report["longest_completion"], report["new_tokens"]) == (5, 5, 30)
    options = bench_step.parse(SMALL)
    prompts = tiny_tokenizer()(bench_step.questions(options))["input_ids"]
    assert report["prompt_tokens"] == 2 * sum(map(len, prompts))
    assert {"generate", "reward", "ref", "update_actor"} <= report["parts_s"].keys()
    assert 0 < sum(report["parts_s"].values()) <= report["step_s"] + 0.01
    assert report["step_s"] > 0 and report["peak_gb"] > 0
    # The warm-up has moved the policy away from its reference.
    assert report["metrics"]["kl"] > 0 and report["metrics"]["grad_norm"] > 0


def test_a_peer_that_is_missing_is_named(monkeypatch, tiny_llama, capsys):
    monkeypatch.setattr(bench_step, "has_trl", lambda python: False)
    monkeypatch.setattr(bench_step, "launch", lambda options, engine: {"step_s": 1.0, "peak_gb": 1.0})
    bench_step.main(["--engine", "all", "--model", str(tiny_llama)])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report) == {"hybrid", "skipped"}
    assert "set --peer_python" in report["skipped"]["trl"]


def test_all_says_how_much_faster_and_smaller(monkeypatch, tiny_llama, capsys):
    figures = {
        ("hybrid", 2, "fast"): {"step_s": 2.0, "peak_gb": 1.0},
        ("trl", 1, "fast"): {"step_s": 7.0, "peak_gb": 4.0},
        ("trl", 1, "defaults"): {"step_s": 9.0, "peak_gb": 2.0},
    }
    monkeypatch.setattr(bench_step, "has_trl", lambda python: True)
    monkeypatch.setattr(
        bench_step, "launch", lambda options, engine: figures[engine, options.ranks, options.peer_settings]
    )
    bench_step.main(["--engine", "all", "--ranks", "2", "--model", str(tiny_llama)])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    speeds = {"speed_vs_trl": 3.5, "memory_vs_trl": 0.25, "speed_vs_trl_defaults": 4.5, "memory_vs_trl_defaults": 0.5}
    reports = dict(zip(("hybrid", "trl", "trl_defaults"), figures.values(), strict=True))
    assert report == reports | speeds | {"skipped": {}}
