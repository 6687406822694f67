"""Answers from an OpenAI-compatible server (vLLM, SGLang, any): one request, repeated until it is well or hopeless.

What can go wrong and what follows:

- No connection, time-out, a connection lost in the middle, 408, 409, 425, 429, 5xx; a reply that is no JSON or half of
  one, or that has not exactly one choice: again, later.
- 400, 413, 422: this conversation cannot be answered (too long, a role that the template refuses); it is given up with
  the server's words.
- 401, 403, 404: no request can succeed; the work ends with the server's words.
- Token counts that are missing, negative or above the limit: not believed; the answer is kept.

"Later" doubles with every try, up to a minute, and is drawn at random between half and all of that, so that requests
that failed together do not come back together; a Retry-After header is obeyed. Every 429 or 503 lowers how many
requests may be under way (by half, at most once per round trip), every full round of good answers raises it by
one: the server sets the pace.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from draftsmith.errors import UserError

_AGAIN = (408, 409, 425, 429)
_HOPELESS = (401, 403, 404)
_BUSY = (429, 503)
_LONGEST_WAIT = 60.0


class GivenUpError(Exception):
    """This request gets no answer; the text says why."""

    def __init__(self, text: str, attempts: int) -> None:
        super().__init__(text)
        self.attempts = attempts


@dataclass(frozen=True)
class Reply:
    """A well-formed answer.

    Attributes:
        message: role, content, and what else the server says (reasoning_content or reasoning, tool_calls).
        finish_reason: as the server says it.
        tokens: of the answer, None if the server's count cannot be believed.
    """

    message: dict[str, Any]
    finish_reason: str
    tokens: int | None


@dataclass
class Traffic:
    """What the work costs, counted while it goes on."""

    requests: int = 0
    again: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    def fault(self, name: str) -> None:
        self.faults[name] = self.faults.get(name, 0) + 1


class Throttle:
    """How many requests may be under way: at most `most`, fewer while the server says that it is busy."""

    def __init__(self, most: int) -> None:
        self.most, self.allowed = most, float(most)
        self.under_way = 0
        self._free = asyncio.Condition()
        self._lowered = 0.0
        self._good = 0

    async def __aenter__(self) -> None:
        async with self._free:
            await self._free.wait_for(lambda: self.under_way < int(self.allowed))
            self.under_way += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._free:
            self.under_way -= 1
            self._free.notify_all()

    def busy(self, began: float) -> None:
        """The server is busy; `began`: when the request that says so was sent."""
        if began > self._lowered:
            self.allowed = max(1.0, self.allowed / 2)
            self._lowered, self._good = time.monotonic(), 0

    def well(self) -> None:
        self._good += 1
        if self._good >= self.allowed and self.allowed < self.most:
            self.allowed, self._good = min(float(self.most), self.allowed + 1), 0


class ChatServer:
    """One server and model.

    Args:
        url: of the API, "http://127.0.0.1:8000/v1".
        model: its name there; None: the only one that it has.
        api_key: sent as a bearer token, and written nowhere.
        concurrency: requests under way at most.
        attempts: how often a request is tried.
        timeout: seconds without a byte before a request counts as lost.
        first_wait: seconds before the first repetition, doubled with each.

    Attributes:
        stopping: set from outside: requests under way come to their end, nothing is repeated.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 64,
        attempts: int = 8,
        timeout: float = 600.0,
        first_wait: float = 1.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model or ""
        self.attempts, self.first_wait = attempts, first_wait
        self.stopping = False  # nothing is repeated any more
        self.traffic = Traffic()
        self.throttle = Throttle(concurrency)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        waits = httpx.Timeout(timeout, connect=min(timeout, 30.0), pool=None)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=waits)

    async def __aenter__(self) -> ChatServer:
        try:
            self.model = self.model or await self._only_model()
        except BaseException:
            await self._client.aclose()
            raise
        self.traffic = Traffic()  # answers are what costs
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def _only_model(self) -> str:
        try:
            content = await self._retried("GET", "/models", None)
            names = [str(entry["id"]) for entry in content["data"]]
        except GivenUpError as error:
            raise UserError(f"does not tell its models: {error}", where=self.url, fix="check --server") from None
        except (KeyError, TypeError):
            raise UserError("does not tell its models", where=self.url, fix="give --model") from None
        if len(names) != 1:
            raise UserError(f"has {len(names)} models", where=self.url, fix=f"give --model: {', '.join(names[:8])}")
        return names[0]

    async def answer(self, request: dict[str, Any]) -> Reply:
        """Asks until there is an answer.

        Args:
            request: body of a chat completion, without the model.

        Raises:
            GivenUpError: there will be none.
            UserError: no request to this server can succeed.
        """
        body = {**request, "model": self.model, "n": 1, "stream": False}
        content = await self._retried("POST", "/chat/completions", body)
        choice = content["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        return Reply(message, str(reason or "unknown"), _tokens(content, request.get("max_tokens")))

    async def _retried(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The reply's JSON."""
        fault = "no attempt"
        for attempt in range(1, self.attempts + 1):
            wait = 0.0
            async with self.throttle:
                began = time.monotonic()
                self.traffic.requests += 1
                self.traffic.again += attempt > 1
                try:
                    response = await self._client.request(method, self.url + path, json=body)
                except httpx.InvalidURL as error:
                    raise UserError(
                        f"is no address: {error}", where=self.url, fix="e.g. http://127.0.0.1:8000/v1"
                    ) from None
                except httpx.UnsupportedProtocol:
                    raise UserError("is no address", where=self.url, fix="e.g. http://127.0.0.1:8000/v1") from None
                except httpx.HTTPError as error:  # no connection, time-out, lost in the middle
                    fault = type(error).__name__
                else:
                    status = response.status_code
                    if status == 200:
                        content = _well_formed(response, path)
                        if isinstance(content, dict):
                            self.throttle.well()
                            return content
                        fault = content
                    else:
                        fault = f"status {status}"
                        self._refuse(response, attempt)
                        if status in _BUSY:
                            self.throttle.busy(began)
                        wait = _retry_after(response)
            self.traffic.fault(fault)
            if self.stopping:
                raise GivenUpError(f"the work ended; {fault}", attempt)
            if attempt < self.attempts:
                longest = min(_LONGEST_WAIT, self.first_wait * 2 ** (attempt - 1))
                await asyncio.sleep(max(wait, random.uniform(0.5, 1.0) * longest))
        raise GivenUpError(f"no answer after {self.attempts} requests, the last one: {fault}", self.attempts)

    def _refuse(self, response: httpx.Response, attempt: int) -> None:
        """Raises if asking again is of no use."""
        status = response.status_code
        if status in _AGAIN or status >= 500:
            return
        words = f"status {status}: {_words(response)}"
        if status in _HOPELESS:
            raise UserError(f"refuses: {words}", where=self.url, fix="check --server, --model and --api-key-env")
        raise GivenUpError(words, attempt)


def _tokens(content: dict[str, Any], most: int | None) -> int | None:
    """Tokens of an answer by the server's count; None if it cannot be believed."""
    usage = content.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if isinstance(tokens, int) and not isinstance(tokens, bool) and 0 <= tokens <= (most or tokens):
        return tokens
    return None


def _well_formed(response: httpx.Response, path: str) -> dict[str, Any] | str:
    """The reply's JSON, or what is wrong with it."""
    try:
        content = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return "not JSON"
    if not isinstance(content, dict):
        return "not an object"
    if path != "/chat/completions":
        return content
    choices = content.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        return "not one choice"
    message = choices[0].get("message") if isinstance(choices[0], dict) else None
    if not isinstance(message, dict):
        return "no message"
    said = message.get("content")
    if said is not None and not isinstance(said, str):
        return "content is no text"
    if said is None and not any(message.get(key) for key in ("tool_calls", "reasoning_content", "reasoning")):
        return "neither content nor tool calls"
    return content


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait, 0 if it does not; never more than a few minutes."""
    text = response.headers.get("retry-after", "")
    try:
        seconds = float(text)
    except ValueError:
        when = email.utils.parsedate_tz(text)
        seconds = email.utils.mktime_tz(when) - time.time() if when else 0.0
    return min(max(seconds, 0.0), 5 * _LONGEST_WAIT) if seconds == seconds else 0.0


def _words(response: httpx.Response) -> str:
    """The server's own words, short."""
    try:
        content = response.json()
        error = content.get("error", content) if isinstance(content, dict) else content
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, RecursionError):
        text = response.text
    return " ".join(str(text).split())[:300] or "no reason given"
