"""Generate text with a language model.

    python recipes/generate.py --prompt "Why is the sky blue?"
    python recipes/generate.py --model ./sft --prompts questions.jsonl --output answers.jsonl --n 4 --temperature 0.8
    torchrun --nproc-per-node 2 recipes/generate.py --model ./sft --prompts questions.jsonl --output answers.jsonl
    torchrun --nproc-per-node 2 recipes/generate.py --model ./sft --tp_size 2 --prompt "Hi" --prompt "Who are you?"
    python recipes/generate.py --model ./sft                    # answers each line of standard input

One prompt's text is shown as it comes. With --output, each row of the prompts gets a line with its columns and its
completions, in order, --prompts_per_step rows at a time; --resume goes on behind them. Ranks are replicas that share
the prompts out, or with --tp_size share each layer. On a CPU a long file starts a replica for each core (--replicas).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from hybrid.arguments import input_errors, parse_arguments, plain_warnings, quieten
from hybrid.config import GenerateConfig, GenerateSettings

if TYPE_CHECKING:
    from hybrid.engine import HybridEngine
    from hybrid.inference.params import SamplingParams


def main(argv: Sequence[str] | None = None) -> None:
    plain_warnings()
    with input_errors():
        groups = [*get_type_hints(GenerateSettings).values()]
        settings = GenerateSettings(*parse_arguments(groups, argv, description=__doc__))
        settings.parallel.check_world(int(os.environ.get("WORLD_SIZE", "1")))
        from hybrid.inference.params import SamplingParams  # imports no torch

        params = SamplingParams(**dataclasses.asdict(settings.sampling))
    # Only now what imports torch, so that --help and a mistyped flag are answered at once.
    from hybrid.parallel import run_main

    run_main(lambda: run(settings, params, [__file__, *(sys.argv[1:] if argv is None else argv)]))


def run(settings: GenerateSettings, params: SamplingParams, command: list[str]) -> None:
    from hybrid.data.completions import chat_prompts
    from hybrid.data.prompts import prompts_of, read_rows
    from hybrid.launch import local_ranks, replicas_to_start
    from hybrid.models.loading import load_tokenizer, resolve_model

    quieten()
    asked = settings.generate
    with input_errors():
        rows = [{"prompt": text} for text in asked.prompt]
        if asked.prompts:
            rows = read_rows(asked.prompts, config_name=asked.prompts_config, split=asked.prompts_split)
        texts = prompts_of(rows, source=asked.prompts or "--prompt", prompt_column=asked.prompt_column) if rows else []
        model = resolve_model(asked.model)
        template = {"apply_chat_template": asked.apply_chat_template, "system": asked.system}
        chat = functools.partial(chat_prompts, tokenizer=load_tokenizer(model), **template)
        prompts = chat(texts)
        work = {"cache_bytes": int(settings.inference.kv_cache_gb * 2**30), "num_samples": len(prompts) * params.n}
        count = replicas_to_start(asked.replicas, model=model.source, tp_size=settings.parallel.tp_size, **work)
    with local_ranks(count, command):
        reply(settings, params, rows, texts, prompts, chat)


def reply(
    settings: GenerateSettings, params: SamplingParams, rows: list, texts: list, prompts: list, chat: Any
) -> None:
    from hybrid.data.completions import CompletionsFile, typed_lines
    from hybrid.engine import HybridEngine
    from hybrid.parallel import init_parallel

    asked, file = settings.generate, None
    if asked.output and int(os.environ.get("RANK", "0")) == 0:
        with input_errors(on_all_ranks=False):
            file = CompletionsFile(asked.output, rows, resume=asked.resume, logprobs=params.logprobs is not None)
    # Other ranks wait for a person who types, as long as it takes.
    mesh = init_parallel(settings.parallel.tp_size, timeout_s=1800 if rows else 30 * 86400)
    how = {"mesh": mesh, "inference": settings.inference, "dtype": asked.dtype, "trains": False}
    with input_errors():
        engine = HybridEngine.from_pretrained(asked.model, **how)
    with engine.generate_mode():
        if not rows:
            for number, line in enumerate(typed_lines(mesh)):
                try:
                    encoded = engine.encode(chat([line]))
                    show(engine, encoded, [line], params, asked, number)
                except ValueError as error:  # it is too long, say; the next line may not be
                    if mesh.is_main:
                        print(f"error: {error}", file=sys.stderr)
            return
        with input_errors():
            encoded = engine.encode(prompts)
            engine.check_requests(encoded, params)
        if asked.output:
            write(engine, encoded, params, asked, file)
        else:
            show(engine, encoded, [t if isinstance(t, str) else t[-1]["content"] for t in texts], params, asked)


def write(engine: HybridEngine, prompts: list, params: SamplingParams, asked: GenerateConfig, file: Any) -> None:
    """Answer the rows that are not in the output yet; the first rank has it open."""
    from hybrid.data.completions import generate_in_rounds, seeds_of

    seeds, start = seeds_of(asked.seed, len(prompts)), engine.mesh.broadcast_object(file and file.num_done)
    how = {"start": start, "size": asked.prompts_per_step, "progress": sys.stderr.isatty()}
    try:
        for completions in generate_in_rounds(engine, prompts, params, seeds, **how):
            if file is not None:
                file.append(completions)
    except KeyboardInterrupt:
        if file is not None:
            print(f"\nstopped; --resume goes on behind row {file.recount()} of {len(prompts)}", file=sys.stderr)
        sys.exit(130)
    if file is not None:
        print(f"{len(prompts)} rows in {asked.output}, {len(prompts) - start} of them new", file=sys.stderr)


def show(
    engine: HybridEngine, prompts: list, texts: list[str], params: SamplingParams, asked: GenerateConfig, first: int = 0
) -> None:
    """Print completions: of one prompt as it comes, of several each under its prompt."""
    from hybrid.data.completions import generate_in_rounds, seeds_of

    mesh, seeds = engine.mesh, seeds_of(asked.seed, len(prompts), first)
    if len(prompts) == params.n == 1:
        for delta in engine.stream(prompts, params, seeds=seeds) if mesh.dp_rank == 0 else ():
            if mesh.is_main:
                print(delta.text, end="" if delta.completion is None else "\n", flush=True)
        return
    labels = [f"> {text}\n\n" for text in texts] if len(texts) > 1 else [""]
    answers = generate_in_rounds(engine, prompts, params, seeds, size=asked.prompts_per_step)
    for label, samples in zip(labels, (samples for each in answers for samples in each), strict=True):
        if mesh.is_main:
            print(label + "\n\n".join(sample.text for sample in samples) + "\n", flush=True)


if __name__ == "__main__":
    main()
