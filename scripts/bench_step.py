"""Time on-policy steps, here and in TRL's ``GRPOTrainer``: one JSON object on the last line.

    python scripts/bench_step.py --model ./model --engine all --peer_python ~/trl/bin/python
    python scripts/bench_step.py --model smollm2-135m --engine hybrid --dtype bf16
    ~/trl/bin/python scripts/bench_step.py --model ./model --engine trl

A step: ``--num_prompts`` sums of ``--terms`` numbers, ``--num_samples`` completions each of exactly ``--new_tokens``
tokens at temperature 1, a rule as the reward, the log-probs of a reference that is a model of its own, and one update
over all samples: clipped objective, the k3 estimate of the KL times 0.04 in the loss, gradients clipped to norm 1,
AdamW at 1e-5. The prompts are the same in every step. One step to warm up, then the median of ``--steps``. On a host
nothing else may run meanwhile.

``hybrid`` samples past ends of sequences, so from the distribution that it trains. TRL leaves out all that follows the
first of them, so it is told to give them no probability, and its entropy in the report is higher. The work is the same.

``trl`` samples with transformers' ``generate``, all completions of a rank in one batch. Samples and steps being
aligned, it takes the old log-probs from the update's own forward. With ``--peer_settings fast`` it is set up by
somebody who knows how: weights and optimizer in the dtype itself (no autocast and, in bf16, no fp32 masters, which
``hybrid`` has), nothing computed again in the backward, ``--peer_batch`` samples a forward and backward. With
``defaults`` these are what ``GRPOConfig`` makes them: autocast in bf16, activations computed again, 8 samples. It may
need a torch and transformers of its own: ``--peer_python`` names the interpreter it is installed for, which needs no
``hybrid``. Its parts are timed around methods of TRL 1.16.

``all`` runs ``hybrid``, ``trl`` set up to be fast and ``trl`` by its defaults one after another: ``hybrid`` in
``--ranks`` processes, ``trl`` in ``--peer_ranks``, which share out the cores. On a CPU, ``hybrid`` has glibc keep freed
memory instead of mapping it anew (see `init_parallel`); ``--tune_peers`` does so for the peer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LEARNING_RATE, BETAS, MAX_GRAD_NORM, KL_COEF = 1e-5, (0.9, 0.999), 1.0, 0.04

# What TRL calls them.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "scale_rewards": "group"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
}


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    parts: dict[str, float]  # seconds by stage
    prompt_tokens: int  # of all samples, so a prompt's count for each
    lengths: tuple[int, int, int]  # of completions: in all, the shortest, the longest
    metrics: dict[str, float]  # reward, kl, entropy, grad_norm


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, ready to do steps; every rank has one."""

    run: Callable[[], list[Step]]  # the step that warms up, then those that count
    peak_memory: Callable[[], float]  # bytes, of the rank that held the most
    report: Callable[[], dict[str, Any]]  # what it says of itself
    is_main: bool


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.engine == "all":
        print(json.dumps(compare(options)))
    elif options.ranks > 1 and "RANK" not in os.environ:
        print(json.dumps(launch(options, options.engine)))
    else:
        ENGINES[options.engine](options)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a directory, Hub id or alias; trl knows no aliases")
    parser.add_argument("--engine", choices=[*ENGINES, "all"], default="hybrid")
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="grpo")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--num_prompts", type=int, default=16)
    parser.add_argument("--num_samples", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--new_tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--terms", type=int, nargs=2, default=(3, 8), help="fewest and most numbers of a sum")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that is not")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="processes of an engine")
    parser.add_argument("--peer_ranks", type=int, default=1, help="all: processes of trl")
    parser.add_argument("--threads", type=int, default=0, help="of each process; 0: all cores, shared by the ranks")
    parser.add_argument("--max_tokens_per_microbatch", type=int, default=2048, help="hybrid: see PPOConfig")
    parser.add_argument("--share_prompts", action=argparse.BooleanOptionalAction, default=True, help="hybrid: the same")
    parser.add_argument("--peer_batch", type=int, default=16, help="trl: samples per forward and backward of a rank")
    parser.add_argument("--peer_python", default=sys.executable, help="the interpreter trl is installed for")
    parser.add_argument("--peer_settings", choices=["fast", "defaults"], default="fast", help="trl: see above")
    parser.add_argument("--tune_peers", action="store_true", help="see above")
    options = parser.parse_args(argv)
    for name, least in {
        **dict.fromkeys(("num_prompts", "new_tokens", "steps", "ranks", "peer_ranks", "peer_batch"), 1),
        "max_tokens_per_microbatch": 1,
        "num_samples": 2,
    }.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}; set it to at least {least}")
    if not 1 <= options.terms[0] <= options.terms[1]:
        parser.error(f"--terms is {options.terms[0]} {options.terms[1]}; the first is at least 1, the second no less")
    samples = options.num_prompts * options.num_samples
    options.peer_batch = min(options.peer_batch, samples)
    peer_ranks = options.peer_ranks if options.engine == "all" else options.ranks
    if options.engine != "hybrid" and samples % (peer_ranks * options.peer_batch):
        parser.error(
            f"trl takes whole batches: {peer_ranks} ranks of {options.peer_batch} samples (--peer_batch) do not divide "
            f"the {samples} samples; set --peer_batch to another number"
        )
    if options.engine == "all" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("--engine all starts worlds of its own; run it without torchrun, and set --ranks")
    return options


