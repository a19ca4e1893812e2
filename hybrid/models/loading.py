"""From a model's name to modules and tokenizers. Every mistake in a name is found before any weight is read."""

from __future__ import annotations

import difflib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file, find_adapter_config_file, is_peft_available
from transformers.utils.hub import get_checkpoint_shard_files

from hybrid.models.aliases import ALIASES
from hybrid.models.attention import ATTENTION_NAME
from hybrid.models.bundled import BUNDLED_NAME, bundled_path
from hybrid.models.empty import empty_module, fill_buffers, own_attention_named
from hybrid.models.hub import hub_is_reachable, why_unreachable
from hybrid.models.matching import MustLoadWholeError, match_names
from hybrid.models.source import (
    ModuleWeights,
    SafetensorsWeights,
    Source,
    WeightSource,
    ZeroTensor,
    read_headers,
)
from hybrid.models.supported import prepare
from hybrid.parallel import uses_cuda

DType = Literal["auto", "bf16", "fp16", "fp32"]
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_LOCAL_HINT = "To use a local copy, pass its directory as ./path or /path."


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that was found: what from_pretrained takes, and its configuration."""

    name: str  # as the user wrote it
    source: str  # a local directory or a Hub id
    config: PreTrainedConfig
    local_files_only: bool  # no network: everything comes from disk

    @property
    def has_score_head(self) -> bool:
        """Whether the checkpoint holds a value or reward head."""
        return any("ForSequenceClassification" in name for name in self.config.architectures or ())

    @property
    def num_positions(self) -> int | None:
        """How many tokens a sequence may have; None: the configuration does not say."""
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose weights have not been read: a module in evaluation mode, and where its parameters come from.

    The parameters are on meta, in the dtype that they compute in; buffers are real, on the CPU. Where parts are not
    enough to load a checkpoint the module is whole instead.
    """

    module: PreTrainedModel
    weights: WeightSource

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        if isinstance(self.weights, SafetensorsWeights):
            self.weights.close()


