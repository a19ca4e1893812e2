"""RLHF step 3: improve a language model against a reward, with PPO or another on-policy algorithm.

    python recipes/rlhf_step3.py                               # the demo: SmolLM2-135M learns a small task on a CPU
    python recipes/rlhf_step3.py --actor llama-2-7b --prompts prompts.jsonl --reward my_reward.py:score
    python recipes/rlhf_step3.py --actor ./sft --reward ./reward-model --prompts owner/dataset --prompt_column question
    python recipes/rlhf_step3.py --algorithm grpo --num_generations 8     # or rloo, dr_grpo, dapo, gspo, ...: no critic
    torchrun --nproc-per-node 2 recipes/rlhf_step3.py --zero_stage 3 --tp_size 2
    torchrun --nproc-per-node 8 recipes/rlhf_step3.py --deepspeed_config ds.json --actor ./sft

Models are directories, Hub ids or aliases. Without --prompts it runs the demo task, with settings that suit it unless
they are set. The run's directory gets the trained model (actor/), metrics.jsonl, samples.jsonl and config.yaml; with
--save_steps also checkpoints, from which --resume_from_checkpoint auto goes on, on any number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from hybrid.arguments import input_errors, parse_arguments, plain_warnings, quieten, save_config, to_flags
from hybrid.config import PPOSettings
from hybrid.deepspeed import DeepSpeedArguments, deepspeed_presets

if TYPE_CHECKING:
    from hybrid.rl.setup import PPOInputs

# Short samples of a task that a small model learns within minutes.
DEMO = {"total_steps": 24, "max_prompt_length": 32, "max_completion_length": 8}


def main(argv: Sequence[str] | None = None) -> None:
    plain_warnings()
    with input_errors():
        groups = [*get_type_hints(PPOSettings).values(), DeepSpeedArguments]
        *configs, deepspeed = parse_arguments(groups, argv, description=__doc__, presets=presets)
        settings = PPOSettings(*configs)
        settings.parallel.check_world(int(os.environ.get("WORLD_SIZE", "1")))
    # Only now what imports torch, so that --help and a mistyped flag are answered at once.
    from hybrid.parallel import run_main

    run_main(lambda: run(settings, deepspeed))


def presets(given: Mapping[str, Any]) -> Mapping[str, Any]:
    demo = {} if given.get("prompts") else DEMO
    if demo and given.get("algorithm", "ppo") == "ppo":  # the others scale advantages in their own way
        demo = {**demo, "whiten_advantages": True}
    elif demo and given["algorithm"] != "reinforce_pp":  # groups as small as a CPU answers quickly
        demo = {**demo, "num_generations": 4}
    return {**demo, **deepspeed_presets(given)}


def run(settings: PPOSettings, deepspeed: DeepSpeedArguments) -> None:
    from hybrid.rewards import RewardError
    from hybrid.rl.setup import find_inputs
    from hybrid.runs import check_run

    quieten()
    with input_errors():
        checkpoint = check_run(settings.run)
        inputs = find_inputs(settings, int(os.environ.get("WORLD_SIZE", "1")), checkpoint=checkpoint)
    hidden_size = inputs.actor.config.get_text_config(decoder=True).hidden_size
    settings = settings._replace(zero=deepspeed.resolve(settings.zero, hidden_size))
    with input_errors(RewardError, on_all_ranks=False):
        train(settings, inputs)


def train(settings: PPOSettings, inputs: PPOInputs) -> None:
    from hybrid.checkpoint import checkpoint_name, drop_old_checkpoints
    from hybrid.monitor import RunRecorder, Timers, make_output_dir
    from hybrid.parallel import init_parallel
    from hybrid.rl.setup import load_parts, make_trainer, settings_to_compare
    from hybrid.runs import resumes_in_place

    mesh = init_parallel(settings.parallel.tp_size)
    parts = load_parts(inputs, settings, mesh)
    actor = parts.actor
    steps, output_dir = inputs.total_steps, None
    if mesh.is_main:
        replace = settings.run.overwrite_output_dir and not resumes_in_place(settings.run, inputs.checkpoint)
        output_dir = make_output_dir(settings.run.output_dir, "rlhf_step3", replace=replace)
    output_dir = mesh.broadcast_object(output_dir)
    trainer = make_trainer(parts, inputs, settings, timers=Timers(mesh.synchronize))
    if inputs.checkpoint is not None:
        before = trainer.load_checkpoint(inputs.checkpoint)["before"]
    else:
        before = [dataclasses.asdict(sample) for sample in trainer.evaluate(inputs.shown)]
    recorder = None
    if mesh.is_main:
        resolved = dataclasses.replace(settings.run, total_steps=steps, output_dir=str(output_dir))
        configs = settings._replace(run=resolved)
        save_config(output_dir / "config.yaml", configs)
        recorder = RunRecorder(
            output_dir,
            total_steps=steps,
            config=to_flags(configs),
            run=resolved,
            title=settings.ppo.algorithm,
            resume_step=trainer.global_step,
        )

    def after_step(step: int, metrics: dict[str, float]) -> None:
        is_logged = step % settings.run.logging_steps == 0
        samples = trainer.sample_records(settings.run.log_tokens) if step and is_logged else []
        if "timing_s/eval" in metrics:
            samples += [{"split": "eval", **dataclasses.asdict(sample)} for sample in trainer.last_evaluation]
        if recorder is not None:
            recorder.record(step, metrics, samples)
        if step and settings.run.save_steps and step % settings.run.save_steps == 0:
            with trainer.timers("save"):
                extra = {"before": before, "settings": settings_to_compare(settings)}
                trainer.save_checkpoint(output_dir / checkpoint_name(step), **extra)
                actor.save_pretrained(output_dir / checkpoint_name(step) / "actor")
                if mesh.is_main:
                    drop_old_checkpoints(output_dir, settings.run.save_total_limit, step)

    trainer.callbacks = [after_step]
    # Closed before an error is printed, or the bar would be drawn again.
    with contextlib.closing(parts), recorder or contextlib.nullcontext():
        trainer.train(steps)
        after = [dataclasses.asdict(sample) for sample in trainer.evaluate(inputs.shown)]
        actor.save_pretrained(output_dir / "actor")
        if settings.ppo.enable_ema:
            actor.save_pretrained(output_dir / "actor_ema", what="average")
        if recorder is not None:
            recorder.finish(before, after)


if __name__ == "__main__":
    main()
