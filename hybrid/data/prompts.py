"""From a file, a Hub dataset or rows in memory to tokenised prompts, in an order that no rank has a say in."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]
Messages = list[dict[str, Any]]
Overlong = Literal["drop", "truncate", "error"]

# Where a prompt is looked for, best first.
PROMPT_COLUMNS = ("prompt", "messages", "text")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenised once."""

    token_ids: list[int]
    text: str  # what the tokens spell, a chat template included
    columns: dict[str, Any] = field(default_factory=dict)  # every other column of its row, for the reward


class PromptDataset:
    """Prompts and the order they are drawn in."""

    def __init__(self, rows: Sequence[Prompt], *, num_dropped: int = 0) -> None:
        if not rows:
            raise ValueError("a dataset of prompts needs at least one")
        self.rows = rows
        self.num_dropped = num_dropped  # over the length limit, or empty

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, step: int, size: int, seed: int) -> list[Prompt]:
        """The prompts of one step, counted from 0: a part of an endless sequence of epochs, each in its own order.

        It depends on the arguments alone, so every rank draws the same, and a resumed run draws on.
        """
        num_rows = len(self.rows)
        places = range(step * size, (step + 1) * size)
        return [self.rows[_order(num_rows, seed, place // num_rows)[place % num_rows]] for place in places]

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int,
        source: str = "the rows given",
        prompt_column: str | None = None,
        apply_chat_template: bool | None = None,
        overlong: Overlong = "drop",
    ) -> PromptDataset:
        """Tokenise rows.

        Args:
            source: what to call the rows in an error.
            prompt_column: which column holds the prompt; by default the first found of ``PROMPT_COLUMNS``. It may
                hold text, or messages, which go through the chat template up to the last one that is not the
                assistant's.
            apply_chat_template: treat text as a user's message; None: do not, and say so once.
            overlong: what becomes of a prompt over ``max_prompt_length``: left out and counted, cut on the left, or
                an error. Empty prompts are left out and counted.

        Raises:
            ValueError: no rows, no usable column, or no row left.
        """
        if not rows:
            raise ValueError(f"{source} holds no rows; a prompt file needs at least one")
        column = _find_column(rows[0], prompt_column, source)
        encode = _Encoder(tokenizer, apply_chat_template)
        prompts: list[Prompt] = []
        empty = overlong_count = 0
        for number, row in enumerate(rows):
            value = _checked(row.get(column), column, number, source)
            text, token_ids, messages = encode(value)
            if not token_ids:
                empty += 1
                continue
            if len(token_ids) > max_prompt_length:
                overlong_count += 1
                if overlong == "drop":
                    continue
                if overlong == "error":
                    raise ValueError(
                        f"row {number} of {source} has {len(token_ids)} tokens and max_prompt_length is "
                        f"{max_prompt_length}; raise --max_prompt_length or set --overlong_prompts drop or truncate"
                    )
                token_ids = token_ids[-max_prompt_length:]
                text = str(tokenizer.decode(token_ids))
            prompts.append(Prompt(token_ids, text, _other_columns(row, column, messages)))
        if not prompts:
            raise ValueError(
                f"none of the {len(rows)} prompts of {source} is left: {overlong_count} are longer than "
                f"max_prompt_length={max_prompt_length} and {empty} are empty; raise --max_prompt_length or set "
                "--overlong_prompts truncate"
            )
        _report(source, len(rows), empty, overlong_count, max_prompt_length, overlong)
        return cls(prompts, num_dropped=len(rows) - len(prompts))


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    config_name: str | None = None,
    split: str = "train",
    prompt_column: str | None = None,
    apply_chat_template: bool | None = None,
    overlong: Overlong = "drop",
) -> PromptDataset:
    """Read and tokenise prompts from a JSONL, JSON, CSV, Parquet or TXT file, or a Hub dataset (see ``from_rows``).

    Raises:
        ValueError: the source is missing, empty, cannot be read, or has no usable column.
    """
    return PromptDataset.from_rows(
        read_rows(source, config_name=config_name, split=split),
        tokenizer,
        max_prompt_length=max_prompt_length,
        source=source,
        prompt_column=prompt_column,
        apply_chat_template=apply_chat_template,
        overlong=overlong,
    )


def read_rows(source: str, *, config_name: str | None = None, split: str = "train") -> list[Row]:
    """The rows of a file or a Hub dataset, as mappings from column to value."""
    path = Path(source).expanduser()
    if path.suffix.lower() in _PARSERS or path.exists():
        return _read_file(source, path)
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ValueError(f"prompts {source!r}: there is no such file")
    return _read_hub(source, config_name, split)


def prompts_of(
    rows: Sequence[Row], *, source: str = "the rows given", prompt_column: str | None = None
) -> list[str | Messages]:
    """The prompt of each row as it stands: text, or messages up to the last one that is not the assistant's.

    Raises:
        ValueError: no rows, no usable column (see `PromptDataset.from_rows`), or a row whose prompt is none.
    """
    if not rows:
        raise ValueError(f"{source} holds no rows; a prompt file needs at least one")
    column = _find_column(rows[0], prompt_column, source)
    return [_checked(row.get(column), column, number, source) for number, row in enumerate(rows)]


def _read_file(source: str, path: Path) -> list[Row]:
    if not path.exists():
        raise ValueError(f"prompts {source!r}: there is no such file")
    if path.is_dir():
        raise ValueError(f"prompts {source!r} is a directory; pass a {', '.join(_PARSERS)} file in it")
    if path.suffix.lower() not in _PARSERS:
        raise ValueError(
            f"prompts {source!r}: {path.suffix or 'no'} extension; it must be one of {', '.join(_PARSERS)}"
        )
    if path.stat().st_size == 0:
        raise ValueError(f"prompts {source!r}: the file is empty")
    try:
        return _PARSERS[path.suffix.lower()](path)
    except (OSError, ValueError) as error:
        raise ValueError(f"prompts {source!r} cannot be read as {path.suffix[1:]}: {error}") from error


def _parse_jsonl(path: Path) -> list[Row]:
    rows = []
    # Not splitlines, which would cut at U+2028 and others that JSON may hold as they are.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error.msg}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not an object with columns")
            rows.append(row)
    return rows


def _parse_txt(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    return [{"prompt": line.rstrip("\r")} for line in lines if line.strip()]


def _parse_json(path: Path) -> list[Row]:
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if isinstance(rows, dict) and isinstance(rows.get("data"), list):
        rows = rows["data"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it must be a list of objects")
    return rows


def _parse_table(path: Path) -> list[Row]:
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    reader = Dataset.from_csv if path.suffix.lower() == ".csv" else Dataset.from_parquet
    try:
        return cast(Dataset, reader(str(path))).to_list()
    except DatasetGenerationError as error:
        raise ValueError(str(error.__cause__ or error)) from error


# JSON is read here, since the Arrow reader forces one type on a column and refuses files where messages differ.
_PARSERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _parse_jsonl,
    ".json": _parse_json,
    ".csv": _parse_table,
    ".parquet": _parse_table,
    ".txt": _parse_txt,
}


def _read_hub(source: str, config_name: str | None, split: str) -> list[Row]:
    import datasets
    import datasets.config as datasets_config
    import huggingface_hub.constants as hub_config

    from hybrid.models.hub import hub_is_reachable, why_unreachable

    reachable = hub_is_reachable()
    if not reachable:
        # What HF_HUB_OFFLINE=1 does when it is set from the start: the cache alone, and no retries.
        datasets_config.HF_HUB_OFFLINE = hub_config.HF_HUB_OFFLINE = True
    try:
        return cast(datasets.Dataset, datasets.load_dataset(source, config_name, split=split)).to_list()
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"prompts {source!r} is no file here and could not be loaded from the Hub "
            f"({reason if reachable else why_unreachable()}); "
            "pass a JSONL, JSON, CSV or Parquet file, or see --prompts_config and --prompts_split"
        ) from error


@lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_rows))
    random.Random(f"prompts/{seed}/{epoch}").shuffle(order)
    return order


