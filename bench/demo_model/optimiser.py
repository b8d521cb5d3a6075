"""Muon for the matrices, Adam for the rest.

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/) takes the orthogonal part of a
matrix's momentum as its step; stacks of matrices are treated together.
"""

# pyright: basic, reportMissingImports=false

import re

import torch
from torch import Tensor

_MATRICES = re.compile(
    r"(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|compressor\.w\w+|indexer\.w[kq]\w*)|"
    r"ffn\.(experts|shared_experts)\.w\d|engram\.wkv)\.weight"
)
_TABLES = ("embed.weight", "head.weight", "engram.embed.weight")


class Optimiser:
    """One over all parameters; `step` takes how much of the full rates applies."""

    def __init__(
        self, parameters: dict[str, Tensor], *, muon_rate: float, table_rate: float, rate: float
    ) -> None:
        self._muon_rate = muon_rate
        self._matrices = [p for key, p in parameters.items() if _MATRICES.fullmatch(key)]
        self._momenta = [torch.zeros_like(p) for p in self._matrices]
        tables = [p for key, p in parameters.items() if key in _TABLES]
        rest = [
            p
            for key, p in parameters.items()
            if p.requires_grad and key not in _TABLES and not _MATRICES.fullmatch(key)
        ]
        groups = [{"params": tables, "lr": table_rate}, {"params": rest, "lr": rate}]
        self._adam = torch.optim.Adam(
            groups, betas=(0.9, 0.95), eps=1e-10, fused=self._matrices[0].is_cuda
        )
        self._rates = [table_rate, rate]
        self._everything = [*self._matrices, *tables, *rest]

    @torch.no_grad()
    def step(self, share: float) -> Tensor:
        """Take a step and clear the gradients; returns the gradient's norm before it was cut."""
        norm = torch.nn.utils.clip_grad_norm_(self._everything, 1.0, foreach=True)
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        self._adam.step()
        torch._foreach_lerp_(self._momenta, [p.grad for p in self._matrices], 0.05)
        rate = self._muon_rate * share
        for p, momentum in zip(self._matrices, self._momenta, strict=True):
            update = _orthogonal(torch.lerp(p.grad, momentum, 0.95))
            p.mul_(1 - 0.1 * rate)
            p.add_(update, alpha=-rate * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)
        for p in self._everything:
            p.grad = None
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
