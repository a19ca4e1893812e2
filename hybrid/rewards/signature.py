"""Which form a reward function has, by the names of its parameters, and what it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hybrid.data.prompts import TRUTH_COLUMNS


class Form(Enum):
    """What distinguishes the forms: the parameter that tells it, and what it is given besides the columns."""

    BATCH = ("", ("prompts", "completions", "completion_ids"))
    SAMPLE = ("completion", ("prompt", "completion", "completion_ids"))
    # verl: compute_score(data_source, solution_str, ground_truth, extra_info), and its plural for batches.
    # https://verl.readthedocs.io/en/latest/preparation/reward_function.html
    VERL = ("solution_str", ("data_source", "solution_str", "extra_info", "prompt", "completion", "completion_ids"))
    VERL_BATCH = (
        "solution_strs",
        ("data_sources", "solution_strs", "ground_truths", "extra_infos", "prompts", "completions", "completion_ids"),
    )
    # OpenRLHF: reward_func(queries, prompts, labels), where a query is a prompt and its completion.
    # https://github.com/OpenRLHF/OpenRLHF/blob/main/examples/python/reward_func.py
    OPENRLHF = ("queries", ("queries", "prompts", "labels", "completions", "completion_ids"))

    def __init__(self, mark: str, given: tuple[str, ...]) -> None:
        self.mark = mark
        self.given = given

    @property
    def is_per_sample(self) -> bool:
        return self in (Form.SAMPLE, Form.VERL)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function's parameters ask for."""

    form: Form
    takes: frozenset[str]
    needs: frozenset[str]
    takes_all: bool  # **kwargs

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Signature:
        """Raises ValueError for parameters that cannot be passed by name."""
        parameters = inspect.signature(function).parameters.values()
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ValueError(
                f"reward function {name} has positional-only parameters; it is called with keywords: "
                f"{', '.join(Form.BATCH.given)} and the prompts' other columns"
            )
        takes = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        needs = {p.name for p in parameters if p.name in takes and p.default is p.empty}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return cls(_form_of(takes), frozenset(takes), frozenset(needs), takes_all)

    def missing(self, columns: Sequence[str]) -> list[str]:
        """The parameters without a default for which there is neither a sample's part nor a column."""
        found = {*self.form.given, *columns}
        if any(name in columns for name in TRUTH_COLUMNS):
            found.add("ground_truth")
        return sorted(self.needs - found)

    def calls(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], columns: dict[str, list[Any]]
    ) -> list[dict[str, Any]]:
        """The keywords of each call: of one with lists, or of one for each sample."""
        lists = columns | _given(self.form, prompts, completions, completion_ids, columns)
        if "ground_truth" not in lists and "ground_truth" in self.takes and (truth := _truth(columns)) is not None:
            lists["ground_truth"] = truth
        lists = {name: values for name, values in lists.items() if self.takes_all or name in self.takes}
        if not self.form.is_per_sample:
            return [lists]
        return [{name: values[i] for name, values in lists.items()} for i in range(len(prompts))]


def _form_of(takes: set[str]) -> Form:
    # A column may be called completion or queries too: then the function takes our own lists besides.
    if "completions" in takes or ("completion" in takes and "prompts" in takes):
        return Form.BATCH
    return next((form for form in Form if form.mark in takes), Form.BATCH)


def _given(
    form: Form,
    prompts: list[str],
    completions: list[str],
    completion_ids: list[list[int]],
    columns: dict[str, list[Any]],
) -> dict[str, list[Any]]:
    nothing = [None] * len(prompts)
    sources = columns.get("data_source", nothing)
    infos = [{} if info is None else info for info in columns.get("extra_info", nothing)]  # as verl does
    every = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        "prompt": prompts,
        "completion": completions,
        "solution_str": completions,
        "solution_strs": completions,
        "data_source": sources,
        "data_sources": sources,
        "extra_info": infos,
        "extra_infos": infos,
        "ground_truths": _truth(columns) or nothing,
        "labels": columns.get("labels") or _truth(columns) or nothing,
        "queries": [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)],
    }
    return {name: every[name] for name in form.given}


def _truth(columns: dict[str, list[Any]]) -> list[Any] | None:
    return next((columns[name] for name in TRUTH_COLUMNS if name in columns), None)
