"""Writing a Hugging Face model directory as its parameters come by, so that no process holds the model."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NUMBERED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_PARTIAL = ".model.partial"


class ModelWriter:
    """Writes sharded safetensors with their index, the configuration and the generation settings, on one rank.

    Files are written beside the directory's present model and take its place in `close`: an interrupted save leaves
    the old model, or for the moment of the exchange none, but no mixture. Other files in the directory stay. As a
    context manager it closes, or after an exception discards what it wrote.

    Where transformers joins several parameters into what it stores, they are kept in memory until `close`.
    """

    def __init__(
        self,
        directory: str | Path,
        module: PreTrainedModel,
        *,
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = 2**30,
    ) -> None:
        """
        Args:
            module: what the parameters are of. Its buffers are saved; its parameters may be empty or on meta.
            dtype: what the weights are stored in; the module's, if None. What its family keeps in another dtype than
                the module's is stored as it comes.
            max_shard_bytes: the size of a file, which is also what is held in memory, unless one tensor is larger.
        """
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={max_shard_bytes} must be 1 or more")
        self._directory, self._module = Path(directory), module
        self._partial = self._directory / _PARTIAL
        self._main_dtype, self._dtype, self._max_bytes = module.dtype, dtype or module.dtype, max_shard_bytes
        self._saved_name = _saved_names(module)
        self._expected = {name for name, _ in module.named_parameters()}
        self._ignored = set(module._keys_to_ignore_on_save or ())
        conversions = _conversions(module)
        self._reverts = bool(conversions)
        # One parameter becomes one stored tensor or several, unless a conversion made several parameters at once.
        self._collects = any(len(conversion.target_patterns) > 1 for conversion in conversions)
        self._added: set[str] = set()
        self._taken: set[str] = set()  # by the names that they are stored under
        self._num_parameters = 0
        self._shard: dict[str, torch.Tensor] = {}
        self._shard_bytes = self._total_bytes = 0
        self._shards: list[list[str]] = []  # the tensors' names, file by file
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._write_config()  # first, since what cannot be saved should be known before the weights are gathered

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a whole parameter, on any device; it is copied at once. A tied one is stored once, whatever its name.

        Raises:
            ValueError: the module has no such parameter, or it came before.
        """
        saved = self._saved_name.get(name)
        if saved is None:
            raise ValueError(f"{type(self._module).__name__} has no parameter {name!r}")
        if name in self._added:
            raise ValueError(f"{name} was added twice")
        self._added.add(name)
        if saved in self._taken:
            return
        self._taken.add(saved)
        self._num_parameters += tensor.numel()
        parameter = self._module.get_parameter(name)
        cast_to = self._dtype if parameter.dtype == self._main_dtype else tensor.dtype
        self._store(saved, tensor, cast_to)

    def close(self) -> None:
        """Write what is left and make it the directory's model.

        Raises:
            ValueError: parameters are missing; what was written is discarded.
        """
        missing = sorted(name for name in self._expected if self._saved_name[name] not in self._taken)
        if missing:
            self.discard()
            raise ValueError(f"{len(missing)} parameters were not added, {missing[0]} first; the model is not saved")
        for name, buffer in _persistent_buffers(self._module).items():
            self._store(name, buffer, buffer.dtype)
        if self._collects:
            self._save_collected()
        else:
            self._flush()
            self._name_shards()
        self._publish()

    def discard(self) -> None:
        """Remove what was written; the directory's model stays as it was."""
        self._shard.clear()
        shutil.rmtree(self._partial, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _store(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        if name in self._ignored:
            return
        held = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if self._collects or not self._reverts:
            self._hold(name, held)
            return
        for stored_name, part in revert_weight_conversion(self._module, {name: held}).items():
            part = part.contiguous()
            is_view = part.untyped_storage().nbytes() != part.nbytes
            self._hold(stored_name, part.clone() if is_view else part)

    def _hold(self, name: str, tensor: torch.Tensor) -> None:
        if self._shard and self._shard_bytes + tensor.nbytes > self._max_bytes and not self._collects:
            self._flush()
        self._shard[name] = tensor
        self._shard_bytes += tensor.nbytes

    def _flush(self) -> None:
        if not self._shard:
            return
        save_file(self._shard, self._partial / f"{len(self._shards)}.safetensors", metadata={"format": "pt"})
        self._shards.append(list(self._shard))
        self._total_bytes += self._shard_bytes
        self._shard.clear()
        self._shard_bytes = 0

    def _name_shards(self) -> None:
        """Give the files the names that Hugging Face expects, now that their number is known."""
        count = len(self._shards)
        if count == 1:
            (self._partial / "0.safetensors").rename(self._partial / _SINGLE)
            return
        weight_map = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._partial / f"{number}.safetensors").rename(self._partial / file)
            weight_map |= dict.fromkeys(names, file)
        metadata = {"total_parameters": self._num_parameters, "total_size": self._total_bytes}
        text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
        (self._partial / _INDEX).write_text(text + "\n", encoding="utf-8")

    def _save_collected(self) -> None:
        self._module.save_pretrained(self._partial, state_dict=self._shard, max_shard_size=self._max_bytes)
        self._shard.clear()
        self._write_config()

    def _write_config(self) -> None:
        """Write the configuration as save_pretrained does, on a copy: the module's own is not touched."""
        module = self._module
        config = copy.deepcopy(module.config)
        config.dtype = str(self._dtype).removeprefix("torch.")
        config.architectures = [type(module).__name__]
        if module._auto_class is not None:  # a class of the user's own, which goes with the model
            custom_object_save(module, str(self._partial), config=cast("Any", config))
        config.save_pretrained(self._partial)
        if module.can_generate():
            cast("Any", module).generation_config.save_pretrained(self._partial)

    def _publish(self) -> None:
        """Exchange the directory's model for the new one. Without its entry file, which goes first and comes last, a
        directory is no model."""
        for name in (_INDEX, _SINGLE):
            (self._directory / name).unlink(missing_ok=True)
        for path in list(self._directory.iterdir()):
            if _NUMBERED.fullmatch(path.name):
                path.unlink()
        entry = next(name for name in (_INDEX, _SINGLE) if (self._partial / name).exists())
        files = sorted(self._partial.iterdir(), key=lambda path: path.name == entry)
        for path in files:
            path.replace(self._directory / path.name)
        self._partial.rmdir()


def _saved_names(module: PreTrainedModel) -> dict[str, str]:
    """The name that each parameter is stored under: of tied ones, the one that the family ties the others to."""
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of[id(parameter)].append(name)
    targets = getattr(module, "all_tied_weights_keys", None) or {}
    saved = {}
    for names in names_of.values():
        main = next((name for name in names if name not in targets), names[0])
        saved |= dict.fromkeys(names, main)
    return saved


def _persistent_buffers(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}


def _conversions(module: PreTrainedModel) -> list[Any]:
    """What save_pretrained reverts: what loading used, or all that the family has if the module was not loaded."""
    used = getattr(module, "_weight_conversions", None)
    return get_model_conversion_mapping(module, add_legacy=False) if used is None else list(used)
