"""Drafters to and from a hub, through its own client. Credentials are the client's business: its environment and its
login; none pass through here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftsmith.errors import UserError, at_home, what_is_at

_WANTED = ["*.json", "*.safetensors", "README.md"]


def fetch(source: str) -> Path:
    """Local folder of a drafter: `source` itself, or the hub's repository of that name, downloaded.

    Raises:
        UserError: neither a folder nor a repository that can be read.
    """
    folder = Path(at_home(source))
    there = what_is_at(folder)
    if there == "folder":
        return folder
    if there or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise UserError("no such folder", where=source, fix="give a drafter's folder, or a hub name like owner/name")
    from huggingface_hub import snapshot_download

    with _explained(source):
        return Path(snapshot_download(source, allow_patterns=_WANTED))


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Uploads a drafter's files into a repository, which is made if it is not there. Returns the commit's address.

    Args:
        folder: of the drafter.
        repository: "owner/name".
        private: visibility of a repository that is made.

    Raises:
        UserError: the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi

    with _explained(repository):
        api = HfApi()
        made = api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            folder_path=folder,
            repo_id=made.repo_id,
            allow_patterns=_WANTED,
            commit_message="Drafter exported by draftsmith",
        )
    return str(commit.commit_url)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns what the client raises about a repository into one line."""
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        HTTPError,
        OSError,
    ) as error:
        first = str(error).strip().splitlines()
        raise UserError(
            f"the hub cannot serve it: {first[0] if first else type(error).__name__}",
            where=name,
            fix="check the name, the connection and the login (hf auth login)",
        ) from error
