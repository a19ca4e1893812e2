"""A function that hangs, in Python, in C or in a coroutine, is cut off, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybrid.rewards import FunctionReward, RewardError, callers, load_reward

PROMPTS = ["p0", "p1", "p2"]
COMPLETIONS = ["1", "hang", "3"]
IDS = [[1], [2], [3]]

FILE = """
import asyncio, os, re, subprocess, sys, time

def in_python(completion):
    while completion == "hang":
        pass
    return float(completion)

def in_c(completion):  # re holds the interpreter's lock
    if completion == "hang":
        re.match(r"(a+)+$", "a" * 60 + "b")
    return float(completion)

def verl(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        time.sleep(60)
    return {"score": float(solution_str), "pid": os.getpid()}

async def cancelled(completion):
    if completion == "hang":
        await asyncio.sleep(60)
    return float(completion)

async def blocking(completion):
    if completion == "hang":
        time.sleep(60)
    return float(completion)

def batch(completions):
    while "hang" in completions:
        pass
    return [float(c) for c in completions]

def children(completion):
    if completion == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(__file__ + ".pid", "w").write(str(child.pid))
        child.wait()
    return float(completion)

def dies(completions):
    for completion in completions:
        if completion == "die":
            os.kill(os.getpid(), 9)
    return [1.0] * len(completions)

def raises(completions):
    return [1.0 / (completion != "hang") for completion in completions]

def prints(completions):
    print("a word of the function's")
    return range(len(completions))

def signals(completion):
    import signal
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # only in a main thread
    return 1.0

def odd(completions):
    return {object(): 1}.keys()

class Refusal(Exception):
    def __init__(self, lock):
        super().__init__("no judge for this")
        self.lock = lock

def refuses(completion):
    import threading
    if completion == "hang":
        raise Refusal(threading.Lock())  # cannot be pickled
    return 1.0

def locks(completion):
    import threading
    return threading.Lock()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(FILE)
    return path


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("name", ["in_python", "in_c", "verl", "cancelled", "blocking", "children"])
def test_the_sample_that_hangs_is_masked_alone(file: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "GRACE_SECONDS", 0.3)
    before = set(children())
    reward = load_reward(f"{file}:{name}", timeout=0.5)
    started = time.monotonic()
    with pytest.warns(UserWarning, match=rf"{name} took longer than 0.5 s for sample 1 \(prompt 'p1', .*masked"):
        output = reward.score(PROMPTS, COMPLETIONS, IDS, {"ground_truth": [0, 0, 0]})
    assert time.monotonic() - started < 15
    assert output.rewards == [1.0, None, 3.0]
    assert output.timed_out == (1,)
    assert output.parts[f"{name}/timed_out"] == [0.0, 1.0, 0.0]
    with warnings.catch_warnings(action="error"):  # it goes on working
        assert reward.score(["p"], ["4"], [[1]], {"ground_truth": [0]}).rewards == [4.0]
    reward.close()
    assert set(children()) == before
    if name == "children":  # those of the function's process too, though they are not ours
        assert not is_running(int(Path(f"{file}.pid").read_text()))


def test_a_batch_that_hangs_is_an_error_that_names_the_function(file: Path) -> None:
    reward = load_reward(f"{file}:batch", timeout=0.3)
    message = r"batch took longer than 0.3 s for 3 samples, the first sample 0 .*; set --reward_timeout to more, or"
    with pytest.raises(RewardError, match=message):
        reward.score(PROMPTS, COMPLETIONS, IDS, {})
    assert not [child for child in children() if "worker.py" in " ".join(child.cmdline())]
    assert reward.score(["p"], ["4"], [[1]], {}).rewards == [4.0]
    reward.close()


def test_what_happens_in_the_process_is_reported_from_here(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reward = load_reward(f"{file}:raises")
    with pytest.raises(RewardError, match=r"raised ZeroDivisionError: .*, on sample 1 \(prompt 'p1'") as caught:
        reward.score(PROMPTS, COMPLETIONS, IDS, {})
    assert "in raises" in caught.value.details and "worker.py" not in caught.value.details
    reward.close()
    prints = load_reward(f"{file}:prints")
    with pytest.raises(RewardError, match="returned range; return a list"):
        prints.score(PROMPTS, COMPLETIONS, IDS, {})
    prints.close()
    assert "a word of the function's" in capfd.readouterr().out
    odd = load_reward(f"{file}:odd")
    with pytest.raises(RewardError, match="returned dict_keys; return a list"):
        odd.score(PROMPTS, COMPLETIONS, IDS, {})
    odd.close()


def test_a_process_that_dies_names_the_sample(file: Path) -> None:
    reward = load_reward(f"{file}:dies")
    with pytest.raises(RewardError, match="its process was killed by signal 9, on sample 2 "):
        reward.score(PROMPTS, ["a", "b", "die"], IDS, {})
    assert reward.score(PROMPTS, ["a", "b", "c"], IDS, {}).rewards == [1.0] * 3
    reward.close()


def test_a_function_of_a_file_has_a_main_thread_and_one_process(file: Path) -> None:
    reward = load_reward(f"{file}:signals")
    assert reward.score(PROMPTS, COMPLETIONS, IDS, {}).rewards == [1.0] * 3
    reward.close()
    pids = load_reward(f"{file}:verl")
    columns = {"ground_truth": [0, 0]}
    (first, second) = pids.score(PROMPTS[:2], ["1", "2"], IDS[:2], columns).parts["verl/pid"]
    assert first == second != os.getpid()
    assert pids.score(PROMPTS[:1], ["1"], IDS[:1], columns).parts["verl/pid"] == [first]
    pids.close()
    pids.close()
    here = load_reward(f"{file}:verl", timeout=0)
    assert here.score(PROMPTS[:1], ["1"], IDS[:1], columns).parts["verl/pid"] == [float(os.getpid())]


def test_what_cannot_be_sent_back_is_told_in_words(file: Path) -> None:
    for name, message in (
        ("refuses", r"refuses raised Refusal: no judge for this, on sample 1 \(prompt 'p1', completion 'hang'\)"),
        ("locks", r"locks returned '<unlocked _thread.lock object at .*' for sample 0 "),
    ):
        reward = load_reward(f"{file}:{name}")
        with pytest.raises(RewardError, match=message):
            reward.score(PROMPTS, COMPLETIONS, IDS, {})
        reward.close()


def test_an_object_that_cannot_be_sent_is_called_here() -> None:
    class Judge:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, completion: str, answer: str | None) -> float | None:
            with self.lock:
                return None if answer is None else float(completion == answer)

    with pytest.warns(UserWarning, match="Judge cannot be imported by another process, so it runs in a thread"):
        reward = FunctionReward(Judge(), own_process=True)
    # A column that some rows lack.
    assert reward.score(PROMPTS, COMPLETIONS, IDS, {"answer": ["1", None, "2"]}).rewards == [1.0, None, 0.0]


def test_columns_that_cannot_be_sent_are_named(file: Path) -> None:
    reward = load_reward(f"{file}:verl")
    with pytest.raises(ValueError, match="column extra_info holds objects that cannot be sent"):
        reward.score(["p"], ["1"], [[1]], {"ground_truth": [0], "extra_info": [lambda: 0]})
    reward.close()


def test_closures_run_in_a_thread_that_is_given_up_on() -> None:
    before = threading.active_count()

    def f(completion: str) -> float:
        while completion == "hang":
            pass
        return float(completion)

    with pytest.warns(UserWarning, match="cannot be imported by another process, so it runs in a thread"):
        reward = FunctionReward(f, timeout=0.2, own_process=True)
    with pytest.warns(UserWarning, match="took longer than 0.2 s for sample 1"):
        assert reward.score(PROMPTS, COMPLETIONS, IDS, {}).rewards == [1.0, None, 3.0]
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before  # an endless loop in Python ends when asked
    assert children() == [] or not [c for c in children() if "worker.py" in " ".join(c.cmdline())]


def test_a_module_level_function_can_have_its_own_process() -> None:
    from hybrid.data.tasks import larger_number

    columns = {"answer": [9], "numbers": [(3, 9)]}
    reward = FunctionReward(larger_number, own_process=True)
    assert reward.score(["p"], ["9"], [[1]], columns).rewards == [1.0]
    assert [child for child in children() if "worker.py" in " ".join(child.cmdline())]
    reward.close()
    assert not [child for child in children() if "worker.py" in " ".join(child.cmdline())]


def test_async_batches_are_cancelled_and_clean_up() -> None:
    cleaned: list[bool] = []

    async def f(completions: list[str]) -> list[float]:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)
        return []

    with pytest.raises(RewardError, match="f took longer than 0.1 s for 3 samples"):
        FunctionReward(f, timeout=0.1).score(PROMPTS, COMPLETIONS, IDS, {})
    assert cleaned == [True]


