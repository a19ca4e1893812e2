"""Several processes share the samples of a slow function; what happens to one is no matter of the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybrid.arguments import UsageError, parse_arguments
from hybrid.config import ModelConfig
from hybrid.rewards import FunctionReward, RewardError, load_reward
from hybrid.rewards.pool import auto_workers

FILE = """
import os, time

def slow(completion):
    if completion == "hang":
        time.sleep(60)
    if completion == "die" and os.path.exists(__file__ + ".died"):
        return 9.0
    if completion == "die":
        open(__file__ + ".died", "w").close()
        os.kill(os.getpid(), 9)
    if completion == "always dies":
        os._exit(3)
    time.sleep(0.2)
    return float(completion)

def verl(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.05 * (10 - int(solution_str)) / 10)  # the first ones end last
    return {"score": float(solution_str == ground_truth), "index": extra_info["index"]}

def quick(completion):
    return {"score": float(completion), "pid": os.getpid(), "threads": int(os.environ["OMP_NUM_THREADS"])}

def batch(completions):
    return [1.0] * len(completions)

async def waits(completion):
    return os.getpid()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(FILE)
    return path


def score(reward: FunctionReward, completions: list[str], **columns: list[Any]) -> Any:
    return reward.score([f"p{i}" for i in range(len(completions))], completions, [[1]] * len(completions), columns)


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "worker.py" in " ".join(child.cmdline())]


def test_slow_samples_are_worked_on_side_by_side(file: Path) -> None:
    reward = load_reward(f"{file}:slow", workers=4)
    assert score(reward, ["1"] * 4).rewards == [1.0] * 4  # the processes are there now
    started = time.monotonic()
    assert score(reward, list("12345678")).rewards == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert time.monotonic() - started < 1.0  # one after another: 1.6 s
    assert len(workers()) == 4
    reward.close()
    assert not workers()


def test_results_come_in_the_order_of_the_samples(file: Path) -> None:
    reward = load_reward(f"{file}:verl", workers=3)
    columns = {"ground_truth": list("0103050709"), "extra_info": [{"index": i} for i in range(10)]}
    output = score(reward, list("0123456789"), **columns)
    assert output.rewards == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert output.parts["verl/index"] == list(range(10))
    reward.close()


def test_one_that_hangs_is_masked_alone_while_the_others_go_on(file: Path) -> None:
    reward = load_reward(f"{file}:slow", timeout=0.5, workers=4)
    assert score(reward, ["1"] * 4).rewards == [1.0] * 4
    started = time.monotonic()
    with pytest.warns(UserWarning, match=r"slow took longer than 0.5 s for sample 1 \(prompt 'p1'.*masked") as caught:
        output = score(reward, ["1", "hang", *"345678"])
    assert time.monotonic() - started < 1.5  # one after another: 1.9 s
    assert len(caught) == 1
    assert output.rewards == [1.0, None, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert output.timed_out == (1,)
    with warnings.catch_warnings(action="error"):
        assert score(reward, list("1234")).rewards == [1.0, 2.0, 3.0, 4.0]
    reward.close()
    assert not workers()


def test_a_process_that_dies_is_replaced(file: Path) -> None:
    reward = load_reward(f"{file}:slow", workers=2)
    assert score(reward, ["1", "die", "3", "4"]).rewards == [1.0, 9.0, 3.0, 4.0]
    assert len(workers()) == 2
    for process in workers():  # also while nobody asks it anything
        process.kill()
        process.wait()
    assert score(reward, ["5", "6"]).rewards == [5.0, 6.0]
    message = r"raised ProcessEnded: its process ended with exit code 3, on sample 2 \(prompt 'p2'"
    with pytest.raises(RewardError, match=message):
        score(reward, ["1", "2", "always dies", "4"])
    reward.close()
    alone = load_reward(f"{file}:slow")
    assert score(alone, ["1"]).rewards == [1.0]
    (process,) = workers()
    process.kill()
    process.wait()
    assert score(alone, ["2"]).rewards == [2.0]
    alone.close()
    assert not workers()


def test_the_first_sample_that_raises_is_named_whichever_ends_first(file: Path) -> None:
    reward = load_reward(f"{file}:slow", workers=3)
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"raised ValueError: .*'b', on sample 1 \(prompt 'p1'") as caught:
        score(reward, ["1", "b", "c", *["hang"] * 5])  # what comes after it is not waited for
    assert time.monotonic() - started < 10
    assert "in slow" in caught.value.details
    assert score(reward, ["4", "5", "6"]).rewards == [4.0, 5.0, 6.0]  # no late answer meets the next question
    reward.close()
    assert not workers()


