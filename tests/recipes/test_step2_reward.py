"""Step 2 as a person runs it, and the whole way from step 1 to step 3."""

from __future__ import annotations

import json
import subprocess
import warnings
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from transformers import AutoModelForCausalLM

from hybrid.arguments import parse_arguments
from hybrid.deepspeed import DeepSpeedArguments, learning_presets
from hybrid.learning_config import PreferenceSettings
from hybrid.models.loading import check_value_model, resolve_model
from tests.recipes.recipe_runs import TORCHRUN, read_lines, run, write_rows
from tests.warm_python import ENVIRONMENT, ROOT, warm_python


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [
        {"prompt": "ab" * n, "chosen": "c" * (n % 3 + 1), "rejected": "d" * (n % 4 + 1), "margin": 0.5}
        for n in range(1, 25)
    ]
    return write_rows(tmp_path / "pairs.jsonl", rows)


@pytest.mark.parametrize("objective", ["reward", "dpo"])
def test_two_ranks_learn_from_pairs(tiny_llama: Path, tmp_path: Path, pairs: Path, objective: str) -> None:
    out = tmp_path / "out"
    words = ["--actor", tiny_llama, "--data", pairs, "--eval_size", 4, "--examples_per_step", 10, "--dtype", "fp32"]
    words += ["--objective", objective, "--num_train_epochs", 4, "--learning_rate", 1e-3, "--no_apply_chat_template"]
    words += ["--ref", tiny_llama] if objective == "dpo" else []
    result = run("rlhf_step2_reward.py", *words, "--output_dir", out, "--save_steps", 8, launcher=TORCHRUN)
    assert result.returncode == 0, result.stderr
    lines = read_lines(out / "metrics.jsonl")
    assert [line["training/global_step"] for line in lines] == list(range(9))
    assert lines[-1]["eval/accuracy"] == 1.0
    assert lines[-1]["eval/margin"] > lines[0]["eval/margin"] == pytest.approx(0, abs=1e-4)
    assert {"eval/brier", "eval/ece", "accuracy", "margin", "brier", "ece"} <= lines[-1].keys()
    assert (out / "checkpoint-8" / "state.json").exists()
    if objective == "reward":
        check_value_model(resolve_model(str(out / "reward")), new_head=False)
    else:
        AutoModelForCausalLM.from_pretrained(out / "actor")


@pytest.mark.parametrize(
    ("batch", "flags", "size", "notes"),
    [
        ({}, "", 16, []),
        ({"train_batch_size": 10}, "", 10, []),  # no need to be a multiple of the ranks
        ({"train_batch_size": "auto"}, "--examples_per_step 12", 12, []),
        (
            {"train_batch_size": 32},
            "--examples_per_step 12",
            12,
            ["train_batch_size gives way to --examples_per_step: 12, not 32"],
        ),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            "",
            48,
            ["train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=3: --examples_per_step is 48, over all "],
        ),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"},
            "",
            24,
            ["train_micro_batch_size_per_gpu=2: --examples_per_step is 24, over all ranks; for memory set --max_tok"],
        ),
        (
            {"train_batch_size": "auto", "gradient_accumulation_steps": 3},
            "",
            16,
            ["gradient_accumulation_steps=3 has no effect: --examples_per_step counts those of all ranks and passes"],
        ),
        (
            {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 5},
            "--examples_per_step 12",
            12,
            ["train_micro_batch_size_per_gpu=5 has no effect"],
        ),
        (
            {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
            "",
            16,
            ["hybrid_engine.inference_tp_size=2 has no effect: nothing is generated in this step"],
        ),
    ],
)
def test_deepspeeds_batch_is_that_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: dict[str, Any], flags: str, size: int, notes: list[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(batch))
    monkeypatch.setenv("WORLD_SIZE", "4")
    groups = [*get_type_hints(PreferenceSettings).values(), DeepSpeedArguments]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn, *_ = parse_arguments(groups, [*flags.split(), "--deepspeed", str(file)], presets=learning_presets)
    assert learn.examples_per_step == size
    said = [str(warning.message).removeprefix(f"{file}: ") for warning in caught]
    assert len(said) == len(notes) and all(map(str.startswith, said, notes))


def test_a_reference_belongs_to_dpo(tiny_llama: Path) -> None:
    result = run("rlhf_step2_reward.py", "--actor", tiny_llama, "--ref", tiny_llama)
    assert result.returncode == 2
    assert "is for dpo, and objective=reward has none; leave it out" in result.stderr


def run_e2e(python: str | Path, *words: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "rlhf_e2e.sh"), *map(str, words)],
        env=ENVIRONMENT | {"PYTHON": str(python)} | environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_the_three_steps_in_a_row(tiny_llama: Path, tmp_path: Path) -> None:
    size = {"MODEL": str(tiny_llama), "EXAMPLES": "8", "PAIRS": "16", "STEPS": "1", "HELD_OUT": "4", "DTYPE": "fp32"}
    result = run_e2e(warm_python(), tmp_path / "out", **size)
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout.splitlines()[-1])
    assert all(0 <= outcome[f"judge_{when}"] <= 1 for when in ("base", "before", "after"))
    assert outcome["held_out"] == 4
    assert "rewards/reward_model/mean" in read_lines(tmp_path / "out" / "step3" / "metrics.jsonl")[0]
    steps = [tmp_path / "out" / step / "config.yaml" for step in ("step1", "step2", "step3")]
    assert [yaml.safe_load(path.read_text())["total_steps"] for path in steps] == [1, 1, 1]


# Stands in for Python: it keeps a list of what it is told, leaves a file as a stage that got half way would, and fails
# where it should.
STAGES = """#!/bin/sh
echo "$*" >> "$LOG"
for made in "$TMPDIR"/rlhf_e2e.??????; do mkdir -p "$made/data"; done
case "$*" in *"$FAIL"*) exit 7 ;; *judge*) echo 0.5 ;; -c*) echo 1.0 ;; esac
"""


@pytest.mark.parametrize(
    ("stage", "calls"),
    [
        ("larger_number.py data", 1),
        ("answers-base.jsonl --temperature", 2),
        ("judge", 3),
        ("rlhf_step1_sft.py", 4),
        ("answers-before.jsonl --temperature", 5),
        ("rlhf_step2_reward.py", 7),
        ("rlhf_step3.py", 8),
        ("answers-after.jsonl --temperature", 9),
        ("-c", 11),
        ("none of them", 11),
    ],
)
def test_a_stage_that_fails_ends_the_script(tmp_path: Path, stage: str, calls: int) -> None:
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(STAGES)
    python.chmod(0o755)
    result = run_e2e(python, LOG=str(log), FAIL=stage, TMPDIR=str(tmp_path))
    failed = stage != "none of them"
    assert result.returncode == (7 if failed else 0)
    assert ("failed, with exit code 7: " in result.stderr) == failed
    assert sum(line.startswith(("-c", str(ROOT))) for line in log.read_text().splitlines()) == calls
    (out,) = tmp_path.glob("rlhf_e2e.*")
    assert f"models, metrics and data are in {out}; remove it" in result.stderr
    if not failed:
        assert json.loads(result.stdout)["judge_after"] == 0.5


def test_a_temporary_directory_without_anything_is_removed(tmp_path: Path) -> None:
    result = run_e2e(tmp_path / "no-python", TMPDIR=str(tmp_path))
    assert result.returncode == 127
    assert not list(tmp_path.iterdir())
