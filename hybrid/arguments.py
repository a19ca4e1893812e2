"""From a command line, and a YAML file, to the configurations of ``hybrid.config``.

It follows transformers' HfArgumentParser (flat dataclasses, ``_`` or ``-`` in a flag, ``--no_flag``, Literal choices)
without importing transformers, which alone takes about a second: `--help` is instant. Values from YAML are read as
if they had been typed, so ``1e-5`` is a number there too.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

# Other spellings, most of them DeepSpeed-Chat's, of what has the same meaning here.
SYNONYMS = {
    "actor_model_name_or_path": "actor",
    "critic_model_name_or_path": "critic",
    "reward_model_name_or_path": "reward",
    "ppo_epochs": "num_ppo_epochs",
    "max_prompt_seq_len": "max_prompt_length",
    "max_answer_seq_len": "max_completion_length",
    "actor_learning_rate": "learning_rate",
    "actor_zero_stage": "zero_stage",
    "critic_zero_stage": "zero_stage",
    "inference_tp_size": "tp_size",
    "num_generations": "n",  # torchrun takes --n for an abbreviation of its own flags
    "deepspeed": "deepspeed_config",
    "unsup_coef": "ptx_coef",
    "unsupervised_dataset_name": "ptx_data",
}

# Other names of a flag's values.
VALUE_SYNONYMS = {
    "dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    "gradient_checkpointing": {"true": "full", "True": "full", "false": "none", "False": "none"},
}

# What describes how this engine always works: asking for it changes nothing, asking against it is refused.
ALWAYS_ON = {
    "enable_hybrid_engine": "one copy of the weights always serves training and generation",
    "release_inference_cache": "the KV cache is always given back before training",
}

# Known elsewhere, not here: flag -> what to do instead. A value in OFF is what happens anyway, so it is accepted.
_LATER = "is not available yet; leave it out"
_NO_MICRO_BATCH = (
    "does not exist: set --max_tokens_per_microbatch for memory, and for optimizer steps --num_minibatches (step 3) or "
    "--examples_per_step (steps 1 and 2)"
)
UNAVAILABLE = {
    "offload": _LATER,
    "offload_dir": _LATER,
    "offload_reference_model": _LATER,
    "per_device_generation_batch_size": "is counted per device; set --prompts_per_step, which counts all devices",
    "per_device_training_batch_size": _NO_MICRO_BATCH,
    "per_device_train_batch_size": _NO_MICRO_BATCH,
    "gradient_accumulation_steps": "is worked out from --max_tokens_per_microbatch; set that",
}
OFF = {"none", "false", "0", "0.0", "no"}
OFF_VALUES = {"gradient_accumulation_steps": {"1", "auto"}}  # where OFF is not what happens anyway


class UsageError(ValueError):
    """A command line or a configuration file that cannot be understood."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One field of a configuration as the command line knows it."""

    name: str  # the flag, without dashes and with underscores
    group: type
    field: str  # its name in the dataclass
    type: Any
    default: Any
    help: str
    is_text: bool = False  # of a sequence: each word is one text, commas and all

    @property
    def options(self) -> tuple[Any, ...]:
        """The types and Literal values that a value may have, None left out."""
        members = get_args(self.type) if get_origin(self.type) in (Union, UnionType) else (self.type,)
        return tuple(member for member in members if member is not NoneType)

    @property
    def optional(self) -> bool:
        return NoneType in get_args(self.type)

    @property
    def choices(self) -> list[str]:
        return [str(value) for option in self.options if get_origin(option) is Literal for value in get_args(option)]

    @property
    def is_bool(self) -> bool:
        return bool in self.options

    @property
    def is_sequence(self) -> bool:
        return get_origin(self.type) is tuple

    @property
    def is_one_or_more(self) -> bool:
        """Whether several words may stand where one does: one stays a text, several become a tuple."""
        return not self.is_sequence and any(get_origin(option) is tuple for option in self.options)

    def parse(self, value: Any) -> Any:
        """The field's value for a word, or a list of words, or what YAML made of them."""
        if self.is_sequence:
            return self._parse_sequence(value)
        if self.is_one_or_more and isinstance(value, (list, tuple)):
            if len(value) > 1:
                return tuple(map(str, value))
            value = value[0] if value else None
        if isinstance(value, (list, tuple, dict)):
            raise UsageError(f"--{self.name} takes one value, not {value!r}")
        if value is None or (self.optional and str(value).lower() in ("none", "null", "")):
            if self.optional:
                return None
            raise UsageError(f"--{self.name} needs a value; its default is {self.default!r}")
        word = VALUE_SYNONYMS.get(self.name, {}).get(str(value), str(value))
        for option in self.options:
            for candidate in _read(option, word):
                return candidate
        raise UsageError(f"--{self.name}={value} is not {self._expected()}")

    def _parse_sequence(self, value: Any) -> tuple[Any, ...]:
        words = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
        if self.is_text:
            return tuple(map(str, words))
        words = [part for word in words for part in str(word).split(",") if part]
        members = get_args(self.type)
        if members[-1] is Ellipsis:
            words = [word for word in words if word.lower() != "none"]
            members = (members[0],) * len(words)
        if len(words) != len(members):
            raise UsageError(f"--{self.name} takes {len(members)} values, not {len(words)}")
        found = [next(iter(_read(kind, str(word))), None) for kind, word in zip(members, words, strict=True)]
        if None in found:
            word = words[found.index(None)]
            raise UsageError(f"--{self.name}: {word!r} is not a {members[0].__name__}")
        return tuple(found)

    def _expected(self) -> str:
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        words = [kinds[option] for option in self.options if option in kinds]
        if self.choices:
            words.append(f"one of {', '.join(self.choices)}")
        return " or ".join(words)


