"""Prompts from every form they come in, tokenised once, in an order that depends on (seed, step) alone."""

from __future__ import annotations

import csv
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hybrid.data import Prompt, PromptDataset, load_prompts
from tests.tiny import tiny_tokenizer

QUESTION = [{"role": "user", "content": "Hi"}]
TEMPLATED = "<|user|>Hi<|end|><|assistant|>"


def make(rows: list[dict[str, Any]], **options: Any) -> PromptDataset:
    tokenizer = options.pop("tokenizer", None) or tiny_tokenizer()
    return PromptDataset.from_rows(rows, tokenizer, **{"max_prompt_length": 100, **options})


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "text", "columns"),
    [
        ({"prompt": "a", "answer": 1}, "a", {"answer": 1, "ground_truth": 1}),
        ({"prompt": "a", "solution": "b", "label": 0}, "a", {"solution": "b", "label": 0, "ground_truth": "b"}),
        ({"prompt": "a", "ground_truth": 2, "answer": 1}, "a", {"ground_truth": 2, "answer": 1}),
        ({"prompt": "a", "label": False}, "a", {"label": False, "ground_truth": False}),
        ({"text": "a"}, "a", {}),
        ({"prompt": "a", "completion": "b"}, "a", {"completion": "b"}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "a", {"chosen": "b", "rejected": "c"}),
        ({"prompt": QUESTION}, TEMPLATED, {"messages": QUESTION}),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "Yo"}]}, TEMPLATED, {"messages": QUESTION}),
        (
            {
                "data_source": "gsm8k",
                "prompt": QUESTION,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "4"},
                "extra_info": {"index": 0},
            },
            TEMPLATED,
            {
                "data_source": "gsm8k",
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "4"},
                "extra_info": {"index": 0},
                "messages": QUESTION,
                "ground_truth": "4",
            },
        ),
    ],
    ids=[
        "answer",
        "solution",
        "ground-truth",
        "label",
        "text",
        "completion",
        "preference",
        "messages-in-prompt",
        "messages",
        "verl",
    ],
)
@pytest.mark.filterwarnings("ignore:prompts are plain text")
def test_columns_are_found_without_flags(row: dict[str, Any], text: str, columns: dict[str, Any]) -> None:
    (prompt,) = make([row]).rows
    assert (prompt.text, prompt.columns) == (text, columns)
    assert tiny_tokenizer().decode(prompt.token_ids) == text


def test_plain_text_stays_plain_and_says_so_once() -> None:
    with pytest.warns(UserWarning, match="plain text") as caught:
        dataset = make([{"prompt": "a"}, {"prompt": "b"}])
    assert len(caught) == 1
    assert [row.text for row in dataset.rows] == ["a", "b"]


def test_plain_text_through_the_template_where_asked() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (prompt,) = make([{"prompt": "Hi"}], apply_chat_template=True).rows
    assert (prompt.text, prompt.columns) == (TEMPLATED, {"messages": QUESTION})  # for a reward model's own template


def test_messages_without_a_template_become_text_and_say_so_once() -> None:
    with pytest.warns(UserWarning, match="no chat template") as caught:
        dataset = make([{"messages": QUESTION}] * 2, tokenizer=tiny_tokenizer(chat_template=None))
    assert len(caught) == 1
    assert dataset.rows[0].text == "user: Hi\nassistant:"


def test_no_double_bos() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    bos = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    rows = [{"messages": QUESTION}]
    assert make(rows, tokenizer=tokenizer).rows[0].token_ids.count(bos) == 1
    texts = [{"prompt": "Hi"}, {"prompt": "<|bos|>Hi"}]
    for prompt in make(texts, tokenizer=tokenizer, apply_chat_template=False).rows:
        assert prompt.token_ids.count(bos) == 1


def test_a_prompt_over_the_limit_is_dropped_and_counted_cut_or_refused() -> None:
    rows = [{"prompt": "abcdef"}, {"prompt": "ab"}]
    options: dict[str, Any] = {"max_prompt_length": 4, "apply_chat_template": False}
    with pytest.warns(UserWarning, match="1 of the 2 prompts of the rows given are longer than max_prompt_length=4"):
        dropped = make(rows, **options)
    assert ([row.text for row in dropped.rows], dropped.num_dropped) == (["ab"], 1)
    with pytest.warns(UserWarning, match="are cut on the left"):
        cut = make(rows, overlong="truncate", **options)
    assert [row.text for row in cut.rows] == ["cdef", "ab"]
    with pytest.raises(ValueError, match="row 0 of the rows given has 6 tokens and max_prompt_length is 4"):
        make(rows, overlong="error", **options)
    with (
        warnings.catch_warnings(action="error"),  # the error says it all
        pytest.raises(ValueError, match="none of the 1 prompts of the rows given is left: 1 are longer"),
    ):
        make(rows[:1], **options)


