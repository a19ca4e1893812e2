"""Time cross-entropy training and measure its memory, here and in the engines that do the same: one JSON object on the
last line.

    python scripts/bench_train.py --model smollm2-135m --engine all --dtype fp32
    torchrun --nproc-per-node 2 scripts/bench_train.py --model smollm2-135m --engine hybrid --dtype bf16
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 scripts/bench_train.py --model ./model --engine fsdp2 --zero_stage 3

``all`` runs ``hybrid`` and each peer that is installed one after another, each in a world of its own, so that the peak
memory is the engine's. On a host the machine must do nothing else meanwhile.

Every engine sees the same tokens (random, every one but a sequence's first is predicted), and does the same step: the
mean cross-entropy, gradients averaged over ranks and clipped to norm 1, torch's fused AdamW at 1e-5 with its default
betas and a weight decay of 0.01. Losses are the first rank's, before the update. (Peers decay vectors as well, as is
torch's default; ``hybrid`` does not. At this rate that changes a weight by one part in 10 million a step.)

``hybrid`` computes elementwise activations again in the backward (``--gradient_checkpointing``), and on a CPU has glibc
keep freed memory instead of mapping it anew each layer (see `init_parallel`). ``--tune_peers`` does the latter for the
peers too: they get faster, and larger.

The peers are set up as their own documentation has it, with transformers' SDPA attention and its loss from labels:

- ``fsdp2``: ``fully_shard`` on every decoder layer and on the root; stage 3 reshards after the forward, stage 2 does
  not. ``bf16`` is fp32 shards under ``MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)``.
- ``deepspeed``: ``deepspeed.initialize`` on a checkpoint loaded in the dtype, its own ``bf16`` with fp32 masters. It is
  imported only when asked for. On a host it compiles its shared-memory collectives on first use (C++ and ninja).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybrid.config import OptimConfig, ZeroConfig
from hybrid.models.loading import ResolvedModel, open_causal_lm, resolve_model
from hybrid.models.ragged import RaggedBatch
from hybrid.parallel import ParallelMesh, init_parallel, run_main
from hybrid.zero.model import ShardedModel

LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-5, 0.01, 1.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# One training step: (batch, seq) token ids -> this rank's loss before the update.
Step = Callable[[torch.Tensor], float]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.engine == "all":
        print(json.dumps(compare(options)))
        return
    mesh = init_parallel(keep_freed_memory=options.engine == "hybrid" or options.tune_peers)
    model = resolve_model(options.model)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    before = mesh.memory_in_use()
    step = ENGINES[options.engine](options, model, mesh)
    loading = mesh.peak_memory() - before
    losses, seconds = [], []
    for index in range(options.steps):
        ids = random_tokens(options, vocab_size, index * 100 + mesh.rank).to(mesh.device)
        mesh.barrier()
        start = time.perf_counter()
        losses.append(round(step(ids), 4))
        mesh.synchronize()
        seconds.append(time.perf_counter() - start)
        if mesh.is_main:
            print(f"step {index}: loss {losses[-1]}, {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    (peak,) = mesh.reduce_scalars([mesh.peak_memory()], op="max")
    if mesh.is_main:
        tokens = options.batch * options.seq * mesh.world_size
        report = {
            "engine": options.engine,
            "dtype": options.dtype,
            "zero_stage": options.zero_stage,
            "gradient_checkpointing": options.gradient_checkpointing if options.engine == "hybrid" else "none",
            "tuned": options.engine == "hybrid" or options.tune_peers,
            "world_size": mesh.world_size,
            "torch": torch.__version__,
            "losses": losses,
            "tokens_per_s": round(tokens / statistics.median(seconds), 1),
            "loading_peak_gb": round(loading / 1e9, 3),  # on rank 0, beyond what was held before
            "peak_rss_gb": round(peak / 1e9, 3),  # on a GPU, what torch had allocated there
            "step_s": [round(second, 3) for second in seconds],
        }
        print(json.dumps(report), flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a directory, Hub id or alias")
    parser.add_argument("--engine", choices=[*ENGINES, "all"], default="hybrid")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--zero_stage", type=int, choices=[0, 1, 2, 3], default=3)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--seq", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2, help="of each world that --engine all starts")
    parser.add_argument(
        "--gradient_checkpointing",
        choices=["none", "selective", "full"],
        default="selective",
        help="what hybrid computes again in the backward; peers keep everything",
    )
    parser.add_argument("--tune_peers", action="store_true", help="see above")
    options = parser.parse_args(argv)
    for name, least in {"batch": 1, "seq": 2, "steps": 1, "ranks": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}; set it to at least {least}")
    if options.engine == "fsdp2" and options.zero_stage < 2:
        parser.error(f"--engine fsdp2 shards gradients: --zero_stage is {options.zero_stage}; set it to 2 or 3")
    if options.engine == "deepspeed" and not is_installed("deepspeed"):
        parser.error("--engine deepspeed: deepspeed is not installed; pip install deepspeed, or choose another engine")
    if options.engine == "all" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("--engine all starts worlds of its own; run it without torchrun, and set --ranks")
    return options


def random_tokens(options: argparse.Namespace, vocab_size: int, seed: int) -> torch.Tensor:
    """(batch, seq) token ids that every engine gets alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (options.batch, options.seq), generator=generator)


