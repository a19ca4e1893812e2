"""What a trainer shows of itself: evaluations of held-out prompts, and samples token by token."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from rl_fakes import FakeActor, FakeModel, FakePrompts, FakeReward, run_world

from hybrid.config import PPOConfig
from hybrid.rl.trainer import PPOTrainer


def _config(**changes) -> PPOConfig:
    settings = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 6, "seed": 1}
    return PPOConfig(**(settings | changes))


def _reward(prompt: str, completion: list[int], index: int) -> float | None:
    return None if index == 2 else sum(completion) / 10 - 2.0


def _trainer(mesh, config, *, held_out=0, ref=True, callbacks=()) -> PPOTrainer:
    has_critic = config.traits.has_critic
    return PPOTrainer(
        FakeActor(mesh, lr=0.3, seed=1),
        FakeModel(mesh, lr=0.3, valued=True, seed=2) if has_critic else None,
        FakeModel(mesh, seed=3) if ref else None,
        FakeReward(_reward),
        FakePrompts(11),
        config,
        held_out=FakePrompts(11).rows[11 - held_out :] if held_out else (),
        callbacks=callbacks,
    )


def _evaluations(mesh, config, *, total_steps=5, **how):
    seen = []
    trainer = _trainer(mesh, config, callbacks=[lambda step, metrics: seen.append((step, dict(metrics)))], **how)
    trainer.train(total_steps)
    return seen, trainer.last_evaluation


def test_held_out_prompts_are_evaluated_before_the_first_step_when_due_and_after_the_last():
    for seen, last in run_world(2, 1, lambda mesh: _evaluations(mesh, _config(eval_steps=2), held_out=3)):
        assert [step for step, _ in seen] == [0, 1, 2, 3, 4, 5]
        assert [step for step, metrics in seen if "eval/reward" in metrics] == [0, 2, 4, 5]
        before = seen[0][1]
        assert {name.split("/")[0] for name in before} == {"eval", "timing_s"}
        assert len(last) == 3
        rewards = [sample.reward for sample in last]
        assert seen[-1][1]["eval/reward"] == pytest.approx(sum(rewards) / 3)
        assert seen[-1][1]["eval/rewards/fake/mean"] == pytest.approx(sum(rewards) / 3)
        assert "reward" in seen[-1][1]


def test_evaluation_changes_no_training():
    def weights(mesh, held_out):
        trainer = _trainer(mesh, _config(eval_steps=1, eval_temperature=1.0, eval_num_generations=3), held_out=held_out)
        trainer.train(3)
        return trainer.actor.head.detach()

    (with_evaluation,) = run_world(1, 1, lambda mesh: weights(mesh, 4))
    (without,) = run_world(1, 1, lambda mesh: weights(mesh, 0))
    assert torch.equal(with_evaluation, without)


def test_sampled_evaluation_has_every_completion_and_the_same_seeds_each_time():
    config = _config(eval_temperature=1.0, eval_num_generations=4, kl_coef=0.0, eval_steps=1, seed=7)

    def main(mesh):
        evaluations = []
        trainer = _trainer(mesh, config, held_out=2, ref=False)
        trainer.actor.lr = trainer.critic.lr = 0.0
        trainer.callbacks = [lambda *_: evaluations.append([s.completion for s in trainer.last_evaluation])]
        trainer.train(2)
        return evaluations

    for evaluations in run_world(2, 2, main):
        first, *later = evaluations
        assert len(first) == 2 * 4 and len(set(first)) > 2
        assert all(again == first for again in later)  # nothing was learnt, so nothing differs


def test_without_held_out_prompts_nothing_is_evaluated():
    ((seen, last),) = run_world(1, 1, lambda mesh: _evaluations(mesh, _config(), total_steps=2))
    assert [step for step, _ in seen] == [1, 2] and not last
    assert not any(name.startswith("eval/") for _, metrics in seen for name in metrics)


def _records(mesh, config, count, **how):
    trainer = _trainer(mesh, config, **how)
    trainer.step()
    return trainer.sample_records(count), trainer.last_samples


@pytest.mark.parametrize("changes", [{}, {"algorithm": "grpo"}, {"rollout_correction": "token_tis"}])
def test_tokens_are_recorded_with_all_that_was_made_of_them(changes):
    config = _config(**changes)
    ((expected, _),) = run_world(1, 1, lambda mesh: _records(mesh, config, -1))
    for records, samples in run_world(4, 2, lambda mesh: _records(mesh, config, -1)):
        assert json.loads(json.dumps(records)) == records
        assert [{k: v for k, v in r.items() if k != "tokens"} for r in records] == [
            dataclasses.asdict(sample) for sample in samples
        ]
        for record, alone in zip(records, expected, strict=True):
            if record["reward"] is None:
                assert record["tokens"] is None
                continue
            tokens = record["tokens"]
            for name, values in tokens.items():
                is_there = {"value": config.traits.has_critic, "return": config.traits.has_critic}
                is_there |= {"weight": config.rollout_correction != "none", "text": False}
                assert (values is not None) == is_there.get(name, True), name
                assert values is None or len(values) == record["num_completion_tokens"]
                assert values == pytest.approx(alone["tokens"][name], abs=2e-6)
            assert " ".join(map(str, tokens["id"])) == record["completion"]
            assert tokens["kl"] == pytest.approx(_kl(config, tokens), abs=1e-5)
            # What a sequence is given: its clipped reward, less the penalty at each token.
            penalty = config.kl_coef * sum(tokens["kl"]) if config.kl_in == "reward" else 0.0
            assert sum(tokens["reward"]) == pytest.approx(record["reward"] - penalty, abs=1e-4)


def _kl(config, tokens):
    ratios = torch.tensor(tokens["ref_logprob"]) - torch.tensor(tokens["old_logprob"])
    return (-ratios if config.kl_estimator == "k1" else ratios.exp() - 1 - ratios).tolist()


def test_as_many_samples_have_their_tokens_as_were_asked_for():
    ((records, _),) = run_world(1, 1, lambda mesh: _records(mesh, _config(), 3))
    scored = [bool(record["tokens"]) for record in records if record["reward"] is not None]
    assert scored == [True] * 3 + [False] * 3
    ((records, _),) = run_world(1, 1, lambda mesh: _records(mesh, _config(), 0))
    assert not any(record["tokens"] for record in records)


def test_a_truncated_sample_that_is_not_in_the_loss_is_recorded_as_such():
    config = _config(mask_truncated_completions=True, num_generations=8)
    ((records, _),) = run_world(1, 1, lambda mesh: _records(mesh, config, -1))
    masks = {(r["finish_reason"], mask) for r in records if r["tokens"] for mask in r["tokens"]["mask"]}
    assert masks == {("length", 0), ("stop", 1)}


def test_resampled_groups_keep_their_tokens_apart():
    config = _config(algorithm="dapo", num_generations=4, overlong_buffer=0, max_resamplings=3)

    def main(mesh):
        trainer = _trainer(mesh, config, ref=False)
        trainer.collector.reward = FakeReward(lambda prompt, ids, index: float(index % 3 and sum(ids)))
        trainer.step()
        return trainer.sample_records(-1)

    (records,) = run_world(1, 1, main)
    assert len({r["prompt_index"] for r in records}) > config.prompts_per_step
    recorded = [record for record in records if record["tokens"]]
    assert len(recorded) == config.prompts_per_step * config.num_generations
    for record in recorded:
        assert " ".join(map(str, record["tokens"]["id"])) == record["completion"]
