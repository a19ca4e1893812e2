"""The PPO step's data flow on fake models: world sizes, empty ranks, masks, metrics, and against a plain loop."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch
from rl_fakes import EOS, FakeActor, FakeModel, FakePrompts, FakeReward, run_world

from hybrid.algorithms import ALGORITHMS
from hybrid.config import PPOConfig
from hybrid.inference.params import SamplingParams
from hybrid.rl.metrics import StepMetrics
from hybrid.rl.rollout import request_seed
from hybrid.rl.trainer import PPOTrainer

# FACTS: what each step reports; save is the recipe's.
_NAMES = """
reward reward_std rewards/fake/mean kl entropy completions/mean_length completions/min_length completions/max_length
completions/clipped_ratio completions/masked completions/reward_clipped_ratio frac_reward_zero_std
actor/pg_loss actor/entropy actor/ppo_kl actor/pg_clipfrac actor/grad_norm actor/lr actor/kl_coef
critic/vf_loss critic/vf_clipfrac critic/vpred_mean critic/vf_explained_var critic/grad_norm
critic/rewards/mean critic/rewards/max critic/rewards/min critic/advantages/mean critic/advantages/max
critic/advantages/min critic/returns/mean critic/returns/max critic/returns/min critic/values/mean critic/values/max
critic/values/min rollout/logprob_gap_mean rollout/logprob_gap_max rollout/ratio_max
timing_s/step timing_s/generate timing_s/flip_to_generate timing_s/flip_to_train timing_s/reward timing_s/old_logprob
timing_s/ref timing_s/values timing_s/update_actor timing_s/update_critic
flip/bytes_received flip/kv_blocks flip/peak_bytes perf/tokens_per_s perf/generated_tokens_per_s perf/max_memory_gb
perf/mfu training/global_step training/epoch training/weights_version
"""
METRIC_NAMES = _NAMES.split()


def _config(**changes) -> PPOConfig:
    settings = {
        "prompts_per_step": 5,
        "num_generations": 3,
        "max_completion_length": 6,
        "max_tokens_per_microbatch": 16,
        "temperature": 0.9,
        "seed": 1,
    }
    return PPOConfig(**(settings | changes))


def _reward(prompt: str, completion: list[int], index: int) -> float | None:
    """Varied, clipped for some, None for the completions of one prompt and of one length."""
    if index == 2 or len(completion) == 3:
        return None
    return sum(completion) / 3 - 5.0


def _trainer(mesh, config, reward=_reward, lr=0.3, ref=True, **kwargs) -> PPOTrainer:
    return PPOTrainer(
        FakeActor(mesh, lr=lr, seed=1),
        FakeModel(mesh, lr=lr, valued=True, seed=2) if config.traits.has_critic else None,
        FakeModel(mesh, seed=3) if ref else None,
        FakeReward(reward),
        FakePrompts(11),
        config,
        **kwargs,
    )


def _train(mesh, config, steps=2, **kwargs):
    trainer = _trainer(mesh, config, **kwargs)
    return trainer, [trainer.step() for _ in range(steps)]


def _run(size, tp_size, config, **kwargs):
    results = run_world(size, tp_size, lambda mesh: _train(mesh, config, **kwargs))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _weights(trainer):
    models = [trainer.actor] if trainer.critic is None else [trainer.actor, trainer.critic]
    return [weight for model in models for weight in (model.embedding, model.head)]


def _keys(experiences):
    return [(e.trajectory.prompt_index, e.trajectory.sample_index) for e in experiences]


def _comparable(metrics):
    """Metrics that must not depend on the ranks."""
    return {k: v for k, v in metrics.items() if k.split("/")[0] not in ("timing_s", "perf", "flip")}


@pytest.mark.parametrize(("size", "tp_size"), [(2, 1), (2, 2), (3, 3), (4, 2), (4, 1), (8, 1)])
def test_result_does_not_depend_on_the_world(size, tp_size):
    """5 prompts over up to 8 replicas: uneven and empty ones; 2 epochs of 2 minibatches that cut across them."""
    config = _config(num_ppo_epochs=2, num_minibatches=2, whiten_advantages=True, entropy_coef=0.01)
    ((alone, expected),) = _run(1, 1, config)
    for trainer, steps in _run(size, tp_size, config):
        for mine, theirs in zip(steps, expected, strict=True):
            assert _comparable(mine) == pytest.approx(_comparable(theirs), rel=1e-5, abs=1e-6)
        torch.testing.assert_close(_weights(trainer), _weights(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("budget", [1, 7, 40, 10_000])
def test_result_does_not_depend_on_the_micro_batch_budget(budget):
    config = {"num_ppo_epochs": 2, "num_minibatches": 2}
    ((one, expected),) = _run(1, 1, _config(**config))
    ((other, actual),) = _run(1, 1, _config(**config, max_tokens_per_microbatch=budget))
    torch.testing.assert_close(_weights(other), _weights(one), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(actual, expected, strict=True):
        assert _comparable(mine) == pytest.approx(_comparable(theirs), rel=1e-5, abs=1e-6)


# Each algorithm, and each flag that changes what is summed up over tokens, sequences or groups.
VARIANTS = [
    *({"algorithm": name} for name in ALGORITHMS),
    *({"algorithm": "ppo", "aggregation": how} for how in ("sequence_mean", "sum_over_constant")),
    {"algorithm": "grpo", "aggregation": "token_mean", "kl_in": "reward", "kl_estimator": "k1", "dual_clip": 3.0},
    {"algorithm": "dr_grpo", "whiten_advantages": True, "whiten_by": "group", "kl_coef": 0.1, "kl_estimator": "k2"},
    {"algorithm": "gspo", "rollout_correction": "sequence_tis", "entropy_coef": 0.01},
    {"algorithm": "dapo", "rollout_correction": "mask", "mask_truncated_completions": True, "max_resamplings": 1},
    {"algorithm": "cispo", "rollout_correction": "token_tis", "early_stop_kl": 1e-4},
]


def _variant(changes):
    epochs = 1 if changes["algorithm"] == "rloo" else 2
    return _config(**{"num_ppo_epochs": epochs, "num_minibatches": 2, "num_generations": 3, **changes})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: " ".join(map(str, changes.values())))
def test_no_algorithm_depends_on_world_micro_batches_or_order(changes):
    config = _variant(changes)
    ((alone, expected),) = _run(1, 1, config)
    assert alone.actor.weights_version > 0 and expected[0]["actor/grad_norm"] > 0
    tight = dataclasses.replace(config, max_tokens_per_microbatch=5)
    for size, tp_size, settings in ((2, 1, config), (4, 2, tight), (1, 1, tight)):
        for trainer, steps in _run(size, tp_size, settings):
            for mine, theirs in zip(steps, expected, strict=True):
                assert _comparable(mine) == pytest.approx(_comparable(theirs), rel=1e-5, abs=1e-6)
            torch.testing.assert_close(_weights(trainer), _weights(alone), rtol=1e-5, atol=1e-6)


def test_without_a_critic_there_is_none_in_metrics_and_calls():
    ((trainer, (metrics, _)),) = _run(1, 1, _config(algorithm="grpo", num_generations=4))
    gone = {name for name in METRIC_NAMES if name.split("/")[0] == "critic"} | {
        *("timing_s/values", "timing_s/update_critic", "timing_s/old_logprob")
    }
    gone -= {f"critic/{kind}/{which}" for kind in ("rewards", "advantages") for which in ("mean", "max", "min")}
    assert sorted(metrics) == sorted({*METRIC_NAMES, "actor/kl_loss"} - gone)
    assert trainer.critic is None


def test_an_algorithm_and_a_critic_must_fit():
    def main(mesh):
        for algorithm, critic in (("ppo", None), ("grpo", FakeModel(mesh, valued=True))):
            config = _config(algorithm=algorithm)
            with pytest.raises(ValueError, match="needs a critic" if critic is None else "has no critic; pass None"):
                PPOTrainer(FakeActor(mesh), critic, None, FakeReward(_reward), FakePrompts(3), config)

    assert run_world(1, 1, main) == [None]


def test_a_kl_penalty_in_the_loss_leaves_the_rewards_alone_and_pulls_to_the_reference():
    """With a reward that never varies GRPO's advantages are 0, so the penalty alone moves the policy."""
    config = _config(algorithm="grpo", kl_coef=1.0, num_generations=4)
    ((trainer, steps),) = _run(1, 1, config, steps=12, lr=2.0, reward=lambda *_: 1.0)
    assert all(metrics["critic/rewards/max"] == metrics["critic/rewards/min"] == 1.0 for metrics in steps)
    assert steps[0]["actor/pg_loss"] == pytest.approx(0, abs=1e-6)
    assert steps[0]["actor/kl_loss"] == pytest.approx(_mean_of_sequences(trainer.mesh, config), rel=1e-5)
    assert steps[-1]["kl"] < steps[0]["kl"] / 2


