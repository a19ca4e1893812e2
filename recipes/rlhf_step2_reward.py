"""RLHF step 2: a reward model from pairs of answers, or the actor itself by direct preference optimisation (DPO).

    python recipes/rlhf_step2_reward.py                        # the demo: SmolLM2-135M learns to judge a small task
    python recipes/rlhf_step2_reward.py --actor ./sft --data pairs.jsonl --eval_size 200
    python recipes/rlhf_step2_reward.py --objective dpo --actor ./sft --data owner/dataset --learning_rate 1e-6
    torchrun --nproc-per-node 8 recipes/rlhf_step2_reward.py --zero_stage 3 --actor ./sft --data pairs.jsonl
    torchrun --nproc-per-node 8 recipes/rlhf_step2_reward.py --deepspeed_config ds.json --actor ./sft --data pairs.jsonl

Rows have `prompt`, `chosen` and `rejected`, as text or messages, or whole conversations as `chosen` and `rejected`; a
`margin` says by how much the one is the better. Training starts from --actor, which a reward model gives a new score
head; recipes/rlhf_step3.py --reward takes it. The run's directory gets the model (reward/, with DPO actor/),
metrics.jsonl and config.yaml; with --save_steps also checkpoints, from which --resume_from_checkpoint auto goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_type_hints

from hybrid.arguments import input_errors, parse_arguments, plain_warnings, quieten
from hybrid.deepspeed import DeepSpeedArguments, learning_presets
from hybrid.learning_config import PreferenceSettings


def main(argv: Sequence[str] | None = None) -> None:
    plain_warnings()
    with input_errors():
        groups = [*get_type_hints(PreferenceSettings).values(), DeepSpeedArguments]
        *configs, deepspeed = parse_arguments(groups, argv, description=__doc__, presets=learning_presets)
        settings = PreferenceSettings(*configs)
    # Only now what imports torch, so that --help and a mistyped flag are answered at once.
    from hybrid.parallel import run_main

    run_main(lambda: run(settings, deepspeed))


def run(settings: PreferenceSettings, deepspeed: DeepSpeedArguments) -> None:
    from hybrid.learning.run import run_training
    from hybrid.learning.setup import find_preference_inputs, load_preference
    from hybrid.learning.trainer import LearningTrainer
    from hybrid.parallel import init_parallel
    from hybrid.runs import check_run

    quieten()
    role = "reward" if settings.preference.objective == "reward" else "actor"
    with input_errors():
        inputs = find_preference_inputs(settings, checkpoint=check_run(settings.run, role))
    hidden_size = inputs.model.config.get_text_config(decoder=True).hidden_size
    settings = settings._replace(zero=deepspeed.resolve(settings.zero, hidden_size))
    mesh = init_parallel()
    objective, train, held_out = load_preference(inputs, settings, mesh)
    trainer = LearningTrainer(objective, train, held_out, settings.learn, num_examples=inputs.num_examples)
    run_training(trainer, inputs, settings, recipe="rlhf_step2_reward")


if __name__ == "__main__":
    main()
