"""Data for `scripts/rlhf_e2e.sh`, made on the spot, and the judge of what comes out.

    python scripts/larger_number.py data DIRECTORY --examples 256 --pairs 1024 --prompts 512 --held_out 100
    python scripts/larger_number.py judge COMPLETIONS.jsonl

Which of two numbers is larger? The examples for step 1 show the form of an answer, a bare number, and give either of
the two: a careless teacher. The pairs for step 2 prefer the larger one to other answers. The judge is the rule itself,
on pairs of numbers that no step has seen: the share of completions that are the larger number and nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid.data.tasks import LargerNumberTask


def example(row: Mapping[str, Any], draw: random.Random) -> dict[str, Any]:
    """A row for step 1."""
    return {"prompt": row["prompt"], "completion": f" {draw.choice(row['numbers'])}"}


def pair(row: Mapping[str, Any], draw: random.Random) -> dict[str, Any]:
    """A row for step 2; rejected is what an actor might try: the other number, another, or more words."""
    answer, other = row["answer"], min(row["numbers"])
    strange = draw.choice([number for number in range(1, 100) if number not in row["numbers"]])
    rejected = draw.choice([f" {other}", f" {other}", f" {strange}", f" {answer} or {other}", " The"])
    return {"prompt": row["prompt"], "chosen": f" {answer}", "rejected": rejected}


def judge(row: Mapping[str, Any]) -> float:
    """1 for the larger number and nothing else, otherwise 0."""
    (completion,) = row["completions"]
    found = re.fullmatch(r"\s*(\d+)\s*", completion)
    return float(found is not None and int(found[1]) == row["answer"])


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data")
    data.add_argument("directory", type=Path)
    for name, size in (("examples", 256), ("pairs", 1024), ("prompts", 512), ("held_out", 100)):
        data.add_argument(f"--{name}", type=int, default=size)
    data.add_argument("--seed", type=int, default=0)
    commands.add_parser("judge").add_argument("completions", type=Path)
    given = parser.parse_args(argv)
    if given.command == "judge":
        rows = [json.loads(line) for line in given.completions.read_text(encoding="utf-8").splitlines()]
        print(round(sum(map(judge, rows)) / len(rows), 4))
        return
    task, draw = LargerNumberTask(), random.Random(given.seed)
    given.directory.mkdir(parents=True, exist_ok=True)
    examples, pairs, prompts = (
        task.rows("train", size=size, seed=given.seed + number)
        for number, size in enumerate((given.examples, given.pairs, given.prompts), 1)
    )
    write(given.directory / "examples.jsonl", (example(row, draw) for row in examples))
    write(given.directory / "pairs.jsonl", (pair(row, draw) for row in pairs))
    write(given.directory / "prompts.jsonl", ({"prompt": row["prompt"]} for row in prompts))
    write(given.directory / "held_out.jsonl", task.rows("test", size=given.held_out, seed=given.seed))


if __name__ == "__main__":
    main()
