"""Time generation, here and in the engines that do the same: one JSON object on the last line.

    python scripts/bench_generate.py --model smollm2-135m --engine all --dtype bf16
    python scripts/bench_generate.py --model ./model --engine hybrid --replicas 1 --threads 2
    python scripts/bench_generate.py --model ./model --engine vllm --peer_python ~/vllm/bin/python
    python scripts/bench_generate.py --model smollm2-135m --workload fixed

The work, ``--workload ragged``: ``--num_prompts`` prompts of 30 to 150 tokens in the model's chat template, each asked
for ``--num_samples`` times, every sample with a ``max_tokens`` of its own drawn from 16 to 128; or ``fixed``: 64
different prompts of 32 tokens, 64 new tokens each. Ends of sequences are ignored and the temperature is 1, so that
every engine makes the same number of tokens. One run to warm up, then the median of ``--runs``. On a host nothing else
may run meanwhile.

``hybrid`` runs as ``--replicas`` processes that share out the cores and the prompts (a prompt's samples stay together).
``hf`` is transformers' generate on static batches of 32, padded on the left, samples of like length together. ``vllm``
is its offline ``LLM`` with prefix caching, compiled or (``--eager``) not; it pins its own torch and transformers, so
``--peer_python`` names the interpreter it is installed for.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTHS = (16, 32, 48, 64, 96, 128)
TEXT = (
    "the small river runs past an old mill where three farmers count their apples before winter and write each number "
    "in a book that nobody reads while children ask how many fish could swim under one bridge if rain never stopped"
)


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]  # token ids
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, ready to do the work."""

    run: Callable[[int], int]  # seed -> new tokens
    report: Callable[[], dict[str, Any]]  # what it says of itself, after the last run
    first_tokens: Callable[[int], list[float]] | None = None  # seed -> seconds to each sample's first token


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.engine == "all":
        print(json.dumps(compare(options)))
    elif options.engine == "hybrid" and options.replicas > 1 and "RANK" not in os.environ:
        print(json.dumps(launch(options, "hybrid", replicas=options.replicas)))
    else:
        ENGINES[options.engine](options)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a directory, Hub id or alias; peers take a directory")
    parser.add_argument("--engine", choices=[*ENGINES, "all"], default="hybrid")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--workload", choices=["ragged", "fixed"], default="ragged")
    parser.add_argument("--num_prompts", type=int, default=32)
    parser.add_argument("--num_samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3, help="timed runs, after one that is not")
    parser.add_argument("--threads", type=int, default=0, help="of each process; 0: all cores, shared by the replicas")
    parser.add_argument("--replicas", type=int, default=2, help="hybrid: processes, each with some of the prompts")
    parser.add_argument("--exact", action="store_true", help="hybrid: log-probs equal to the trainer's, bit for bit")
    parser.add_argument("--eager", action="store_true", help="vllm: without torch.compile")
    parser.add_argument("--peer_python", default=sys.executable, help="the interpreter vllm is installed for")
    options = parser.parse_args(argv)
    for name in ("num_prompts", "num_samples", "runs", "replicas"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; set it to at least 1")
    options.threads = options.threads or max(1, len(os.sched_getaffinity(0)) // processes(options))
    return options


def processes(options: argparse.Namespace) -> int:
    return options.replicas if options.engine == "hybrid" else 1


# -- the work ----------------------------------------------------------------------------------------------------------


def requests(options: argparse.Namespace, tokenizer: Any) -> list[Request]:
    """The same requests for every engine, samples of a prompt next to each other."""
    draw = random.Random(options.seed)
    if options.workload == "fixed":
        ids = [i for i in range(len(tokenizer)) if i not in set(tokenizer.all_special_ids)]
        return [Request(draw.choices(ids, k=32), 64) for _ in range(64)]
    made = []
    for _ in range(options.num_prompts):
        prompt = chat_prompt(tokenizer, draw.randint(30, 150), draw)
        made += [Request(prompt, draw.choice(LENGTHS)) for _ in range(options.num_samples)]
    return made


def chat_prompt(tokenizer: Any, num_tokens: int, draw: random.Random) -> list[int]:
    """About so many tokens, with the chat template's own."""
    known, words = TEXT.split(), []
    while True:
        words.append(draw.choice(known))
        messages = [{"role": "user", "content": " ".join(words)}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= num_tokens:
            return ids


def measure(options: argparse.Namespace, engine: Engine, wait: Callable[[], None] = lambda: None) -> dict[str, Any]:
    seconds, new_tokens = [], 0
    for index in range(options.runs + 1):
        wait()
        start = time.perf_counter()
        new_tokens = engine.run(options.seed + 1 + index)
        wait()
        if index:  # the first one warms up
            seconds.append(time.perf_counter() - start)
    report = {
        "engine": options.engine,
        "dtype": options.dtype,
        "workload": options.workload,
        "threads": options.threads,
        "replicas": processes(options),
        "seconds": round(statistics.median(seconds), 2),
        "all_seconds": [round(each, 2) for each in seconds],
        "new_tokens": new_tokens,
    }
    if engine.first_tokens is not None:
        wait()
        first = engine.first_tokens(options.seed)
        report["first_token_s"] = {"mean": round(statistics.mean(first), 3), "max": round(max(first), 3)}
    return report | engine.report()


def finish(report: dict[str, Any], work: list[Request]) -> None:
    report["prompt_tokens"] = sum(len(each.prompt) for each in work)
    report["tokens_per_s"] = round(report["new_tokens"] / report["seconds"], 1)
    print(json.dumps(report), flush=True)


# -- engines -----------------------------------------------------------------------------------------------------------


def hybrid(options: argparse.Namespace) -> None:
    from hybrid.parallel import run_main

    run_main(lambda: run_hybrid(options))


def run_hybrid(options: argparse.Namespace) -> None:
    from hybrid.config import InferenceConfig
    from hybrid.engine import HybridEngine
    from hybrid.inference.params import SamplingParams
    from hybrid.parallel import init_parallel

    mesh = init_parallel(threads=options.threads)
    engine = HybridEngine.from_pretrained(
        options.model, mesh=mesh, trains=False, dtype=options.dtype, inference=InferenceConfig(exact=options.exact)
    )
    work = requests(options, engine.tokenizer)
    together = options.num_samples if options.workload == "ragged" else 1  # samples of a prompt stay on one replica
    mine = [each for index, each in enumerate(work) if index // together % mesh.dp_size == mesh.dp_rank]
    prompts = [each.prompt for each in mine]
    params = [SamplingParams(max_tokens=each.max_tokens, ignore_eos=True) for each in mine]

    def seeds(seed: int) -> list[int]:
        return [seed * 1000 + index for index in range(len(mine))]

    def run(seed: int) -> int:
        return sum(len(each.token_ids) for each in engine.generate(prompts, params, seeds=seeds(seed)))

    def first_tokens(seed: int) -> list[float]:
        start, seen = time.perf_counter(), {}
        for delta in engine.stream(prompts, params, seeds=seeds(seed)):
            seen.setdefault((delta.prompt_index, delta.sample_index), time.perf_counter() - start)
        return list(seen.values())

    def report() -> dict[str, Any]:
        stats, flip, num_runs = engine.generation_stats, engine.flips[-1], options.runs + 2
        return {
            "exact": options.exact,
            "kv_blocks": flip.kv_blocks,
            "kv_pool_mb": round(flip.kv_bytes / 1e6, 1),
            "flip_ms": round(flip.milliseconds, 1),
            "parts_s": {part: round(each / num_runs, 2) for part, each in stats.seconds.items()},
            "steps": stats.steps // num_runs,
            "peak_rss_gb": round(mesh.peak_memory() / 1e9, 2),
        }

    with engine.generate_mode():
        measured = measure(options, Engine(run, report, first_tokens), mesh.barrier)
    (measured["new_tokens"],) = (int(x) for x in mesh.reduce_scalars([measured["new_tokens"]], op="sum"))
    if mesh.is_main:
        finish(measured, work)


def hf(options: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(options.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    work = requests(options, tokenizer)

    def run(seed: int) -> int:
        torch.manual_seed(seed)
        ordered = sorted(work, key=lambda each: each.max_tokens)
        for start in range(0, len(ordered), 32):
            batch = ordered[start : start + 32]
            width = max(len(each.prompt) for each in batch)
            ids = torch.full((len(batch), width), tokenizer.eos_token_id)
            mask = torch.zeros_like(ids)
            for row, each in enumerate(batch):
                ids[row, width - len(each.prompt) :] = torch.tensor(each.prompt)
                mask[row, width - len(each.prompt) :] = 1
            count = max(each.max_tokens for each in batch)
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=tokenizer.eos_token_id,
            )
        return sum(each.max_tokens for each in work)

    finish(measure(options, Engine(run, dict)), work)


def vllm(options: argparse.Namespace) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB, as InferenceConfig.kv_cache_gb
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    engine: Any = importlib.import_module("vllm")
    llm = engine.LLM(
        model=options.model,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[options.dtype],
        max_model_len=2048,
        max_num_seqs=256,
        enable_prefix_caching=True,
        enforce_eager=options.eager,
        seed=options.seed,
    )

    work = requests(options, llm.get_tokenizer())

    def run(seed: int) -> int:
        llm.reset_prefix_cache()
        outputs = llm.generate(
            [{"prompt_token_ids": each.prompt} for each in work],
            [engine.SamplingParams(temperature=1.0, max_tokens=each.max_tokens, ignore_eos=True) for each in work],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def report() -> dict[str, Any]:
        return {"version": engine.__version__, "compiled": not options.eager}

    finish(measure(options, Engine(run, report)), work)


ENGINES: dict[str, Callable[[argparse.Namespace], None]] = {"hybrid": hybrid, "hf": hf, "vllm": vllm}


# -- comparison --------------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """All engines one after another, each in a process of its own, and ``hybrid``'s speed over each peer's."""
    with directory_of(options.model) as options.model:
        reports: dict[str, Any] = {"hybrid": launch(options, "hybrid", replicas=options.replicas)}
        if options.replicas > 1:
            reports["hybrid_1_replica"] = launch(options, "hybrid", replicas=1)
        reports["hf"] = launch(options, "hf")
        if has_vllm(options.peer_python):
            reports["vllm"] = launch(options, "vllm")
    speed = reports["hybrid"]["tokens_per_s"]
    return reports | {
        f"speed_vs_{name}": round(speed / report["tokens_per_s"], 3)
        for name, report in reports.items()
        if name != "hybrid"
    }


@contextmanager
def directory_of(model: str) -> Iterator[str]:
    """Peers load a directory: the model's own, or for the time being a copy of one that has none."""
    if Path(model).is_dir():
        yield model
        return
    import tempfile

    from hybrid.engine import HybridEngine

    with tempfile.TemporaryDirectory() as directory:
        HybridEngine.from_pretrained(model, trains=False).save_pretrained(directory)
        yield directory


def has_vllm(python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec("vllm") is not None
    done = subprocess.run([python, "-c", "import vllm"], capture_output=True)
    return done.returncode == 0


def launch(options: argparse.Namespace, engine: str, *, replicas: int = 1) -> dict[str, Any]:
    """One engine's report, from processes that share out the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // replicas)
    python = options.peer_python if engine == "vllm" else sys.executable
    command = [python]
    if replicas > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(replicas)]
    command += [__file__, "--engine", engine, "--replicas", str(replicas), "--threads", str(threads)]
    for name in ("model", "dtype", "workload", "num_prompts", "num_samples", "seed", "runs"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--exact"] * options.exact + ["--eager"] * options.eager
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if replicas > 1:  # threads that spin would take the cores from one another; alone, to be woken costs more
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"the run of {engine} failed with exit code {done.returncode}; its errors are above")
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
