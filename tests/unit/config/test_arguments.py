"""The command line and its YAML: transformers' conventions, DeepSpeed-Chat's spellings, and errors that help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from hybrid.arguments import UsageError, input_errors, parse_arguments, save_config, to_flags
from hybrid.config import PPOSettings, setting

GROUPS = list(get_type_hints(PPOSettings).values())


def parse(line: str, **options: Any) -> PPOSettings:
    return PPOSettings(*parse_arguments(GROUPS, line.split(), **options))


def test_no_arguments_are_all_defaults() -> None:
    assert parse("") == PPOSettings(*(group() for group in GROUPS))


def test_conventions_of_hf_argument_parser() -> None:
    settings = parse("--zero-stage 1 --num_generations=4 --whiten-advantages --no_zero_keep_slices --kv_blocks 12")
    assert (settings.zero.stage, settings.ppo.num_generations, settings.inference.kv_blocks) == (1, 4, 12)
    assert settings.ppo.whiten_advantages is True
    assert settings.zero.keep_slices is False
    assert parse("--whiten_advantages false").ppo.whiten_advantages is False
    assert parse("--kv_blocks auto --kl_target 0.5").ppo.kl_target == 0.5
    assert parse("--kl_target none").ppo.kl_target is None
    assert parse("--adam_betas 0.8 0.9").optim.betas == parse("--adam_betas 0.8,0.9").optim.betas == (0.8, 0.9)
    for spelling, dtype in {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "float32": "fp32"}.items():
        assert parse(f"--dtype {spelling}").model.dtype == dtype
    assert parse("--report_to wandb tensorboard").run.report_to == ("wandb", "tensorboard")
    assert parse("--report_to none").run.report_to == ()


def test_last_of_a_repeated_flag_wins() -> None:
    assert parse("--seed 1 --seed 2").ppo.seed == 2


def test_deepspeed_chat_spellings() -> None:
    settings = parse(
        "--actor_model_name_or_path a --critic_model_name_or_path c --ppo_epochs 2 --max_prompt_seq_len 9 "
        "--max_answer_seq_len 8 --actor_learning_rate 1e-6 --actor_zero_stage 2 --critic-zero-stage=2 "
        "--reward_model_name_or_path r --gradient_accumulation_steps 1 --no_enable_ema "
        "--inference_tp_size 2 --enable_hybrid_engine --release_inference_cache --offload none --local_rank=3"
    )
    assert (settings.model.actor, settings.model.critic, settings.model.reward) == ("a", "c", "r")
    assert (settings.ppo.num_ppo_epochs, settings.ppo.max_prompt_length, settings.ppo.max_completion_length) == (
        2,
        9,
        8,
    )
    assert (settings.optim.learning_rate, settings.zero.stage, settings.parallel.tp_size) == (1e-6, 2, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--actr x", "unknown flag --actr; did you mean --actor?"),
        ("--zzzzzz 1", "unknown flag --zzzzzz; --help lists every flag"),
        ("--act x", "unknown flag --act"),  # no abbreviations: a new flag would change what they mean
        ("stray", "'stray' follows no flag"),
        ("--actor", "expected one argument"),
        ("--seed one", "--seed=one is not a whole number"),
        ("--learning_rate fast", "--learning_rate=fast is not a number"),
        ("--zero_stage 5", "--zero_stage=5 is not one of 0, 1, 2, 3"),
        ("--dtype fp8", "--dtype=fp8 is not one of auto, bf16, fp16, fp32"),
        ("--kv_blocks many", "--kv_blocks=many is not a whole number or one of auto"),
        ("--whiten_advantages maybe", "--whiten_advantages=maybe is not true or false"),
        ("--adam_betas 0.9", "--adam_betas takes 2 values, not 1"),
        ("--adam_betas 0.9 x", "--adam_betas: 'x' is not a float"),
        ("--offload cpu", "--offload is not available yet"),
        ("--enable_hybrid_engine false", "cannot be turned off: one copy of the weights"),
        ("--no_enable_hybrid_engine", "cannot be turned off: one copy of the weights"),
        ("--lr_scheduler cosin", "--lr_scheduler=cosin is not one of constant, constant_with_warmup, linear, cosine"),
        ("--per_device_generation_batch_size 4", "set --prompts_per_step, which counts all devices"),
        ("--gradient_accumulation_steps 4", "worked out from --max_tokens_per_microbatch"),
        ("--actor_zero_stage 3 --critic_zero_stage 2", "to different values; set --zero_stage once"),
    ],
)
def test_mistakes_are_named(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_is_under_the_command_line_and_over_presets(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "learning_rate: 1e-6\nppo_epochs: 3\nseed: 5\nreport-to: [wandb]\nkl_target: null\nenable_ema: false\n"
    )
    seen: dict[str, Any] = {}

    def presets(given: Any) -> dict[str, Any]:
        seen.update(given)
        return {"seed": 7, "top_k": 9}

    settings = parse(f"--config {file} --num_ppo_epochs 4", presets=presets)
    assert settings.optim.learning_rate == 1e-6  # which YAML itself reads as text
    assert (settings.ppo.num_ppo_epochs, settings.ppo.seed, settings.ppo.top_k) == (4, 5, 9)
    assert settings.run.report_to == ("wandb",)
    assert seen["seed"] == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed: 1", "unknown flag --sed; did you mean --seed?"),
        ("ppo: {seed: 1}", "unknown flag --ppo"),
        ("seed: [1, 2]", "--seed takes one value, not [1, 2]"),
        ("- seed", "must map flags to values"),
        ("seed: {", "is not YAML"),
        ("seed: null", "--seed needs a value; its default is 0"),
        ("actor_zero_stage: 3\ncritic_zero_stage: 2", "to different values; set --zero_stage once"),
        ("offload: cpu", "--offload is not available yet"),
    ],
)
def test_mistakes_in_yaml_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        parse(f"--config {file}")
    assert message in str(caught.value)


def test_a_config_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes("actor: größe".encode("latin-1"))
    with pytest.raises(UsageError, match=r"run.yaml is not text in UTF-8 \(byte 9\); save it as UTF-8"):
        parse(f"--config {tmp_path}/run.yaml")


@pytest.mark.parametrize("line", ["--learning_rate inf", "--critic_learning_rate nan", "--temperature inf"])
def test_numbers_that_are_not_finite_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="is no finite number|is too small"):
        parse(line)


def test_a_missing_config_file_is_named() -> None:
    with pytest.raises(UsageError, match=r"--config /nowhere.yaml cannot be read: No such file"):
        parse("--config /nowhere.yaml")


def test_saved_settings_read_back_the_same(tmp_path: Path) -> None:
    settings = parse("--actor x --seed 3 --adam_betas 0.5 0.6 --report_to wandb --kv_blocks 7 --learning_rate 3e-7")
    save_config(tmp_path / "config.yaml", settings)
    assert parse(f"--config {tmp_path / 'config.yaml'}") == settings
    assert to_flags(settings)["zero_stage"] == 3


def test_two_groups_cannot_share_a_flag() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other:
        number: int = setting(0, "clashes", flag="seed")

    globals()["Other"] = Other
    with pytest.raises(ValueError, match="--seed is both PPOConfig's and Other's"):
        parse_arguments([*GROUPS, Other], [])


def test_input_errors_ends_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, input_errors():
        parse("--actr x")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: unknown flag --actr; did you mean --actor?\n"