def _mean_of_sequences(mesh, config) -> float:
    """k3 of the first step's samples, averaged over each sequence and then over all."""
    trainer = _trainer(mesh, config, reward=lambda *_: 1.0)
    batch = trainer.sampler.sample(0)
    means = []
    for t in batch.trajectories:
        context = [t.prompt_ids[-1], *t.completion_ids[:-1]]
        mine, ref = (
            torch.log_softmax(m.embedding[context] @ m.head.T / config.temperature, -1)[
                range(len(t.completion_ids)), t.completion_ids
            ].detach()
            for m in (trainer.actor, trainer.maker.ref)
        )
        means.append(float(((ref - mine).exp() - 1 - (ref - mine)).mean()))
    return sum(means) / len(means)


def test_updates_stop_once_the_policy_is_too_far():
    settings = {"num_ppo_epochs": 4, "num_minibatches": 3}
    ((free, (metrics,)),) = _run(1, 1, _config(**settings), steps=1, lr=3.0)
    assert free.actor.weights_version == 12 and "actor/early_stopped" not in metrics
    ((stopped, (metrics,)),) = _run(1, 1, _config(**settings, early_stop_kl=0.01), steps=1, lr=3.0)
    assert 1 < stopped.actor.weights_version < 12 and metrics["actor/early_stopped"] == 1
    ((patient, (metrics,)),) = _run(1, 1, _config(**settings, early_stop_kl=1e6), steps=1, lr=3.0)
    assert patient.actor.weights_version == 12 and metrics["actor/early_stopped"] == 0


