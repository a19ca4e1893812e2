"""The generation benchmark: mistakes in its flags, and that every engine it compares does the same work."""

from __future__ import annotations

import json

import pytest

from scripts import bench_generate
from tests.tiny import save_tiny_llama, tiny_tokenizer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "0"], "--replicas is 0; set it to at least 1"),
        (["--runs", "0"], "--runs is 0; set it to at least 1"),
        (["--engine", "megatron"], "invalid choice: 'megatron'"),
    ],
)
def test_mistakes(words, message, capsys):
    with pytest.raises(SystemExit):
        bench_generate.parse(words)
    assert message in capsys.readouterr().err


def test_the_work_is_what_it_says():
    options = bench_generate.parse(["--num_prompts", "9", "--num_samples", "3", "--seed", "5"])
    work = bench_generate.requests(options, tiny_tokenizer())
    assert len(work) == 27
    assert work == bench_generate.requests(options, tiny_tokenizer())
    for index in range(0, 27, 3):
        first, *others = work[index : index + 3]
        assert all(other.prompt == first.prompt for other in others)
    assert {each.max_tokens for each in work} <= set(bench_generate.LENGTHS)
    fixed = bench_generate.requests(bench_generate.parse(["--workload", "fixed"]), tiny_tokenizer())
    assert [(len(each.prompt), each.max_tokens) for each in fixed] == [(32, 64)] * 64


def test_every_engine_makes_the_same_tokens(warm_worlds, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_generate, "has_vllm", lambda python: False)
    save_tiny_llama(tmp_path)
    words = ["--engine", "all", "--model", str(tmp_path), "--dtype", "fp32", "--num_prompts", "3", "--num_samples", "2"]
    bench_generate.main([*words, "--runs", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    engines = [report[name] for name in ("hybrid", "hybrid_1_replica", "hf")]
    assert len({each["new_tokens"] for each in engines}) == len({each["prompt_tokens"] for each in engines}) == 1
    assert [each["replicas"] for each in engines] == [2, 1, 1]
    assert report["speed_vs_hf"] == pytest.approx(engines[0]["tokens_per_s"] / engines[2]["tokens_per_s"], abs=1e-3)
    assert engines[0]["first_token_s"]["mean"] > 0
