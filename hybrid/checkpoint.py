"""Checkpoints that a run of any world size, ZeRO stage and tensor-parallel size resumes from.

A checkpoint holds whole tensors by parameter name, in fp32: masters, and beside them the optimizer's moments and, where
one is kept, the average of the weights. Nothing of how they were sharded is kept, so nothing of it has to match. They
are gathered and written group by group, and read the same way: no rank ever holds a model.

    checkpoint-40/
        state.json                  versions, the trainer's state, which file holds which tensor
        actor-00000.safetensors     a group of the actor's parameters: NAME, NAME#exp_avg, NAME#exp_avg_sq, NAME#step,
                                    NAME#average
        critic-00000.safetensors
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hybrid.parallel import ParallelMesh
from hybrid.zero.model import ShardedModel

_STATE_FILE = "state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def save_checkpoint(
    directory: str | Path, models: Mapping[str, ShardedModel], trainer_state: Mapping[str, Any], mesh: ParallelMesh
) -> None:
    """Write a checkpoint; every rank calls this, the first one writes.

    The directory appears under its name only when it is complete, so an interrupted save is never resumed from.
    """
    directory = Path(directory)
    partial = directory.with_name(directory.name + ".partial")
    if mesh.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    record: dict[str, Any] = {"trainer": dict(trainer_state), "models": {}}
    for role, model in models.items():
        files: dict[str, str] = {}
        for number, tensors in enumerate(model.optimizer_state()):
            name = f"{role}-{number:05d}.safetensors"
            if mesh.is_main:
                host = {key: tensor.to("cpu").contiguous() for key, tensor in tensors.items()}
                save_file(host, partial / name)
                files |= dict.fromkeys(host, name)
        record["models"][role] = {"weights_version": model.weights_version, "files": files}
        if model.optimizer is not None and model.optimizer.loss_scale is not None:
            record["models"][role]["loss_scale"] = model.optimizer.loss_scale.state_dict()
    if mesh.is_main:
        (partial / _STATE_FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")
        replaced = directory.with_name(directory.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if directory.exists():  # moved aside first: at no time is there neither
            directory.rename(replaced)
        partial.rename(directory)
        shutil.rmtree(replaced, ignore_errors=True)
    mesh.barrier()


def load_checkpoint(directory: str | Path, models: Mapping[str, ShardedModel]) -> dict[str, Any]:
    """Restore models and return the trainer's state; every rank calls this.

    Raises:
        ValueError: the directory is no checkpoint, or one of other models.
    """
    directory = Path(directory)
    if not is_checkpoint(directory):
        raise ValueError(
            f"{directory} is no checkpoint (it has no {_STATE_FILE}); set --resume_from_checkpoint to a checkpoint-N"
        )
    record = _read_record(directory)
    missing = sorted(models.keys() - record["models"].keys())
    if missing:
        raise ValueError(f"{directory} holds no {', '.join(missing)}; it has {', '.join(sorted(record['models']))}")
    for role, model in models.items():
        saved = record["models"][role]
        reader = _Reader(directory, saved["files"], role)
        model.load_optimizer_state(reader, saved["weights_version"])
        if model.optimizer is not None and model.optimizer.loss_scale is not None and "loss_scale" in saved:
            model.optimizer.loss_scale.load_state_dict(saved["loss_scale"])
    return record["trainer"]


class _Reader(Mapping[str, torch.Tensor]):
    """The tensors of one model in a checkpoint, each read when it is asked for."""

    def __init__(self, directory: Path, files: Mapping[str, str], role: str) -> None:
        self._directory, self._files, self._role = directory, files, role

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._files:
            raise ValueError(f"{self._directory} holds no {key} of the {self._role}; it was saved from another model")
        with safe_open(self._directory / self._files[key], framework="pt") as file:
            return file.get_tensor(key)

    def __iter__(self):
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory holds a whole checkpoint."""
    return (directory / _STATE_FILE).is_file()


def find_checkpoints(directory: str | Path) -> list[Path]:
    """Complete checkpoints in a run's directory, oldest first."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = [(match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda pair: int(pair[0][1])) if is_checkpoint(path)]


def drop_old_checkpoints(directory: str | Path, keep: int, step: int | None = None) -> None:
    """Remove all but the newest ``keep`` checkpoints of a run that is at ``step``; 0 keeps all of its own.

    Those beyond ``step`` are of a course that the run has left by going back to an earlier checkpoint: they are
    removed too, or the next resume would return to it.
    """
    found = {path: checkpoint_step(path) for path in find_checkpoints(directory)}
    reached = [path for path, number in found.items() if step is None or number <= step]
    for path in found.keys() - set(reached[-keep:]):
        shutil.rmtree(path)


def checkpoint_step(directory: Path) -> int:
    return int(directory.name.removeprefix("checkpoint-"))


def read_trainer_state(directory: Path) -> dict[str, Any]:
    """What a checkpoint says of the trainer, without its tensors.

    Raises:
        ValueError: its record cannot be read.
    """
    return _read_record(directory)["trainer"]


def _read_record(directory: Path) -> dict[str, Any]:
    try:
        record = json.loads((directory / _STATE_FILE).read_text(encoding="utf-8"))
        return {"trainer": record["trainer"], "models": record["models"]}
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{directory} is damaged: its {_STATE_FILE} cannot be read; resume from another") from error
