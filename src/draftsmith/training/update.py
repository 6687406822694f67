"""The update: float32 masters, one optimizer's work shared by D replicas.

Every parameter is owned by one replica. An update is, for the replicas together:

1. each adds its rows' gradients up in float32 (`accumulate`, after every row);
2. each owner sums its parameters' gradients over the replicas in fixed order and divides by the global Σ w (`reduce`);
3. the squared norms of all owners give one clip factor; owners step their masters (`apply`);
4. every replica copies the new weights from the owners (`refresh`).

The order of sums is fixed, so a rerun is identical; each optimizer state exists once, on its owner. The barriers
between the phases are `pipeline/sync.py`'s; with one replica this is plain mixed-precision AdamW.

Matrices may be updated by Muon (orthogonalised momentum), everything else by AdamW; both are torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftsmith.config import OptimizerConfig
from draftsmith.drafter import DraftModel
from draftsmith.objective import Sums


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
        model: its drafter, in the compute dtype.
        owners: owner of every parameter.
        config: optimizer settings.
    """

    def __init__(
        self,
        index: int,
        model: DraftModel,
        owners: dict[str, int],
        config: OptimizerConfig,
    ) -> None:
        self.index = index
        self.config = config
        self.parameters = dict(model.named_parameters())
        self.device = next(iter(self.parameters.values())).device
        self.accumulated = {
            name: torch.zeros(parameter.shape, dtype=torch.float32, device=self.device)
            for name, parameter in self.parameters.items()
        }
        self._fresh = True
        self.masters = {
            name: self.parameters[name].detach().to(torch.float32, copy=True).requires_grad_()
            for name, owner in owners.items()
            if owner == index
        }
        self.optimizers = self._make_optimizers()

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        config = self.config
        matrices = [value for value in self.masters.values() if value.dim() == 2]
        others = [value for value in self.masters.values() if value.dim() != 2]
        optimizers: list[torch.optim.Optimizer] = []
        fused = self.device.type == "cuda"
        groups: list[dict[str, Any]] = [{"params": others, "weight_decay": 0.0}] if others else []
        if config.name == "muon":
            if matrices:
                muon_lr = config.muon_lr or 10 * config.lr
                optimizers.append(torch.optim.Muon(matrices, lr=muon_lr, weight_decay=config.weight_decay))
        elif matrices:
            groups.append({"params": matrices, "weight_decay": config.weight_decay})
        if groups:
            optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]
        return optimizers

    @torch.no_grad()
    def accumulate(self) -> None:
        """Moves the gradients of one row into the float32 sums."""
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        sums, gradients = [self.accumulated[name] for name in found], list(found.values())
        if self._fresh:
            torch._foreach_copy_(sums, gradients)
            self._fresh = False
        else:
            torch._foreach_add_(sums, gradients)
        for name in found:
            self.parameters[name].grad = None

    @torch.no_grad()
    def reduce(self, replicas: list[ReplicaUpdate], weight: Tensor) -> Tensor:
        """Gradients of the owned masters: the replicas' sums in order, divided by Σ w. Returns their squared norm."""
        names = list(self.masters)
        squared = torch.zeros((), device=self.device)
        if not names:
            return squared
        gradients = [torch.zeros_like(self.masters[name]) for name in names]
        for replica in replicas:
            if not replica._fresh:
                torch._foreach_add_(gradients, [replica.accumulated[name].to(self.device) for name in names])
        # A row may teach nothing at all; its gradients are zero and stay zero.
        torch._foreach_div_(gradients, weight.clamp_min(torch.finfo(torch.float32).tiny))
        for name, gradient in zip(names, gradients, strict=True):
            self.masters[name].grad = gradient
        for norm in torch._foreach_norm(gradients):
            squared = squared + norm.square()
        return squared

    @torch.no_grad()
    def apply(self, norm: Tensor, lr_factor: float) -> None:
        """Clips by the global norm and steps the owned masters."""
        if not self.masters:
            return
        factor = (self.config.clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([m.grad for m in self.masters.values() if m.grad is not None], factor)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * lr_factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def refresh(self, replicas: list[ReplicaUpdate]) -> None:
        """Copies the owners' new weights into this replica's model and forgets the gradient sums."""
        for owner in replicas:
            if owner.masters:
                torch._foreach_copy_([self.parameters[name] for name in owner.masters], list(owner.masters.values()))
        self._fresh = True

    def state_tensors(self) -> dict[str, Tensor]:
        """Masters and optimizer state of the owned parameters, by name; independent of the number of replicas."""
        name_of = {id(master): name for name, master in self.masters.items()}
        tensors = {f"master/{name}": master.detach() for name, master in self.masters.items()}
        for optimizer in self.optimizers:
            for master, state in optimizer.state.items():
                for key, value in state.items():
                    tensors[f"state/{name_of[id(master)]}/{key}"] = torch.as_tensor(value).detach()
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Puts back what `state_tensors` of any number of replicas returned."""
        states: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, rest = key.partition("/")
            if kind == "state":
                name, _, field = rest.rpartition("/")
                states.setdefault(name, {})[field] = value
        for name, master in self.masters.items():
            master.copy_(tensors[f"master/{name}"])
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for master in group["params"]:
                    name = next(name for name, value in self.masters.items() if value is master)
                    if name in states:
                        optimizer.state[master] = {
                            # torch keeps AdamW's step counter where the parameter lives only if it is fused.
                            field: value.to(self.device if field != "step" or group.get("fused") else "cpu", copy=True)
                            for field, value in states[name].items()
                        }


def make_updates(models: list[DraftModel], config: OptimizerConfig) -> list[ReplicaUpdate]:
    """One `ReplicaUpdate` per replica; all replicas must hold equal weights."""
    sizes = {name: parameter.numel() for name, parameter in models[0].named_parameters()}
    owners = choose_owners(sizes, len(models))
    return [ReplicaUpdate(index, model, owners, config) for index, model in enumerate(models)]


def total_sums(parts: list[Sums], device: torch.device) -> Sums:
    """Sums of all replicas, added in order, on `device`."""
    total = parts[0].values.to(device, copy=True)
    for part in parts[1:]:
        total += part.values.to(device)
    return Sums(total)
