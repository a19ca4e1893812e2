"""Several rewards and several sources of prompts on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.arguments import UsageError, parse_arguments, save_config
from hybrid.config import DataConfig, ModelConfig


def parse(*words: str) -> tuple[ModelConfig, DataConfig]:
    model, data = parse_arguments([ModelConfig, DataConfig], words)
    return model, data


def test_one_stays_a_text_and_several_become_a_tuple() -> None:
    model, data = parse("--reward", "a.py:f", "--prompts", "a.jsonl")
    assert (model.reward, data.prompts) == ("a.py:f", "a.jsonl")
    assert (model.rewards, data.sources) == (("a.py:f",), ("a.jsonl",))
    model, data = parse(
        *("--reward", "a.py:f", "http://b:1/x,http://c:1/x", "--reward_weights", "1", "-0.5", "--reward-timeout", "5"),
        *("--prompts", "a.jsonl", "b.jsonl", "--prompt_weights", "1", "2"),
    )
    assert model.rewards == ("a.py:f", "http://b:1/x,http://c:1/x")
    assert (model.reward_weights, model.reward_timeout) == ((1.0, -0.5), 5.0)
    assert (data.sources, data.prompt_weights) == (("a.jsonl", "b.jsonl"), (1.0, 2.0))
    model, data = parse()
    assert (model.rewards, data.sources, model.reward_timeout) == ((), (), 60.0)


@pytest.mark.parametrize("words", [("--reward", "a.py:f"), ("--reward", "a", "b", "--prompts", "c", "d"), ()])
def test_yaml_reads_back_what_was_written(tmp_path: Path, words: tuple[str, ...]) -> None:
    configs = parse(*words)
    save_config(tmp_path / "config.yaml", configs)
    assert parse("--config", str(tmp_path / "config.yaml")) == configs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--reward", "a", "b", "--reward_weights", "1"), "are not one for each reward, of which there are 2"),
        (("--reward_weights", "1"), "of which there are 0"),
        (("--reward", "a", "--reward_weights", "nan"), r"reward_weights\[0\]=nan is no finite number"),
        (("--reward_timeout", "-1"), "reward_timeout=-1.0 is too small; set it to 0 or more"),
        (("--prompts", "a", "b", "--prompt_weights", "1", "0"), r"prompt_weights\[1\]=0.0 must be positive"),
        (("--prompts", "a", "b", "--prompt_weights", "1,2,3"), "are not one for each source of prompts, .* are 2"),
    ],
)
def test_what_does_not_fit_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*words)


def test_other_flags_still_take_one_value() -> None:
    with pytest.raises(UsageError, match="'b' follows no flag"):
        parse("--actor", "a", "b")
