"""The recipe as a person runs it: instant help, one sentence for each mistake, and whole runs on tiny models."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import rlhf_step3
from tests.recipes import recipe_runs
from tests.recipes.recipe_runs import TORCHRUN, read_lines
from tests.tiny import save_tiny_llama

run = functools.partial(recipe_runs.run, "rlhf_step3.py")


def read_steps(output_dir: Path) -> list[dict[str, Any]]:
    """The metrics of a run's steps, without those of an evaluation before the first."""
    return [line for line in read_lines(output_dir / "metrics.jsonl") if line["training/global_step"]]


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        result = run("--help", python=sys.executable)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0
    assert result.returncode == 0
    assert "torchrun --nproc-per-node 2 recipes/rlhf_step3.py" in result.stdout
    for flag in ("--actor", "--zero_stage", "--tp_size", "--kl_coef", "--output_dir", "--config", "--deepspeed_config"):
        assert flag in result.stdout


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, tiny_reward_model: Path) -> Path:
    """A directory with good and bad inputs under short names, and the recipe kept from training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rlhf_step3, "quieten", lambda: None)
    monkeypatch.setattr(rlhf_step3, "plain_warnings", lambda: None)
    (tmp_path / "offload.json").write_text('{"zero_optimization": {"offload_param": {"device": "cpu"}}}')
    monkeypatch.setattr(rlhf_step3, "train", lambda settings, inputs: None)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "tiny").symlink_to(tiny_llama)
    (tmp_path / "rm").symlink_to(tiny_reward_model)
    (tmp_path / "noweights").mkdir()
    shutil.copy(tiny_llama / "config.json", tmp_path / "noweights")
    (tmp_path / "good.jsonl").write_text('{"prompt": "ab", "answer": "c"}\n')
    (tmp_path / "nocolumn.jsonl").write_text('{"question": "ab", "id": 1}\n')
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a" * 300}) + "\n")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "reward.py").write_text(
        "def good(completions): return [1.0] * len(completions)\n"
        "def needy(completions, gold): return [1.0] * len(completions)\n"
    )
    (tmp_path / "null.jsonl").write_text('{"prompt": null, "answer": "c"}\n')
    shutil.copytree(tiny_llama, tmp_path / "damaged")
    weights = (tiny_llama / "model.safetensors").read_bytes()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(weights[:-100])
    shutil.copytree(tiny_llama, tmp_path / "old" / "checkpoint-7" / "actor")
    before = {"settings": {"actor": "./tiny", "seed": 3, "prompts_per_step": 16}}
    state = {"trainer": {"global_step": 7, "extra": before}, "models": {}}
    (tmp_path / "old" / "checkpoint-7" / "state.json").write_text(json.dumps(state))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "done" / "actor").mkdir(parents=True)
    (tmp_path / "other" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "other" / "checkpoint-1" / "state.json").write_text('{"trainer": {"global_step": 1}, "models": {}}')
    return tmp_path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--actr tiny", "unknown flag --actr; did you mean --actor?"),
        ("--config none.yaml", "--config none.yaml cannot be read"),
        ("--tp_size 3", "tp_size=3 does not divide the world of 1 rank; set --tp_size 1, or start"),
        ("--actor lama-2-7b", "did you mean llama-2-7b"),
        ("--actor ./nowhere", "model './nowhere': there is no such directory"),
        (
            "--actor llama-2-7b",
            "'llama-2-7b' (meta-llama/Llama-2-7b-hf): it is not in the local cache and HF_HUB_OFFLINE",
        ),
        ("--actor ./noweights", "the directory has no weights"),
        ("--actor ./tiny --reward ./tiny", "without a score head"),
        ("--actor ./tiny --prompts good.jsonl", "need a reward; set --reward"),
        ("--actor ./tiny --reward reward.py:good --prompts none.jsonl", "prompts 'none.jsonl': there is no such file"),
        ("--actor ./tiny --reward reward.py:good --prompts empty.jsonl", "the file is empty"),
        ("--actor ./tiny --reward reward.py:good --prompts nocolumn.jsonl", "it has question, id; name one with"),
        ("--actor ./tiny --reward reward.py:good --prompts long.jsonl", "1 are longer than max_prompt_length=256"),
        ("--actor ./tiny --reward reward.py:god", "has no function god; did you mean good?"),
        ("--actor ./tiny --reward nowhere.py:f", "there is no file nowhere.py"),
        ("--actor ./tiny --reward reward.py:needy --prompts good.jsonl", "needs gold; besides prompts, completions"),
        ("--actor ./tiny --output_dir run", "output_dir=run holds a run already (metrics.jsonl)"),
        ("--actor ./tiny --output_dir old", "output_dir=old holds a run already (checkpoint-7)"),
        (
            "--actor ./tiny --max_prompt_length 64 --output_dir old --resume_from_checkpoint auto --total_steps 6",
            "old/checkpoint-7 is at step 7, beyond total_steps=6; set --total_steps to more",
        ),
        (
            "--actor old/checkpoint-7/actor --max_prompt_length 64 --output_dir old --overwrite_output_dir",
            "actor 'old/checkpoint-7/actor' is in output_dir=old, whose run --overwrite_output_dir removes",
        ),
        ("--actor ./damaged", "model.safetensors is missing or damaged"),
        (
            "--actor ./tiny --max_prompt_length 64 --max_completion_length 500",
            "the actor './tiny' has 512 positions, too few for the longest prompt's 41 tokens and max_completion",
        ),
        (
            "--actor ./tiny --max_prompt_length 64 --kv_blocks 2 --max_completion_length 8",
            "kv_blocks=2 of 16 tokens are too few for the longest prompt's 41 tokens and max_completion_length=8; "
            "set --kv_blocks to 4 or more",
        ),
        ("--actor ./tiny --reward reward.py:good --prompts null.jsonl", "row 0 of null.jsonl: column 'prompt' has no"),
        (
            "--actor ./tiny --output_dir done --resume_from_checkpoint auto",
            "output_dir=done holds a run already (actor)",
        ),
        ("--actor ./tiny --output_dir run --resume_from_checkpoint other/checkpoint-1", "holds a run already (metrics"),
        ("--actor ./tiny --report_to wandbb", "unknown tracker 'wandbb'"),
        (
            "--deepspeed_config offload.json",
            'offload.json: zero_optimization.offload_param.device="cpu": offload is not available yet; set it to none',
        ),
        ("--deepspeed_config ds.json", "ds.json: cannot be read: No such file or directory"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_mistake_is_one_sentence(files: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        rlhf_step3.main(line.split())
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_critic_and_reference_must_share_the_actors_vocabulary(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_llama(files / "other", vocab_size=64)
    with pytest.raises(SystemExit):
        rlhf_step3.main(["--actor", "./tiny", "--critic", "./other"])
    assert "the critic './other' has another vocabulary than the actor" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_defaults_of_the_roles(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(rlhf_step3, "train", lambda settings, inputs: found.append(inputs))
    rlhf_step3.main(["--actor", "./tiny", "--max_prompt_length", "64"])
    rlhf_step3.main(["--actor", "./tiny", "--max_prompt_length", "64", "--reward", "./rm"])
    by_function, by_model = found
    assert (by_function.critic.name, by_function.ref.name) == ("./tiny", "./tiny")
    assert by_function.reward.name == "larger_number"
    assert (by_model.critic.name, by_model.ref.name, by_model.reward.name) == ("./rm", "./tiny", "./rm")


def test_a_resumed_run_with_other_settings_is_warned_of_by_name(files: Path) -> None:
    words = "--actor ./tiny --max_prompt_length 64 --output_dir old --resume_from_checkpoint auto"
    with pytest.warns(UserWarning, match="with seed=3 and the run goes on with seed=0") as caught:
        rlhf_step3.main(words.split())
    assert len(caught) == 1


def test_a_reward_models_template_is_used_and_its_positions_are_kept(files: Path) -> None:
    """What `find_inputs` hands on: messages for the template of the reward model."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlhf_step3, "train", lambda settings, inputs: found.append(inputs))
        rlhf_step3.main(["--actor", "./tiny", "--reward", "./rm", "--prompts", "good.jsonl", "--apply_chat_template"])
    (inputs,) = found
    assert inputs.prompts.rows[0].columns["messages"] == [{"role": "user", "content": "ab"}]
    assert inputs.reward.num_positions == 512