def _find_column(row: Row, wanted: str | None, source: str) -> str:
    if wanted is not None:
        if wanted not in row:
            raise ValueError(f"{source} has no column {wanted!r}; it has {', '.join(row)}")
        return wanted
    for column in PROMPT_COLUMNS:
        if row.get(column) is not None:
            return column
    for column in PROMPT_COLUMNS:
        if column in row:  # without a value: the error is about this row
            return column
    raise ValueError(
        f"{source} has no column with prompts ({', '.join(PROMPT_COLUMNS)}); it has {', '.join(row) or 'none'}; "
        "name one with --prompt_column"
    )


def _checked(value: Any, column: str, number: int, source: str) -> str | Messages:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and value:
        messages = [dict(message) for message in value if isinstance(message, Mapping)]
        if len(messages) == len(value) and all("role" in m and "content" in m for m in messages):
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()  # the answer of a dataset for supervised training
            if messages:
                return messages
    if value is None:
        raise ValueError(f"row {number} of {source}: column {column!r} has no value; write a prompt or remove the row")
    raise ValueError(
        f"row {number} of {source}: column {column!r} holds {str(value)[:80]!r}; "
        "a prompt is text, or messages with a role and a content, the assistant's last"
    )


def _other_columns(row: Row, column: str, messages: Messages | None) -> dict[str, Any]:
    columns = {name: item for name, item in row.items() if name != column}
    if messages is not None:
        columns["messages"] = messages  # what a reward model with a template of its own starts from
    model = row.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        columns.setdefault("ground_truth", model["ground_truth"])  # verl's nested form
    return columns


