"""The README's Python runs as it stands, on the real model."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_is_a_reward_loop_of_at_most_25_lines():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 25


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block {i}" for i in range(len(BLOCKS))])
def test_a_block_runs(block, tmp_path, monkeypatch, smollm2):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    saved = list(tmp_path.glob("*/model.safetensors"))
    assert saved, "each block ends by saving a model"
