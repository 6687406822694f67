"""What is installed: two flavours of one thing, leftovers, serving stacks beside the trainer, foreign modules, drift.

Read from the metadata of installed distributions and from where modules really come from; nothing is installed, and no
registry is asked.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shlex
import site
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from packaging.requirements import InvalidRequirement, Requirement

import draftsmith
from draftsmith.doctor.finding import Finding
from draftsmith.pipeline.environment import package_name

SERVING = ("sglang", "vllm", "flashinfer-python", "tensorrt-llm", "lmdeploy", "sgl-kernel")
PINNED = ("torch", "triton", "transformers", "tokenizers", "numpy", "safetensors")
MODULES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pydantic"),
    *("fla", "causal_conv1d", "flash_attn", "draftsmith"),
)
# With a CUDA major as suffix up to CUDA 12; since then these carry it as their own version, others have numbers of
# their own.
_VERSIONED_AS_CUDA = re.compile(r"nvidia-(cublas|cuda-(runtime|nvrtc|cupti)|nvjitlink|nvtx)")
_TORCHES = ("torch", "torchvision", "torchaudio")  # built against each other, for one CUDA


def check(constraints: Path | None = None) -> list[Finding]:
    """All findings about installed packages."""
    installed = list(metadata.distributions())
    return [
        *flavours(installed),
        *leftovers(map(Path, _site_folders())),
        *serving(installed),
        *foreign_modules(),
        *drift(constraints or _beside_sources()),
    ]


def flavours(installed: Iterable[metadata.Distribution]) -> list[Finding]:
    """One package twice on the path, CUDA libraries of two major versions, or torch's own packages built for two."""
    places: dict[str, list[str]] = defaultdict(list)
    cuda: dict[str, list[str]] = defaultdict(list)
    builds: dict[str, list[str]] = defaultdict(list)
    for distribution in installed:
        name = _name(distribution)
        places[name].append(f"{distribution.version} in {distribution.locate_file('')}")
        major = re.fullmatch(r"nvidia-.*-cu(\d\d)", name)
        if major:
            cuda[major[1]].append(name)
        elif _VERSIONED_AS_CUDA.fullmatch(name):
            cuda[distribution.version.partition(".")[0]].append(name)
        if name in _TORCHES and "+" in distribution.version:
            builds[distribution.version.partition("+")[2]].append(f"{name} {distribution.version}")
    findings = []
    if len(builds) > 1:
        text = f"built for different devices: {', '.join(each for names in builds.values() for each in names)}"
        mend = "pip install --force-reinstall torch and the others from one index: https://download.pytorch.org/whl"
        findings.append(Finding("two flavours", "bad", text, mend))
    for name in PINNED:
        if len(set(places[name])) > 1:
            text = f"{name} is installed {len(places[name])} times: {'; '.join(places[name])}"
            mend = f"pip uninstall {name} until none is left, then pip install {name} once"
            findings.append(Finding("two flavours", "bad" if name in ("torch", "triton") else "warn", text, mend))
    if len(cuda) > 1:
        fewest = min(cuda.values(), key=len)
        text = "CUDA libraries of two versions: " + ", ".join(f"{len(n)} for CUDA {v}" for v, n in sorted(cuda.items()))
        findings.append(Finding("two flavours", "warn", text, f"pip uninstall {' '.join(sorted(fewest))}"))
    return findings or [Finding("two flavours", "ok", "one torch, one CUDA")]


def leftovers(folders: Iterable[Path]) -> list[Finding]:
    """Folders that pip left behind ("~orch"), and metadata whose files are gone."""
    findings = []
    for folder in folders:
        if not folder.is_dir():
            continue
        torn = sorted(item.name for item in folder.iterdir() if item.name.startswith("~"))
        if torn:
            text = f"{len(torn)} half removed packages in {folder}: {', '.join(torn[:4])}"
            findings.append(Finding("leftovers", "warn", text, f"rm -r {folder}/'~'*"))
        for info in folder.glob("*.dist-info"):
            distribution = metadata.Distribution.at(info)
            if _is_hollow(distribution, folder):
                text = f"{_name(distribution)} {distribution.version} is listed, but its files are gone"
                mend = f"rm -r {info} && pip install {_name(distribution)}=={distribution.version}"
                findings.append(Finding("leftovers", "warn", text, mend))
    return findings or [Finding("leftovers", "ok", "none")]


def _is_hollow(distribution: metadata.Distribution, folder: Path) -> bool:
    """Whether nothing is there of what a distribution lists beside its own metadata; False where it lists nothing."""
    # Line by line, up to the first file that is there: `distribution.files` makes an object of each one first.
    record = [line for line in (distribution.read_text("RECORD") or "").splitlines() if line]
    names = (name for name, *_ in csv.reader(record))
    listed = (folder / name for name in names if not name.partition("/")[0].endswith((".dist-info", "..")))
    if not record:
        modules = (distribution.read_text("top_level.txt") or "").split()
        listed = (place for name in modules for place in (folder / name, *folder.glob(f"{name}.*")))
    gone = False
    for place in listed:
        if place.exists():
            return False
        gone = True
    return gone


