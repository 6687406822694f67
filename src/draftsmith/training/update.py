"""The update: float32 masters, one optimizer's work shared by D replicas.

Every parameter is owned by one replica. An update is, for the replicas together:

1. each adds its rows' gradients up in float32 (`accumulate`, after every row);
2. each owner sums its parameters' gradients over the replicas in fixed order, and over ranks if there are any, and
   takes their squared norm (`reduce`);
3. the squared norms of all owners give one clip factor; owners step their masters and their model's weights (`apply`);
4. every replica copies the other owners' new weights (`refresh`).

The order of sums is fixed, so a rerun is identical; each optimizer state exists once, on its owner. The barriers
between the phases are `pipeline/sync.py`'s; with one replica this is plain mixed-precision AdamW.

Sums, masters and moments are flat buffers (`flat.py`). Dividing by Σ w and clipping are one factor of the step. On
CUDA, AdamW is two Triton passes (`fused.py`: 30 bytes a parameter with one row an update); elsewhere, and where Triton
is missing, it is torch's operators (`adamw.py`). Matrices may be updated by Muon (`muon.py`).

A gradient that is not finite changes nothing: no weight, no moment, no step count. What becomes of the run then is not
decided here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.config import OptimizerConfig, muon_rate
from draftsmith.drafter import DraftModel
from draftsmith.objective import Sums
from draftsmith.training.adamw import StepCount, adamw_step
from draftsmith.training.flat import DECAYED, MUON, PLAIN, Layout, make_layout, padded, span, views
from draftsmith.training.muon import batches, muon_step

if TYPE_CHECKING:
    from draftsmith.training.fused import FusedUpdate

PIECE = 2**25  # elements of another replica's sums that are copied at a time
SMALLEST = torch.finfo(torch.float32).tiny

Across = Callable[[Tensor], None]


def choose_owners(sizes: dict[str, int], replicas: int) -> dict[str, int]:
    """Owner of each parameter: largest first, each to the replica that owns least so far."""
    load = [0] * replicas
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = load.index(min(load))
        owners[name] = owner
        load[owner] += sizes[name]
    return owners


class ReplicaUpdate:
    """One replica's share of the update.

    Args:
        index: of the replica.
        replicas: their number.
        model: its drafter, in the compute dtype.
        layout: of all replicas' buffers.
        config: optimizer settings.
        fused: whether Triton does AdamW.
    """

    def __init__(
        self, index: int, replicas: int, model: DraftModel, layout: Layout, config: OptimizerConfig, *, fused: bool
    ) -> None:
        self.index, self.alone = index, replicas == 1
        self.config, self.layout = config, layout
        found = dict(model.named_parameters())
        self.parameters = [found[each.name] for each in layout.segments]
        self.device = self.parameters[0].device
        self.owned = layout.owned_by(index)
        self._adamw, self._muon = layout.owned_by(index, DECAYED, PLAIN), layout.owned_by(index, MUON)
        self._start, self._stop = span(self.owned)
        self._weights = self._owned_by(index)

        self._master = self._zeros(self._stop - self._start)
        self._masters = views(self._master, self.owned, self._start)
        self._write_masters([weight.detach() for weight in self._weights])
        moments = sum(padded(each.size) for each in self._adamw)
        self._exp_avg, self._exp_avg_sq = self._zeros(moments), self._zeros(moments)
        self._count = StepCount(config.betas, self.device)
        self._momentum = self._zeros(sum(padded(each.size) for each in self._muon))
        self._batches = batches(self._muon, self._muon[0].start) if self._muon else []

        self._sums: Tensor | None = None  # [layout.size], made when it is first needed
        self._summed = False  # whether the sums hold rows of this update
        self._last: list[Tensor] | None = None  # gradients of the last row, not yet in the sums
        self._gradient: tuple[Tensor | None, Sequence[Tensor] | None] = (None, None)  # what `apply` steps with
        self._weight = torch.ones((), device=self.device)
        self._fused = self._make_kernels() if fused else None
        self.settle()

    @torch.no_grad()
    def accumulate(self, *, last: bool = False) -> None:
        """Moves the gradients of one row out of `.grad` and into the float32 sums.

        Args:
            last: of this replica in this update; spares two passes over memory where the step can take them as they
                are. Only a hint, and only for the last: they take up memory until then.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        if all(gradient is None for gradient in gradients):
            return
        for parameter in self.parameters:
            parameter.grad = None
        self._add_last()
        self._last = [
            _readable(torch.zeros_like(parameter) if gradient is None else gradient, parameter)
            for gradient, parameter in zip(gradients, self.parameters, strict=True)
        ]
        if not (last and self._takes_last()):
            self._add_last()

    @torch.no_grad()
    def reduce(self, replicas: Sequence[ReplicaUpdate], weight: Tensor, across: Across | None = None) -> Tensor:
        """Sums the owned gradients and returns the squared norm of their weighted mean, float32 [].

        Args:
            replicas: all, in order. What they did before is ordered before this on this device.
            weight: Σ w over all rows, float32 [] on this device.
            across: adds up, in place, one flat float32 tensor over the ranks; called if anything is owned here.
        """
        self._weight = weight.clamp_min(SMALLEST)  # an update may teach nothing: its gradients are zero and stay zero
        if not self.owned:
            return torch.zeros((), device=self.device)
        if self._takes_last() and self._last is not None and across is None:
            self._gradient = (self._sums if self._summed else None, self._last)
        else:
            self._add_last()
            own = self._sum_over(replicas)
            if across is not None:
                across(own)
            self._gradient = (self._sums, None)
        sums, last = self._gradient
        if self._fused is not None:
            norm = self._fused.squares(sums, last, self.owned).sqrt()
        else:
            assert sums is not None
            norm = torch.linalg.vector_norm(sums[self._start : self._stop])
        return (norm / self._weight).square()

    @torch.no_grad()
    def apply(self, norm: Tensor, lr_factor: float) -> None:
        """Clips by the global norm, steps the owned masters and writes the owned weights of this replica's model.

        Args:
            norm: of the whole gradient, float32 [] on this device. If it is not finite, nothing changes.
            lr_factor: of this update, by the schedule.
        """
        if not self.owned:
            return
        config = self.config
        go = norm.isfinite()
        scale = (config.clip / (norm + 1e-6)).clamp(max=1.0) / self._weight
        sums, last = self._gradient
        if self._adamw:
            lr = config.lr * lr_factor
            factors, keep = self._count.factors(go, scale, lr), 1 - lr * config.weight_decay
            self._step_adamw(sums, last, factors, keep)
        if self._batches:
            assert sums is not None
            lr = muon_rate(config.lr, config.muon_lr) * lr_factor
            master, gradient = self._muon_part(self._master, self._start), self._muon_part(sums, 0)
            for batch in self._batches:
                w, b, g = batch.of(master), batch.of(self._momentum), batch.of(gradient)
                muon_step(w, b, g, go, scale, lr, config.weight_decay)
            self._write_weights(len(self._adamw))
        self._last, self._gradient = None, (None, None)

    @torch.no_grad()
    def refresh(self, replicas: Sequence[ReplicaUpdate]) -> None:
        """Copies the other owners' new weights into this replica's model and forgets the gradient sums."""
        for owner in replicas:
            if owner is not self and owner.owned:
                torch._foreach_copy_(self._owned_by(owner.index), owner._weights)
        self._summed = False

    def state_tensors(self) -> dict[str, Tensor]:
        """Masters and optimizer state of the owned parameters, by name; independent of the number of replicas."""
        tensors = {f"master/{each.name}": view for each, view in zip(self.owned, self._masters, strict=True)}
        for key, name, view in self._state():
            tensors[f"state/{name}/{key}"] = view
        for each in self._adamw:
            tensors[f"state/{each.name}/step"] = self._count.steps
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Puts back what `state_tensors` of any number of replicas returned; state that is not there starts anew."""
        self._write_masters([tensors[f"master/{each.name}"] for each in self.owned])
        for key, name, view in self._state():
            value = tensors.get(f"state/{name}/{key}")
            view.zero_() if value is None else view.copy_(value)
        found = [tensors[key] for each in self._adamw if (key := f"state/{each.name}/step") in tensors]
        steps = {float(value) for value in found}
        assert len(steps) <= 1, f"parameters of one update were stepped {sorted(steps)} times"
        self._count.steps.fill_(max(steps, default=0.0))
        self._write_weights(0)
        self.settle()

    def describe(self) -> str:
        """How AdamW runs here, for people."""
        if self._fused is None:
            return f"torch's operators over flat float32 buffers on {self.device}"
        return f"Triton over flat float32 buffers on {self.device}, ready in {self._fused.seconds:.1f} s"

    @property
    def kernel_seconds(self) -> float | None:
        """That compiling the kernels took, or reading them from Triton's cache; None where there are none."""
        return None if self._fused is None else self._fused.seconds

    def _make_kernels(self) -> FusedUpdate:
        from draftsmith.training.fused import FusedUpdate

        return FusedUpdate(self.layout, self.parameters, alone=self.alone)

    def settle(self) -> None:
        """Waits for what was given to the device: workers have streams of their own, which do not wait for the main
        thread's."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, device=self.device)

    def _owned_by(self, owner: int) -> list[Tensor]:
        """Those of this replica's model's weights that a replica owns."""
        both = zip(self.layout.segments, self.parameters, strict=True)
        return [parameter for each, parameter in both if each.owner == owner]

    def _takes_last(self) -> bool:
        """Whether the step can read the last row's gradient from where autograd left it."""
        return self._fused is not None and self.alone and not self._muon

    def _add_last(self) -> None:
        """The last row's gradient goes into the sums."""
        if self._last is None:
            return
        if self._sums is None:
            self._sums = self._zeros(self.layout.size)
        if self._fused is not None:
            self._fused.add(self._sums, self._last, summed=self._summed)
        elif self._summed:
            torch._foreach_add_(views(self._sums, self.layout.segments), self._last)
        else:
            torch._foreach_copy_(views(self._sums, self.layout.segments), self._last)
        self._summed, self._last = True, None

    def _sum_over(self, replicas: Sequence[ReplicaUpdate]) -> Tensor:
        """The owned part of this replica's sums, which now holds that of all replicas, added in their order."""
        if self._sums is None:
            self._sums = self._zeros(self.layout.size)
        whole = self._sums[self._start : self._stop]
        parts = [each._sums for each in replicas if each._summed and each._sums is not None]
        if not parts:
            return whole.zero_()
        for start in range(self._start, self._stop, PIECE):
            piece = slice(start, min(start + PIECE, self._stop))
            own = self._sums[piece]
            total = parts[0][piece].to(self.device)
            for part in parts[1:-1]:
                total = total + part[piece].to(self.device)
            # Its old content is in the total, or is the last part: only now may it be overwritten.
            if len(parts) > 1:
                torch.add(total, parts[-1][piece].to(self.device), out=own)
            elif total.data_ptr() != own.data_ptr():
                own.copy_(total)
        return whole

    def _step_adamw(self, sums: Tensor | None, last: Sequence[Tensor] | None, factors: Tensor, keep: float) -> None:
        start, stop = span(self._adamw)
        state = (self._master[: stop - start], self._exp_avg, self._exp_avg_sq)
        decayed = sum(padded(each.size) for each in self._adamw if each.rule == DECAYED)
        betas, eps = self.config.betas, self.config.eps
        if self._fused is not None:
            self._fused.step(state, sums, last, self._adamw, decayed, factors, betas, eps, keep)
            return
        assert sums is not None
        for part, kept in ((slice(0, decayed), keep), (slice(decayed, stop - start), 1.0)):
            w, m, v, g = (flat[part] for flat in (*state, sums[start:stop]))
            adamw_step(w, m, v, g, factors, betas, eps, kept)
        self._write_weights(0, len(self._adamw))

    def _muon_part(self, flat: Tensor, origin: int) -> Tensor:
        start, stop = span(self._muon)
        return flat[start - origin : stop - origin]

    def _state(self) -> list[tuple[str, str, Tensor]]:
        """(key, parameter, view) of all optimizer state but the step count."""
        origin = self._start
        found = [("exp_avg", self._exp_avg, self._adamw, origin), ("exp_avg_sq", self._exp_avg_sq, self._adamw, origin)]
        found.append(("momentum_buffer", self._momentum, self._muon, span(self._muon)[0]))
        return [
            (key, each.name, view)
            for key, flat, segments, first in found
            for each, view in zip(segments, views(flat, segments, first), strict=True)
        ]

    def _write_masters(self, values: Sequence[Tensor]) -> None:
        if self._masters:
            torch._foreach_copy_(self._masters, list(values))

    def _write_weights(self, first: int, stop: int | None = None) -> None:
        """Rounds owned masters into the model's weights."""
        if self._weights[first:stop]:
            torch._foreach_copy_(self._weights[first:stop], self._masters[first:stop])