def test_under_a_launcher_one_rank_speaks() -> None:
    result = run("--actr", "x", launcher=TORCHRUN, python=sys.executable)
    assert result.returncode != 0
    assert result.stderr.count("error: unknown flag --actr") == 1


def check_run(output_dir: Path, steps: int) -> dict[str, Any]:
    """What every run leaves behind; returns the last step's metrics."""
    module = AutoModelForCausalLM.from_pretrained(output_dir / "actor")
    tokenizer = AutoTokenizer.from_pretrained(output_dir / "actor")
    assert tokenizer.chat_template
    ids = tokenizer("Which", return_tensors="pt")
    assert torch.isfinite(module(**ids).logits).all()
    lines = read_steps(output_dir)
    assert [line["training/global_step"] for line in lines] == list(range(1, steps + 1))
    samples = read_lines(output_dir / "samples.jsonl")
    assert {"step", "prompt", "completion", "reward", "finish_reason"} <= set(samples[0])
    config = yaml.safe_load((output_dir / "config.yaml").read_text())
    assert (config["total_steps"], config["output_dir"]) == (steps, str(output_dir))
    return lines[-1]


def test_the_demo_on_a_tiny_model(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--max_prompt_length", 64, "--eval_steps", 1, "--log_tokens", 3, "--enable_ema"]
    result = run("--actor", tiny_llama, *flags, "--total_steps", 2, "--output_dir", out)
    assert result.returncode == 0, result.stderr
    assert "Samples before and after" in result.stdout
    assert "reward on held-out prompts: " in result.stdout
    assert "reward=" in result.stderr
    last = check_run(out, 2)
    names = "reward reward_std rewards/larger_number/mean kl entropy completions/mean_length completions/clipped_ratio "
    names += (
        "frac_reward_zero_std actor/pg_loss actor/grad_norm actor/lr actor/kl_coef critic/vf_loss critic/grad_norm "
    )
    names += "rollout/logprob_gap_mean rollout/ratio_max timing_s/step timing_s/generate timing_s/flip_to_generate "
    names += "flip/bytes_received flip/kv_blocks perf/tokens_per_s perf/max_memory_gb training/weights_version"
    assert not set(names.split()) - set(last)
    before, *steps = read_lines(out / "metrics.jsonl")
    assert before["training/global_step"] == 0 and all("eval/reward" in line for line in (before, *steps))
    samples = read_lines(out / "samples.jsonl")
    assert [sum(s["step"] == step and s.get("split") == "eval" for s in samples) for step in range(3)] == [64] * 3
    with_tokens = [sample for sample in samples if sample.get("tokens")]
    assert [sample["step"] for sample in with_tokens] == [1] * 3 + [2] * 3
    for sample in with_tokens:
        assert len(sample["tokens"]["advantage"]) == sample["num_completion_tokens"]
        assert len(sample["tokens"]["text"]) == sample["num_completion_tokens"]
    average = AutoModelForCausalLM.from_pretrained(out / "actor_ema")
    trained = AutoModelForCausalLM.from_pretrained(out / "actor")
    differ = [not torch.equal(a, b) for a, b in zip(average.parameters(), trained.parameters(), strict=True)]
    assert any(differ)
    again = run("--config", out / "config.yaml")
    assert again.returncode == 2
    assert "holds a run already" in again.stderr


def test_a_resumed_run_equals_an_uninterrupted_one(tiny_llama: Path, tmp_path: Path) -> None:
    flags = [
        "--actor",
        tiny_llama,
        "--max_prompt_length",
        64,
        "--dtype",
        "fp32",
        "--warmup_steps",
        3,
        "--save_steps",
        2,
    ]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run(*flags, "--total_steps", 4, "--output_dir", whole).returncode == 0
    resumed.mkdir()
    shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
    shutil.copy(whole / "metrics.jsonl", resumed)  # as if the run had been killed in its step 4
    result = run(
        *flags,
        *("--total_steps", 4, "--output_dir", resumed, "--save_total_limit", 1),
        *("--resume_from_checkpoint", "auto", "--zero_stage", 2),
        launcher=TORCHRUN,
    )
    assert result.returncode == 0, result.stderr
    check_run(resumed, 4)
    assert [path.name for path in resumed.glob("checkpoint-*")] == ["checkpoint-4"]
    for name in ("reward", "kl", "actor/grad_norm", "actor/lr", "critic/vf_loss", "completions/mean_length"):
        values = [[line[name] for line in read_steps(out)] for out in (whole, resumed)]
        assert values[1] == pytest.approx(values[0], rel=1e-3, abs=1e-5), name
    result = run(*flags, "--total_steps", 4, "--output_dir", resumed, "--resume_from_checkpoint", resumed / "actor")
    assert result.returncode == 2 and "is no complete checkpoint" in result.stderr


def test_a_deepspeed_configuration_under_flags_on_two_ranks(tiny_llama: Path, tmp_path: Path) -> None:
    document = {
        "train_batch_size": "auto",
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "reduce_bucket_size": 2e8,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.9]}},
        "gradient_clipping": 0.5,
        "hybrid_engine": {"enabled": True, "inference_tp_size": 2, "max_out_tokens": 512},
    }
    (tmp_path / "ds.json").write_text(json.dumps(document))
    out = tmp_path / "out"
    words = f"--deepspeed --deepspeed_config {tmp_path}/ds.json --max_grad_norm 0.7 --max_prompt_length 64"
    result = run("--actor", tiny_llama, *words.split(), "--total_steps", 1, "--output_dir", out, launcher=TORCHRUN)
    assert result.returncode == 0, result.stderr
    check_run(out, 1)
    notes = [line.partition("ds.json: ")[2] for line in result.stderr.splitlines() if line.startswith("note: ")]
    assert [note for note in notes if note] == [
        "hybrid_engine.max_out_tokens=512 has no effect: each request says how long it may get "
        "(--max_completion_length)",
        "gradient_clipping gives way to --max_grad_norm: 0.7, not 0.5",
    ]
    hidden_size = json.loads((tiny_llama / "config.json").read_text())["hidden_size"]
    expected = {
        "zero_stage": 3,
        "zero_persistence_threshold": 10 * hidden_size,
        "zero_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "zero_reduce_bucket_size": 200_000_000,
        "adam_betas": [0.8, 0.9],
        "max_grad_norm": 0.7,
        "tp_size": 2,
        "dtype": "fp32",
    }
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert {name: config[name] for name in expected} == expected