# -- engines: each takes the options, the model and the mesh, and returns its step -------------------------------------


def hybrid_step(options: argparse.Namespace, model: ResolvedModel, mesh: ParallelMesh) -> Step:
    sharded = ShardedModel.load(
        open_causal_lm(model, DTYPES[options.dtype]),
        mesh,
        zero=ZeroConfig(stage=options.zero_stage, gradient_checkpointing=options.gradient_checkpointing),
        optim=OptimConfig(
            learning_rate=LEARNING_RATE,
            betas=(0.9, 0.999),
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_GRAD_NORM,
            lr_scheduler="constant",
        ),
    )

    def step(ids: torch.Tensor) -> float:
        loss = sharded.loss(RaggedBatch.from_sequences(ids.tolist(), device=mesh.device))
        sharded.backward(loss)
        sharded.step()
        return loss.item()

    return step


def fsdp2_step(options: argparse.Namespace, model: ResolvedModel, mesh: ParallelMesh) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = load_for_peer(model, torch.float32)
    policy = MixedPrecisionPolicy()
    if options.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    devices = init_device_mesh(mesh.device.type, (mesh.world_size,))
    layer_classes = set(module._no_split_modules or ())
    for layer in [layer for layer in module.modules() if type(layer).__name__ in layer_classes]:
        fully_shard(layer, mesh=devices, mp_policy=policy, reshard_after_forward=options.zero_stage == 3)
    fully_shard(module, mesh=devices, mp_policy=policy)
    optimizer = adamw(module)

    def step(ids: torch.Tensor) -> float:
        loss = module(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def deepspeed_step(options: argparse.Namespace, model: ResolvedModel, mesh: ParallelMesh) -> Step:
    deepspeed: Any = importlib.import_module("deepspeed")
    module = load_for_peer(model, DTYPES[options.dtype])
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=adamw(module),
        config={
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_clipping": MAX_GRAD_NORM,
            "bf16": {"enabled": options.dtype == "bf16"},
            "zero_optimization": {"stage": options.zero_stage},
        },
    )

    def step(ids: torch.Tensor) -> float:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def load_for_peer(model: ResolvedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model on the CPU, in the mode to train in: what is held while loading is less than a step's peak."""
    module = AutoModelForCausalLM.from_pretrained(
        model.source, dtype=dtype, attn_implementation="sdpa", local_files_only=model.local_files_only
    )
    return module.train()


def adamw(module: PreTrainedModel) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


ENGINES: dict[str, Callable[[argparse.Namespace, ResolvedModel, ParallelMesh], Step]] = {
    "hybrid": hybrid_step,
    "fsdp2": fsdp2_step,
    "deepspeed": deepspeed_step,
}


# -- comparison --------------------------------------------------------------------------------------------------------


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """The reports of all engines that can run these options, and ``hybrid``'s speed and memory over each peer's."""
    skipped = {}
    if options.zero_stage < 2:
        skipped["fsdp2"] = "shards gradients: --zero_stage 2 or 3"
    if not is_installed("deepspeed"):
        skipped["deepspeed"] = "not installed"
    reports = {engine: run_world(engine, options) for engine in ENGINES if engine not in skipped}
    mine = reports["hybrid"]
    result: dict[str, Any] = {**reports, "skipped": skipped}
    for peer in reports.keys() - {"hybrid"}:
        result[f"speed_vs_{peer}"] = round(mine["tokens_per_s"] / reports[peer]["tokens_per_s"], 3)
        result[f"memory_vs_{peer}"] = round(mine["peak_rss_gb"] / reports[peer]["peak_rss_gb"], 3)
    return result


def run_world(engine: str, options: argparse.Namespace) -> dict[str, Any]:
    """One engine's report, from a world of ``--ranks`` processes that share out the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // options.ranks)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    words = [__file__, "--engine", engine]
    for name in ("model", "dtype", "zero_stage", "batch", "seq", "steps", "gradient_checkpointing"):
        words += [f"--{name}", str(getattr(options, name))]
    words += ["--tune_peers"] * options.tune_peers
    done = subprocess.run(
        [sys.executable, *launcher, *words],
        stdout=subprocess.PIPE,
        text=True,
        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    if done.returncode:
        raise SystemExit(f"the run of {engine} failed with exit code {done.returncode}; its errors are above")
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    run_main(main)