def test_truncated_completions_can_be_left_out_of_the_loss_but_not_of_the_baseline():
    config = _config(algorithm="dr_grpo", prompts_per_step=8, num_generations=4, mask_truncated_completions=True)
    reward = lambda prompt, ids, index: float(len(ids))  # noqa: E731

    def main(mesh):
        trainer = _trainer(mesh, config, reward=reward)
        batch = trainer.sampler.sample(0)
        experiences = trainer.maker.make(batch.trajectories, 0.0, StepMetrics())
        return batch.trajectories, [experience for experience in experiences if experience.in_loss]

    ((trajectories, experiences),) = run_world(1, 1, main)
    assert 0 < len(experiences) < len(trajectories)
    assert all(e.trajectory.finish_reason == "stop" for e in experiences)
    for e in experiences:
        group = [len(t.completion_ids) for t in trajectories if t.prompt_index == e.trajectory.prompt_index]
        expected = len(e.trajectory.completion_ids) - sum(group) / len(group)
        assert e.advantages.tolist() == pytest.approx([expected] * len(e.trajectory.completion_ids), abs=1e-6)


def test_the_punishment_for_length_is_taken_from_the_reward():
    config = _config(overlong_buffer=4, overlong_penalty=2.0, kl_coef=0.0)

    def main(mesh):
        trainer = _trainer(mesh, config, reward=lambda *_: 1.0)
        return trainer.maker.make(trainer.sampler.sample(0).trajectories, 0.0, StepMetrics())

    (experiences,) = run_world(1, 1, main)
    for e in experiences:
        length = len(e.trajectory.completion_ids)
        assert e.rewards.tolist() == pytest.approx([0.0] * (length - 1) + [1.0 - 2.0 * max(length - 2, 0) / 4])


def test_every_rank_runs_as_many_forwards_and_backwards():
    results = _run(4, 1, _config(prompts_per_step=2, num_generations=1), steps=3, reward=lambda *_: 1.0)
    calls = [[name for name, _ in trainer.actor.calls] for trainer, _ in results]
    assert all(mine == calls[0] for mine in calls) and "backward" in calls[0]
    scored = [sum(tokens for _, tokens in trainer.actor.calls) for trainer, _ in results]
    assert scored[0] > 0 and scored[1] > 0 and scored[2] == scored[3] == 0
    assert len({trainer.mesh.num_collectives for trainer, _ in results}) == 1