def test_auto_is_the_ranks_part_of_the_cores(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for cores, ranks, expected in ((2, 1, 2), (2, 4, 1), (64, 1, 8), (64, 16, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert auto_workers() == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")  # 2 of the 64 cores
    reward = load_reward(f"{file}:quick", workers="auto")
    output = score(reward, list("12345678"))
    assert output.rewards == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert 1 <= len(set(output.parts["quick/pid"])) <= 2
    assert output.parts["quick/threads"] == [1.0] * 8
    reward.close()
    reward = load_reward(f"{file}:quick", workers=4)
    score(reward, ["1", "2"])
    assert len(workers()) == 2  # no more than there are samples
    reward.close()


def test_a_setting_without_effect_is_said(file: Path) -> None:
    with pytest.warns(
        UserWarning, match="reward_workers=4 has no effect on batch, which takes a batch at once; define"
    ):
        reward = load_reward(f"{file}:batch", workers=4)
    assert score(reward, ["1", "2"]).rewards == [1.0, 1.0]
    reward.close()
    with pytest.warns(UserWarning, match="reward_workers=4 has no effect on waits, which is async"):
        reward = load_reward(f"{file}:waits", workers=4)
    assert len(set(score(reward, ["1", "2"]).rewards)) == 1
    reward.close()
    with pytest.warns(UserWarning, match="has no effect on quick, which is called in this process"):
        load_reward(f"{file}:quick", workers=4, timeout=0)
    with pytest.warns(UserWarning, match="has no effect on http://127.0.0.1:9/judge, which is asked for a batch"):
        load_reward("http://127.0.0.1:9/judge", workers=4)
    with pytest.warns(UserWarning, match="cannot be imported by another process, so it runs in a thread"):
        reward = FunctionReward(lambda completion: float(completion), workers=4)
    assert score(reward, ["1", "2"]).rewards == [1.0, 2.0]
    with warnings.catch_warnings(action="error"):
        for name in ("batch", "waits", "quick"):
            load_reward(f"{file}:{name}", workers="auto", timeout=0)
            load_reward(f"{file}:{name}", workers="auto")
        load_reward("http://127.0.0.1:9/judge", workers="auto")
    assert not workers()


def test_the_flag() -> None:
    assert parse_arguments([ModelConfig], [])[0].reward_workers == "auto"
    assert parse_arguments([ModelConfig], ["--reward_workers", "4"])[0].reward_workers == 4
    with pytest.raises(ValueError, match="reward_workers=0 is too small; set it to 1 or more"):
        parse_arguments([ModelConfig], ["--reward_workers", "0"])
    with pytest.raises(UsageError, match="--reward_workers=many is not a whole number or one of auto"):
        parse_arguments([ModelConfig], ["--reward_workers", "many"])
    with pytest.raises(ValueError, match="workers=0 is too small"):
        FunctionReward(lambda completion: 1.0, workers=0)


# Two programs for one import of torch.
PROGRAM = """
import os, signal, sys
from hybrid.rewards import load_reward
os.fork()
signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background, a program would not see it
reward = load_reward(sys.argv[1] + ":slow", timeout=60, workers=3)
reward.score(["p"] * 3, ["1"] * 3, [[1]] * 3, {})
sys.stdout.write(f"{os.getpid()}\\n")
sys.stdout.flush()
reward.score(["p"] * 3, ["hang"] * 3, [[1]] * 3, {})
"""


def test_nothing_is_left_behind_by_an_interrupt_or_a_kill(file: Path) -> None:
    (file.parent / "tmp").mkdir()
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(file)],
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "TMPDIR": str(file.parent / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    pids = {int(running.stdout.readline()) for _ in range(2)}
    time.sleep(0.3)  # the processes are at work
    forked = psutil.Process((pids - {running.pid}).pop())
    in_fork = forked.children()
    here = [child for child in psutil.Process(running.pid).children() if child.pid != forked.pid]
    assert (len(in_fork), len(here)) == (3, 3)
    forked.kill()
    assert_gone(in_fork)
    assert not [child for child in here if not child.is_running()]
    running.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in running.communicate(timeout=30)[1]
    assert_gone(here)
    assert not list((file.parent / "tmp").iterdir())


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
