"""Where a target comes from, and its configuration without its weights.

A target is named by a directory, a hub name, a `.gguf` file, or a directory or hub name plus `gguf_file`; `demo` is the
one inside this package. Everything wrong with the name, the files or the configuration becomes one `UserError` here, so
that the rooms above see either a usable target or a line for a person.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils.hub import cached_file

from draftsmith.config import TargetConfig
from draftsmith.data.hub import look_for_hub
from draftsmith.errors import UserError, what_is_at
from draftsmith.target import gguf_model
from draftsmith.target.gguf_header import read_header

DEMO = Path(__file__).resolve().parent.parent / "demo" / "target"

# Loading patches process-wide state of torch and transformers (default dtype, weight initialisation), so only one
# thread may do it at a time. Re-entrant, because loading a target also reads its configuration.
loading = threading.RLock()

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Source:
    """A target that has been located.

    Attributes:
        place: directory or hub name, as transformers takes it.
        gguf_file: name of the GGUF file in `place`, or None.
        local: True for a directory of this machine.
    """

    place: str
    gguf_file: str | None
    local: bool

    @property
    def name(self) -> str:
        """For messages to people."""
        return f"{self.place}/{self.gguf_file}" if self.gguf_file else self.place

    @property
    def has_tokenizer(self) -> bool:
        """Whether the directory holds tokenizer files of its own; only asked of local targets."""
        return any((Path(self.place) / name).is_file() for name in _TOKENIZER_FILES)

    def gguf_path(self) -> str | None:
        """Local path of the GGUF file, fetched from the hub if need be; None for other targets."""
        if self.gguf_file is None:
            return None
        if self.local:
            return str(Path(self.place) / self.gguf_file)
        with explained(self):
            return cached_file(self.place, self.gguf_file)


def locate(config: TargetConfig) -> Source:
    """Finds the target without reading it.

    Raises:
        UserError: the path does not exist, or the directory lacks configuration or weights.
    """
    path = DEMO if config.path == "demo" else Path(config.path)
    there = what_is_at(path)
    if there == "file":
        if path.suffix != ".gguf":
            raise UserError("is a file, but not a .gguf file", where=str(path), fix="give the model's directory")
        return Source(str(path.parent), path.name, local=True)
    if there == "folder":
        _check_directory(path, config.gguf_file)
        return Source(str(path), config.gguf_file, local=True)
    if config.path.endswith(".gguf") or path.is_absolute() or config.path.startswith(".") or config.path == "demo":
        raise UserError("no such target", where=str(path), fix="set target.path to a model directory or .gguf file")
    if not _HUB_NAME.fullmatch(config.path):
        raise UserError("is neither a directory nor a hub name", where=config.path, fix="check target.path")
    look_for_hub()
    return Source(config.path, config.gguf_file, local=False)


def _check_directory(path: Path, gguf_file: str | None) -> None:
    """Refuses a directory from which no model can come."""
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            raise UserError(f"holds no {gguf_file}", where=str(path), fix="check target.gguf_file")
        return
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob("*.gguf"))
        fix = f"set target.gguf_file, e.g. {files[0]}" if files else "give the directory that save_pretrained wrote"
        raise UserError("holds no config.json", where=str(path), fix=fix)


def check_weight_files(source: Source) -> None:
    """Refuses a local directory without weights; transformers' own message lists ten file names.

    Raises:
        UserError: see above.
    """
    if source.local and source.gguf_file is None:
        path = Path(source.place)
        if not any(next(path.glob(pattern), None) for pattern in _WEIGHT_FILES):
            raise UserError("holds no weights", where=source.place, fix="put the model's *.safetensors files there")


@contextmanager
def explained(source: Source, install: str = "") -> Iterator[None]:
    """Turns what transformers raises about a model's files into a `UserError` that names the target.

    Args:
        install: the command for packages that this target is known to need.
    """
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f"needs a package that is missing: {_first_line(error)}",
            where=source.name,
            fix="pip install 'draftsmith[gguf]'" if source.gguf_file else install or "install it",
        ) from error
    except Exception as error:
        message = _first_line(error)
        if "trust_remote_code" in str(error):
            raise UserError(
                "runs code that comes with the model",
                where=source.name,
                fix="set target.trust_remote_code: true if you trust it",
            ) from error
        if "accelerate" in message:
            raise UserError(message, where=source.name, fix=install or "pip install 'draftsmith[gguf]'") from error
        trouble = "" if source.local else look_for_hub()
        if trouble and isinstance(error, OSError):
            message = f"{trouble}, and it is not kept here"
        fix = "check the files" if source.local else "check the name and the connection, or give a local directory"
        raise UserError(f"cannot be loaded: {message}", where=source.name, fix=fix) from error


def _first_line(error: BaseException) -> str:
    """The first lines of an exception's text, at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def read_config(config: TargetConfig) -> Any:
    """The target's transformers configuration, without its weights.

    Raises:
        UserError: the target does not exist, or its configuration cannot be read.
    """
    source = locate(config)
    with loading, explained(source):
        path = source.gguf_path()
        if path is not None:
            header = read_header(path)
            gguf_model.check_supported(header)
            if gguf_model.is_dense(header):
                return gguf_model.read_config(header)
            return AutoConfig.from_pretrained(source.place, gguf_file=source.gguf_file)
        return AutoConfig.from_pretrained(source.place, trust_remote_code=config.trust_remote_code)