def test_an_empty_prompt_is_left_out_and_counted() -> None:
    with pytest.warns(UserWarning, match="1 of the 2 prompts of the rows given are empty"):
        assert len(make([{"prompt": ""}, {"prompt": "a"}], apply_chat_template=False)) == 1


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "holds no rows"),
        (
            [{"question": "a", "id": 1}],
            {},
            "no column with prompts .*; it has question, id; name one with --prompt_col",
        ),
        ([{"question": "a"}], {"prompt_column": "q"}, "no column 'q'; it has question"),
        ([{"prompt": None, "id": 1}], {}, "row 0 of the rows given: column 'prompt' has no value"),
        ([{"prompt": 3}], {}, "row 0 of the rows given: column 'prompt' holds '3'; a prompt is text, or messages"),
        ([{"prompt": [{"content": "a"}]}], {}, "messages with a role and a content"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], {}, "the assistant's last"),
    ],
)
def test_unusable_rows_are_named(rows: list[dict[str, Any]], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(rows, **options)


def test_every_file_format_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [{"question": "What, then?\n2+2", "answer": 4}, {"question": "ü", "answer": 5}]
    files = [write_jsonl(tmp_path / "a.jsonl", rows), str(tmp_path / "a.json"), str(tmp_path / "a.csv")]
    Path(files[1]).write_text(json.dumps(rows))
    with open(files[2], "w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    import datasets

    files.append(str(tmp_path / "a.parquet"))
    datasets.Dataset.from_list(rows).to_parquet(files[3])
    for file in files:
        dataset = load_prompts(
            file, tiny_tokenizer(), max_prompt_length=50, prompt_column="question", apply_chat_template=False
        )
        assert [(row.text, row.columns) for row in dataset.rows] == [
            ("What, then?\n2+2", {"answer": 4, "ground_truth": 4}),
            ("ü", {"answer": 5, "ground_truth": 5}),
        ], file


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d"
    file = tmp_path / "a.jsonl"
    file.write_bytes((json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n").encode() * 2)
    dataset = load_prompts(str(file), tiny_tokenizer(), max_prompt_length=50, apply_chat_template=False)
    assert [row.text for row in dataset.rows] == [text] * 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.jsonl", None, "there is no such file"),
        ("./none", None, "there is no such file"),
        ("empty.jsonl", "", "the file is empty"),
        ("blank.jsonl", "\n\n", "holds no rows"),
        ("bad.jsonl", '{"prompt": "a"}\n{"prompt"\n', "line 2"),
        ("list.jsonl", "[1]\n", "line 1 is not an object"),
        ("bad.json", '{"a": 1}', "must be a list of objects"),
        ("bad.parquet", "nonsense", "cannot be read as parquet"),
        ("prompts.xlsx", "x", "extension; it must be one of .jsonl, .json, .csv, .parquet"),
        ("no/such-dataset", None, "is no file here and could not be loaded from the Hub"),
    ],
)
def test_unreadable_sources_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(ValueError) as caught:
        load_prompts(name, tiny_tokenizer(), max_prompt_length=5)
    assert message in str(caught.value)


def test_order_depends_on_seed_and_step_alone() -> None:
    rows = [Prompt([i], str(i)) for i in range(10)]
    dataset = PromptDataset(rows)
    drawn = [dataset.batch(step, 4, seed=0) for step in range(5)]
    assert [PromptDataset(rows).batch(step, 4, seed=0) for step in reversed(range(5))] == drawn[::-1]
    texts = [prompt.text for batch in drawn for prompt in batch]
    assert Counter(texts) == {str(i): 2 for i in range(10)}  # two whole epochs, none of its rows twice
    assert sorted(texts[:10]) == sorted(texts[10:])
    assert texts[:10] != texts[10:]
    assert dataset.batch(0, 4, seed=1) != drawn[0]
    assert len(dataset.batch(0, 25, seed=0)) == 25  # more than there are


def test_a_column_that_only_some_rows_have_is_none_in_the_others() -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": 1}, {"prompt": "c", "reward_model": {"ground_truth": "2"}}]
    dataset = make(rows, apply_chat_template=False)
    assert [row.columns["ground_truth"] for row in dataset.rows] == [None, 1, "2"]
    assert all(sorted(row.columns) == ["answer", "ground_truth", "reward_model"] for row in dataset.rows)


def test_verls_nested_form_from_a_parquet_file(tmp_path: Path) -> None:
    import datasets

    row = {
        "data_source": "openai/gsm8k",
        "prompt": QUESTION,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"index": 0, "split": "train"},
    }
    file = str(tmp_path / "train.parquet")
    datasets.Dataset.from_list([row]).to_parquet(file)
    (prompt,) = load_prompts(file, tiny_tokenizer(), max_prompt_length=50).rows
    assert prompt.text == TEMPLATED
    rest = {name: value for name, value in row.items() if name != "prompt"}
    assert prompt.columns == {**rest, "messages": QUESTION, "ground_truth": "72"}


def test_duplicates_unicode_and_very_long_prompts() -> None:
    texts = ["same", "same", "Ünïcödé \u2028 漢字 \U0001f600 e\u0301", "x" * 100_000, "\u200f\u05d0"]
    rows = [{"prompt": text} for text in texts]
    options: dict[str, Any] = {"apply_chat_template": False}
    whole = make(rows, max_prompt_length=100_000, **options)
    assert [row.text for row in whole.rows] == texts
    assert [tiny_tokenizer().decode(row.token_ids) for row in whole.rows] == texts
    assert Counter(prompt.text for step in range(2) for prompt in whole.batch(step, 5, seed=0)) == {
        text: 2 * texts.count(text) for text in texts
    }
    with pytest.warns(UserWarning, match="1 of the 5 prompts of the rows given are longer"):
        assert make(rows, max_prompt_length=99_999, **options).num_dropped == 1