def _read(kind: Any, word: str) -> Iterator[Any]:
    """Yield ``word`` as ``kind`` if it can be read as that."""
    if get_origin(kind) is Literal:
        yield from (value for value in get_args(kind) if str(value) == word)
    elif kind is bool:
        truth = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if word.lower() in truth:
            yield truth[word.lower()]
    else:
        try:
            yield kind(word)
        except ValueError:
            return


def collect_flags(groups: Sequence[type]) -> dict[str, Flag]:
    """Every field of ``groups`` by its flag."""
    flags: dict[str, Flag] = {}
    for group in groups:
        hints = get_type_hints(group)
        for field in dataclasses.fields(group):
            name = field.metadata.get("flag") or field.name
            if name in flags:
                raise ValueError(f"--{name} is both {flags[name].group.__name__}'s and {group.__name__}'s")
            flags[name] = Flag(
                name=name,
                group=group,
                field=field.name,
                type=hints[field.name],
                default=field.default,
                help=field.metadata.get("help", ""),
                is_text=field.metadata.get("is_text", False),
            )
    return flags


def parse_arguments(
    groups: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    description: str | None = None,
    presets: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> tuple[Any, ...]:
    """One instance of each of ``groups``, from the command line, then ``--config``, then presets, then defaults.

    Args:
        groups: dataclasses made with ``hybrid.config.setting``; no flag may occur twice.
        argv: the words of the command line (default: this process's).
        description: opens the text of ``--help``.
        presets: given the flags that were set, returns values to use for others.

    Raises:
        UsageError: an unknown flag or key, a value that cannot be read.
        ValueError: a value outside of what its configuration allows.
    """
    flags = collect_flags(groups)
    given = _parse_words(flags, sys.argv[1:] if argv is None else argv, description)
    config_file = given.pop("config", None)
    if config_file is not None:
        given = {**_parse_file(flags, config_file), **given}
    if presets is not None:
        given = {**presets(given), **given}
    return tuple(
        group(**{flag.field: given[flag.name] for flag in flags.values() if flag.group is group and flag.name in given})
        for group in groups
    )


def to_flags(configs: Sequence[Any]) -> dict[str, Any]:
    """``configs`` as one flat mapping of flags to plain values, which ``--config`` reads back."""
    flags = collect_flags([type(config) for config in configs])
    by_type = {type(config): config for config in configs}
    values = {flag.name: getattr(by_type[flag.group], flag.field) for flag in flags.values()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def save_config(path: Path, configs: Sequence[Any]) -> None:
    """Write ``configs`` as YAML that ``--config`` reads back."""
    import yaml

    path.write_text(yaml.safe_dump(to_flags(configs), sort_keys=False), encoding="utf-8")


@contextmanager
def input_errors(kind: type[ValueError] = ValueError, *, on_all_ranks: bool = True) -> Iterator[None]:
    """End the program with one sentence if the block finds a mistake of the user's, an error of this ``kind``.

    Under a launcher every rank finds the same mistake. Rank 0 says it; the others wait, because a launcher kills
    everyone as soon as one has ended, and speak only if nobody else did. With ``on_all_ranks=False`` the error is
    raised on one rank alone, which speaks at once. An error's ``details`` are printed before it.
    """
    try:
        yield
    except kind as error:
        if os.environ.get("HYBRID_TRACEBACK"):
            raise
        if on_all_ranks and int(os.environ.get("RANK", "0")) != 0:
            time.sleep(5)
        print(f"{getattr(error, 'details', '')}error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def plain_warnings() -> None:
    """Print warnings as one line each, from rank 0 alone: every rank finds the same."""
    if int(os.environ.get("RANK", "0")) != 0:
        warnings.simplefilter("ignore")
    warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)


def quieten() -> None:
    """No progress bars but our own, and of what transformers says only the errors."""
    from transformers.utils import logging

    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # datasets, if used at all, is not imported yet
    logging.set_verbosity_error()
    logging.disable_progress_bar()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parse_words(flags: Mapping[str, Flag], argv: Sequence[str], description: str | None) -> dict[str, Any]:
    parser = _build_parser(flags, description)
    namespace, rest = parser.parse_known_args(_ours(flags, argv))
    for word in rest:
        if not word.startswith("-"):
            example = next(iter(flags.values()))
            raise UsageError(f"{word!r} follows no flag; write it after one, as in --{example.name} {example.default}")
        raise UsageError(_unknown(word, flags))
    given: dict[str, Any] = {}
    for name, value in vars(namespace).items():
        given[name] = flags[name].parse(value) if name in flags else value
    return given


def _build_parser(flags: Mapping[str, Flag], description: str | None) -> _Parser:
    parser = _Parser(
        description=description,
        usage="%(prog)s [--config FILE.yaml] [--flag value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file of flags and values; the command line wins")
    sections: dict[type, Any] = {}
    for flag in flags.values():
        if flag.group not in sections:
            title, _, _ = (flag.group.__doc__ or flag.group.__name__).partition("\n")
            sections[flag.group] = parser.add_argument_group(title.rstrip("."))
        _add(sections[flag.group], flag)
    return parser


def _add(section: Any, flag: Flag) -> None:
    text = flag.help.replace("%", "%%")
    if flag.default is not None and flag.default != () and not flag.is_bool:
        default = " ".join(map(str, flag.default)) if flag.is_sequence else flag.default
        text += f" [{default}]"
    if flag.is_bool:
        section.add_argument(f"--{flag.name}", nargs="?", const=True, metavar="BOOL", help=text)
        section.add_argument(f"--no_{flag.name}", dest=flag.name, action="store_false", help=argparse.SUPPRESS)
    else:
        metavar = "|".join([option.__name__.upper() for option in flag.options if option in (int, float, str)])
        metavar = "|".join(filter(None, [metavar, *flag.choices])) if not flag.is_sequence else "VALUE"
        nargs = "*" if flag.is_sequence else "+" if flag.is_one_or_more else None
        action = "extend" if flag.is_text else "store"
        section.add_argument(f"--{flag.name}", nargs=nargs, action=action, metavar=metavar, help=text)


def _ours(flags: Mapping[str, Flag], argv: Sequence[str]) -> list[str]:
    """``argv`` with each flag in our spelling, without those that ask for what happens anyway."""
    words: list[str] = []
    stated_by: dict[str, dict[str, str | None]] = {}  # our name -> spelling -> value
    index = 0
    while index < len(argv):
        word = argv[index]
        index += 1
        if not word.startswith("--") or word == "--":
            words.append(word)
            continue
        spelling, equals, value = word[2:].partition("=")
        spelling = spelling.replace("-", "_")
        following = argv[index] if index < len(argv) and not argv[index].startswith("--") else None
        stated = value if equals else following
        name = _translate(spelling, stated, flags)
        if name is None:
            index += not equals and following is not None
            continue
        stated_by.setdefault(name, {})[spelling] = stated
        _refuse_contradiction(name, stated_by[name])
        words.append(f"--{name}{equals}{value}")
    return words


def _refuse_contradiction(name: str, stated: Mapping[str, str | None]) -> None:
    if len(set(stated.values())) > 1:
        ways = " and ".join(f"--{spelling} {value}" for spelling, value in stated.items())
        raise UsageError(f"{ways} set the same thing to different values; set --{name} once")


def _translate(name: str, stated: str | None, flags: Mapping[str, Flag]) -> str | None:
    """Our name for a flag, or None for one that asks for what happens anyway.

    Raises:
        UsageError: it asks for what is not available, or against what cannot be changed.
    """
    if name in flags:
        return name
    off = stated is not None and stated.lower() in OFF_VALUES.get(name, OFF)
    positive = name.removeprefix("no_")
    if positive != name and positive in (*ALWAYS_ON, *UNAVAILABLE):
        name, off = positive, True
    if name in ALWAYS_ON:
        if off:
            raise UsageError(f"--{name} cannot be turned off: {ALWAYS_ON[name]}")
        return None
    if name in UNAVAILABLE:
        if not off:
            raise UsageError(f"--{name} {UNAVAILABLE[name]}")
        return None
    if name == "local_rank":  # some launchers pass it; they say the same in the environment, which is read
        return None
    if name == "deepspeed" and (stated is None or stated.lower() == "true"):  # DeepSpeed's switch: ZeRO is always there
        return None
    ours = SYNONYMS.get(name, name)
    return ours if ours in flags else name


def _parse_file(flags: Mapping[str, Flag], path: str) -> dict[str, Any]:
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path} is not text in UTF-8 (byte {error.start}); save it as UTF-8") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"--config {path} must map flags to values, one `flag: value` a line")
    given: dict[str, Any] = {}
    stated_by: dict[str, dict[str, str | None]] = {}
    for key, value in values.items():
        spelling = str(key).replace("-", "_")
        name = _translate(spelling, str(value), flags)
        if name is None:
            continue
        if name not in flags:
            raise UsageError(f"{path}: {_unknown(name, flags)}")
        stated_by.setdefault(name, {})[spelling] = str(value)
        _refuse_contradiction(name, stated_by[name])
        given[name] = flags[name].parse(value)
    return given


def _unknown(word: str, flags: Mapping[str, Flag]) -> str:
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    close = difflib.get_close_matches(name, [*flags, *SYNONYMS, "config"], n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join('--' + match for match in close)}?" if close else "--help lists every flag"
    return f"unknown flag --{name}; {hint}"
