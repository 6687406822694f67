"""Whether the Hugging Face hub can be reached, found out within seconds.

Its client tries a request that finds no connection again and again, half a minute for every file, before it says so.
Here one connection is opened first (to the proxy, where there is one). If that fails, the client is told to use what it
has kept and nothing else, so a model that is there is loaded at once and one that is not is missed at once. Asked again
after `ASK_AGAIN_SECONDS`. Who has set HF_HUB_OFFLINE is not overruled.

Cost: one connection, 5 s at most.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.parse
import urllib.request

from huggingface_hub import constants

CONNECT_SECONDS = 5.0
ASK_AGAIN_SECONDS = 30.0
_PORTS = {"http": 80, "https": 443}

_lock = threading.Lock()
_asked = -float("inf")
_trouble = ""


def look_for_hub() -> str:
    """To be called before the hub is asked for anything; returns why it cannot be reached, "" if it can."""
    global _asked, _trouble
    with _lock:
        if constants.HF_HUB_OFFLINE and not _trouble:
            return ""  # the user's own choice
        if time.monotonic() - _asked >= ASK_AGAIN_SECONDS:
            _trouble = _try_to_connect()
            _asked = time.monotonic()
            constants.HF_HUB_OFFLINE = bool(_trouble)
        return _trouble


def _try_to_connect() -> str:
    endpoint = urllib.parse.urlsplit(constants.ENDPOINT)
    host = endpoint.hostname or ""
    proxy = urllib.request.getproxies().get(endpoint.scheme)
    with contextlib.suppress(OSError):  # a look-up of the host's own name may fail
        if proxy and urllib.request.proxy_bypass(host):
            proxy = None
    through = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else endpoint
    try:
        address = (through.hostname or host, through.port or _PORTS.get(through.scheme, 443 if not proxy else 80))
        socket.create_connection(address, timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        way = f"proxy {_address(through)}: " if proxy else ""
        return f"{constants.ENDPOINT} cannot be reached ({way}{reason})"
    return ""


def _address(parts: urllib.parse.SplitResult) -> str:
    """Host and port, without a user's name and password."""
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.hostname}{port}"
