"""Completions of many prompts: what the model is asked, in which order, and the file that the answers go to."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybrid.data.prompts import Messages, Row
    from hybrid.engine import HybridEngine
    from hybrid.inference.params import SamplingParams
    from hybrid.inference.sequence import Completion
    from hybrid.parallel import ParallelMesh

_OUTPUT_COLUMNS = ("completions", "finish_reasons", "num_prompt_tokens", "num_tokens")
_LOGPROB_COLUMNS = ("token_ids", "logprobs", "top_logprobs")


def chat_prompts(
    prompts: Sequence[str | Messages],
    tokenizer: PreTrainedTokenizerBase,
    *,
    apply_chat_template: bool = True,
    system: str | None = None,
) -> list[Any]:
    """Prompts for `HybridEngine.encode`: text as a user's message if the tokenizer has a chat template.

    Args:
        apply_chat_template: False leaves text as it is.
        system: goes before every prompt that does not open with a system message.

    Raises:
        ValueError: a system message, or a prompt of messages, and no chat template.
    """
    has_template = bool(tokenizer.chat_template)
    if system is not None and not has_template:
        raise ValueError(f"system={system[:40]!r} needs a chat template and the tokenizer has none; leave it out")
    asked: list[Any] = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if not (has_template and apply_chat_template):
                asked.append(prompt)
                continue
            prompt = [{"role": "user", "content": prompt}]
        elif not has_template:
            raise ValueError(f"row {number} has messages and the tokenizer no chat template; write the prompt as text")
        if system is not None and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": system}, *prompt]
        asked.append(prompt)
    return asked


def generate_in_rounds(
    engine: HybridEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    seeds: Sequence[int],
    *,
    start: int = 0,
    size: int,
    progress: bool = False,
) -> Iterator[list[list[Completion]]]:
    """The completions of each prompt, prompts in order from ``start`` on and ``size`` of them at a time.

    A round's prompts are dealt over the replicas. Every rank calls this alike and gets all completions, whose
    ``prompt_index`` is a prompt's place in ``prompts[start:][i::D]`` of one round and not in ``prompts``.
    """
    mesh = engine.mesh
    for low in range(start, len(prompts), size):
        indices = range(low, min(low + size, len(prompts)))
        mine = indices[mesh.dp_rank :: mesh.dp_size]
        completions = engine.generate(
            [prompts[i] for i in mine], params, seeds=[seeds[i] for i in mine], progress=progress
        )
        by_prompt: list[list[Completion]] = [[] for _ in mine]
        for completion in completions:
            by_prompt[completion.prompt_index].append(completion)
        shares = mesh.all_gather_object(by_prompt if mesh.tp_rank == 0 else [])[:: mesh.tp_size]
        yield [shares[place % mesh.dp_size][place // mesh.dp_size] for place in range(len(indices))]


def seeds_of(seed: int, count: int, start: int = 0) -> list[int]:
    """A seed for each prompt from the ``start``-th on, wherever it is generated and whatever else is."""
    digests = (hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8) for place in range(start, start + count))
    return [int.from_bytes(digest.digest(), "little") for digest in digests]


def typed_lines(mesh: ParallelMesh) -> Iterator[str]:
    """Lines of the first rank's standard input that are not blank, on every rank."""
    while True:
        line = None
        if mesh.is_main:
            if sys.stdin.isatty():
                print("> ", end="", flush=True)
            line = sys.stdin.readline()
        line = mesh.broadcast_object(line)
        if not line:
            return
        if line.strip():
            yield line.strip()


class CompletionsFile:
    """A JSONL file with a line for each row of the input, in its order: the row's columns and what was generated.

    Lines are only ever added at its end, so that the file holds the first rows whole, whatever ends a run.

    Args:
        rows: of the input.
        resume: go on behind the rows that the file holds; otherwise it must not exist yet.
        logprobs: write token ids and log-probabilities too.

    Raises:
        ValueError: the file exists, cannot be written, or holds other rows; a column of the input has the name of one
            that is written.
    """

    def __init__(self, path: str | Path, rows: Sequence[Row], *, resume: bool = False, logprobs: bool = False) -> None:
        self._path, self._logprobs = Path(path).expanduser(), logprobs
        self._rows = [json.loads(json.dumps(row, default=str)) for row in rows]
        columns = (*_OUTPUT_COLUMNS, *(_LOGPROB_COLUMNS if logprobs else ()))
        taken = sorted({column for row in self._rows for column in row} & set(columns))
        if taken:
            raise ValueError(f"the input has a column {taken[0]!r}, which output {str(path)!r} needs; rename it")
        self.num_done = 0  # rows that the file holds
        if self._path.exists():
            if not resume:
                raise ValueError(
                    f"output {str(path)!r} exists already; set --resume to go on behind its rows, or another --output"
                )
            self.recount()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.open("a").close()
        except OSError as error:
            raise ValueError(f"output {str(path)!r} cannot be written: {error.strerror}") from error

    def append(self, answers: Sequence[Sequence[Completion]]) -> None:
        """Write the next rows, each with its completions."""
        rows = self._rows[self.num_done : self.num_done + len(answers)]
        lines = [
            json.dumps({**row, **self._columns(answer)}, ensure_ascii=False) + "\n"
            for row, answer in zip(rows, answers, strict=True)
        ]
        with self._path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(lines))
        self.num_done += len(lines)

    def recount(self) -> int:
        """`num_done` by what the file holds: an interrupt may come between a row's writing and its counting."""
        self.num_done = self._check_lines()
        return self.num_done

    def _columns(self, completions: Sequence[Completion]) -> dict[str, Any]:
        columns: dict[str, Any] = {
            "completions": [each.text for each in completions],
            "finish_reasons": [each.finish_reason for each in completions],
            "num_prompt_tokens": len(completions[0].prompt_token_ids),
            "num_tokens": [len(each.token_ids) for each in completions],
        }
        if self._logprobs:
            columns["token_ids"] = [each.token_ids for each in completions]
            columns["logprobs"] = [each.logprobs.tolist() for each in completions]
            # Not those that were filtered out: JSON has no infinity.
            columns["top_logprobs"] = [
                [{str(token): value for token, value in top.items() if math.isfinite(value)} for top in tops]
                for tops in (each.top_logprobs or [] for each in completions)
            ]
        return columns

    def _check_lines(self) -> int:
        """How many rows the file holds; a line that was not written to its end is taken off."""
        whole, _, torn = self._path.read_bytes().rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        for number, line in enumerate(lines):
            try:
                found: Any = json.loads(line)
            except ValueError:
                found = None
            row = self._rows[number] if number < len(self._rows) else None
            if not isinstance(found, Mapping) or row is None or any(found.get(key) != row[key] for key in row):
                raise ValueError(
                    f"line {number + 1} of output {str(self._path)!r} does not come from row {number} of the input, so "
                    "it cannot be resumed; set another --output"
                )
        if torn:
            with self._path.open("r+b") as file:
                file.truncate(len(whole) + 1 if whole else 0)
        return len(lines)