def resolve_model(name: str) -> ResolvedModel:
    """Find a model by a local directory, a Hub id, or an alias.

    Raises:
        ValueError: there is no such model, or it cannot be reached, or may not be, or has no weights.
    """
    if not name.strip():
        raise ValueError(f"the model's name is empty; pass a local directory, a Hub id or one of {', '.join(ALIASES)}")
    if Path(name).expanduser().is_dir():
        return _resolve_directory(name, Path(name).expanduser())
    alias = name.lower()
    if alias == BUNDLED_NAME and (directory := bundled_path()) is not None:
        return _resolve_directory(name, directory)
    if alias in ALIASES:
        return _resolve_hub(name, ALIASES[alias])
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists():
        raise ValueError(f"model {name!r}: there is no such directory")
    if "/" not in name:
        close = difflib.get_close_matches(alias, ALIASES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"aliases are {', '.join(ALIASES)}."
        raise ValueError(
            f"unknown model {name!r}: it is no directory, no alias and, without an owner/, no Hub id; {hint} "
            f"{_LOCAL_HINT}"
        )
    return _resolve_hub(name, name)


def load_causal_lm(resolved: ResolvedModel, dtype: torch.dtype | DType = "auto") -> PreTrainedModel:
    """The causal language model on the CPU, in evaluation mode. Buffers keep the dtype their family gives them."""
    return _load(AutoModelForCausalLM, resolved, dtype)[0]


def load_value_model(
    resolved: ResolvedModel, dtype: torch.dtype | DType = "auto", *, new_head: bool = True
) -> PreTrainedModel:
    """A model with one score per token, on the CPU, in evaluation mode.

    Args:
        new_head: where the checkpoint is a causal language model, give it a score head of zeros: a critic's first
            values are 0 rather than noise of a scale that depends on the family.

    Raises:
        ValueError: the checkpoint has no score head and ``new_head`` is False, or its head gives several scores.
    """
    check_value_model(resolved, new_head=new_head)
    return _load_with_zeros(AutoModelForSequenceClassification, resolved, dtype, num_labels=1)


def open_causal_lm(resolved: ResolvedModel, dtype: torch.dtype | DType = "auto") -> OpenedModel:
    """`load_causal_lm` without reading the parameters. Ranks call this independently.

    Warns where transformers converts the checkpoint in a way that cannot be done by ranges, so that each rank loads it
    whole.

    Raises:
        ValueError: weights are missing or of another shape.
    """
    return _open(AutoModelForCausalLM, resolved, dtype)


def open_value_model(
    resolved: ResolvedModel, dtype: torch.dtype | DType = "auto", *, new_head: bool = True
) -> OpenedModel:
    """`load_value_model` without reading the parameters; see `open_causal_lm`."""
    check_value_model(resolved, new_head=new_head)
    return _open(AutoModelForSequenceClassification, resolved, dtype, num_labels=1)


def require_vocabulary(
    role: str, model: ResolvedModel, actor: ResolvedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ValueError for a critic or a reference with another vocabulary: they read the actor's token ids."""
    if model.source == actor.source:
        return
    size = model.config.get_text_config(decoder=True).vocab_size
    if size < len(tokenizer) or load_tokenizer(model).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the {role} {model.name!r} has another vocabulary than the actor {actor.name!r}, whose token ids it "
            f"reads; set --{role} to a model of the actor's family"
        )


def check_value_model(resolved: ResolvedModel, *, new_head: bool) -> None:
    """Raise ValueError unless ``load_value_model`` would find the score head it needs."""
    if not new_head and not resolved.has_score_head:
        kind = " ".join(resolved.config.architectures or ["of an unknown kind"])
        raise ValueError(
            f"model {resolved.name!r} is {kind}, without a score head; "
            "a reward model is a checkpoint of AutoModelForSequenceClassification with one label"
        )
    num_scores = resolved.config.num_labels
    if resolved.has_score_head and num_scores != 1:
        raise ValueError(f"model {resolved.name!r} gives {num_scores} scores; a value or reward model has num_labels=1")


def load_tokenizer(resolved: ResolvedModel) -> PreTrainedTokenizerBase:
    """The model's tokenizer. One without a pad token pads with its end-of-sequence token: no id is added, so the
    model's embeddings keep their size."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolved.source, local_files_only=resolved.local_files_only)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"model {resolved.name!r} has no tokenizer that can be loaded ({_first_line(error)}); "
            "save one beside it with tokenizer.save_pretrained"
        ) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {resolved.name!r} has no end-of-sequence token; set its eos_token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def resolve_dtype(dtype: torch.dtype | DType, device: torch.device | str | None = None) -> torch.dtype:
    """The dtype weights compute in; "auto" is bf16 where ``device`` (default: the one torch has) computes it natively,
    else fp32."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        device = torch.device(device or ("cuda" if uses_cuda() else "cpu"))
        return torch.bfloat16 if _has_native_bf16(device) else torch.float32
    known = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if dtype not in known:
        raise ValueError(f"dtype={dtype!r} is unknown; choose auto, bf16, fp16 or fp32")
    return known[dtype]


def _has_native_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # torch has no public question for this in every version that is supported, so ask the kernel.
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16"})


def _load(
    auto_class: Any, resolved: ResolvedModel, dtype: torch.dtype | DType, **overrides: Any
) -> tuple[PreTrainedModel, list[str]]:
    """The module and the names of its parameters outside of the body that the checkpoint did not hold."""
    try:
        with own_attention_named(resolved.config):
            model, info = auto_class.from_pretrained(
                resolved.source,
                dtype=resolve_dtype(dtype),
                attn_implementation=ATTENTION_NAME,
                local_files_only=resolved.local_files_only,
                output_loading_info=True,
                **overrides,
            )
    except OSError as error:
        raise ValueError(f"model {resolved.name!r} could not be loaded: {_first_line(error)}") from error
    prepare(model)
    missing = sorted(info["missing_keys"])
    _check_body(model, missing, resolved)
    # A tied head is reported as missing by some versions; it shares the embedding's storage and is not.
    parameters = dict(model.named_parameters())
    return model.eval(), [name for name in missing if name in parameters]


def _load_with_zeros(
    auto_class: Any, resolved: ResolvedModel, dtype: torch.dtype | DType, **overrides: Any
) -> PreTrainedModel:
    model, missing = _load(auto_class, resolved, dtype, **overrides)
    with torch.no_grad():
        for name in missing:
            model.get_parameter(name).zero_()
    return model


def _check_body(model: PreTrainedModel, missing: list[str], resolved: ResolvedModel) -> None:
    lost = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
    if lost:
        raise ValueError(
            f"the checkpoint of {resolved.name!r} lacks {len(lost)} of the model's weights, {lost[0]} first; "
            "it is damaged or of another architecture than its config.json says"
        )


def _open(auto_class: Any, resolved: ResolvedModel, dtype: torch.dtype | DType, **overrides: Any) -> OpenedModel:
    is_value_model = auto_class is AutoModelForSequenceClassification
    try:
        stored = read_headers(_find_safetensors(resolved))
        where = {"local_files_only": resolved.local_files_only}
        compute_dtype = resolve_dtype(dtype)
        module = empty_module(
            auto_class, resolved.config, compute_dtype, source=resolved.source, where=where, **overrides
        )
        match = match_names(module, stored)
        _check_body(module, list(match.missing), resolved)
        heads = [name for name in match.missing if name in dict(module.named_parameters())]
        if heads and not is_value_model:
            raise MustLoadWholeError(f"it has no {heads[0]}, which transformers makes up")
    except MustLoadWholeError as reason:
        warnings.warn(f"model {resolved.name!r} is loaded whole on this rank: {reason}", stacklevel=3)
        if is_value_model:
            whole = _load_with_zeros(auto_class, resolved, dtype, **overrides)
        else:
            whole = _load_repeatably(auto_class, resolved, dtype)
        return OpenedModel(whole, ModuleWeights(whole))
    except OSError as error:
        raise ValueError(f"model {resolved.name!r} could not be loaded: {_first_line(error)}") from error
    zeros: dict[str, Source] = {name: ZeroTensor(tuple(module.get_parameter(name).shape)) for name in heads}
    weights = SafetensorsWeights({**match.sources, **zeros})
    fill_buffers(module, match, weights, compute_dtype)
    return OpenedModel(module, weights)


def _load_repeatably(auto_class: Any, resolved: ResolvedModel, dtype: torch.dtype | DType) -> PreTrainedModel:
    """What transformers makes up is the same on all ranks, which come here without asking each other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _load(auto_class, resolved, dtype)[0]


def _find_safetensors(resolved: ResolvedModel) -> list[Path]:
    """The files that from_pretrained would read, downloaded if need be.

    Raises:
        MustLoadWholeError: there are none, or they are not all of the model.
    """
    config, offline = resolved.config, resolved.local_files_only
    if getattr(config, "quantization_config", None) is not None:
        raise MustLoadWholeError("it is quantised")
    special = ("transformers_weights", "fusion_config", "extra_files")
    if any(getattr(config, name, None) for name in special):
        raise MustLoadWholeError("its config.json says how to assemble it")
    if is_peft_available() and find_adapter_config_file(resolved.source, local_files_only=offline) is not None:
        raise MustLoadWholeError("it has an adapter")
    optional = {"local_files_only": offline, "_raise_exceptions_for_missing_entries": False}
    if file := cached_file(resolved.source, _WEIGHT_FILES[0], **optional):
        return [Path(file)]
    if index := cached_file(resolved.source, _WEIGHT_FILES[1], **optional):
        shards, _ = get_checkpoint_shard_files(resolved.source, index, local_files_only=offline)
        return [Path(file) for file in shards]
    raise MustLoadWholeError("its files are no safetensors")


def _resolve_directory(name: str, directory: Path) -> ResolvedModel:
    if not (directory / "config.json").exists():
        raise ValueError(f"model {name!r}: the directory has no config.json, so it is no Hugging Face model")
    if not any((directory / file).exists() for file in _WEIGHT_FILES):
        found = ", ".join(sorted(path.name for path in directory.iterdir())[:8])
        raise ValueError(f"model {name!r}: the directory has no weights ({_WEIGHT_FILES[0]}); it holds {found}")
    resolved = ResolvedModel(name, str(directory), _read_config(name, str(directory), local_files_only=True), True)
    _check_safetensors(name, directory)
    return resolved


def _check_safetensors(name: str, directory: Path) -> None:
    """Raise ValueError for a file that is missing, cut off or no safetensors; only the headers are read."""
    single, index = directory / _WEIGHT_FILES[0], directory / _WEIGHT_FILES[1]
    try:
        if single.exists():
            files = [single]
        elif index.exists():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [directory / file for file in sorted(set(weight_map.values()))]
        else:
            return
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"model {name!r}: {index.name} is damaged; copy or download it again") from error
    for file in files:
        try:
            safe_open(file, framework="pt").__exit__(None, None, None)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"model {name!r}: {file.name} is missing or damaged ({_first_line(error)}); copy or download it again"
            ) from error


def _resolve_hub(name: str, hub_id: str) -> ResolvedModel:
    offline = not hub_is_reachable()
    label = repr(name) if name == hub_id else f"{name!r} ({hub_id})"
    config = _read_config(label, hub_id, local_files_only=offline)
    return ResolvedModel(name, hub_id, config, offline)


def _read_config(label: str, source: str, *, local_files_only: bool) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(source, local_files_only=local_files_only)
    except (OSError, ValueError, KeyError) as error:
        causes = _causes(error)
        if any(isinstance(cause, GatedRepoError) for cause in causes):
            reason = f"it is gated; ask for access on its page, then run `hf auth login` or set HF_TOKEN. {_LOCAL_HINT}"
        elif any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
            reason = f"the Hub has no such model, or it is private (run `hf auth login`). {_LOCAL_HINT}"
        elif local_files_only and not Path(source).is_dir():
            reason = f"it is not in the local cache and {why_unreachable()}. {_LOCAL_HINT}"
        else:
            reason = f"its configuration cannot be read: {_first_line(error)}"
        raise ValueError(f"model {label}: {reason}") from error


def _causes(error: BaseException | None) -> list[BaseException]:
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