def test_prompts_and_a_reward_function_on_two_ranks(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": "ab" * n, "n": n}) + "\n" for n in range(1, 6))
    )
    (tmp_path / "reward.py").write_text(
        "def score(completions, n):\n    return [float(len(c) > k) for c, k in zip(completions, n)]\n"
    )
    words = f"--prompts {tmp_path}/prompts.jsonl --reward {tmp_path}/reward.py:score --prompts_per_step 3 --tp_size 2"
    words += " --num_generations 3 --max_completion_length 6 --save_steps 1 --no_apply_chat_template"
    out = tmp_path / "out"
    result = run("--actor", tiny_llama, "--output_dir", out, *words.split(), launcher=TORCHRUN)
    assert result.returncode == 0, result.stderr
    check_run(out, 2)  # one pass over five prompts, three at a time
    assert (out / "checkpoint-1" / "actor" / "model.safetensors").exists()
    assert result.stdout.count("Samples before and after") == 1


BAD_REWARDS = """
def raises(completions, n):
    return [check(k) for k in n]

def check(k):
    if k == 3:
        raise KeyError("no judge")
    return 1.0

def nan(completions): return [float("nan")] * len(completions)

def timeout(completions): raise RuntimeError("request timed out")
"""


def bad_reward_run(tiny_llama: Path, tmp_path: Path, name: str, launcher: tuple[str, ...] = ()) -> str:
    """Run with a reward that fails; returns what was said, the launcher's own words left out."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "ab" * n, "n": n}) + "\n" for n in (1, 3)))
    (tmp_path / "reward.py").write_text(BAD_REWARDS)
    words = f"--prompts {tmp_path}/prompts.jsonl --reward {tmp_path}/reward.py:{name} --no_apply_chat_template"
    words += f" --max_completion_length 4 --output_dir {tmp_path}/out --total_steps 2 --prompts_per_step 2"
    result = run("--actor", tiny_llama, *words.split(), launcher=launcher)
    assert result.returncode != 0 if launcher else result.returncode == 2
    if launcher:
        assert "exitcode  : 2 " in result.stderr
    assert "in _score" not in result.stderr and "gather_or_raise" not in result.stderr  # our frames are no help
    assert result.stderr.count("error: ") == 1
    return result.stderr


def test_a_reward_that_raises_is_one_sentence_after_its_authors_frames(tiny_llama: Path, tmp_path: Path) -> None:
    error = bad_reward_run(tiny_llama, tmp_path, "raises")
    assert "raise KeyError" in error.partition("error: ")[0]
    sentence = error.partition("error: ")[2]
    assert sentence.startswith("reward function raises raised KeyError: 'no judge', on sample 0 (prompt 'ababab'")
    assert sentence.count("\n") == 1  # nor is the bar drawn again


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "error: reward function raises raised KeyError: 'no judge', on sample 0 (prompt 'ababab'"),
        ("timeout", "error: reward function timeout raised RuntimeError: request timed out, on sample 0"),
        ("nan", "error: reward function nan returned nan for sample 0"),
    ],
)
def test_on_two_ranks_only_the_one_whose_reward_failed_speaks(
    tiny_llama: Path, tmp_path: Path, name: str, message: str
) -> None:
    error = bad_reward_run(tiny_llama, tmp_path, name, launcher=TORCHRUN)
    assert message in error and "lost another rank" not in error


def test_overwriting_removes_the_old_runs_checkpoints(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "checkpoint-9").mkdir(parents=True)
    (out / "checkpoint-9" / "state.json").write_text('{"trainer": {"global_step": 9}, "models": {}}')
    (out / "notes.txt").touch()
    words = f"--max_prompt_length 64 --total_steps 1 --save_steps 1 --overwrite_output_dir --output_dir {out}"
    result = run("--actor", tiny_llama, *words.split())
    assert result.returncode == 0, result.stderr
    assert {path.name for path in out.iterdir()} == {
        *("actor", "checkpoint-1", "config.yaml", "metrics.jsonl", "samples.jsonl", "notes.txt")
    }


def test_a_reward_model_is_reward_and_critic(tiny_llama: Path, tiny_reward_model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    words = f"--prompts {tmp_path}/prompts.jsonl --prompts_per_step 2 --max_completion_length 4 --total_steps 1"
    out = tmp_path / "out"
    result = run("--actor", tiny_llama, "--reward", tiny_reward_model, "--output_dir", out, *words.split())
    assert result.returncode == 0, result.stderr
    assert "rewards/reward_model/mean" in check_run(out, 1)