def make_updates(
    models: list[DraftModel], config: OptimizerConfig, *, fused: bool | None = None
) -> list[ReplicaUpdate]:
    """One `ReplicaUpdate` per replica; all replicas must hold equal weights.

    Args:
        fused: whether Triton does AdamW; None: on CUDA, where Triton is installed.
    """
    triton = importlib.util.find_spec("triton") is not None
    parameters = dict(models[0].named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    owners = choose_owners({name: parameter.numel() for name, parameter in parameters.items()}, len(models))
    layout = make_layout(shapes, owners, muon=config.name == "muon")
    updates = []
    for index, model in enumerate(models):
        own = triton and next(model.parameters()).device.type == "cuda" if fused is None else fused
        updates.append(ReplicaUpdate(index, len(models), model, layout, config, fused=own))
    return updates


def buffer_bytes(parameters: int, replicas: int, rows: int, config: OptimizerConfig, device: torch.device) -> int:
    """Bytes of a replica's float32 buffers: sums, and its share of masters and optimizer state.

    Args:
        parameters: of the drafter.
        replicas: of a rank.
        rows: of an update, of all ranks.
        config: optimizer settings.
        device: of the replica; on CUDA with Triton.
    """
    muon = config.name == "muon"
    # One row, so one replica and one rank: its gradient goes straight into the step.
    sums = 0 if rows == 1 and device.type == "cuda" and not muon else 4 * parameters
    return sums + (8 if muon else 12) * parameters // replicas


def _readable(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient as a kernel reads it: contiguous, aligned, in the weight's dtype. Autograd leaves it like that."""
    gradient = gradient.to(parameter.dtype).contiguous()
    return gradient if gradient.data_ptr() % 16 == 0 else gradient.clone()


def total_sums(parts: list[Sums], device: torch.device) -> Sums:
    """Sums of all replicas, added in order, on `device`."""
    total = parts[0].values.to(device, copy=True)
    for part in parts[1:]:
        total += part.values.to(device)
    return Sums(total)
