"""A tiny chat server on this machine that misbehaves on purpose.

Its answers depend on what was asked alone ("<n words> after: <last user text>"), so that a conversation comes out the
same however often its requests were lost. Each request meets the next fault of `script` (None: behaves well); when the
script is used up, `then` decides. Everything that was asked is kept.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HostileServer:
    """Use as a context; `url` is the API's address.

    Faults: "slow" (a second), "hang" (until the client has gone), "drop" (closes
    without a word), "half" (half a JSON, announced whole), "cut" (half a JSON, well-formed HTTP), "empty list", "two
    choices", "no message", "counts" (absurd token counts), "uncounted" (none), "length" (cut off), "tool" (calls a
    tool), "silent" (an answer without text), or a status as a number.
    """

    def __init__(self, script: list[Any] | None = None, then: Callable[[int], Any] = lambda _number: None) -> None:
        self.script, self.then = list(script or []), then
        self.asked: list[dict[str, Any]] = []
        self.answered: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.under_way = self.most_under_way = 0
        self.pause = 0.0
        self.models = ["smith"]
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                _reply(self, 200, {"data": [{"id": name} for name in owner.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with owner._lock:
                    number = len(owner.asked)
                    owner.asked.append(body)
                    owner.headers.append({key.lower(): value for key, value in self.headers.items()})
                    fault = owner.script.pop(0) if owner.script else owner.then(number)
                    owner.under_way += 1
                    owner.most_under_way = max(owner.most_under_way, owner.under_way)
                try:
                    time.sleep(owner.pause)
                    owner._misbehave(self, body, fault)
                finally:
                    with owner._lock:
                        owner.under_way -= 1

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                pass  # clients of these tests are killed

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> HostileServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _misbehave(self, handler: BaseHTTPRequestHandler, body: dict[str, Any], fault: Any) -> None:
        if isinstance(fault, int):
            more = {"retry-after": "0"} if fault in (429, 503) else {}
            _reply(handler, fault, {"error": {"message": f"fault {fault}\n  as asked"}}, more)
            return
        if fault == "drop":
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
            return
        if fault == "slow":
            time.sleep(1.0)
        if fault == "hang":
            handler.connection.settimeout(120)
            handler.connection.recv(1)
        content = completion(body)
        choice = content["choices"][0]
        if fault == "empty list":
            content["choices"] = []
        elif fault == "two choices":
            content["choices"] *= 2
        elif fault == "no message":
            del choice["message"]
        elif fault == "counts":
            content["usage"]["completion_tokens"] = 10**9
        elif fault == "uncounted":
            del content["usage"]
        elif fault == "length":
            choice["finish_reason"] = "length"
        elif fault == "silent":
            choice["message"]["content"] = ""
        elif fault == "tool":
            call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            choice["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
            choice["finish_reason"] = "tool_calls"
        data = json.dumps(content).encode()
        if fault == "cut":
            data = data[: len(data) // 2]
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        if fault == "half":
            handler.wfile.write(data[: len(data) // 2])
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
            return
        handler.wfile.write(data)
        if fault in (None, "slow", "counts", "uncounted", "length"):
            with self._lock:
                self.answered.append(question_of(body))


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """The well-behaved reply to a request."""
    text = answer_to(body["messages"])
    return {
        "id": "x",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": len(text.split())},
    }


def answer_to(messages: list[dict[str, Any]]) -> str:
    """What this server says; depends on the whole history."""
    words = sum(len((message.get("content") or "").split()) for message in messages)
    return f"{words} words before: {messages[-1]['content']}"


def question_of(body: dict[str, Any]) -> str:
    """A name for a request: what was asked, and how many answers stood before it."""
    answers = sum(message["role"] == "assistant" for message in body["messages"])
    return f"{body['messages'][-1]['content']} / {answers}"


def _reply(
    handler: BaseHTTPRequestHandler, status: int, content: dict[str, Any], more: dict[str, str] | None = None
) -> None:
    data = json.dumps(content).encode()
    handler.send_response(status)
    for key, value in {"content-type": "application/json", "content-length": str(len(data)), **(more or {})}.items():
        handler.send_header(key, value)
    handler.end_headers()
    handler.wfile.write(data)
