"""Rows with answers to token ids and what of them is learnt: for supervised training, and pairs for preferences."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from jinja2 import TemplateError

from hybrid.data.mixing import held_out_rows, mixed_order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybrid.data.prompts import Messages, Overlong, Row

T = TypeVar("T")
LossOn = Literal["completions", "all"]

# Which columns a row is read by, best first.
SFT_COLUMNS = (("messages",), ("prompt", "completion"), ("prompt", "chosen"), ("chosen",), ("text",))
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # what transformers looks for in a template


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence, tokenised once."""

    token_ids: list[int]
    scored: list[bool]  # of each token, whether its loss counts; never of the first, which nothing predicts

    @property
    def num_scored(self) -> int:
        return sum(self.scored)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, of which the first is preferred."""

    chosen: Example
    rejected: Example
    margin: float = 0.0  # by how much, where the row says so
    reference: tuple[float, float] | None = None  # log-probs (nats) of chosen and rejected under a frozen model


class ExampleDataset(Generic[T]):
    """Examples, or pairs of them, and the order they are drawn in."""

    def __init__(self, rows: Sequence[T], *, num_dropped: int = 0, num_truncated: int = 0) -> None:
        self.rows = rows
        self.num_dropped, self.num_truncated = num_dropped, num_truncated

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, step: int, size: int, seed: int, end: int | None = None) -> list[T]:
        """The examples of one step, counted from 0, out of an endless sequence of epochs, each in its own order.

        It depends on the arguments alone, so every rank draws the same, and a resumed run draws on.

        Args:
            end: the length of the sequence, where it ends: the last batch is what is left.
        """
        places = range(step * size, min((step + 1) * size, end if end is not None else (step + 1) * size))
        num_rows = len(self.rows)
        sizes = (num_rows,)
        return [self.rows[mixed_order(sizes, sizes, seed, place // num_rows)[place % num_rows]] for place in places]

    def hold_out(self, size: int, seed: int) -> tuple[ExampleDataset[T], ExampleDataset[T]]:
        """This dataset without ``size`` of its examples, drawn by ``seed``, and those.

        Raises:
            ValueError: nothing would be left.
        """
        held_out = held_out_rows(len(self.rows), size, seed)
        rest = [row for index, row in enumerate(self.rows) if index not in held_out]
        kept = ExampleDataset(rest, num_dropped=self.num_dropped, num_truncated=self.num_truncated)
        return kept, ExampleDataset([self.rows[index] for index in sorted(held_out)])


def read_examples(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    loss_on: LossOn = "completions",
    apply_chat_template: bool | None = None,
    overlong: Overlong = "drop",
    source: str = "the rows given",
) -> ExampleDataset[Example]:
    """Examples for supervised training, from ``messages``, ``prompt,completion``, ``prompt,chosen`` or ``text``.

    Args:
        loss_on: what is scored: the assistant's messages, or the completion, each up to and with the token that ends
            it; or everything. A ``text`` has no such parts and is scored whole. A template that marks what the
            assistant says is taken at its word; with any other, its text before and after a message is compared, and
            a conversation that the assistant opens has that message unscored.
        apply_chat_template: treat a prompt and a completion that are text as a conversation; None: do not, and say so
            once.
        overlong: what becomes of an example of more than ``max_length`` tokens: left out and counted, cut at its end
            and counted, or an error. Those without a scored token are left out and counted.
        source: what to call the rows in an error.

    Raises:
        ValueError: no rows, no usable columns, a row that is no conversation, a chat template that does not tell the
            assistant's tokens from others, or no example left.
    """
    encode = _Encoder(tokenizer, apply_chat_template, loss_on)

    def read(row: Row) -> Iterator[Example]:
        yield encode.row(row)

    def cut(example: Example) -> Example:
        return Example(example.token_ids[:max_length], example.scored[:max_length])

    collected = _collect(rows, read, cut, max_length, overlong, source)
    return ExampleDataset([example for (example,), _ in collected.kept], **collected.counts)


def read_pairs(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    for_reward: bool,
    apply_chat_template: bool | None = None,
    overlong: Overlong = "drop",
    source: str = "the rows given",
) -> ExampleDataset[Pair]:
    """Pairs for preferences, from ``prompt,chosen,rejected``, or from ``chosen,rejected`` that hold the prompt too.

    A column ``margin`` says by how much the chosen answer is the better one. What is scored are the answers.

    Args:
        for_reward: tokenise as a reward model is given samples to score, in one piece; else as an actor is, the prompt
            by itself.
        overlong: as in `read_examples`, for a pair of which either is too long; it is cut at its beginning.

    Raises:
        ValueError: as `read_examples`.
    """
    encode = _Encoder(tokenizer, apply_chat_template)

    def read(row: Row) -> Iterator[Example]:
        _margin(row)  # here, where a mistake in it is told with the row's number
        for column in ("chosen", "rejected"):
            if row.get(column) is None:
                raise ValueError(f"no {column} (a pair has chosen and rejected); its columns are {', '.join(row)}")
            prompt, answer = _split(row.get("prompt"), row[column], column)
            yield encode.whole(prompt, answer) if for_reward else encode.answer(prompt, answer)

    def cut(example: Example) -> Example:
        return Example(example.token_ids[-max_length:], [False, *example.scored[-max_length:][1:]])

    collected = _collect(rows, read, cut, max_length, overlong, source)
    pairs = [Pair(chosen, rejected, _margin(row)) for (chosen, rejected), row in collected.kept]
    return ExampleDataset(pairs, **collected.counts)


@dataclass(frozen=True, slots=True)
class _Collected:
    kept: list[tuple[list[Example], Row]]
    counts: dict[str, int]


def _collect(
    rows: Sequence[Row],
    read: Callable[[Row], Iterator[Example]],
    cut: Callable[[Example], Example],
    max_length: int,
    overlong: Overlong,
    source: str,
) -> _Collected:
    """Each row's examples, with those that are too long or score nothing left out and counted."""
    if not rows:
        raise ValueError(f"{source} holds no rows; there must be at least one to learn from")
    counts: Counter[str] = Counter()
    kept: list[tuple[list[Example], Row]] = []
    for number, row in enumerate(rows):
        try:
            examples = list(read(row))
        except (ValueError, TemplateError) as error:
            raise ValueError(f"row {number} of {source}: {error}") from error
        longest = max(len(example.token_ids) for example in examples)
        if longest > max_length:
            counts["overlong"] += 1
            if overlong == "error":
                raise ValueError(
                    f"row {number} of {source} has {longest} tokens and max_length is {max_length}; raise --max_length "
                    "or set --overlong drop or truncate"
                )
            if overlong == "drop":
                continue
            examples = [cut(example) for example in examples]
        if not all(example.num_scored for example in examples):
            counts["empty"] += 1
            continue
        kept.append((examples, row))
    if not kept:
        raise ValueError(
            f"none of the {len(rows)} examples of {source} is left: {counts['overlong']} are longer than "
            f"max_length={max_length} and {counts['empty']} have nothing to learn; raise --max_length, or set "
            "--overlong truncate"
        )
    _report(source, len(rows), counts, max_length, overlong)
    truncated = counts["overlong"] if overlong == "truncate" else 0
    return _Collected(kept, {"num_dropped": len(rows) - len(kept), "num_truncated": truncated})


