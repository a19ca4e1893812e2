"""What of a row is learnt: column by column, template by template, against transformers' own masks and encodings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybrid.data.conversations import Example, ExampleDataset, read_examples, read_pairs
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

MARKED_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# The last message is told from earlier ones, as templates do that leave out what a model thought in earlier turns.
FORGETFUL_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if loop.last %}!{% endif %}"
    "{{ message['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LINE_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = [
    {"role": "system", "content": "Be brief"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Höla"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ciao 🙂"},
]

OPENING = "<|system|>Be brief<|end|><|user|>Hi<|end|><|assistant|>"


def said_by(content: str, role: str = "assistant") -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def read(row: dict[str, Any], template: str | None = CHAT_TEMPLATE, **how: Any) -> tuple[Example, Any]:
    tokenizer = tiny_tokenizer(chat_template=template)
    how = {"max_length": 200, "apply_chat_template": False, **how}
    (example,) = read_examples([row], tokenizer, **how).rows
    return example, tokenizer


def said(example: Example, tokenizer: Any) -> str:
    """The text that is scored."""
    ids = [token for token, scored in zip(example.token_ids, example.scored, strict=True) if scored]
    return tokenizer.decode(ids)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED_TEMPLATE])
def test_the_assistants_tokens_are_those_that_transformers_marks(template: str) -> None:
    example, tokenizer = read({"messages": TURNS}, template)
    oracle: Any = tiny_tokenizer(chat_template=MARKED_TEMPLATE).apply_chat_template(
        TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert example.token_ids == oracle["input_ids"]
    assert example.scored == [bool(mark) for mark in oracle["assistant_masks"]]
    assert said(example, tokenizer) == "Höla<|end|>Ciao 🙂<|end|>"


def test_a_line_break_behind_the_end_is_not_scored_and_there_is_one_beginning() -> None:
    example, tokenizer = read({"messages": TURNS}, LINE_TEMPLATE)
    assert said(example, tokenizer) == "Höla<|end|>Ciao 🙂<|end|>"
    assert example.token_ids.count(tokenizer.bos_token_id) == 1


def test_an_assistant_that_opens_the_conversation_answers_nothing() -> None:
    example, tokenizer = read({"messages": TURNS[2:]})
    assert said(example, tokenizer) == "Ciao 🙂<|end|>"


def test_a_template_that_tells_nothing_is_refused_unless_everything_is_learnt() -> None:
    with pytest.raises(ValueError, match="row 0 of the rows given: the chat template renders.* set --loss_on all"):
        read({"messages": TURNS}, FORGETFUL_TEMPLATE)
    example, tokenizer = read({"messages": TURNS}, FORGETFUL_TEMPLATE, loss_on="all")
    assert example.token_ids == tokenizer.apply_chat_template(TURNS, tokenize=True)["input_ids"]
    assert example.scored == [False] + [True] * (len(example.token_ids) - 1)


@pytest.mark.parametrize(
    ("row", "learnt"),
    [
        ({"prompt": "What? ", "completion": "That"}, "That<|end|>"),
        ({"prompt": "What? ", "chosen": "That", "rejected": "This"}, "That<|end|>"),
        ({"prompt": "What? ", "completion": "That<|end|>"}, "That<|end|>"),
        ({"text": "abc"}, "bc<|end|>"),  # the first token is predicted by nothing
        ({"messages": TURNS, "prompt": "Hi"}, "Höla<|end|>Ciao 🙂<|end|>"),
        ({"prompt": TURNS[:2], "completion": "Höla"}, "Höla<|end|>"),
        ({"prompt": TURNS[:4], "completion": TURNS[4:]}, "Ciao 🙂<|end|>"),
        ({"prompt": "Hi", "chosen": TURNS}, "Ciao 🙂<|end|>"),  # the whole conversation again
    ],
)
def test_columns_are_found(row: dict[str, Any], learnt: str) -> None:
    example, tokenizer = read(row)
    assert said(example, tokenizer) == learnt


def test_text_is_wrapped_where_it_is_asked_for() -> None:
    row = {"prompt": "Hi", "completion": "Höla"}
    wrapped, tokenizer = read(row, apply_chat_template=True)
    assert tokenizer.decode(wrapped.token_ids) == "<|user|>Hi<|end|><|assistant|>Höla<|end|>"
    with pytest.warns(UserWarning, match="stay so; set --apply_chat_template"):
        read(row, apply_chat_template=None)


def test_what_an_actor_is_given_is_the_beginning_of_what_it_learnt_from() -> None:
    prompt = TURNS[:4]
    example, tokenizer = read({"prompt": prompt, "completion": "Ciao"})
    asked = tokenizer.apply_chat_template(prompt, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert example.token_ids[: len(asked)] == asked
    assert example.scored == [False] * len(asked) + [True] * (len(example.token_ids) - len(asked))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_overlong_are_dropped_cut_or_refused_and_counted() -> None:
    rows = [{"prompt": "a" * 10, "completion": "b" * size} for size in (2, 20)]

    def dataset(**how: Any) -> ExampleDataset[Example]:
        return read_examples(rows, tiny_tokenizer(chat_template=None), max_length=16, **how)

    dropped, cut = dataset(), dataset(overlong="truncate")
    assert (len(dropped), dropped.num_dropped, dropped.num_truncated) == (1, 1, 0)
    assert (len(cut), cut.num_dropped, cut.num_truncated) == (2, 0, 1)
    assert [len(example.token_ids) for example in cut.rows] == [13, 16]
    with pytest.raises(ValueError, match="row 1 of the rows given has 31 tokens and max_length is 16"):
        dataset(overlong="error")
    with pytest.warns(UserWarning, match="1 of the 2 examples of the rows given are longer than max_length=16"):
        dataset()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pairs_are_cut_at_their_beginning() -> None:
    row = {"prompt": "a" * 10, "chosen": "bb", "rejected": "b" * 8, "margin": 2}
    how = {"max_length": 8, "overlong": "truncate"}
    (pair,) = read_pairs([row], tiny_tokenizer(chat_template=None), for_reward=False, **how).rows
    assert (len(pair.chosen.token_ids), pair.chosen.num_scored) == (8, 3)
    assert (len(pair.rejected.token_ids), pair.rejected.num_scored) == (8, 7)  # the first is predicted by nothing
    assert pair.margin == 2.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, "row 0 of the rows given: no columns to learn from .* its columns are question"),
        ({"messages": []}, "column 'messages' holds"),
        ({"messages": [{"role": "user"}]}, "it must be messages with a role and a content"),
        ({"messages": TURNS[:2]}, "none of the 1 examples .* 1 have nothing to learn"),
        ({"prompt": "a", "completion": 3}, "column 'completion' holds '3'; it must be"),
    ],
)
def test_each_mistake_is_one_sentence(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(row)


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(ValueError, match="messages need a chat template and the tokenizer has none"):
        read({"messages": TURNS}, None)


@pytest.mark.parametrize("for_reward", [False, True])
@pytest.mark.parametrize(
    ("row", "whole"),
    [
        ({"prompt": "Why? ", "chosen": "So", "rejected": "Nö"}, "Why? {}<|end|>"),
        ({"prompt": "Why? ", "chosen": "So<|end|>", "rejected": "Nö"}, "Why? {}<|end|>"),
        ({"chosen": "So", "rejected": "Nö"}, "{}<|end|>"),  # the prompt is part of the text
        ({"prompt": TURNS[:2], "chosen": "So", "rejected": "Nö"}, f"{OPENING}{{}}<|end|>"),
        ({"prompt": TURNS[:2], "chosen": said_by("So"), "rejected": said_by("Nö")}, f"{OPENING}{{}}<|end|>"),
        (  # whole conversations, with their prompt besides or without
            {"prompt": "Hi", "chosen": TURNS[:2] + said_by("So"), "rejected": TURNS[:2] + said_by("Nö")},
            f"{OPENING}{{}}<|end|>",
        ),
        ({"chosen": TURNS[:2] + said_by("So"), "rejected": TURNS[:2] + said_by("Nö")}, f"{OPENING}{{}}<|end|>"),
    ],
)
def test_pairs_are_found_in_text_and_in_messages(row: dict[str, Any], whole: str, for_reward: bool) -> None:
    tokenizer = tiny_tokenizer()
    how = {"max_length": 200, "for_reward": for_reward, "apply_chat_template": False}
    (pair,) = read_pairs([{**row, "margin": None, "other": 1}], tokenizer, **how).rows
    for example, answer in ((pair.chosen, "So"), (pair.rejected, "Nö")):
        assert tokenizer.decode(example.token_ids) == whole.format(answer)
        learnt = said(example, tokenizer)
        if for_reward:
            assert learnt == "<|end|>" and example.scored[-1]
        elif whole.startswith("{}"):
            assert learnt == f"{answer[1:]}<|end|>"  # the first token is predicted by nothing
        else:
            assert learnt == f"{answer}<|end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}, "margin is 'much'; it must be a number"),
        ({"chosen": TURNS[2:3], "rejected": TURNS[2:3]}, "no prompt, and 'chosen' is no conversation"),
    ],
)
def test_each_mistake_in_a_pair_is_one_sentence(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pairs([row], tiny_tokenizer(), max_length=100, for_reward=False, apply_chat_template=False)


def test_a_reward_models_pairs_are_encoded_as_it_is_given_samples_later() -> None:
    from hybrid.rewards.model import ModelReward

    tokenizer = tiny_tokenizer()
    prompts = ["Why? ", TURNS[:2]]
    rows = [{"prompt": prompt, "chosen": "So", "rejected": "Not"} for prompt in prompts]
    pairs = read_pairs(rows, tokenizer, max_length=100, for_reward=True, apply_chat_template=False).rows
    reward = ModelReward(None, tokenizer)  # pyright: ignore[reportArgumentType]
    assert pairs[0].chosen.token_ids == reward._encode("Why? ", "So", True, None)
    assert pairs[1].rejected.token_ids == reward._encode("", "Not", True, TURNS[:2])


def test_every_epoch_is_all_of_them_in_another_order_and_the_last_batch_is_what_is_left() -> None:
    dataset = ExampleDataset(list(range(7)))
    drawn = [dataset.batch(step, 3, seed=1, end=14) for step in range(5)]
    assert [len(batch) for batch in drawn] == [3, 3, 3, 3, 2]
    flat = [row for batch in drawn for row in batch]
    assert sorted(flat[:7]) == sorted(flat[7:]) == list(range(7))
    assert flat[:7] != flat[7:]


def test_fewer_examples_than_a_batch_fill_it_or_end_it() -> None:
    assert sorted(ExampleDataset([0, 1]).batch(0, 5, seed=1)[:4]) == [0, 0, 1, 1]
    assert sorted(ExampleDataset([0, 1]).batch(0, 5, seed=1, end=2)) == [0, 1]
    assert ExampleDataset([7]).batch(3, 2, seed=1) == [7, 7]


def test_what_is_held_out_is_not_trained_on() -> None:
    train, held_out = ExampleDataset(list(range(10))).hold_out(3, seed=0)
    assert sorted([*train.rows, *held_out.rows]) == list(range(10)) and len(held_out) == 3
    with pytest.raises(ValueError, match="eval_size=10 of 10 rows leaves none"):
        ExampleDataset(list(range(10))).hold_out(10, seed=0)


def test_unicode_survives() -> None:
    text = "naïve 🙂 \u2028 end"
    example, tokenizer = read(json.loads(json.dumps({"prompt": "a", "completion": text})))
    assert said(example, tokenizer) == f"{text}<|end|>"
