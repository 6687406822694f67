"""What training refuses before it reads data or weights, found by the functions that refuse it there.

Data and what is known only with it (a mask token that occurs, rows too few) are for `draftsmith train CONFIG --plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from draftsmith.config import RunConfig
from draftsmith.doctor.finding import Finding
from draftsmith.drafter import resolve_spec
from draftsmith.errors import UserError
from draftsmith.observe.tracking import find_tracker
from draftsmith.pipeline.plan import check_length, read_spec_to_start_from
from draftsmith.pipeline.topology import Topology, decoding_device, resolve_topology
from draftsmith.target.geometry import TargetGeometry, read_geometry
from draftsmith.target.load import load_tokenizer
from draftsmith.target.source import check_weight_files, locate
from draftsmith.target.taps import choose_mask_token

T = TypeVar("T")


def check(config: RunConfig) -> tuple[Topology | None, TargetGeometry | None, list[Finding]]:
    """Devices and target as training would take them, None where it refuses them, and all refusals."""
    findings: list[Finding] = []

    def tried(name: str, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except UserError as error:
            findings.append(Finding.of_refusal(name, error))
            return None

    topology = tried("devices", lambda: resolve_topology(config.pipeline, config.training.rows_per_update))
    if topology is not None:
        findings.append(_devices(topology))
        if config.decoding.every:
            tried("devices", lambda: decoding_device(config.decoding, topology))
    for name in config.training.trackers:
        tried("trackers", lambda name=name: find_tracker(name))  # type: ignore[misc]
    geometry = tried("target", lambda: read_geometry(config.target))
    if geometry is not None:
        tried("rows", lambda: check_length(config.rows.length, geometry))
        tried("drafter", lambda: _spec(config, geometry))
        if config.target.features is None:
            tried("target weights", lambda: check_weight_files(locate(config.target)))
    return topology, geometry, findings


def _devices(topology: Topology) -> Finding:
    spans = ", ".join("+".join(map(str, span)) for span in topology.spans)
    drafters = ", ".join(map(str, topology.drafters))
    return Finding("devices", "ok", f"targets on {spans}; drafters on {drafters} ({topology.reason})")


def _spec(config: RunConfig, geometry: TargetGeometry) -> None:
    """The drafter's sizes and its mask token, as far as they are known without data; the target's tokenizer with it.

    Raises:
        UserError: training would refuse them.
    """
    tokenizer = load_tokenizer(config.target)
    spec = read_spec_to_start_from(config, geometry, []) if config.drafter.init else None
    configured = spec.mask_token_id if spec else config.drafter.mask_token_id
    mask = choose_mask_token(tokenizer, geometry.vocab_rows, None, configured)
    if spec is None:
        resolve_spec(config.drafter, geometry, mask.id)