class _Encoder:
    """Text or messages to (text, token ids, messages), with one beginning-of-sequence token at most.

    Text that stays plain has no messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool | None) -> None:
        self.tokenizer = tokenizer
        self.apply_chat_template = apply_chat_template
        self._said: set[str] = set()

    def __call__(self, value: str | Messages) -> tuple[str, list[int], Messages | None]:
        if isinstance(value, str):
            if not self.apply_chat_template:
                if self.apply_chat_template is None and self.tokenizer.chat_template:
                    self._say(
                        "prompts are plain text and stay so; set --apply_chat_template to wrap them in one, "
                        "or --no_apply_chat_template to hear no more of this"
                    )
                return value, self._encode(value), None
            value = [{"role": "user", "content": value}]
        if not self.tokenizer.chat_template:
            self._say("the tokenizer has no chat template, so messages become plain text, a line each")
            text = "".join(f"{message['role']}: {message['content']}\n" for message in value) + "assistant:"
            return text, self._encode(text), value
        text = str(self.tokenizer.apply_chat_template(value, tokenize=False, add_generation_prompt=True))
        # The template writes every special token there is to be, a beginning of sequence included.
        return text, self.tokenizer.encode(text, add_special_tokens=False), value

    def _encode(self, text: str) -> list[int]:
        bos = self.tokenizer.bos_token
        starts_with_bos = bool(bos) and text.startswith(str(bos))
        return self.tokenizer.encode(text, add_special_tokens=not starts_with_bos)

    def _say(self, note: str) -> None:
        if note not in self._said:
            self._said.add(note)
            warnings.warn(note, stacklevel=4)


def _report(source: str, total: int, empty: int, overlong_count: int, limit: int, overlong: Overlong) -> None:
    if overlong_count:
        done = {"drop": "are left out", "truncate": "are cut on the left"}[overlong]
        warnings.warn(
            f"{overlong_count} of the {total} prompts of {source} are longer than max_prompt_length={limit} and {done}",
            stacklevel=3,
        )
    if empty:
        warnings.warn(f"{empty} of the {total} prompts of {source} are empty and are left out", stacklevel=3)
