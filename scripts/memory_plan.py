"""What each rank will hold in each mode, before anything is allocated: a table, and one JSON object on the last line.

    python scripts/memory_plan.py --model llama-2-70b --world_size 64 --tp_size 8 --dtype bf16 --gpu_memory_gb 80
    python scripts/memory_plan.py --model path/to/config.json --world_size 8 --zero_stage 2 --optimizer sgd

Of the model only its config.json is read: a directory or a file, a Hub id or an alias. The other settings are the
engine's, under their usual flags. Sizes are bytes in the JSON and GiB in the table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from hybrid.arguments import input_errors, parse_arguments, plain_warnings
from hybrid.config import InferenceConfig, OptimConfig, ParallelConfig, ZeroConfig, setting

if TYPE_CHECKING:
    from rich.table import Table

    from hybrid.memory_plan import MemoryPlan, RankPlan

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What is planned, and for which machines."""

    model: str = setting("smollm2-135m", "a directory or file with its configuration, a Hub id or an alias")
    world_size: int = setting(1, "ranks in all")
    dtype: Literal["auto", "bf16", "fp32"] = setting("bf16", "what the weights compute in; auto: what suits this host")
    no_optim: bool = setting(False, "a model that only generates and scores")
    max_tokens_per_microbatch: int = setting(2048, "tokens per forward and backward pass on a rank")
    gpu_memory_gb: float | None = setting(None, "memory of one GPU in GiB, of which the KV cache takes what is free")


def main(argv: Sequence[str] | None = None) -> None:
    plain_warnings()
    groups = [PlanConfig, ParallelConfig, ZeroConfig, OptimConfig, InferenceConfig]
    with input_errors():
        options, parallel, zero, optim, inference = parse_arguments(groups, argv, description=__doc__)
        parallel.check_world(options.world_size)
        plan = make_plan(options, parallel.tp_size, zero, None if options.no_optim else optim, inference)
    show(plan, options.gpu_memory_gb)
    print(json.dumps(plan.to_dict()))


def make_plan(
    options: PlanConfig, tp_size: int, zero: ZeroConfig, optim: OptimConfig | None, inference: InferenceConfig
) -> MemoryPlan:
    from hybrid.memory_plan import memory_plan  # only now what imports torch: a mistyped flag is answered at once

    return memory_plan(
        options.model,
        options.world_size,
        tp_size,
        zero=zero,
        optim=optim,
        inference=inference,
        dtype=options.dtype,
        max_tokens_per_microbatch=options.max_tokens_per_microbatch,
        device_memory=None if options.gpu_memory_gb is None else int(options.gpu_memory_gb * GIB),
    )


def show(plan: MemoryPlan, gpu_memory_gb: float | None) -> None:
    from rich.console import Console

    from hybrid.memory_plan import NOT_COUNTED

    console = Console(width=110, highlight=False)
    console.print(make_table(plan))
    console.print(f"Not counted: {NOT_COUNTED}.")
    if gpu_memory_gb is not None:
        for mode, needed in {"training": plan.worst.train_total, "generation": plan.worst.generate_total}.items():
            left = gpu_memory_gb - needed / GIB
            verdict = f"leaves {left:.2f} GiB for what is not counted" if left >= 0 else f"is {-left:.2f} GiB too much"
            console.print(f"On the ranks that need most, with {gpu_memory_gb:g} GiB, {mode} {verdict}.")
        if not plan.worst.generate.kv_blocks:
            console.print("There is no room for a KV block: no generation. Set a larger --tp_size, or more ranks.")


def make_table(plan: MemoryPlan) -> Table:
    """A column for the ranks that need the most and, where they differ, one for those that need the least."""
    from rich.table import Table

    least = min(plan.tensor_ranks, key=lambda rank: max(rank.train_total, rank.generate_total))
    columns = {"every rank": plan.worst}
    if len({tuple(list_lines(rank)) for rank in plan.tensor_ranks}) > 1:
        columns = {
            f"most: tensor rank {plan.worst.tp_rank}": plan.worst,
            f"least: tensor rank {least.tp_rank}": least,
        }
    table = Table(
        "GiB",
        title=f"{plan.model_type}, {plan.num_parameters / 1e9:.2f}B parameters in {plan.dtype} on {plan.world_size} "
        f"ranks, {plan.tp_size} to a tensor group, ZeRO stage {plan.zero_stage}",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for lines in zip(*(list_lines(rank) for rank in columns.values()), strict=True):
        name, style = lines[0].name, "bold" if lines[0].is_total else None
        table.add_row(name, *(line.value for line in lines), style=style, end_section=lines[0].is_total)
    return table


class Line(NamedTuple):
    """One number of the table."""

    name: str
    value: str
    is_total: bool = False


def list_lines(rank: RankPlan) -> list[Line]:
    rest, peak, generate = rank.rest, rank.peak, rank.generate
    return [
        Line("weights at rest, as shards", gib(rest.shards)),
        Line("weights at rest, whole", gib(rest.whole)),
        Line("fp32 masters", gib(rest.masters)),
        Line("optimizer state", gib(rest.optimizer_state)),
        Line("at rest", gib(rest.total), is_total=True),
        Line("gathered weights, at most", gib(peak.gathered)),
        Line("gradients, at most", gib(peak.gradients)),
        Line("these two at once, at most", gib(peak.together)),
        Line("LM head's working memory", gib(rank.head)),
        Line("TRAIN, without activations", gib(rank.train_total), is_total=True),
        Line("slices beyond the shards", gib(generate.slices)),
        Line("weights packed for oneDNN (CPU)", gib(generate.packed)),
        Line(f"KV cache: {generate.max_tokens:,} tokens of {generate.kv_token / 2**10:g} KiB", gib(generate.kv_pool)),
        Line("GENERATE, without activations", gib(rank.generate_total), is_total=True),
        Line("a flip to GENERATE receives", gib(generate.received)),
        Line("a flip to TRAIN frees", gib(generate.total)),
    ]


def gib(size: int) -> str:
    """``size`` bytes in GiB, with digits enough to show a small one."""
    return f"{size / GIB:,.2f}" if size >= GIB / 10 or not size else f"{size / GIB:,.5f}"


if __name__ == "__main__":
    main()
