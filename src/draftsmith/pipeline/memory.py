"""Memory by device, counted before anything is loaded.

A device holds, all the time, the target's weights, the drafter's, embedding and head, masters and optimizer state; and
at its fullest moment a row: its features, what the drafter's pass keeps for its backward, and either a head chunk or
the backward's own tensors and the gradients that it has made so far.

What a compiled pass keeps is what torch's partitioner saves, tensor by tensor (`saved_by_layer`; a test holds it
against the partitioner's own graph). For each layer, Q slots, S context tokens:

    residual before attention and before the MLP, both norms' outputs                4 · Q · H
    queries before and after norm and rotation, what attention gives                 3 · Q · heads
    keys before norm and rotation, keys, values, of context and slots                3 · (S + Q) · kv heads
    gate, up and their product                                                       3 · Q · intermediate
    one over each norm's size, and attention's log-sum-exp, in float32

The backward goes from the last layer to the first, gives back what a layer kept and makes its gradients; where slots
are few, gradients are larger than what is given back, and the peak stands at its end. Eager passes (dense attention, on
the CPU) keep more, and are estimated by what their operators save.

What is asked of the driver lies a little above: the context of CUDA and its libraries, some 0.5 GiB, and what the
caching allocator holds in pieces that do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftsmith.config import RunConfig
from draftsmith.drafter import DrafterSpec
from draftsmith.pipeline.topology import Topology, decoding_device
from draftsmith.target.geometry import TargetGeometry
from draftsmith.target.weights import Weights
from draftsmith.training.update import buffer_bytes

GIB = 2**30
WORKSPACE = 64 * 2**20  # of cuBLAS, for each thread that works on a device
CHUNK_COPIES = {"data": 2, "kl": 3, "tv": 3}  # logits, their gradient, the teacher's logits
_PIECE = 2 * 4 * 2**25  # what an update holds beside the buffers while it adds up replicas
_MUON = 5 * 2 * 2**26  # and while it makes matrices orthogonal


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device, by purpose.

    Attributes:
        target: its weights.
        drafter: its weights; embedding and head where no target has them; gradients are with the step.
        optimizer: sums, masters and state.
        activations: a step's tensors, gradients and the rows that wait included.
        free: on the device now.
        loading: the target's whole weights, before what does not run is given back.
    """

    device: str
    target: int
    drafter: int
    optimizer: int
    activations: int
    free: int | None
    loading: int = 0

    @property
    def total(self) -> int:
        """At the fullest moment."""
        return max(self.loading, self.target + self.drafter + self.optimizer + self.activations)

    def line(self) -> str:
        """For people."""
        parts = {
            "target": self.target,
            "drafter": self.drafter,
            "optimizer": self.optimizer,
            "a step": self.activations,
        }
        text = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        free = "" if self.free is None else f" of {self.free / GIB:.1f} GiB free"
        return f"{self.device}: about {self.total / GIB:.2f} GiB{free} ({text})"


@dataclass(frozen=True)
class RowShape:
    """What decides the size of a drafter's step.

    Attributes:
        length, queries: S and Q = N·B.
        chunk: taught slots per head chunk.
        labels: of the objective.
        size: bytes of a number of the compute dtype.
        compiled: flex attention in a compiled pass; else dense and eager.
        checkpointing: layers are computed again in the backward.
    """

    length: int
    queries: int
    chunk: int
    labels: str
    size: int
    compiled: bool
    checkpointing: bool


def saved_by_layer(spec: DrafterSpec, row: RowShape) -> int:
    """Bytes that a layer keeps for its backward, the residual that it starts from included."""
    hidden, query, key = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    both = row.length + row.queries
    if not row.compiled:
        numbers = row.queries * (10 * hidden + 6 * spec.intermediate_size + 8 * query) + both * 8 * key
        scores = 4 * spec.heads * row.queries * (row.length + 16)
        return numbers * row.size + scores * 4
    numbers = row.queries * (4 * hidden + 3 * query + 3 * spec.intermediate_size) + 3 * both * key
    sizes = row.queries * (2 * spec.heads + spec.kv_heads + 2) + row.length * spec.kv_heads
    return numbers * row.size + sizes * 4


def last_layer_more(spec: DrafterSpec, row: RowShape) -> int:
    """What the last layer keeps beyond the others, which leaves the anchors out behind its attention: what attention
    gave and the residual once more without them, and all that follows for fewer slots."""
    if not row.compiled:
        return 0
    anchors = row.queries // spec.block_size
    hidden, query = spec.hidden_size, spec.heads * spec.head_dim
    twice = (row.queries - anchors) * (query + (hidden if spec.layers > 1 else 0))
    return (twice - anchors * 3 * (hidden + spec.intermediate_size)) * row.size


def layer_parameters(spec: DrafterSpec) -> int:
    """Of one drafter layer."""
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return spec.hidden_size * (2 * query + 2 * key + 3 * spec.intermediate_size + 2) + 2 * spec.head_dim


