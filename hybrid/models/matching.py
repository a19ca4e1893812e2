"""Which stored tensor is which parameter of a module.

Names are translated by transformers' own table of renamings and conversions, the one that from_pretrained uses. A
conversion that only stacks, joins, splits or transposes (experts that files hold one by one) is run for one parameter
at a time; any other, and whatever else from_pretrained decides by looking at values, is left to it.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from hybrid.models.source import ConvertedTensor, ReadStored, Source, StoredTensor, equal

_MOVING_OPS = (Chunk, Concatenate, MergeModulelist, Transpose)  # they move values and look at none


@dataclass(frozen=True, slots=True)
class Match:
    """A module's parameters and persistent buffers in a checkpoint. Tied parameters go under their first name."""

    sources: Mapping[str, Source]
    missing: Sequence[str]  # what the checkpoint lacks and the family does not expect to lack
    conversions: Sequence[Any]  # transformers' renamings and converters that took part; saving reverts them


class MustLoadWholeError(Exception):
    """from_pretrained does something with the checkpoint that cannot be done by ranges; says what."""


def match_names(module: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> Match:
    """Find a module's weights, which may be on meta, in a checkpoint. What the module has no use for is ignored.

    Raises:
        ValueError: a tensor has another shape than the parameter.
        MustLoadWholeError: reading parts is not enough to load the checkpoint.
    """
    expected = module.state_dict()
    conversions = get_model_conversion_mapping(module)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    prefix = module.base_model_prefix
    sources: dict[str, Source] = {}
    converted: dict[str, list[tuple[str, str]]] = defaultdict(list)  # first parameter made: (pattern, stored name)
    # In the order of from_pretrained: some renamings depend on what came before, and so does the order of experts.
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name not in expected:
            continue
        if pattern is None:
            sources.setdefault(name, stored[key])
        else:
            converted[name].append((pattern, key))
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name, parts in converted.items():
        sources.update(_plan_conversion(module, by_pattern[parts[0][0]], name, parts, stored))
    _check_shapes(expected, sources)
    missing = _join_tied(module, sources, expected.keys() - sources.keys())
    allowed = module._keys_to_ignore_on_load_missing or ()
    return Match(
        sources,
        sorted(name for name in missing if not any(re.search(pattern, name) for pattern in allowed)),
        [entry for entry in conversions if entry.was_used()],
    )


def _plan_conversion(
    module: PreTrainedModel,
    converter: WeightConverter,
    name: str,
    parts: Sequence[tuple[str, str]],
    stored: Mapping[str, StoredTensor],
) -> dict[str, ConvertedTensor]:
    """The parameters that a converter makes of some stored tensors, tried out without reading them."""
    for operation in converter.operations:
        if type(operation) not in _MOVING_OPS:
            raise MustLoadWholeError(f"transformers computes {name} from its files ({type(operation).__name__})")

    def run(read: ReadStored, row: int | None = None) -> dict[str, torch.Tensor]:
        # A converter collects what it is given, so each run has its own.
        fresh, counts = copy.deepcopy(converter), defaultdict[str, int](int)
        for pattern, key in parts:
            if row is None or counts[pattern] == row:
                fresh.add_tensor(name, key, pattern, partial(read, stored[key]))  # pyright: ignore[reportArgumentType]
            counts[pattern] += 1
        made = fresh.convert(name, model=module, config=module.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}

    def run_row(read: ReadStored, row: int, target: str) -> torch.Tensor:
        return run(read, row)[target].squeeze(0)

    try:
        outline = run(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    except (RuntimeError, ValueError, LookupError) as error:
        raise ValueError(
            f"the checkpoint's {len(parts)} tensors that {name} is made of do not fit together ({error}); it is "
            "damaged or of another architecture than its config.json says"
        ) from error
    by_rows = _is_by_rows(converter)
    return {
        target: ConvertedTensor(
            tuple(value.shape),
            value.dtype,
            lambda read, target=target: run(read)[target],
            partial(run_row, target=target) if by_rows else None,
        )
        for target, value in outline.items()
    }


def _is_by_rows(converter: WeightConverter) -> bool:
    """Whether a converter stacks what it is given and leaves the rows of that alone."""
    first, *others = converter.operations
    if not isinstance(first, MergeModulelist) or first.dim != 0:
        return False
    dims = [
        dim
        for operation in others
        for dim in ((operation.dim0, operation.dim1) if isinstance(operation, Transpose) else (operation.dim,))  # pyright: ignore
    ]
    return all(dim > 0 for dim in dims)


def _check_shapes(expected: Mapping[str, torch.Tensor], sources: Mapping[str, Source]) -> None:
    for name, source in sources.items():
        if name in expected and source.shape != tuple(expected[name].shape):
            raise ValueError(
                f"the checkpoint's {name} has shape {source.shape} and the model's {tuple(expected[name].shape)}; "
                "it is damaged or of another size than its config.json says"
            )


def _join_tied(module: PreTrainedModel, sources: dict[str, Source], missing: set[str]) -> set[str]:
    """Put what is known of tied parameters under their first name; returns the names that are still missing."""
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of[id(parameter)].append(name)
    for first, *others in names_of.values():
        found = [sources[name] for name in (first, *others) if name in sources]
        for name in others:
            sources.pop(name, None)
        missing.difference_update(others)
        if not found:
            continue
        for other in found[1:]:
            if isinstance(found[0], StoredTensor) and isinstance(other, StoredTensor) and equal(found[0], other):
                continue
            raise MustLoadWholeError(f"{first} and {', '.join(others)} are tied and its files hold both, which differ")
        sources[first] = found[0]
        missing.discard(first)
    return missing