def _report(source: str, total: int, counts: Counter[str], limit: int, overlong: Overlong) -> None:
    if counts["overlong"]:
        done = {"drop": "left out", "truncate": "cut"}[overlong]
        warnings.warn(
            f"{counts['overlong']} of the {total} examples of {source} are longer than max_length={limit} "
            f"and are {done}",
            stacklevel=4,
        )
    if counts["empty"]:
        warnings.warn(f"{counts['empty']} of the {total} examples of {source} have nothing to learn", stacklevel=4)


class _Encoder:
    """Conversations, or prompts and answers, to examples that open with one beginning-of-sequence token at most."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        apply_chat_template: bool | None,
        loss_on: LossOn = "completions",
    ) -> None:
        self.tokenizer, self.apply_chat_template, self.loss_on = tokenizer, apply_chat_template, loss_on
        self._said = False

    def row(self, row: Row) -> Example:
        """By the first of ``SFT_COLUMNS`` that the row has."""
        columns = next((names for names in SFT_COLUMNS if all(row.get(name) is not None for name in names)), None)
        if columns is None:
            known = "; ".join(",".join(names) for names in SFT_COLUMNS)
            raise ValueError(f"no columns to learn from ({known}); its columns are {', '.join(row) or 'none'}")
        value = row[columns[-1]]
        if columns == ("messages",):
            return self._conversation(_messages(value, "messages"))
        if columns == ("text",):
            return _all_scored(self._with_end(self._encode(_text(value, "text"))))
        return self.answer(*_split(row.get("prompt"), value, columns[-1]))

    def answer(self, prompt: str | Messages, answer: str | Messages) -> Example:
        """The prompt as an actor is given it, and the answer, which is scored, as it would sample it."""
        messages = self._as_messages(prompt, answer)
        if messages is not None:
            first = len(messages) - (len(answer) if isinstance(answer, list) else 1)
            return self._conversation(messages, first)
        before = self._encode(_text(prompt, "prompt"))
        after = self._with_end(self.tokenizer.encode(_text(answer, "completion"), add_special_tokens=False))
        if self.loss_on == "all":
            return _all_scored(before + after)
        return Example(before + after, _not_the_first([False] * len(before) + [True] * len(after)))

    def whole(self, prompt: str | Messages, answer: str | Messages) -> Example:
        """Prompt and answer as a reward model reads them, in one piece; what is scored is its last token."""
        messages = self._as_messages(prompt, answer)
        if messages is not None:
            ids = self.tokenizer.encode(self._render(messages), add_special_tokens=False)
        else:
            ids = self._with_end(self._encode(_text(prompt, "prompt") + _text(answer, "answer")))
        return Example(ids, [False] * (len(ids) - 1) + [True] if ids else [])

    def _as_messages(self, prompt: str | Messages, answer: str | Messages) -> Messages | None:
        """The conversation that prompt and answer make, or None for two texts that stay as they are."""
        if isinstance(prompt, str) and isinstance(answer, str) and not self.apply_chat_template:
            if self.apply_chat_template is None and self.tokenizer.chat_template and not self._said:
                self._said = True
                warnings.warn(
                    "prompts and answers are plain text and stay so; set --apply_chat_template to wrap them in one, "
                    "or --no_apply_chat_template to hear no more of this",
                    stacklevel=6,
                )
            return None
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        return [*before, *after]

    def _conversation(self, messages: Messages, first: int = 0) -> Example:
        """The assistant's messages, from message ``first`` on, scored; or all of it."""
        if self.loss_on == "all":
            return _all_scored(self.tokenizer.encode(self._render(messages), add_special_tokens=False))
        marked = _GENERATION.search(self._template()) is not None
        if marked and not any(message["role"] == "assistant" for message in messages[:first]):
            encoded: Any = self.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return Example(list(encoded["input_ids"]), _not_the_first(map(bool, encoded["assistant_masks"])))
        return self._by_prefixes(messages, first)

    def _by_prefixes(self, messages: Messages, first: int) -> Example:
        """What an assistant's message adds to the rendered text is its own, if the text before it stays as it was."""
        whole, spans = self._render(messages), []
        for index, message in enumerate(messages):
            if index < max(first, 1) or message["role"] != "assistant":
                continue  # one that opens the conversation answers nothing, and what comes before it cannot be rendered
            before = self._render(messages[:index], add_generation_prompt=True)
            after = self._render(messages[: index + 1])
            if not (after.startswith(before) and whole.startswith(after)):
                raise ValueError(
                    f"the chat template renders the conversation up to message {index} otherwise than inside the "
                    "whole, so the assistant's tokens cannot be told from the others; set --loss_on all, or mark them "
                    "in the template with {% generation %}"
                )
            said = after[len(before) :]
            # The line break that many templates put behind the end of a message is nothing that is ever sampled.
            if said.rstrip().endswith(str(self.tokenizer.eos_token)):
                said = said.rstrip()
            spans.append((len(before), len(before) + len(said)))
        return self._offsets(whole, spans)

    def _offsets(self, text: str, spans: Sequence[tuple[int, int]]) -> Example:
        """``text`` as it is, with the tokens that begin in ``spans`` of its characters scored."""
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"{type(self.tokenizer).__name__} does not say where its tokens begin, so those of a conversation's "
                "assistant cannot be found; use prompt and completion as text, or a fast tokenizer"
            )
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in encoded["offset_mapping"]]
        scored = [any(low <= start < high for low, high in spans) for start in starts]
        return Example(list(encoded["input_ids"]), _not_the_first(scored))

    def _template(self) -> str:
        template = self.tokenizer.chat_template
        if not template:
            raise ValueError(
                "messages need a chat template and the tokenizer has none; use text columns, or set its chat_template"
            )
        return template if isinstance(template, str) else self.tokenizer.get_chat_template()

    def _render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        self._template()
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        )

    def _encode(self, text: str) -> list[int]:
        bos = self.tokenizer.bos_token
        return self.tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(str(bos))))

    def _with_end(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return [*ids, end] if isinstance(end, int) and ids[-1:] != [end] else ids


def _all_scored(ids: list[int]) -> Example:
    return Example(ids, _not_the_first([True] * len(ids)))


def _not_the_first(scored: Iterable[bool]) -> list[bool]:
    return [index > 0 and value for index, value in enumerate(scored)]


def _split(prompt: Any, answer: Any, column: str) -> tuple[str | Messages, str | Messages]:
    """Prompt and answer of a row; an answer that opens with another's message is the conversation, prompt included."""
    if not isinstance(answer, str):
        messages = _messages(answer, column)
        turns = [index for index, message in enumerate(messages) if message["role"] != "assistant"]
        if turns:
            return messages[: turns[-1] + 1], messages[turns[-1] + 1 :]
        answer = messages
    if prompt is None and isinstance(answer, str):
        return "", answer  # the prompt is part of the text
    if prompt is None:
        raise ValueError(f"no prompt, and {column!r} is no conversation that holds one")
    return (prompt if isinstance(prompt, str) else _messages(prompt, "prompt")), answer


def _text(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"column {column!r} holds {str(value)[:80]!r}; it must be text")


def _messages(value: Any, column: str) -> Messages:
    if isinstance(value, (list, tuple)) and value:
        messages = [dict(message) for message in value if isinstance(message, Mapping)]
        if len(messages) == len(value) and all("role" in m and "content" in m for m in messages):
            return messages
    raise ValueError(f"column {column!r} holds {str(value)[:80]!r}; it must be messages with a role and a content")


def _margin(row: Row) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise ValueError(f"a pair's margin is {margin!r}; it must be a number, or left out")
    return float(margin)
