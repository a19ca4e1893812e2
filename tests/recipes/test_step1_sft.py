"""Step 1 as a person runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import rlhf_step1_sft
from tests.recipes.recipe_runs import TORCHRUN, read_lines, run, write_rows


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": "ab" * n}, {"role": "assistant", "content": "c" * (n % 5 + 1)}]}
        for n in range(1, 13)
    ]
    return write_rows(tmp_path / "chats.jsonl", rows)


def test_two_ranks_learn_what_one_learns_and_an_interrupted_run_goes_on(
    tiny_llama: Path, tmp_path: Path, chats: Path
) -> None:
    words = ["--actor", tiny_llama, "--data", chats, "--eval_size", 2, "--examples_per_step", 4, "--dtype", "fp32"]
    words += ["--num_train_epochs", 2, "--learning_rate", 1e-3, "--zero_persistence_threshold", 0]
    one = run("rlhf_step1_sft.py", *words, "--output_dir", tmp_path / "one", "--save_steps", 2)
    assert one.returncode == 0, one.stderr
    assert "loss on held-out examples:" in one.stdout
    two = run("rlhf_step1_sft.py", *words, "--output_dir", tmp_path / "two", launcher=TORCHRUN)
    assert two.returncode == 0, two.stderr
    lines, other = read_lines(tmp_path / "one" / "metrics.jsonl"), read_lines(tmp_path / "two" / "metrics.jsonl")
    assert [line["training/global_step"] for line in lines] == list(range(6))
    assert lines[5]["training/epoch"] == 2.0
    assert lines[5]["eval/perplexity"] < lines[0]["eval/perplexity"]
    for line, same in zip(lines[1:], other[1:], strict=True):
        assert line["loss"] == pytest.approx(same["loss"], rel=1e-3)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "actor")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one" / "actor")
    assert tokenizer.chat_template
    assert torch.isfinite(model(**tokenizer("Which", return_tensors="pt")).logits).all()
    assert yaml.safe_load((tmp_path / "one" / "config.yaml").read_text())["total_steps"] == 5

    (tmp_path / "again").mkdir()
    (tmp_path / "one" / "checkpoint-4").rename(tmp_path / "again" / "checkpoint-4")
    words += ["--output_dir", tmp_path / "again", "--resume_from_checkpoint", "auto"]
    again = run("rlhf_step1_sft.py", *words, launcher=TORCHRUN)
    assert again.returncode == 0, again.stderr
    (line,) = read_lines(tmp_path / "again" / "metrics.jsonl")
    assert line["training/global_step"] == 5
    assert line["loss"] == pytest.approx(lines[5]["loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lossy_on all", "unknown flag --lossy_on; did you mean --loss_on?"),
        ("--loss_on some", "--loss_on=some is not one of completions, all"),
        ("--actor ./nowhere", "model './nowhere': there is no such directory"),
        ("--actor ./tiny --data none.jsonl", "there is no such file"),
        (
            "--actor ./tiny --data bad.jsonl",
            "row 0 of bad.jsonl: no columns to learn from (messages; prompt,completion",
        ),
        ("--actor ./tiny --data good.jsonl --eval_size 1", "eval_size=1 of 1 examples leaves none to train on"),
        ("--actor ./tiny --data long.jsonl", "has 512 positions, too few for the longest example's 602 tokens"),
        ("--actor ./tiny --data good.jsonl --output_dir run", "output_dir=run holds a run already (metrics.jsonl)"),
        ("--actor ./tiny --data good.jsonl --resume_from_checkpoint here", "is no complete checkpoint"),
        ("--actor ./tiny --eval_data good.jsonl --eval_size 1", "set one of the two"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_mistake_is_one_sentence(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rlhf_step1_sft, "quieten", lambda: None)
    monkeypatch.setattr(rlhf_step1_sft, "plain_warnings", lambda: None)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "tiny").symlink_to(tiny_llama)
    write_rows(tmp_path / "good.jsonl", [{"prompt": "a", "completion": "b"}])
    write_rows(tmp_path / "bad.jsonl", [{"question": "a"}])
    write_rows(tmp_path / "long.jsonl", [{"prompt": "a", "completion": "b" * 600}])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(SystemExit) as caught:
        rlhf_step1_sft.main(line.split())
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
