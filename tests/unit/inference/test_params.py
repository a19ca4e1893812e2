from __future__ import annotations

import pickle

import pytest

from hybrid.inference.params import SamplingParams

EVERYTHING = {
    "n": 2,
    "temperature": 0.7,
    "top_k": -1,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "max_tokens": 5,
    "min_tokens": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [4, 5],
    "ignore_eos": True,
    "seed": 7,
    "logprobs": 0,
    "raw_logprobs": True,
    "logit_bias": {3: -100.0, 9: 1.5},
    "allowed_token_ids": [9, 3, 9],
}


def test_ranks_can_compare_send_and_hash_them():
    params, same = SamplingParams(**EVERYTHING), SamplingParams(**EVERYTHING)
    assert params == same == pickle.loads(pickle.dumps(params))
    assert hash(params) == hash(same)
    assert params != SamplingParams(**{**EVERYTHING, "logit_bias": {3: -100.0}})
    assert params.allowed_token_ids == (9, 3)


def test_what_was_passed_may_change_afterwards():
    bias, allowed = {3: 1.0}, [3]
    params = SamplingParams(logit_bias=bias, allowed_token_ids=allowed)
    bias[4] = 2.0
    allowed.append(4)
    assert params == SamplingParams(logit_bias={3: 1.0}, allowed_token_ids=(3,))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("n", 0, "at least 1"),
        ("temperature", -1.0, "finite and 0"),
        ("temperature", float("nan"), "finite and 0"),
        ("temperature", float("inf"), "finite and 0"),
        ("top_k", -2, "1 or more, or to 0 or -1"),
        ("top_p", 0.0, "in (0, 1]"),
        ("min_p", 1.5, "in [0, 1]"),
        ("repetition_penalty", 0.0, "more than 0"),
        ("repetition_penalty", float("inf"), "more than 0"),
        ("presence_penalty", 2.1, "in [-2, 2]"),
        ("frequency_penalty", float("nan"), "in [-2, 2]"),
        ("max_tokens", -1, "0 or more"),
        ("max_tokens", None, "the number of new tokens there may be"),
        ("min_tokens", 65, "from 0 to max_tokens=64"),
        ("stop", ("a", ""), "not empty"),
        ("stop_token_ids", (-1,), "token ids of 0 or more"),
        ("seed", -1, "from 0 to 2**64 - 1"),
        ("seed", 1 << 64, "from 0 to 2**64 - 1"),
        ("logprobs", -1, "0 or more, or None"),
        ("logit_bias", {-1: 1.0}, "token ids of 0 or more"),
        ("logit_bias", {1: float("-inf")}, "finite numbers"),
        ("allowed_token_ids", (), "one or more token ids"),
        ("allowed_token_ids", (3, -1), "one or more token ids"),
    ],
)
def test_parameters_out_of_range_are_refused(field, value, rule):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert message.startswith(f"{field}={value!r} is not allowed; set it to ")
    assert rule in message and "\n" not in message


@pytest.mark.parametrize(
    ("field", "value"), [("stop_token_ids", [3, 10]), ("logit_bias", {3: 1.0, 10: 1.0}), ("allowed_token_ids", [3, 10])]
)
def test_ids_that_the_model_does_not_have_are_refused_by_name(field, value):
    params = SamplingParams(**{field: value})
    params.require_in_vocabulary(11, 0)
    with pytest.raises(
        ValueError, match=f"^{field} of prompt 4 has the id 10 and the model's vocabulary has 10; set ids"
    ):
        params.require_in_vocabulary(10, 4)


def test_so_low_a_temperature_that_it_is_none():
    assert [SamplingParams(temperature=t).is_greedy for t in (0, 1e-6, 1e-5, 1.0)] == [True, True, False, False]
