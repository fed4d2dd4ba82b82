"""Optimiser of the tiny model: orthogonalised momentum for matrices, Adam for the rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Quintic Newton-Schulz coefficients that pull singular values towards 1 in a few rounds.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Replace each matrix of (N, A, B) by a nearby one with singular values near 1."""
    a, b, c = _COEFFICIENTS
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    for _ in range(_ROUNDS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose step is orthogonalised per matrix; 3-D weights are stacks of matrices."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        """Take matrices (A, B) and stacks (E, A, B); ``lr`` bounds a step's spectral norm."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: nn.Parameter, group: dict[str, float]) -> None:
        state = self.state[param]
        if not state:
            state["momentum"] = torch.zeros_like(param)
        buffer: Tensor = state["momentum"]
        buffer.lerp_(param.grad, 1 - group["momentum"])  # type: ignore[arg-type]
        direction = param.grad.lerp(buffer, group["momentum"])  # type: ignore[union-attr]
        split = 2 if param.dim() == 3 and param.shape[1] < param.shape[2] else 1
        # A fused gate-and-up weight is two matrices: both get a full-size step.
        stack = direction.reshape(-1, param.shape[-2] // split, param.shape[-1])
        scale = max(1.0, stack.shape[1] / stack.shape[2]) ** 0.5
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(orthogonalise(stack).reshape(param.shape), alpha=-group["lr"] * scale)


def make_optimisers(
    model: nn.Module, muon_lr: float, adam_lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Return Muon for the attention and expert matrices and Adam for all other parameters."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, param in model.named_parameters():
        inner = param.dim() >= 2 and "embed" not in name and ".gate." not in name
        (matrices if inner else others).append(param)
    return [
        Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=weight_decay),
        torch.optim.Adam(others, lr=adam_lr, betas=(0.9, 0.95)),
    ]
