"""Memory by device, estimated before anything is loaded.

Weights, gradients, float32 sums, masters and optimizer state are counted exactly; activations are the tensors that one
drafter pass keeps for its backward, one head chunk, and what the target holds at a time. The process that decodes while
training has weights of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftsmith.config import RunConfig
from draftsmith.drafter import DrafterSpec
from draftsmith.pipeline.topology import Topology, decoding_device
from draftsmith.target.geometry import TargetGeometry

GIB = 2**30


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device, by purpose."""

    device: str
    target: int
    drafter: int
    optimizer: int
    activations: int
    free: int | None

    @property
    def total(self) -> int:
        return self.target + self.drafter + self.optimizer + self.activations

    def line(self) -> str:
        """For people."""
        parts = {
            "target": self.target,
            "drafter": self.drafter,
            "optimizer": self.optimizer,
            "activations": self.activations,
        }
        text = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        free = "" if self.free is None else f" of {self.free / GIB:.1f} GiB free"
        return f"{self.device}: about {self.total / GIB:.2f} GiB{free} ({text})"


def estimate_memory(
    config: RunConfig,
    topology: Topology,
    geometry: TargetGeometry,
    spec: DrafterSpec,
    parameters: int,
    dtype: torch.dtype,
    target_dtype: torch.dtype,
    attention: str,
) -> tuple[DeviceMemory, ...]:
    """One estimate per device of the topology."""
    size, target_size = dtype.itemsize, target_dtype.itemsize
    length, queries = config.rows.length, config.rows.anchors * spec.block_size
    layer = 2 * geometry.hidden_size * geometry.head_dim * (geometry.heads + geometry.kv_heads)
    layer += 3 * geometry.hidden_size * geometry.intermediate_size
    embedding = geometry.vocab_rows * geometry.hidden_size
    embeddings = embedding * (1 if geometry.tie_word_embeddings else 2)
    features = length * len(spec.taps) * spec.hidden_size * target_size

    attention_heads = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    per_layer = queries * (6 * spec.hidden_size + 4 * spec.intermediate_size + 3 * attention_heads)
    per_layer += length * 4 * spec.kv_heads * spec.head_dim
    kept = spec.hidden_size * queries if config.training.activation_checkpointing else per_layer
    activations = (spec.layers * kept + per_layer) * size
    if attention == "dense":
        activations += 4 * spec.heads * queries * (length + spec.block_size) * 4
    chunk = min(config.objective.chunk, queries) * geometry.vocab_rows * (3 * 4 if dtype == torch.float32 else 8)

    decoder = decoding_device(config.decoding, topology) if config.decoding.every else None
    memories = []
    for device in dict.fromkeys((*topology.devices, *([decoder] if decoder else []))):
        targets, drafters = topology.targets.count(device), topology.drafters.count(device)
        target = drafter = optimizer = working = 0
        if targets:
            # Several workers on one device share the target's weights.
            target = (geometry.layers * layer + embeddings) * target_size
            working += targets * (features + length * 4 * geometry.intermediate_size * target_size)
        if drafters:
            drafter = drafters * parameters * 2 * size + (0 if targets else embeddings * size)
            optimizer = drafters * parameters * 4 + parameters * 12 * drafters // len(topology.drafters)
            working += drafters * (activations + chunk + config.pipeline.queue * features)
        if device == decoder:
            # A process of its own, with its own copy of the target, and of the drafter.
            target += (geometry.layers * layer + embeddings) * target_size
            drafter += parameters * size
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        memories.append(DeviceMemory(str(device), target, drafter, optimizer, working, free))
    return tuple(memories)
