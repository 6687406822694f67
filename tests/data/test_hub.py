"""A hub that cannot be reached is known at once, and one that can is asked."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from draftsmith.config import TargetConfig
from draftsmith.data import hub
from draftsmith.data.conversations import read_conversations
from draftsmith.errors import UserError
from draftsmith.target.geometry import read_geometry


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_asked", -float("inf"))
    monkeypatch.setattr(hub, "_trouble", "")
    monkeypatch.setattr(hub, "ASK_AGAIN_SECONDS", 3600.0)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def address_of(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def closed_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as once:
        return address_of(once)


def test_a_hub_that_answers_is_asked(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address_of(server))
    assert hub.look_for_hub() == ""
    assert not constants.HF_HUB_OFFLINE


def test_one_that_does_not_is_not_and_is_asked_again_later(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", closed_address())
    assert "cannot be reached (Connection refused)" in hub.look_for_hub()
    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "ENDPOINT", address_of(server))
    assert hub.look_for_hub() != "", "not asked again so soon"
    monkeypatch.setattr(hub, "ASK_AGAIN_SECONDS", 0.0)
    assert hub.look_for_hub() == ""
    assert not constants.HF_HUB_OFFLINE


def test_the_users_own_choice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_try_to_connect", lambda: pytest.fail("asked"))
    assert hub.look_for_hub() == ""
    assert constants.HF_HUB_OFFLINE


def test_a_proxy_is_what_must_be_reached(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://no.such.host.invalid")
    monkeypatch.setenv("http_proxy", address_of(server))
    assert hub.look_for_hub() == ""
    monkeypatch.setattr(hub, "ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setenv("http_proxy", closed_address().replace("http://", "http://name:secret@"))
    trouble = hub.look_for_hub()
    assert "(proxy 127.0.0.1:" in trouble
    assert "secret" not in trouble


def test_targets_and_data_are_missed_at_the_first_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", closed_address())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    connect, asked = hub._try_to_connect, []
    monkeypatch.setattr(hub, "_try_to_connect", lambda: asked.append(1) or connect())
    with pytest.raises(UserError, match=r"smiths/none: cannot be loaded: .*cannot be reached.* is not kept here"):
        read_geometry(TargetConfig(path="smiths/none"))  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"no such file here, and not to be had from the hub: .* cannot be reached"):
        list(read_conversations(["smiths/none"]))
    assert asked == [1]
    assert constants.HF_HUB_OFFLINE, "the hub's client, which tries for minutes, asks nobody"