def step_peak(spec: DrafterSpec, row: RowShape, vocab_rows: int) -> int:
    """Bytes that a drafter's step takes at its fullest moment, beyond weights and the row's features."""
    slots, layers = row.queries * spec.hidden_size * row.size, spec.layers
    context = row.length * spec.hidden_size * row.size
    layer, gradients = saved_by_layer(spec, row), layer_parameters(spec) * row.size
    kept = slots if row.checkpointing else layer
    again = layer if row.checkpointing else 0  # of the one that is computed again
    # Block embeddings, the output, its gradient; fc's output before and after its norm; rotary tables.
    always = 3 * slots + 2 * context + 2 * (row.queries + row.length) * spec.head_dim * row.size
    last = 0 if row.checkpointing else last_layer_more(spec, row)
    # The gradient of the residual and of a norm's output; of the MLP's inside; of its largest matrix.
    working = 2 * slots + row.queries * 2 * spec.intermediate_size * row.size
    working += spec.hidden_size * spec.intermediate_size * row.size
    backward = max(
        kept * (layers - done) + (0 if done else last) + again + working + gradients * done for done in range(layers)
    )
    fc = len(spec.taps) * spec.hidden_size**2 * row.size
    end = layers * gradients + fc + context * (1 + len(spec.taps))
    chunk = min(row.chunk, row.queries)
    copies = CHUNK_COPIES[row.labels] * row.size if row.compiled else (CHUNK_COPIES[row.labels] + 3) * 4
    loss = kept * layers + last + chunk * (vocab_rows * copies + 2 * spec.hidden_size * row.size)
    return always + max(loss, backward, end)


def target_working(geometry: TargetGeometry, length: int, size: int, *, packed: bool) -> int:
    """Bytes that a row takes inside the target, beyond its features: a layer's MLP, and masks where it needs them."""
    layer = length * (2 * geometry.intermediate_size + 3 * geometry.hidden_size) * size
    return layer if packed else layer + length * length * (1 + size) + length * geometry.intermediate_size * size


def optimizer_bytes(config: RunConfig, parameters: int, replicas: int, everywhere: int, device: torch.device) -> int:
    """Sums, masters and state on one device, and what an update holds beside them.

    Args:
        config: of the run.
        parameters: of the drafter.
        replicas: on this device.
        everywhere: replicas in all; each owns its part of masters and state.
        device: this one.
    """
    rows, muon = config.training.rows_per_update, config.optimizer.name == "muon"
    buffers = replicas * buffer_bytes(parameters, everywhere, rows, config.optimizer, device)
    return buffers + (_PIECE if everywhere > 1 else 0) + (_MUON if muon and parameters > 2**26 else 0)


def estimate_memory(
    config: RunConfig,
    topology: Topology,
    geometry: TargetGeometry,
    spec: DrafterSpec,
    parameters: int,
    dtype: torch.dtype,
    target_dtype: torch.dtype,
    attention: str,
    weights: Weights | None = None,
) -> tuple[DeviceMemory, ...]:
    """One estimate per device of the topology, and of the process that decodes.

    Args:
        weights: of the target, in `target_dtype`; None: those of a dense decoder of that geometry.
    """
    size, target_size = dtype.itemsize, target_dtype.itemsize
    length, queries = config.rows.length, config.rows.anchors * spec.block_size
    row = RowShape(
        length, queries, config.head_chunk(spec.block_size), config.objective.labels, size, attention == "flex",
        config.training.activation_checkpointing,
    )  # fmt: skip
    embeddings = geometry.vocab_rows * geometry.hidden_size * (1 if geometry.tie_word_embeddings else 2)
    features = length * len(spec.taps) * spec.hidden_size * size
    last = length * spec.hidden_size * size if config.objective.labels != "data" else 0
    runs = geometry.layers if last else max(spec.taps) + 1
    if weights is None:
        layer = geometry.layer_parameters * target_size
        weights = Weights((layer,) * geometry.layers, embeddings * target_size)
    running = weights.first(runs) // (target_size if config.target.precision == "fp8" else 1)
    whole = weights.first(geometry.layers)
    working = target_working(geometry, length, target_size, packed=attention == "flex")

    decoder = decoding_device(config.decoding, topology) if config.decoding.every else None
    memories = []
    for device in dict.fromkeys((*topology.devices, *([decoder] if decoder else []))):
        # A target may span devices: each holds its share of the layers, the first everything else. Workers on the same
        # devices share the weights.
        spans = dict.fromkeys(span for span in topology.spans if device in span)
        targets = sum(device in span for span in topology.spans)
        drafters = topology.drafters.count(device)
        target = drafter = optimizer = step = loading = 0
        workspace = WORKSPACE if device.type == "cuda" else 0
        if config.target.features is not None:
            targets, embedded = 0, False
        else:
            embedded = any(device == span[0] for span in spans)
            for span in spans:
                rest = weights.rest if device == span[0] else 0
                target += running // len(span) + rest
                loading += whole // len(span) + rest
            step += targets * (working + features + last + workspace)
        if drafters:
            drafter = drafters * parameters * size + (0 if embedded else embeddings * size)
            optimizer = optimizer_bytes(config, parameters, drafters, len(topology.drafters), device)
            waiting, most = config.pipeline.queue * (features + last), config.pipeline.queue_bytes
            in_flight = features + last + (waiting if most is None else min(waiting, max(most, features + last)))
            step += drafters * (step_peak(spec, row, geometry.vocab_rows) + in_flight + workspace)
        if device == decoder:
            # A process of its own, with its own copy of the target, and of the drafter.
            target += whole + weights.rest
            drafter += parameters * size
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        memories.append(DeviceMemory(str(device), target, drafter, optimizer, step, free, loading))
    return tuple(memories)
