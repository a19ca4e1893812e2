"""A reward behind HTTP: what goes out, what comes back, and what is done when nothing does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hybrid.rewards import FunctionReward, RemoteFunction, RewardError, load_reward, remote
from hybrid.rewards.function import is_function_path

PROMPTS = ["p0", "p1", "p2"]
COMPLETIONS = ["a", "bb", "ccc"]
IDS = [[1], [2], [3]]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.01)


@contextmanager
def serving(answer: Callable[[Any], tuple[int, Any]]) -> Iterator[str]:
    """A server that answers ``answer(body)``: a status, and JSON or bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = answer({"path": self.path, **body})
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lengths(body: Any) -> tuple[int, Any]:
    return 200, {"rewards": [len(completion) for completion in body["completions"]]}


def score(reward: FunctionReward, **columns: list[Any]) -> Any:
    return reward.score(PROMPTS, COMPLETIONS, IDS, columns)


def test_a_batch_goes_out_and_rewards_come_back() -> None:
    bodies: list[Any] = []

    def answer(body: Any) -> tuple[int, Any]:
        bodies.append(body)
        return 200, {"rewards": [1, None, 0.5], "style": [1, 2, 3], "extra_logs": {"judge_s": [0.1, 0.2, 0.3]}}

    with serving(answer) as url:
        assert is_function_path(f"{url}/v1/judge?x=1")
        reward = load_reward(f"{url}/v1/judge?x=1")
        output = score(reward, label=["x", "y", "z"], extra_info=[{"a": 1}, None, {}])
    assert bodies == [
        {
            "path": "/v1/judge?x=1",
            "prompts": PROMPTS,
            "completions": COMPLETIONS,
            "label": ["x", "y", "z"],
            "extra_info": [{"a": 1}, None, {}],
        }
    ]
    assert output.rewards == [1.0, None, 0.5]
    assert output.parts == {
        "judge": [1.0, None, 0.5],
        "judge/style": [1.0, 2.0, 3.0],
        "judge/judge_s": [0.1, 0.2, 0.3],
    }


def test_several_servers_share_the_batch() -> None:
    asked: list[tuple[int, list[str]]] = []

    def answer(number: int) -> Callable[[Any], tuple[int, Any]]:
        def record(body: Any) -> tuple[int, Any]:
            asked.append((number, body["completions"]))
            return lengths(body)

        return record

    threads = threading.active_count()
    with serving(answer(0)) as first, serving(answer(1)) as second:
        output = score(load_reward(f"{first}/a,{second}/a"))
    assert sorted(asked) == [(0, ["a"]), (1, ["bb", "ccc"])]
    assert output.rewards == [1.0, 2.0, 3.0]
    assert threading.active_count() == threads


def test_trouble_of_the_servers_is_tried_again_and_at_another_server() -> None:
    tries: list[int] = []

    def answer(body: Any) -> tuple[int, Any]:
        tries.append(1)
        return (503, {"error": "loading"}) if len(tries) < 3 else lengths(body)

    with serving(answer) as url:
        assert score(load_reward(url)).rewards == [1.0, 2.0, 3.0]
    assert len(tries) == 3
    with serving(lengths) as url:
        gone = RemoteFunction(["http://127.0.0.1:9", url])
        assert score(FunctionReward(gone)).rewards == [1.0, 2.0, 3.0]


def test_no_server_is_one_sentence() -> None:
    reward = FunctionReward(RemoteFunction(["http://127.0.0.1:9/judge"], retries=2), timeout=None)
    with pytest.raises(RewardError, match=r"judge could not be had in 3 tries, the last at .*ConnectionRefusedError"):
        score(reward)


@pytest.mark.parametrize(
    ("status", "reply", "message", "tries"),
    [
        (500, {"error": "out of memory"}, "in 5 tries, .* it answered 500 .*out of memory", 5),
        (404, {"detail": "no such path"}, "refused the batch: it answered 404 .*no such path", 1),
        (307, b"", "refused the batch: it answered 307", 1),
        (200, b"<html>", "answered no JSON: '<html>'", 1),
        (200, {"scores": [1, 2, 3]}, r"it must answer {\"rewards\": \[...\]}", 1),
        (200, [1, 2, 3], "it must answer", 1),
        (200, {"rewards": [1, 2]}, "answered 2 rewards for 3 samples; it must answer one for each", 1),
        (200, b'{"rewards": [1, NaN, 2]}', r"judge returned nan for sample 1 \(prompt 'p1'", 1),
        (200, {"rewards": [1, "2", 3]}, r"judge returned '2' for sample 1 ", 1),
    ],
)
def test_a_wrong_answer_is_named(status: int, reply: Any, message: str, tries: int) -> None:
    asked: list[Any] = []

    def answer(body: Any) -> tuple[int, Any]:
        asked.append(body)
        return status, reply

    with serving(answer) as url, pytest.raises(RewardError, match=message):
        score(load_reward(f"{url}/judge"))
    assert len(asked) == tries


@pytest.mark.parametrize("drip", [False, True])
def test_a_server_that_hangs_is_cut_off_and_not_asked_again(drip: bool) -> None:
    asked: list[None] = []
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(None)
            if drip:  # always something, never the end
                self.send_response(200)
                self.end_headers()
                while not released.wait(0.02):
                    try:
                        self.wfile.write(b" ")
                    except OSError:
                        return
            released.wait(10)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/judge"
    started = time.monotonic()
    with pytest.raises(RewardError, match="took longer than 0.3 s to answer; set --reward_timeout to more"):
        score(load_reward(url, timeout=0.3))
    assert time.monotonic() - started < 3
    assert len(asked) == 1
    released.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("url", ["http://", "http://host:port/x", "https:///path"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        load_reward(url)


def test_columns_that_are_no_json_are_named() -> None:
    with pytest.raises(RewardError, match="column image cannot be sent to a remote reward"):
        score(load_reward("http://127.0.0.1:9/judge"), image=[b"", b"", b""], other=[1, 2, 3])