def serving(installed: Iterable[metadata.Distribution]) -> list[Finding]:
    """Serving stacks beside the trainer, and which of its pins they would move or have moved."""
    installed = list(installed)
    versions = {_name(distribution): distribution.version for distribution in installed}
    findings = []
    for distribution in installed:
        if _name(distribution) not in SERVING:
            continue
        clashes = [
            f"wants {requirement.name}{requirement.specifier}, {versions[name]} is installed"
            for requirement in _requirements(distribution)
            if (name := requirement.name.lower()) in PINNED
            and name in versions
            and not requirement.specifier.contains(versions[name], prereleases=True)
        ]
        text = f"{_name(distribution)} {distribution.version} is installed beside the trainer"
        mend = "serve from an environment of its own: python -m venv serve && serve/bin/pip install " + _name(
            distribution
        )
        if clashes:
            findings.append(Finding("serving stack", "warn", f"{text}; it {'; '.join(clashes)}", mend))
        else:
            findings.append(Finding("serving stack", "warn", f"{text} and decides versions with it", mend))
    return findings or [Finding("serving stack", "ok", "none in this environment")]


def foreign_modules(names: Iterable[str] = MODULES) -> list[Finding]:
    """Modules that would be imported from outside this environment (PYTHONPATH, user site, working directory)."""
    inside = [Path(folder).resolve() for folder in {*_site_folders(), sys.prefix, sys.base_prefix}]
    inside += _editable_sources()
    user = Path(site.getusersitepackages()).resolve() if site.ENABLE_USER_SITE else None
    findings = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin or spec.origin in ("built-in", "frozen"):
            continue
        origin = Path(spec.origin).resolve()
        at_user = user is not None and origin.is_relative_to(user)
        if at_user or not any(origin.is_relative_to(folder) for folder in inside):
            mend = "export PYTHONNOUSERSITE=1" if at_user else "unset PYTHONPATH, and start from another folder"
            findings.append(Finding("foreign modules", "warn", f"{name} comes from {origin}", mend))
    return findings or [Finding("foreign modules", "ok", "all from this environment")]


def _editable_sources() -> list[Path]:
    """Folders that Draftsmith is installed from in place; its modules come from there."""
    with suppress(metadata.PackageNotFoundError, ValueError):
        content = json.loads(metadata.distribution("draftsmith").read_text("direct_url.json") or "{}")
        if content.get("dir_info", {}).get("editable"):
            return [Path(url2pathname(urlparse(content["url"]).path)).resolve()]
    return []


def drift(constraints: Path | None) -> list[Finding]:
    """Installed versions that differ from the pinned ones, and pinned packages that Draftsmith needs and that are gone.

    Other pinned packages may be missing: they are of extras that nobody asked for.
    """
    if constraints is None or not constraints.is_file():
        why = "no constraints.txt lies beside the sources" if constraints is None else f"there is no {constraints}"
        return [Finding("pinned versions", "ok", f"not checked: {why}")]
    needed = _needed()
    differing, found = [], 0
    pins: dict[str, str] = {}
    build = ""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            requirement = Requirement(content)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if package_name(requirement.name) in needed:
                differing.append(f"{requirement.name} is missing (pinned {requirement.specifier})")
                pins[requirement.name] = f"{requirement.name}{requirement.specifier}"
            continue
        found += 1
        # A local part ("+cpu", "+cu130") is a build of the same version.
        public, _, local = version.partition("+")
        if not requirement.specifier.contains(public, prereleases=True):
            differing.append(f"{requirement.name} {version} (pinned {requirement.specifier})")
            pins[requirement.name] = f"{requirement.name}{requirement.specifier}"
            build = local if requirement.name == "torch" else build
    if not differing:
        return [Finding("pinned versions", "ok", f"all {found} as in {constraints.name}")]
    text = f"{len(differing)} differ from {constraints.name}: {', '.join(differing[:5])}"
    return [Finding("pinned versions", "warn", text, _install(pins, build))]


def _install(pins: dict[str, str], build: str) -> str:
    """The command that brings exactly these; torch from its own index where a build of it is installed."""
    pins = dict(pins)
    commands = []
    if "torch" in pins and re.fullmatch(r"cpu|xpu|cu\d+|rocm[\d.]+", build):
        index = f"https://download.pytorch.org/whl/{build}"
        commands.append(f"pip install {shlex.quote(pins.pop('torch'))} --index-url {index}")
    if pins:
        commands.append(f"pip install {' '.join(map(shlex.quote, pins.values()))}")
    return " && ".join(commands)


def _needed() -> set[str]:
    """Names of what Draftsmith depends on without any extra; empty where it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        requirements = _requirements(metadata.distribution("draftsmith"))
        return {package_name(requirement.name) for requirement in requirements}
    return set()


def _requirements(distribution: metadata.Distribution) -> Iterator[Requirement]:
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _name(distribution: metadata.Distribution) -> str:
    return package_name(distribution.metadata["Name"] or "")


def _site_folders() -> list[str]:
    return [folder for folder in dict.fromkeys(sys.path) if folder.endswith(("site-packages", "dist-packages"))]


def _beside_sources() -> Path | None:
    found = Path(draftsmith.__file__).parents[2] / "constraints.txt"
    return found if found.is_file() else None
