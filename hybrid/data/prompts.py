"""From a file, a Hub dataset or rows in memory to tokenised prompts, in an order that no rank has a say in."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from hybrid.data.mixing import (
    Source,
    check_weights,
    draws_per_epoch,
    held_out_rows,
    is_source_list,
    mixed_order,
    read_source_list,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]
Messages = list[dict[str, Any]]
Overlong = Literal["drop", "truncate", "error"]

# Where a prompt is looked for, best first.
PROMPT_COLUMNS = ("prompt", "messages", "text")

# What a completion is checked against has one of these names, best first; rewards find it by the first.
TRUTH_COLUMNS = ("ground_truth", "answer", "solution", "label")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenised once."""

    token_ids: list[int]
    text: str  # what the tokens spell, a chat template included
    columns: dict[str, Any] = field(default_factory=dict)  # every other column of its row, for the reward


class PromptDataset:
    """Prompts and the order they are drawn in.

    Args:
        rows: the prompts of all sources, one source after the other.
        num_dropped: how many were left out: over the length limit, or empty.
        sizes: the number of prompts of each source (default: there is one).
        weights: how often each source is drawn from, beside the others (default: each prompt once an epoch).
    """

    def __init__(
        self,
        rows: Sequence[Prompt],
        *,
        num_dropped: int = 0,
        sizes: Sequence[int] = (),
        weights: Sequence[float] | None = None,
    ) -> None:
        if not rows:
            raise ValueError("a dataset of prompts needs at least one")
        self.rows = rows
        self.num_dropped = num_dropped
        self.sizes = tuple(sizes) or (len(rows),)
        if sum(self.sizes) != len(rows) or min(self.sizes) < 1:
            raise ValueError(f"sizes={self.sizes} of the sources do not add up to the {len(rows)} rows")
        self.weights = weights
        self.draws = draws_per_epoch(self.sizes, weights)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, step: int, size: int, seed: int) -> list[Prompt]:
        """The prompts of one step, counted from 0: a part of an endless sequence of epochs, each in its own order.

        It depends on the arguments alone, so every rank draws the same, and a resumed run draws on. A batch that an
        epoch's end does not fill is filled from the next.
        """
        num_rows = len(self.rows)
        places = range(step * size, (step + 1) * size)
        return [
            self.rows[mixed_order(self.sizes, self.draws, seed, place // num_rows)[place % num_rows]]
            for place in places
        ]

    def hold_out(self, size: int, seed: int) -> tuple[PromptDataset, PromptDataset]:
        """This dataset without ``size`` of its prompts, drawn by ``seed`` from all sources, and those.

        Raises:
            ValueError: a source would have nothing left.
        """
        chosen = held_out_rows(len(self.rows), size, seed)
        starts = [0, *itertools.accumulate(self.sizes)]
        sizes = [len(set(range(*span)) - chosen) for span in itertools.pairwise(starts)]
        if not all(sizes):
            raise ValueError(
                f"eval_size={size} of {len(self.rows)} prompts leaves a source without any; set --eval_size to less, "
                "or --eval_prompts to a file"
            )
        rest = [row for index, row in enumerate(self.rows) if index not in chosen]
        kept = PromptDataset(rest, num_dropped=self.num_dropped, sizes=sizes, weights=self.weights)
        return kept, PromptDataset([self.rows[index] for index in sorted(chosen)])

    @classmethod
    def mix(
        cls, datasets: Sequence[PromptDataset], weights: Sequence[float] | None = None, names: Sequence[str] = ()
    ) -> PromptDataset:
        """Several datasets as one.

        Args:
            weights: how often each is drawn from, beside the others (default: each prompt once an epoch).
            names: of the datasets; prompts without a column ``data_source`` get them as that.

        Raises:
            ValueError: no datasets, or not a positive weight for each.
        """
        if not datasets:
            raise ValueError("there are no datasets of prompts to mix; give at least one")
        rows: list[Prompt] = []
        for number, dataset in enumerate(datasets):
            name = {"data_source": names[number]} if names else {}
            rows += [
                Prompt(prompt.token_ids, prompt.text, {**name, **_without_none(prompt.columns, name)})
                for prompt in dataset.rows
            ]
        return cls(
            _with_every_column(rows),
            num_dropped=sum(dataset.num_dropped for dataset in datasets),
            sizes=[len(dataset) for dataset in datasets],
            weights=weights,
        )

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
        return cls(_with_every_column(prompts), num_dropped=len(rows) - len(prompts))


def load_prompts(
    source: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    weights: Sequence[float] = (),
    config_name: str | None = None,
    split: str = "train",
    prompt_column: str | None = None,
    apply_chat_template: bool | None = None,
    overlong: Overlong = "drop",
) -> PromptDataset:
    """Read and tokenise prompts from a JSONL, JSON, CSV, Parquet or TXT file, or a Hub dataset (see ``from_rows``).

    Several sources are mixed: a sequence of them with their ``weights``, or a YAML file that lists them (see
    ``read_source_list``), whose entries may each have a configuration, a split and a column of their own.

    Raises:
        ValueError: a source is missing, empty, cannot be read, or has no usable column; or there is not a positive
            weight for each.
    """
    sources = [Source(name) for name in ([source] if isinstance(source, str) else source)]
    if len(sources) == 1 and is_source_list(sources[0].prompts):
        if weights:
            raise ValueError(
                f"prompt_weights={tuple(weights)} are given, but {sources[0].prompts} lists several sources; write the "
                "weights into it"
            )
        sources = read_source_list(sources[0].prompts)
        weights = _weights_of(sources)
    if weights:
        check_weights(weights, len(sources))
    datasets = [
        PromptDataset.from_rows(
            read_rows(one.prompts, config_name=one.prompts_config or config_name, split=one.prompts_split or split),
            tokenizer,
            max_prompt_length=max_prompt_length,
            source=one.prompts,
            prompt_column=one.prompt_column or prompt_column,
            apply_chat_template=apply_chat_template,
            overlong=overlong,
        )
        for one in sources
    ]
    if len(datasets) == 1:
        return datasets[0]
    return PromptDataset.mix(datasets, weights or None, [_source_name(one.prompts) for one in sources])


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


def _weights_of(sources: Sequence[Source]) -> list[float]:
    """The sources' weights: those that have none weigh 1, unless none has one."""
    if all(source.weight is None for source in sources):
        return []
    return [1.0 if source.weight is None else source.weight for source in sources]


def _source_name(source: str) -> str:
    """A file's name without its ending, or a Hub dataset's name."""
    return Path(source).stem if Path(source).suffix.lower() in _PARSERS else source


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
    nested = model.get("ground_truth") if isinstance(model, Mapping) else None  # verl's form
    found = [columns.get("ground_truth"), nested, *(columns.get(name) for name in TRUTH_COLUMNS)]
    truth = next((value for value in found if value is not None), None)
    return columns if truth is None else {**columns, "ground_truth": truth}


def _with_every_column(prompts: list[Prompt]) -> list[Prompt]:
    """The prompts, each with every column that any has: a reward is asked for the same columns at each step."""
    names = {name: None for prompt in prompts for name in prompt.columns}
    if all(len(prompt.columns) == len(names) for prompt in prompts):
        return prompts
    return [Prompt(prompt.token_ids, prompt.text, {**names, **prompt.columns}) for prompt in prompts]


def _without_none(columns: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """``columns`` without those of ``names`` that have no value."""
    return {name: value for name, value in columns.items() if name not in names or value is not None}


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