def _plain_step(config, reward):
    """One PPO step over all samples at once, transcribed from DeepSpeed-Chat: (gradient, kl, scores, values)."""

    def run(mesh):
        actor, ref = FakeActor(mesh, seed=1), FakeModel(mesh, seed=3)
        critic = FakeModel(mesh, valued=True, seed=2)
        prompts = FakePrompts(11).batch(0, config.prompts_per_step, config.seed)
        policy_terms, value_terms, num_tokens = [], [], 0
        for index, prompt in enumerate(prompts):
            for sample in range(config.num_generations):
                request = SamplingParams(
                    temperature=config.temperature,
                    max_tokens=config.max_completion_length,
                    seed=request_seed(config.seed, 0, index),
                )
                completion = actor._sample(0, sample, prompt.token_ids, request).token_ids
                score = reward(prompt.text, completion, prompt.columns["index"])
                if score is None:
                    continue
                context = [prompt.token_ids[-1], *completion[:-1]]

                def scores_of(model, context=context, completion=completion):
                    logits = model.embedding[context] @ model.head.T / config.temperature
                    return torch.log_softmax(logits, -1)[range(len(completion)), completion]

                new, reference = scores_of(actor), scores_of(ref).detach()
                old = new.detach()
                values = (critic.embedding[context] @ critic.head.T).squeeze(-1)
                rewards = -config.kl_coef * (old - reference)
                rewards[-1] += max(-config.reward_clip, min(config.reward_clip, score))
                advantages, last = [0.0] * len(completion), 0.0
                for t in reversed(range(len(completion))):
                    following = float(values[t + 1]) if t + 1 < len(completion) else 0.0
                    delta = float(rewards[t]) + config.gamma * following - float(values[t])
                    last = delta + config.gamma * config.lam * last
                    advantages[t] = last
                advantages = torch.tensor(advantages, dtype=torch.float64)
                ratio = (new - old).exp()
                policy_terms.append(torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).sum())
                value_terms.append(0.5 * (values - (advantages + values.detach())).square().sum())
                num_tokens += len(completion)
        (sum(policy_terms) / num_tokens).backward()
        (sum(value_terms) / num_tokens).backward()
        return [torch.cat([m.embedding.grad.flatten(), m.head.grad.flatten()]) for m in (actor, critic)]

    return run_world(1, 1, run)[0]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_gradients_equal_a_plain_loop():
    config = _config(gamma=0.97)
    expected = _plain_step(config, _reward)
    if isinstance(expected, Exception):
        raise expected
    for trainer, _ in _run(4, 2, config, steps=1):
        torch.testing.assert_close(trainer.actor.gradient, expected[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(trainer.critic.gradient, expected[1], rtol=1e-5, atol=1e-7)


def test_metrics_have_their_names_and_meanings():
    config = _config(num_generations=4, reward_clip=5.0)
    ((_, (metrics, second)),) = _run(1, 1, config)
    assert sorted(metrics) == sorted(METRIC_NAMES)
    assert all(math.isfinite(value) for value in metrics.values())
    # The fake generator samples from the very function that the trainer scores.
    assert metrics["rollout/logprob_gap_max"] < 1e-5
    assert metrics["rollout/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6) and metrics["actor/pg_clipfrac"] == 0
    assert metrics["flip/bytes_received"] == 6 and metrics["flip/kv_blocks"] == 7 and metrics["flip/peak_bytes"] == 11
    assert [metrics["training/global_step"], second["training/global_step"]] == [1, 2]
    assert second["training/weights_version"] == 2 and second["training/epoch"] == pytest.approx(10 / 11)
    assert metrics["completions/min_length"] >= 1 and metrics["completions/max_length"] <= 6
    assert 0 < metrics["completions/masked"] < 20 and metrics["actor/lr"] == 0.3


def test_learning_rate_0_keeps_the_ratio_at_1_and_moves_nothing():
    ((trainer, steps),) = _run(1, 1, _config(num_ppo_epochs=3), steps=3, lr=0.0)
    assert all(metrics["actor/pg_clipfrac"] == 0 for metrics in steps)
    assert all(metrics["rollout/ratio_max"] == pytest.approx(1.0, abs=1e-5) for metrics in steps)
    torch.testing.assert_close(trainer.actor.head, FakeActor(trainer.mesh, seed=1).head)


def test_a_stale_generator_shows_in_the_gap():
    class StaleActor(FakeActor):
        def generate(self, prompts, params):
            fresh, self.head = self.head, self.head * 1.5
            try:
                return super().generate(prompts, params)
            finally:
                self.head = fresh

    def main(mesh):
        trainer = _trainer(mesh, _config())
        trainer.actor = trainer.collector.actor = trainer.maker.actor = StaleActor(mesh, seed=1)
        return trainer.step()

    (metrics,) = run_world(1, 1, main)
    assert metrics["rollout/logprob_gap_mean"] > 0.1 and metrics["rollout/ratio_max"] > 1.5
    assert metrics["rollout/ratio_max"] == pytest.approx(math.exp(metrics["rollout/logprob_gap_max"]), rel=1e-4)


def test_masked_samples_do_not_touch_the_update():
    """The reward a masked sample would have had, or its being there at all, changes neither loss nor gradient."""
    config = _config(prompts_per_step=4)
    masking = lambda prompt, ids, index: None if index == 3 else float(len(ids))  # noqa: E731
    ((masked, _),) = _run(1, 1, config, steps=1, reward=masking)

    def without(mesh):
        trainer = _trainer(mesh, config, reward=lambda prompt, ids, index: float(len(ids)))
        collect = trainer.collector.collect

        def dropped(*args, **kwargs):
            rollout = collect(*args, **kwargs)
            rollout.trajectories[:] = [t for t in rollout.trajectories if t.prompt_index != 2]
            return rollout

        trainer.collector.collect = dropped
        trainer.step()
        return trainer

    (expected,) = run_world(1, 1, without)
    torch.testing.assert_close(_weights(masked), _weights(expected))


@pytest.mark.parametrize(("size", "tp_size"), [(1, 1), (4, 2)])
def test_a_step_whose_samples_are_all_masked_updates_nothing(size, tp_size):
    for trainer, (metrics,) in _run(size, tp_size, _config(), steps=1, reward=lambda *_: None):
        assert trainer.actor.weights_version == trainer.critic.weights_version == 0
        assert metrics["completions/masked"] == 15 and "reward" not in metrics and "actor/pg_loss" not in metrics
        assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_without_samples_to_train_on_is_said_once():
    with pytest.warns(UserWarning, match="all 15 samples of step 1 are masked: no update was made") as caught:
        _run(1, 1, _config(), steps=3, reward=lambda *_: None)
    assert len(caught) == 1


def test_a_reward_beyond_the_clip_is_said_once_with_both_numbers():
    rewards = {2: -9.5, 3: 7.0}  # of the first step's prompts 1 to 5
    with pytest.warns(UserWarning, match=r"a reward of -9.5 is beyond reward_clip=5, so it is clipped") as caught:
        ((_, (metrics, *_)),) = _run(1, 1, _config(), steps=3, reward=lambda prompt, ids, i: rewards.get(i, 5.0))
    assert len(caught) == 1
    assert metrics["completions/reward_clipped_ratio"] == pytest.approx(2 / 5)


def test_an_empty_minibatch_is_skipped_by_all():
    """One trainable sample in 15 minibatches: one optimizer step, on every rank."""
    config = _config(num_minibatches=15)
    reward = lambda prompt, ids, index: 1.0 if index == 1 and ids[0] % 2 else None  # noqa: E731
    for trainer, (metrics,) in _run(4, 2, config, steps=1, reward=reward):
        assert trainer.actor.weights_version == trainer.critic.weights_version == 15 - metrics["completions/masked"] > 0


def test_minibatches_partition_the_step_and_change_with_the_epoch():
    def main(mesh):
        trainer = _trainer(mesh, _config(num_minibatches=4), reward=lambda *_: 1.0)
        seen = {}
        trainer.update = lambda experiences, metrics: seen.setdefault("updates", []).append(_keys(experiences))
        make = trainer.maker.make
        trainer.maker.make = lambda *args: seen.setdefault("experiences", make(*args))
        trainer.step()
        trainer.global_step = 0
        epochs = [
            [_keys(experiences) for experiences in trainer.minibatches(seen["experiences"], epoch)]
            for epoch in range(2)
        ]
        return seen["updates"], epochs

    ((updates, epochs),) = run_world(1, 1, main)
    assert updates == epochs[0] != epochs[1]
    for epoch in epochs:
        assert [len(part) for part in epoch] == [3, 4, 4, 4]
        assert sorted(key for part in epoch for key in part) == [(p, s) for p in range(5) for s in range(3)]


def test_kl_coefficient_adapts_to_the_kl_per_sequence():
    config = _config(kl_target=0.5, kl_horizon=100)
    ((_, (first, second)),) = _run(1, 1, config, reward=lambda *_: 1.0)
    assert first["actor/kl_coef"] == 0.1
    error = max(-0.2, min(0.2, first["kl"] * first["completions/mean_length"] / 0.5 - 1))
    assert second["actor/kl_coef"] == pytest.approx(0.1 * (1 + error * 15 / 100))


def test_without_a_reference_there_is_no_penalty():
    ((_, (metrics,)),) = _run(1, 1, _config(), steps=1, ref=False, reward=lambda *_: 2.0)
    assert metrics["kl"] == 0 and metrics["critic/rewards/mean"] == 2.0 and "timing_s/ref" not in metrics


def test_resumed_equals_uninterrupted():
    config = _config(kl_target=0.5, kl_horizon=100)

    def interrupted(mesh):
        first = _trainer(mesh, config)
        first.step()
        second = _trainer(mesh, config)
        second.load_state_dict(first.state_dict())
        for new, old in zip(_weights(second), _weights(first), strict=True):
            new.data.copy_(old.data)
        return second, second.step()

    ((resumed, metrics),) = run_world(1, 1, interrupted)
    ((expected, steps),) = _run(1, 1, config)
    torch.testing.assert_close(_weights(resumed), _weights(expected))
    assert metrics["actor/kl_coef"] == steps[1]["actor/kl_coef"] != 0.1


def test_a_plain_function_is_a_reward():
    def half(completion_ids, index):
        return [0.5 if i % 2 else None for i in index]

    def main(mesh):
        trainer = _trainer(mesh, _config())
        plain = PPOTrainer(trainer.actor, trainer.critic, None, half, trainer.prompts, trainer.config)
        return plain.step()

    (metrics,) = run_world(1, 1, main)
    assert metrics["reward"] == metrics["rewards/half/mean"] == 0.5 and metrics["completions/masked"] > 0


def test_train_logs_on_the_main_rank_and_calls_back_on_all():
    class Logger:
        def __init__(self):
            self.lines = []

        def log(self, step, metrics):
            self.lines.append((step, metrics["training/global_step"]))

    def main(mesh):
        logger, called = Logger(), []
        trainer = _trainer(
            mesh,
            _config(num_ppo_epochs=2, num_minibatches=3),
            logger=logger,
            callbacks=[lambda step, metrics: called.append((step, metrics["reward"]))],
        )
        trainer.train(2)
        trainer.train(2)
        return logger.lines, called, trainer.actor.total_steps, trainer.critic.total_steps

    for rank, (lines, called, actor_steps, critic_steps) in enumerate(run_world(2, 1, main)):
        assert lines == ([(1, 1), (2, 2)] if rank == 0 else [])
        assert [step for step, _ in called] == [1, 2]
        assert actor_steps == critic_steps == 2 * 2 * 3


def test_evaluate_is_greedy_repeatable_and_the_same_on_every_rank():
    def main(mesh):
        trainer = _trainer(mesh, _config(), lr=5.0)
        rows = trainer.prompts.rows[:3]
        first = trainer.evaluate(rows)
        trainer.step()
        return first, trainer.evaluate(rows)

    ((before, after),) = run_world(1, 1, main)
    assert [sample.prompt for sample in before] == ["prompt 0", "prompt 1", "prompt 2"]
    assert before != after
    for ranks_before, ranks_after in run_world(4, 2, main):
        assert (ranks_before, ranks_after) == (before, after)


def test_truncated_sampling_is_said_once():
    def main(mesh):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _train(mesh, _config(top_p=0.9, top_k=4))
        return [str(w.message) for w in caught if "truncate" in str(w.message)]

    (messages,) = run_world(1, 1, main)
    assert len(messages) == 1 and "--top_p 1" in messages[0]


def test_completions_of_every_kind_get_their_reward_on_their_last_token():
    """Stopped at EOS, cut off, of one token: the sum of rewards without a KL penalty is the reward, on the last one."""

    def main(mesh):
        config = _config(kl_coef=0.0, prompts_per_step=11, num_generations=12, temperature=3.0)
        trainer = _trainer(mesh, config, reward=lambda *_: 4.0)
        made = []
        make = trainer.maker.make
        trainer.maker.make = lambda *args: made.append(make(*args)) or made[0]
        trainer.step()
        return made[0]

    (experiences,) = run_world(1, 1, main)
    kinds = {(e.trajectory.finish_reason, len(e.trajectory.completion_ids) == 1) for e in experiences}
    assert {("stop", True), ("stop", False), ("length", False)} <= kinds
    for experience in experiences:
        ids = experience.trajectory.completion_ids
        assert experience.rewards.tolist() == [0.0] * (len(ids) - 1) + [4.0]
        assert (experience.trajectory.finish_reason == "stop") == (ids[-1] == EOS)