def test_its_own_time_out_is_no_cut_off() -> None:
    async def f(completion: str) -> float:
        raise TimeoutError("no judge")

    with pytest.raises(RewardError, match="raised TimeoutError: no judge, on sample 0"):
        FunctionReward(f).score(PROMPTS, COMPLETIONS, IDS, {})


def test_a_function_that_needs_the_main_thread_is_told_how_to_have_it() -> None:
    def f(completions: list[str]) -> list[float]:
        import signal

        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match="signal only works in main thread.*; set its timeout to 0"):
        FunctionReward(f).score(PROMPTS, COMPLETIONS, IDS, {})
    assert FunctionReward(f, timeout=0).score(PROMPTS, COMPLETIONS, IDS, {}).rewards == [1.0] * 3


def test_the_process_ends_with_the_program(file: Path) -> None:
    program = f"""
import os, signal, sys, threading, time
from hybrid.rewards import load_reward
reward = load_reward({str(file)!r} + ":in_c", timeout=60)
threading.Thread(target=reward.score, args=(["p"], ["hang"], [[1]], {{}}), daemon=True).start()
while reward._caller._process is None:
    time.sleep(0.01)
time.sleep(0.5)
print(reward._caller._process.pid, flush=True)
if sys.argv[1] == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).resolve().parents[3]
    programs = [
        subprocess.Popen([sys.executable, "-c", program, how], cwd=root, stdout=subprocess.PIPE, text=True)
        for how in ("exits", "is killed")
    ]
    for running in programs:
        pid = int(running.communicate(timeout=60)[0])
        deadline = time.monotonic() + 5
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_limit_is_a_number_of_seconds(timeout: float) -> None:
    def f(completions: Any) -> Any: ...

    with pytest.raises(ValueError, match="is no number of seconds; set it to 0"):
        FunctionReward(f, timeout=timeout)


def test_an_async_object_is_waited_for_also_inside_a_loop() -> None:
    class Judge:
        async def __call__(self, completions: list[str]) -> list[int]:
            await asyncio.sleep(0)
            return [len(completion) for completion in completions]

    async def notebook(timeout: float) -> list[float | None]:
        return FunctionReward(Judge(), timeout=timeout).score(PROMPTS, COMPLETIONS, IDS, {}).rewards

    for timeout in (0.0, 5.0):
        assert asyncio.run(notebook(timeout)) == [1.0, 4.0, 1.0]
