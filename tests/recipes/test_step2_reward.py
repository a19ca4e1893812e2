"""Step 2 as a person runs it, and the whole way from step 1 to step 3."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hybrid.models.loading import check_value_model, resolve_model
from tests.recipes.recipe_runs import ENVIRONMENT, ROOT, TORCHRUN, read_lines, run, write_rows


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


def test_a_reference_belongs_to_dpo(tiny_llama: Path) -> None:
    result = run("rlhf_step2_reward.py", "--actor", tiny_llama, "--ref", tiny_llama)
    assert result.returncode == 2
    assert "is for dpo, and objective=reward has none; leave it out" in result.stderr


def test_the_three_steps_in_a_row(tiny_llama: Path, tmp_path: Path) -> None:
    size = {"MODEL": str(tiny_llama), "EXAMPLES": "8", "PAIRS": "16", "STEPS": "1", "HELD_OUT": "4", "DTYPE": "fp32"}
    result = subprocess.run(
        [str(ROOT / "scripts" / "rlhf_e2e.sh"), str(tmp_path / "out")],
        env=ENVIRONMENT | size | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout.splitlines()[-1])
    assert all(0 <= outcome[f"judge_{when}"] <= 1 for when in ("base", "before", "after"))
    assert outcome["held_out"] == 4
    assert "rewards/reward_model/mean" in read_lines(tmp_path / "out" / "step3" / "metrics.jsonl")[0]
