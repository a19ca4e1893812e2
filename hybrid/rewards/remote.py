"""Rewards from a server: a batch goes out as JSON, and a number for each of its samples comes back."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hybrid.rewards.protocol import RewardError

# Waits of about 0.5, 1, 2 and 4 seconds outlast a server that is being restarted.
RETRIES = 4
FIRST_WAIT_SECONDS = 0.5

_MAX_SHOWN = 200
_CHUNK_BYTES = 1 << 16


class _Unavailable(Exception):
    """The server could not be reached or is in trouble; another try may find it well."""


@dataclass(frozen=True, slots=True)
class Server:
    """One address of the form http://host:port/path."""

    url: str
    host: str
    port: int | None
    target: str  # path and query
    is_https: bool

    @classmethod
    def parse(cls, url: str) -> Server:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"reward {url!r} is no address: {error}; write it as http://host:port/path") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"reward {url!r} is no address; write it as http://host:port/path")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(url, parts.hostname, port, target, parts.scheme == "https")

    @property
    def name(self) -> str:
        """For metrics: the path's last part, else the host."""
        return self.target.partition("?")[0].strip("/").rpartition("/")[2] or self.host


class RemoteFunction:
    """A reward function that asks one server, or several that each get a share of the batch.

    A request is ``POST {"prompts": [...], "completions": [...], column: [...], ...}`` and its answer
    ``{"rewards": [...]}``, with null for a sample to be masked; lists of numbers besides are sub-scores. A server that
    cannot be reached or answers 5xx is asked again, after waits that double; where there are several, the next one is.
    Proxies are not used and redirects are not followed.

    Args:
        urls: the servers' addresses.
        timeout: seconds for each request; None: no limit.
        retries: more tries after the first.
    """

    def __init__(self, urls: Sequence[str], *, timeout: float | None = 60.0, retries: int = RETRIES) -> None:
        if not urls:
            raise ValueError("a remote reward needs the address of a server")
        self.servers = [Server.parse(url) for url in urls]
        self.timeout = timeout or None
        self.retries = retries
        self.__name__ = self.servers[0].name

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> dict[str, Any]:
        """Raises RewardError: no server answered, or one answered something else."""
        columns.pop("completion_ids", None)  # means nothing to a server, which has no tokenizer
        batch = {**columns, "prompts": prompts, "completions": completions}
        num_shares = min(len(self.servers), len(prompts))
        bounds = [len(prompts) * share // num_shares for share in range(num_shares + 1)]
        bodies = [
            _encoded({name: values[low:high] for name, values in batch.items()})
            for low, high in zip(bounds, bounds[1:], strict=False)
        ]
        counts = [high - low for low, high in zip(bounds, bounds[1:], strict=False)]
        if num_shares == 1:
            return self._ask(0, bodies[0], counts[0])
        with ThreadPoolExecutor(num_shares, thread_name_prefix="reward") as threads:
            answers = list(threads.map(self._ask, range(num_shares), bodies, counts))
        return _joined(answers, counts)

    def _ask(self, first: int, body: bytes, count: int) -> dict[str, Any]:
        """One share's answer, from the ``first`` server or those after it."""
        reason = ""
        for attempt in range(self.retries + 1):
            server = self.servers[(first + attempt) % len(self.servers)]
            if attempt:
                # Not all ranks at once.
                time.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
            try:
                return _checked(server, self._request(server, body), count)
            except _Unavailable as error:
                reason = f"{server.url}: {error}"
        raise RewardError(
            f"the remote reward {self.__name__} could not be had in {self.retries + 1} tries, the last at {reason}; "
            "see that the server runs and --reward is its address"
        )

    def _request(self, server: Server, body: bytes) -> bytes:
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        kind = http.client.HTTPSConnection if server.is_https else http.client.HTTPConnection
        connection = kind(server.host, server.port, timeout=self.timeout)
        try:
            connection.connect()
        except OSError as error:
            raise _Unavailable(f"{type(error).__name__}: {error}") from error
        # Kept, since the connection lets go of it before the answer's body is read.
        sock = connection.sock
        answer = bytearray()
        try:
            connection.request("POST", server.target, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            while True:
                if deadline is not None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError
                    sock.settimeout(left)
                chunk = response.read1(_CHUNK_BYTES)
                if not chunk:
                    break
                answer += chunk
            if response.length:
                raise http.client.IncompleteRead(bytes(answer), response.length)
        except TimeoutError as error:
            raise RewardError(
                f"the remote reward {server.url} took longer than {self.timeout:g} s to answer; "
                "set --reward_timeout to more"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise _Unavailable(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        text = f"it answered {response.status} {response.reason}: {_short(answer)}"
        if response.status >= 500:
            raise _Unavailable(text)
        if response.status != 200:
            raise RewardError(f"the remote reward {server.url} refused the batch: {text}")
        return bytes(answer)


def is_url(reward: str) -> bool:
    return reward.startswith(("http://", "https://"))


def _encoded(batch: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(batch).encode()
    except (TypeError, ValueError) as error:
        name = next((name for name, values in batch.items() if not _is_json(values)), "?")
        raise RewardError(
            f"column {name} cannot be sent to a remote reward: {error}; leave it out of the prompts, or make it text, "
            "numbers, lists or objects"
        ) from error


def _is_json(values: Any) -> bool:
    try:
        json.dumps(values)
    except (TypeError, ValueError):
        return False
    return True


def _checked(server: Server, answer: bytes, count: int) -> dict[str, Any]:
    try:
        result = json.loads(answer)
    except ValueError as error:
        raise RewardError(f"the remote reward {server.url} answered no JSON: {_short(answer)}") from error
    rewards = result.get("rewards") if isinstance(result, dict) else None
    if not isinstance(rewards, list):
        raise RewardError(
            f'the remote reward {server.url} answered {_short(answer)}; it must answer {{"rewards": [...]}}'
        )
    if len(rewards) != count:
        raise RewardError(
            f"the remote reward {server.url} answered {len(rewards)} rewards for {count} samples; "
            "it must answer one for each"
        )
    logs = result.pop("extra_logs", None)
    return {**result, **logs} if isinstance(logs, dict) else result


def _joined(answers: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> dict[str, Any]:
    """The answers to shares as that to the whole; what one server leaves out is null for its samples."""
    joined: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for answer in answers for name in answer):
        joined[name] = []
        for answer, count in zip(answers, counts, strict=True):
            values = answer.get(name)
            fits = isinstance(values, list) and len(values) == count
            joined[name] += values if fits and isinstance(values, list) else [values] * count
    return joined


def _short(answer: bytes | bytearray) -> str:
    text = answer.decode("utf-8", "replace")
    return repr(text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "...")
