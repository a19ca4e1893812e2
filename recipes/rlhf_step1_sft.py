"""RLHF step 1: supervised fine-tuning of a language model on conversations, answers or text.

    python recipes/rlhf_step1_sft.py                           # the demo: SmolLM2-135M learns a small task on a CPU
    python recipes/rlhf_step1_sft.py --actor llama-2-7b --data chats.jsonl --eval_size 200 --num_train_epochs 2
    python recipes/rlhf_step1_sft.py --actor ./base --data owner/dataset --loss_on all --lr_scheduler cosine
    torchrun --nproc-per-node 8 recipes/rlhf_step1_sft.py --zero_stage 3 --actor ./base --data chats.jsonl
    torchrun --nproc-per-node 8 recipes/rlhf_step1_sft.py --deepspeed_config ds.json --actor ./base --data chats.jsonl

Rows have `messages`, `prompt` and `completion`, `prompt` and `chosen`, or `text`. What counts is the loss of what the
assistant says, and with --loss_on all that of everything. Examples are packed without padding, by a budget of tokens
(--max_tokens_per_microbatch). The run's directory gets the model (actor/), metrics.jsonl and config.yaml; with
--save_steps also checkpoints, from which --resume_from_checkpoint auto goes on, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_type_hints

from hybrid.arguments import input_errors, parse_arguments, plain_warnings, quieten
from hybrid.deepspeed import DeepSpeedArguments, learning_presets
from hybrid.learning_config import SFTSettings


def main(argv: Sequence[str] | None = None) -> None:
    plain_warnings()
    with input_errors():
        groups = [*get_type_hints(SFTSettings).values(), DeepSpeedArguments]
        *configs, deepspeed = parse_arguments(groups, argv, description=__doc__, presets=learning_presets)
        settings = SFTSettings(*configs)
    # Only now what imports torch, so that --help and a mistyped flag are answered at once.
    from hybrid.parallel import run_main

    run_main(lambda: run(settings, deepspeed))


def run(settings: SFTSettings, deepspeed: DeepSpeedArguments) -> None:
    from hybrid.learning.run import run_training
    from hybrid.learning.setup import find_sft_inputs, load_sft
    from hybrid.learning.trainer import LearningTrainer
    from hybrid.parallel import init_parallel
    from hybrid.runs import check_run

    quieten()
    with input_errors():
        inputs = find_sft_inputs(settings, checkpoint=check_run(settings.run, "actor"))
    hidden_size = inputs.model.config.get_text_config(decoder=True).hidden_size
    settings = settings._replace(zero=deepspeed.resolve(settings.zero, hidden_size))
    mesh = init_parallel()
    trainer = LearningTrainer(
        load_sft(inputs, settings, mesh),
        inputs.train,
        inputs.held_out,
        settings.learn,
        num_examples=inputs.num_examples,
    )
    run_training(trainer, inputs, settings, recipe="rlhf_step1_sft")


if __name__ == "__main__":
    main()
