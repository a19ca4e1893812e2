"""A Hugging Face module as from_pretrained returns it, but for its parameters, which take no memory."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from hybrid.models.attention import ATTENTION_NAME
from hybrid.models.matching import Match
from hybrid.models.source import SafetensorsWeights
from hybrid.models.supported import prepare, require_supported


@contextmanager
def own_attention_named(config: PreTrainedConfig) -> Iterator[None]:
    """Name a family that looks its attention classes up in a table of its own, which raises a bare KeyError."""
    try:
        yield
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        raise ValueError(
            f"{config.model_type} has attention classes of its own and does not use transformers' attention interface, "
            "so it can neither be trained nor generate here; choose another family"
        ) from error


def skeleton(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal language model without storage, buffers neither, each parameter of the dtype that it is loaded in: for
    what depends on shapes alone.

    Raises:
        ValueError: transformers has no such model, or it cannot run here (see `supported`).
    """
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{config.model_type} has no causal language model in transformers, so no actor can be made")
    with own_attention_named(config), torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    require_supported(module)
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(_loaded_dtype(module, name, parameter, dtype))
    return module


def empty_module(
    auto_class: Any,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    source: str,
    where: Mapping[str, Any],
    **overrides: Any,
) -> PreTrainedModel:
    """A module in evaluation mode with its parameters on meta, tied where the family ties them, and its buffers real.

    Args:
        source, where: the directory or Hub id that the generation settings are read from, and how.
        overrides: settings that the configuration gets; it is copied.

    Raises:
        ValueError: the model cannot run here (see `supported`).
    """
    module = _build(auto_class, config, dtype, overrides)
    module.config.name_or_path = source
    if dtype != torch.float32:
        # Some families' tables of positions come out coarse when they are computed in bf16; from_pretrained computes
        # them in fp32 whatever the weights are, and then casts.
        exact = dict(_build(auto_class, config, torch.float32, overrides).named_buffers())
        for name, buffer in list(module.named_buffers()):
            buffer.copy_(exact[name])
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        data = parameter.to(_loaded_dtype(module, name, parameter, dtype))
        _set(module, name, nn.Parameter(data, requires_grad=parameter.requires_grad))
    module.tie_weights()  # under init_empty_weights a tied parameter becomes two
    prepare(module)
    if module.can_generate():
        module.generation_config = _generation_config(source, where)
    return module.eval()


def _build(
    auto_class: Any, config: PreTrainedConfig, dtype: torch.dtype, overrides: Mapping[str, Any]
) -> PreTrainedModel:
    config = copy.deepcopy(config)
    for name, value in overrides.items():
        setattr(config, name, value)
    with own_attention_named(config), init_empty_weights(include_buffers=False):
        return auto_class.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)


def fill_buffers(module: PreTrainedModel, match: Match, weights: SafetensorsWeights, dtype: torch.dtype) -> None:
    """Load the buffers that the checkpoint holds; the others keep what they were built with."""
    for name, buffer in list(module.named_buffers()):
        stored = match.sources.get(name)
        if stored is not None:
            loaded = weights.read(name, 0, 0, stored.shape[0] if stored.shape else 1)
            _set(module, name, loaded.to(_loaded_dtype(module, name, buffer, dtype)))
    # As from_pretrained leaves them, for save_pretrained; plain nn.Module types an attribute as a tensor or a module.
    cast("Any", module)._weight_conversions = list(match.conversions)


def _generation_config(source: str, where: Mapping[str, Any]) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(source, **where)
    except OSError:  # older checkpoints have its settings in config.json
        return GenerationConfig.from_pretrained(
            source, config_file_name="config.json", _from_model_config=True, **where
        )


def _loaded_dtype(module: PreTrainedModel, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that from_pretrained gives a loaded weight: a family may keep some in fp32."""
    for pattern, kept in module._get_dtype_plan(dtype).items():
        if re.search(pattern.replace("*", ".*"), name):
            return kept
    return tensor.dtype


def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, tensor)
