"""Step 1 as a person runs it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

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


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe runs in this process, alone."""
    monkeypatch.setattr(rlhf_step1_sft, "quieten", lambda: None)
    monkeypatch.setattr(rlhf_step1_sft, "plain_warnings", lambda: None)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 4,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}},
    "gradient_clipping": 0.3,
    "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},  # as Chat writes for each step
}


@pytest.mark.usefixtures("here")
def test_a_deepspeed_configuration_gives_the_run_of_its_flags(tiny_llama: Path, tmp_path: Path, chats: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    hidden_size = json.loads((tiny_llama / "config.json").read_text())["hidden_size"]
    flags = "--examples_per_step 4 --zero_stage 2 --no_zero_overlap_comm --learning_rate 1e-3 --weight_decay 0.01 "
    flags += "--adam_betas 0.9 0.999 --lr_scheduler linear --warmup_steps 2 --max_grad_norm 0.3 --dtype fp32"
    ways = {
        "json": ["--deepspeed_config", str(tmp_path / "ds.json")],
        "flags": [*flags.split(), "--zero_reduce_bucket_size", str(hidden_size**2)],
        "default": ["--dtype", "fp32"],
    }
    lines, configs = {}, {}
    for way, words in ways.items():
        out = tmp_path / way
        common = ["--actor", str(tiny_llama), "--data", str(chats), "--num_train_epochs", "2", "--output_dir", str(out)]
        with warnings.catch_warnings(action="error"):
            rlhf_step1_sft.main([*common, *words])
        lines[way] = [
            {name: line.get(f"actor/{name}", line.get(name)) for name in ("loss", "lr", "grad_norm")}
            for line in read_lines(out / "metrics.jsonl")
        ]
        configs[way] = yaml.safe_load((out / "config.yaml").read_text()) | {"output_dir": None}
    assert configs["json"] == configs["flags"] != configs["default"]
    assert lines["json"] == lines["flags"] and len(lines["json"]) == 6
    assert lines["default"][0]["loss"] != lines["json"][0]["loss"]  # another number of examples


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_batch_sise": 4}, "unknown key train_batch_sise; did you mean train_batch_size"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, 'offload_param.device="cpu": offload is not'),
        ({"train_batch_size": 0}, "train_batch_size: train_batch_size=0 is too small"),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "train_batch_size=4 is not train_micro_batch_size_per_gpu=4 x gradient_accumulation_steps=2 x 2 ranks; "
            "set it to 16, or to auto",
        ),
        (
            {"train_micro_batch_size_per_gpu": 4},
            "train_batch_size=4 is no multiple of train_micro_batch_size_per_gpu=4 x 2 ranks",
        ),
    ],
)
def test_a_key_that_does_not_fit_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    message: str,
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED | change))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as caught:
        rlhf_step1_sft.main(["--deepspeed_config", str(tmp_path / "ds.json")])
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith(f"error: {tmp_path}/ds.json: ") and message in error and error.count("\n") == 1


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
        ("--actor ./tiny --data good.jsonl --eval_size 1", "eval_size=1 of 1 rows leaves none to train on"),
        ("--actor ./tiny --data long.jsonl", "has 512 positions, too few for the longest example's 602 tokens"),
        ("--actor ./tiny --data good.jsonl --output_dir run", "output_dir=run holds a run already (metrics.jsonl)"),
        ("--actor ./tiny --data good.jsonl --resume_from_checkpoint here", "is no complete checkpoint"),
        ("--actor ./tiny --eval_data good.jsonl --eval_size 1", "set one of the two"),
    ],
)
@pytest.mark.usefixtures("here")
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
