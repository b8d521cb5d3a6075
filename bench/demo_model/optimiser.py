"""Muon for the matrices, Adam for the rest.

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/) takes the orthogonal part of a
matrix's momentum as its step; stacks of matrices are treated together.
"""

# pyright: basic, reportMissingImports=false

import re
from dataclasses import dataclass

import torch
from torch import Tensor

_MATRICES = re.compile(
    r"(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|compressor\.w\w+|indexer\.w[kq]\w*)|"
    r"ffn\.(experts|shared_experts)\.w\d|engram\.wkv)\.weight"
)
_BETAS = (0.9, 0.95)
_TABLES = ("embed.weight", "head.weight", "engram.embed.weight")


@dataclass(frozen=True)
class Rates:
    """What a step multiplies with: Muon's, of the tables and of the rest."""

    muon: float = 0.02
    table: float = 4e-3
    rest: float = 2e-3


class Optimiser:
    """One over all parameters; what changes from step to step is in tensors, for CUDA graphs."""

    def __init__(self, parameters: dict[str, Tensor], rates: Rates) -> None:
        self._rates = rates
        self._matrices = [p for key, p in parameters.items() if _MATRICES.fullmatch(key)]
        tables = [p for key, p in parameters.items() if key in _TABLES]
        rest = [
            p
            for key, p in parameters.items()
            if p.requires_grad and key not in _TABLES and not _MATRICES.fullmatch(key)
        ]
        self._groups = [tables, rest]
        self._momenta = [torch.zeros_like(p) for p in self._matrices]
        self._means = [[torch.zeros_like(p) for p in group] for group in self._groups]
        self._squares = [[torch.zeros_like(p) for p in group] for group in self._groups]
        self.parameters = [*self._matrices, *tables, *rest]
        # Muon's rate, those of Adam's groups, and what the mean squares are multiplied with.
        self._now = torch.zeros(4, device=self._matrices[0].device)
        self._steps = 0

    def set_rates(self, share: float) -> None:
        """Before a step: how much of the full rates applies to it."""
        self._steps += 1
        table, rest = (
            rate * share / (1 - _BETAS[0] ** self._steps)
            for rate in (self._rates.table, self._rates.rest)
        )
        now = [self._rates.muon * share, table, rest, 1 / (1 - _BETAS[1] ** self._steps)]
        self._now.copy_(torch.tensor(now), non_blocking=True)

    def reset(self) -> None:
        """Forget the steps taken."""
        self._steps = 0
        for state in (self._momenta, *self._means, *self._squares):
            torch._foreach_zero_(state)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Take a step; returns the gradient's norm before it was cut."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        for i, group in enumerate(self._groups):
            gradients = [p.grad for p in group]
            torch._foreach_lerp_(self._means[i], gradients, 1 - _BETAS[0])
            torch._foreach_mul_(self._squares[i], _BETAS[1])
            torch._foreach_addcmul_(self._squares[i], gradients, gradients, 1 - _BETAS[1])
            scales = torch._foreach_mul(self._squares[i], self._now[3])
            torch._foreach_sqrt_(scales)
            torch._foreach_add_(scales, 1e-10)
            updates = torch._foreach_div(self._means[i], scales)
            torch._foreach_mul_(updates, self._now[1 + i])
            torch._foreach_sub_(group, updates)
        gradients = [p.grad for p in self._matrices]
        torch._foreach_lerp_(self._momenta, gradients, 0.05)
        nesterov = torch._foreach_lerp(gradients, self._momenta, 0.95)
        rate = self._now[0]
        for p, update in zip(self._matrices, nesterov, strict=True):
            p.mul_(1 - 0.1 * rate)
            p.sub_(_orthogonal(update) * (rate * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5))
        return norm


def _orthogonal(g: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices of a stack, by five Newton-Schulz steps in bf16."""
    x = g.bfloat16()
    if is_tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-20)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if is_tall else x
