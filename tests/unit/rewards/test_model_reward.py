"""A reward model scores text with its own tokenizer, at its last token: transformers' own forward is the oracle."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification

from hybrid.models.heads import token_values
from hybrid.models.loading import load_tokenizer, load_value_model, resolve_model
from hybrid.rewards import ModelReward
from tests.tiny import tiny_tokenizer

QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def reward(tiny_reward_model: Path) -> ModelReward:
    resolved = resolve_model(str(tiny_reward_model))
    module = load_value_model(resolved, torch.float32, new_head=False)
    mesh = SimpleNamespace(device="cpu", reduce_scalars=lambda values, op: values)
    model: Any = SimpleNamespace(
        mesh=mesh, resident=nullcontext, values=lambda batch: token_values(module, batch), can_share_prefixes=True
    )
    return ModelReward(model, load_tokenizer(resolved), max_tokens_per_microbatch=20)


def oracle(directory: Path, texts: list[str]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(resolve_model(str(directory)))
    with torch.no_grad():
        return [model(torch.tensor([tokenizer.encode(text, add_special_tokens=False)])).logits.item() for text in texts]


def test_plain_text(reward: ModelReward, tiny_reward_model: Path) -> None:
    prompts, completions = ["one ", "a longer one ", "x"], ["two", "three", ""]
    output = reward.score(prompts, completions, [[9]] * 3, {})
    expected = oracle(tiny_reward_model, ["one two", "a longer one three", "x"])
    assert output.rewards == pytest.approx(expected, abs=1e-5)
    assert output.parts == {"reward_model": output.rewards}


@pytest.mark.parametrize("shares", [True, False])
def test_what_completions_of_a_prompt_have_in_common_is_computed_once(
    reward: ModelReward, tiny_reward_model: Path, shares: bool
) -> None:
    computed: list[int] = []
    values = reward.model.values
    reward.model.can_share_prefixes = shares
    reward.model.values = lambda batch: computed.append(batch.num_tokens) or values(batch)
    reward.max_tokens_per_microbatch = 200
    prompts, completions = ["a prompt ", "else ", "a prompt ", "a prompt "], ["two", "two", "twenty", "two"]
    output = reward.score(prompts, completions, [[9]] * 4, {})
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    assert output.rewards == pytest.approx(oracle(tiny_reward_model, texts), abs=1e-5)
    alone = sum(len(reward.tokenizer.encode(text)) + 1 for text in texts)
    assert sum(computed) == alone - 2 * len(reward.tokenizer.encode("a prompt tw")) * shares


def test_messages_go_through_its_own_template(reward: ModelReward, tiny_reward_model: Path) -> None:
    messages = [[{"role": "user", "content": "Hi"}]]
    output = reward.score(["[INST]Hi[/INST]"], ["Yo"], [[9]], {"messages": messages})
    expected = oracle(tiny_reward_model, ["<|user|>Hi<|end|><|assistant|>Yo<|end|>"])
    assert output.rewards == pytest.approx(expected, abs=1e-5)


def test_plain_text_that_ended_by_itself_gets_the_models_own_end(reward: ModelReward, tiny_reward_model: Path) -> None:
    reward.end_ids = frozenset([9])  # the actor's, which means nothing to the reward model
    output = reward.score(["one ", "one "], ["two", "two"], [[5, 9], [5, 6]], {})
    expected = oracle(tiny_reward_model, [f"one two{reward.tokenizer.eos_token}", "one two"])
    assert output.rewards == pytest.approx(expected, abs=1e-5)
    assert expected[0] != pytest.approx(expected[1], abs=1e-3)


def test_what_is_too_long_is_cut_on_the_left_and_said_once(reward: ModelReward, tiny_reward_model: Path) -> None:
    reward.max_length = 4
    with pytest.warns(UserWarning, match="a sample has 6 tokens for the reward model, which takes 4") as caught:
        output = reward.score(["abc", "abcd"], ["def", "efg"], [[9]] * 2, {})
    assert len(caught) == 1
    assert output.rewards == pytest.approx(oracle(tiny_reward_model, ["cdef", "defg"]), abs=1e-5)


def test_every_rank_takes_part_in_as_many_forwards(reward: ModelReward) -> None:
    calls: list[int] = []
    values = reward.model.values
    reward.model.mesh.reduce_scalars = lambda scores, op: [3.0]  # another rank has three micro-batches
    reward.model.values = lambda batch: calls.append(batch.num_targets) or values(batch)
    assert reward.score([], [], [], {}).rewards == []
    assert calls == [0, 0, 0]


def test_the_actors_tokens_template_and_vocabulary_mean_nothing_to_it(tmp_path: Path) -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.tiny import save_tiny_reward_model

    directory = save_tiny_reward_model(tmp_path / "words", vocab_size=32)
    words = ["<unk>", "<end>", "Human", "Robot", ":", "Hi", "Yo", "."]
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # pyright: ignore
    own = PreTrainedTokenizerFast(tokenizer_object=vocabulary, unk_token="<unk>", eos_token="<end>")
    own.chat_template = (
        "{% for m in messages %}{{ 'Human' if m.role == 'user' else 'Robot' }}: {{ m.content }} {% endfor %}"
    )
    own.save_pretrained(directory)
    resolved = resolve_model(str(directory))
    module = load_value_model(resolved, torch.float32, new_head=False)
    mesh = SimpleNamespace(device="cpu", reduce_scalars=lambda values, op: values)
    model: Any = SimpleNamespace(
        mesh=mesh, resident=nullcontext, values=lambda batch: token_values(module, batch), can_share_prefixes=True
    )
    reward = ModelReward(model, load_tokenizer(resolved))
    # Ids and text of an actor with bytes for tokens and a template of its own.
    output = reward.score(["<|user|>Hi<|end|><|assistant|>"], ["Yo."], [[200, 250, 261]], {"messages": [QUESTION]})
    with torch.no_grad():
        oracle_model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
        ids = [words.index(word) for word in ("Human", ":", "Hi", "Robot", ":", "Yo", ".")]
        expected = oracle_model(torch.tensor([ids])).logits.item()
    assert output.rewards == pytest.approx([expected], abs=1e-5)


def test_the_score_is_of_the_last_token_also_where_that_is_padding(tmp_path: Path) -> None:
    from tests.tiny import save_tiny_reward_model

    directory = save_tiny_reward_model(tmp_path / "padded", pad_token_id=2)  # its end-of-sequence token
    resolved = resolve_model(str(directory))
    module = load_value_model(resolved, torch.float32, new_head=False)
    mesh = SimpleNamespace(device="cpu", reduce_scalars=lambda values, op: values)
    model: Any = SimpleNamespace(
        mesh=mesh, resident=nullcontext, values=lambda batch: token_values(module, batch), can_share_prefixes=True
    )
    reward = ModelReward(model, load_tokenizer(resolved), end_ids=[9])
    # Ended by itself, cut off, and one that is nothing but its end.
    output = reward.score(["one ", "one ", "one "], ["two", "two", ""], [[5, 9], [5, 6], [9]], {})
    plain = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    expected = []
    for text in ("one two<|end|>", "one two", "one <|end|>"):
        ids = torch.tensor([reward.tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():  # transformers' own choice of a token would pass by those that are padding
            expected.append(plain.score(plain.model(ids).last_hidden_state[0, -1]).item())
    assert output.rewards == pytest.approx(expected, abs=1e-5)


def test_a_text_that_opens_with_the_first_token_gets_no_second_one():
    tokenizer = tiny_tokenizer(chat_template=None)
    first = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)])
    tokenizer._tokenizer.post_processor = first
    model: Any = None
    reward = ModelReward(model, tokenizer)
    ids = [reward._encode(prompt, "Yo", True, None) for prompt in ("<|bos|>Hi ", "Hi ")]
    assert ids[0] == ids[1]
    assert ids[0].count(tokenizer.bos_token_id) == 1
