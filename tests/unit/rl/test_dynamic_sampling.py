"""Groups without spread are replaced by the next prompts', the same on every rank, and a resumed run draws on."""

from __future__ import annotations

import pytest
from rl_fakes import FakeActor, FakePrompts, FakeReward, run_world

from hybrid.config import PPOConfig
from hybrid.data.prompts import Prompt, PromptDataset
from hybrid.rl.metrics import StepMetrics
from hybrid.rl.rollout import ScoredSample
from hybrid.rl.sampling import groups_with_spread
from hybrid.rl.trainer import PPOTrainer


def _config(**changes) -> PPOConfig:
    settings = {"algorithm": "dapo", "prompts_per_step": 4, "num_generations": 3, "max_completion_length": 6, "seed": 1}
    return PPOConfig(**(settings | changes))


def _odd_prompts_teach(prompt: str, completion: list[int], index: int) -> float:
    """Even prompts' completions all get one reward."""
    return float(sum(completion)) if index % 2 else 1.0


def _trainer(mesh, config, reward=_odd_prompts_teach) -> PPOTrainer:
    return PPOTrainer(FakeActor(mesh, lr=0.3, seed=1), None, None, FakeReward(reward), FakePrompts(100), config)


def _keys(trajectories):
    return sorted((t.prompt_index, t.sample_index) for t in trajectories)


@pytest.mark.parametrize(("size", "tp_size"), [(1, 1), (2, 1), (4, 2), (8, 1)])
def test_a_step_is_filled_with_groups_that_differ(size, tp_size):
    batches = run_world(size, tp_size, lambda mesh: _trainer(mesh, _config()).sampler.sample(0))
    for batch in batches:
        # Seed 1: prompts 1 to 4, of which 1 and 3 teach; then 5 and 6; then 7.
        assert batch.kept == [0, 2, 4, 6] and batch.num_drawn == 7
        assert [sample.prompt for sample in batch.samples[::3]] == [f"prompt {i}" for i in range(1, 8)]
        assert len(batch.trained) == 12 and {sample.prompt_index for sample in batch.trained} == {0, 2, 4, 6}
    assert _keys(t for batch in batches for t in batch.trajectories) == [(p, s) for p in range(4) for s in range(3)]


def test_rounds_are_limited_and_what_is_missing_is_said_once():
    def main(mesh):
        trainer = _trainer(mesh, _config(max_resamplings=1))
        with pytest.warns(UserWarning, match=r"6 prompts of step 1 gave 3 groups with spread in reward, of 4 wanted"):
            metrics = trainer.step()
        return metrics, trainer.step(), trainer.sampler.position

    ((first, second, position),) = run_world(1, 1, main)
    assert (first["rollout/resampled_groups"], first["rollout/missing_groups"]) == (2, 1)
    assert second["training/epoch"] == pytest.approx(position / 100) and position == 12
    assert first["frac_reward_zero_std"] == pytest.approx(0.5)  # of all that were drawn


def test_a_step_without_any_spread_makes_no_update():
    def main(mesh):
        trainer = _trainer(mesh, _config(max_resamplings=2), reward=lambda *_: 1.0)
        return trainer.step(), trainer.actor.weights_version

    with pytest.warns(UserWarning, match="12 prompts of step 1 gave 0 groups with spread"):
        results = run_world(2, 1, main)
    for metrics, version in results:
        assert version == 0 and metrics["rollout/missing_groups"] == 4 and metrics["reward"] == 1.0


def test_a_resumed_run_draws_the_prompts_that_follow():
    def main(mesh):
        whole = _trainer(mesh, _config())
        whole.step()
        state = whole.state_dict()
        resumed = _trainer(mesh, _config())
        resumed.load_state_dict(state)
        resumed.actor.embedding.data.copy_(whole.actor.embedding.data)
        resumed.actor.head.data.copy_(whole.actor.head.data)
        whole.step()
        resumed.step()
        return state, whole.last_samples, resumed.last_samples

    ((state, whole, resumed),) = run_world(1, 1, main)
    assert state["prompts_drawn"] == 7 and whole[0].prompt == "prompt 8"
    assert whole == resumed


def test_a_state_without_a_place_among_the_prompts_follows_from_the_step():
    def main(mesh):
        trainer = _trainer(mesh, _config(dynamic_sampling=False))
        state = trainer.state_dict() | {"global_step": 5}
        del state["prompts_drawn"]
        trainer.load_state_dict(state)
        return trainer.sampler.position

    assert run_world(1, 1, main) == [20]


def test_masked_samples_are_no_spread():
    def sample(prompt, reward):
        return ScoredSample(prompt, 0, "p", "c", 2, 4, "stop", reward, {})

    rewards = [(0, 1.0), (0, None), (1, 1.0), (1, 1.0), (2, None), (3, 0.0), (3, 1.0), (3, None)]
    assert groups_with_spread([sample(*pair) for pair in rewards]) == [3]


def test_fewer_prompts_than_a_step_has_are_drawn_again_each_time_as_a_group_of_its_own():
    config = _config(algorithm="dr_grpo", prompts_per_step=5, num_generations=4)
    rows = [Prompt([3], "a", {"index": 1}), Prompt([3], "a", {"index": 1})]  # of the same text, at that

    def main(mesh):
        trainer = PPOTrainer(
            FakeActor(mesh, seed=1), None, None, FakeReward(_odd_prompts_teach), PromptDataset(rows), config
        )
        batch = trainer.sampler.sample(0)
        return batch, trainer.maker.make(batch.trajectories, 0.0, StepMetrics())

    ((batch, experiences),) = run_world(1, 1, main)
    groups = {index: [s for s in batch.samples if s.prompt_index == index] for index in range(5)}
    assert [len(group) for group in groups.values()] == [4] * 5
    assert len({tuple(sample.completion for sample in group) for group in groups.values()}) == 5  # seeds of their own
    for index in groups:
        mine = [float(e.advantages[0]) for e in experiences if e.trajectory.prompt_index == index]
        assert sum(mine) == pytest.approx(0, abs=1e-5) and any(mine)
