"""Whether the Hugging Face Hub can be reached: its clients retry for half a minute before they say that it cannot."""

from __future__ import annotations

import os
import socket
from functools import cache
from urllib.parse import urlsplit


def is_offline_by_choice() -> bool:
    """Whether the environment forbids asking the Hub."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


@cache
def hub_is_reachable(timeout_s: float = 5.0) -> bool:
    """Whether the Hub's host takes connections; asked once a process."""
    if is_offline_by_choice():
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # only the client can tell
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        with socket.create_connection((url.hostname or "", port), timeout_s):
            return True
    except OSError:
        return False


def why_unreachable() -> str:
    return "HF_HUB_OFFLINE is set" if is_offline_by_choice() else "the Hub cannot be reached"