def threads_of(options: argparse.Namespace) -> int:
    return options.threads or max(1, len(os.sched_getaffinity(0)) // options.ranks)


# -- the work ----------------------------------------------------------------------------------------------------------


def questions(options: argparse.Namespace) -> list[str]:
    """Sums as plain text: of three to eight numbers about 20 to 40 tokens."""
    draw = random.Random(options.seed)
    counts = [draw.randint(*options.terms) for _ in range(options.num_prompts)]
    sums = [" + ".join(str(draw.randint(10, 99)) for _ in range(count)) for count in counts]
    return [f"What is {each}? The answer is" for each in sums]


def alphanumeric(completions: Sequence[str], **_: Any) -> list[float]:
    """The reward: the fraction of a completion's characters that are letters or digits."""
    return [sum(character.isalnum() for character in text) / max(1, len(text)) for text in completions]


def measure(options: argparse.Namespace, engine: Engine) -> None:
    _, *steps = engine.run()
    peak = engine.peak_memory()
    if not engine.is_main:
        return
    total, shortest, longest = steps[-1].lengths
    seconds = statistics.median(step.seconds for step in steps)
    report = {
        "engine": options.engine,
        "algorithm": options.algorithm,
        "dtype": options.dtype,
        "ranks": options.ranks,
        "threads": threads_of(options),
        "step_s": round(seconds, 3),
        "parts_s": {
            part: round(statistics.median(step.parts.get(part, 0.0) for step in steps), 3) for part in steps[-1].parts
        },
        "all_step_s": [round(step.seconds, 3) for step in steps],
        "samples": options.num_prompts * options.num_samples,
        "prompt_tokens": steps[-1].prompt_tokens,
        "new_tokens": total,
        "shortest_completion": shortest,
        "longest_completion": longest,
        "tokens_per_s": round((total + steps[-1].prompt_tokens) / seconds, 1),
        "peak_gb": round(peak / 1e9, 2),  # resident memory; on a GPU, what torch had allocated there
        "metrics": {name: float(f"{value:.4g}") for name, value in steps[-1].metrics.items()},
    }
    print(json.dumps(report | engine.report()), flush=True)


# -- hybrid ------------------------------------------------------------------------------------------------------------


def hybrid(options: argparse.Namespace) -> None:
    from hybrid.parallel import run_main

    run_main(lambda: measure(options, hybrid_engine(options)))


def hybrid_engine(options: argparse.Namespace) -> Engine:
    import dataclasses

    import torch

    from hybrid.config import OptimConfig, PPOConfig
    from hybrid.rl.setup import make_ppo_trainer

    trainer = make_ppo_trainer(
        options.model,
        reward=alphanumeric,
        prompts=questions(options),
        ppo=PPOConfig(
            algorithm=options.algorithm,
            prompts_per_step=options.num_prompts,
            num_generations=options.num_samples,
            kl_coef=KL_COEF,
            kl_estimator="k3",
            kl_in="loss",
            max_prompt_length=16 * (options.terms[1] + 1),  # more than a tokenizer makes of them
            max_completion_length=options.new_tokens,
            share_prompts=options.share_prompts,
            max_tokens_per_microbatch=options.max_tokens_per_microbatch,
            seed=options.seed,
        ),
        optim=OptimConfig(
            learning_rate=LEARNING_RATE, betas=BETAS, max_grad_norm=MAX_GRAD_NORM, lr_scheduler="constant"
        ),
        dtype=options.dtype,
        apply_chat_template=False,
    )
    torch.set_num_threads(threads_of(options))
    mesh = trainer.mesh
    trainer.sampler.params = dataclasses.replace(trainer.sampler.params, ignore_eos=True)

    def run_step() -> Step:
        mesh.barrier()
        start = time.perf_counter()
        metrics = trainer.step()
        mesh.synchronize()
        seconds = time.perf_counter() - start
        samples = trainer.last_samples
        lengths = [sample.num_completion_tokens for sample in samples]
        return Step(
            seconds,
            {
                name.removeprefix("timing_s/"): value
                for name, value in metrics.items()
                if name.startswith("timing_s/") and name != "timing_s/step"
            },
            sum(sample.num_prompt_tokens for sample in samples),
            (sum(lengths), min(lengths), max(lengths)),
            {name.removeprefix("actor/"): metrics[name] for name in ("reward", "kl", "entropy", "actor/grad_norm")}
            | {"logprob_gap": metrics["rollout/logprob_gap_mean"]},
        )

    def peak_memory() -> float:
        (peak,) = mesh.reduce_scalars([mesh.peak_memory()], op="max")
        return peak

    def report() -> dict[str, Any]:
        settings = {name: getattr(options, name) for name in ("max_tokens_per_microbatch", "share_prompts")}
        return {"torch": torch.__version__, **settings}

    return Engine(lambda: [run_step() for _ in range(options.steps + 1)], peak_memory, report, mesh.is_main)


# -- trl: imports nothing of hybrid ------------------------------------------------------------------------------------


def trl(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        measure(options, trl_engine(options, directory))


def trl_engine(options: argparse.Namespace, directory: str) -> Engine:
    import torch
    import transformers

    library: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    torch.set_num_threads(threads_of(options))
    clock = StepClock()
    trainer = timed_trainer(library, clock)(
        model=options.model,
        reward_funcs=alphanumeric,
        args=library.GRPOConfig(**trl_settings(options, directory)),
        train_dataset=datasets.Dataset.from_list([{"prompt": question} for question in questions(options)]),
        callbacks=[step_callback(transformers.TrainerCallback, clock)],
    )
    trainer.remove_callback(transformers.PrinterCallback)

    def run() -> list[Step]:
        trainer.train()
        logs = [log for log in trainer.state.log_history if "completions/mean_length" in log]
        seen = [0, *(int(log["num_tokens"]) for log in logs)]
        return [trl_step(options, log, seen[i + 1] - seen[i], *clock.steps[i]) for i, log in enumerate(logs)]

    def peak_memory() -> float:
        peak = float(trl_peak_memory())
        return trainer.accelerator.gather(torch.tensor([peak], device=trainer.accelerator.device)).max().item()

    def report() -> dict[str, Any]:
        versions = {module.__name__: module.__version__ for module in (library, transformers, torch)}
        return versions | {
            "settings": options.peer_settings,
            "peer_batch": trainer.args.per_device_train_batch_size,
            "tuned": options.tune_peers,
        }

    return Engine(run, peak_memory, report, trainer.accelerator.is_main_process)


def trl_settings(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """The arguments of a ``GRPOConfig`` that does the step described above."""
    import torch

    samples = options.num_prompts * options.num_samples
    batch = options.peer_batch if options.peer_settings == "fast" else min(8, samples // options.ranks)
    fast: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False}  # bf16 is autocast
    return {
        **ALGORITHMS[options.algorithm],
        **(fast if options.peer_settings == "fast" else {"bf16": options.dtype == "bf16"}),
        "output_dir": directory,
        "model_init_kwargs": {"dtype": {"bf16": "bfloat16", "fp32": "float32"}[options.dtype]},
        "use_cpu": not torch.cuda.is_available(),
        "max_steps": options.steps + 1,
        "num_generations": options.num_samples,
        "max_completion_length": options.new_tokens,
        "generation_kwargs": {"min_new_tokens": options.new_tokens},
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": samples // (options.ranks * batch),
        "beta": KL_COEF,
        "use_bias_correction_kl": False,
        "learning_rate": LEARNING_RATE,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "seed": options.seed,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def trl_step(
    options: argparse.Namespace, log: dict[str, float], num_tokens: int, seconds: float, parts: dict[str, float]
) -> Step:
    new_tokens = round(log["completions/mean_length"] * options.num_prompts * options.num_samples)
    lengths = (new_tokens, int(log["completions/min_length"]), int(log["completions/max_length"]))
    metrics = {name: log[name] for name in ("reward", "kl", "entropy", "grad_norm")}
    return Step(seconds, parts, num_tokens - new_tokens, lengths, metrics)


class StepClock:
    """Seconds of each step and of its parts."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, dict[str, float]]] = []
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._start = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._parts[part] += time.perf_counter() - start

    def begin(self) -> None:
        self._parts.clear()
        self._start = time.perf_counter()

    def end(self) -> None:
        seconds, parts = time.perf_counter() - self._start, dict(self._parts)
        prepared = parts.pop("prepare")  # all that comes before the update
        parts["other"] = prepared - sum(parts.values())
        self.steps.append((seconds, parts | {"update_actor": seconds - prepared}))


def step_callback(base: Any, clock: StepClock) -> Any:
    class Callback(base):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.end()

    return Callback()


def timed_trainer(library: Any, clock: StepClock) -> Any:
    """TRL's trainer with its stages timed."""

    class TimedTrainer(library.GRPOTrainer):
        def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
            with clock("prepare"):
                return super()._prepare_inputs(*args, **kwargs)

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with clock("generate"):
                return super()._generate(*args, **kwargs)

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            with clock("reward"):
                return super()._calculate_rewards(*args, **kwargs)

        def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if model is not self.ref_model:  # the update's own forward
                return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            with clock("ref"):
                return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    return TimedTrainer


def trl_peak_memory() -> int:
    import resource

    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


ENGINES: dict[str, Callable[[argparse.Namespace], None]] = {"hybrid": hybrid, "trl": trl}


# -- comparison --------------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Both engines' reports, and ``hybrid``'s speed and memory over the peer's."""
    from hybrid.models.loading import resolve_model

    options.model = resolve_model(options.model).source  # what an alias stands for
    mine = launch(options, "hybrid")
    if not has_trl(options.peer_python):
        return {"hybrid": mine, "skipped": {"trl": f"not installed for {options.peer_python}; set --peer_python"}}
    options.ranks = options.peer_ranks
    found: dict[str, Any] = {"hybrid": mine, "skipped": {}}
    for name, settings in (("trl", "fast"), ("trl_defaults", "defaults")):
        options.peer_settings = settings
        found[name] = peer = launch(options, "trl")
        found[f"speed_vs_{name}"] = round(peer["step_s"] / mine["step_s"], 3)
        found[f"memory_vs_{name}"] = round(mine["peak_gb"] / peer["peak_gb"], 3)
    return found


def has_trl(python: str) -> bool:
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('trl') is None)"
    return subprocess.run([python, "-c", ask], capture_output=True).returncode == 0


def launch(options: argparse.Namespace, engine: str) -> dict[str, Any]:
    """One engine's report, from processes that share out the cores."""
    command = [options.peer_python if engine == "trl" else sys.executable]
    if options.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    command += [__file__, "--engine", engine]
    for name in ("model", "algorithm", "dtype", "num_prompts", "num_samples", "new_tokens", "steps", "seed", "ranks"):
        command += [f"--{name}", str(getattr(options, name))]
    for name in ("threads", "max_tokens_per_microbatch", "peer_batch", "peer_settings"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--terms", *map(str, options.terms)]
    command += ["--no-share_prompts"] * (not options.share_prompts) + ["--tune_peers"] * options.tune_peers
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads_of(options))}
    if options.ranks > 1:  # threads that spin would take the cores from one another; alone, to be woken costs more
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if engine == "trl" and options.tune_peers:
        environment |= {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"the run of {engine} failed with exit code {done.returncode}; its errors are above")
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
