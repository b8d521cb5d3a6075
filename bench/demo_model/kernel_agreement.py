"""Holds the kernels to PyTorch's arithmetic: values and gradients on random tensors.

    python -m bench.demo_model.kernel_agreement

Training calls it first. Without a GPU, TRITON_INTERPRET=1 runs the kernels on the CPU.
"""

# pyright: basic, reportMissingImports=false

import os

import torch
from torch import Tensor

from bench.demo_model import sublayers

_SIZES = {"B": 2, "T": 256, "H": 4, "D": 32, "W": 32, "k": 16}
# The demo model's own, on a GPU also in bf16.
_FULL = {"B": 2, "T": 2048, "H": 4, "D": 128, "W": 128, "k": 128}
_LONG = _FULL | {"B": 1, "T": 8192}


def agree(device: str) -> None:
    """Raise an error where a kernel and PyTorch differ; nothing to do on a CPU."""
    if device != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        return
    from bench.demo_model import fused

    torch.manual_seed(0)
    x = _random(device, 70, 4, 4)
    _same("sinkhorn", *(_with_gradient(m.sinkhorn, [x], 19, 1e-6) for m in (fused, sublayers)))
    for R in (0, 1, 2):
        _agree_on_rows(fused, device, R, _SIZES, torch.float32)
    if device == "cuda":
        for sizes, R in ((_FULL, 0), (_FULL, 1), (_FULL, 2), (_LONG, 1)):
            _agree_on_rows(fused, device, R, sizes, torch.bfloat16)


def _agree_on_rows(fused, device: str, R: int, sizes: dict[str, int], dtype: torch.dtype) -> None:
    B, T, H, D, W, k = sizes.values()
    lengths = [T * 2 // 5, T // 6, 0]
    lengths[2] = T - sum(lengths)
    documents = torch.arange(3, device=device).repeat_interleave(torch.tensor(lengths).to(device))
    layout = sublayers.layout_of(torch.stack([documents, documents * 0][:B]))
    q, kv, sink = _random(device, B, T, H, D), _random(device, B, T, D), _random(device, H)
    mask: tuple[Tensor | None, ...] = (None, None)
    tensors = [q.to(dtype), kv.to(dtype), sink]
    if R:
        S = T // R
        # Of a few values, so that many scores are equal.
        index_q = _random(device, B, T, H, D).round().to(dtype)
        keys = _random(device, B, S, D).round().to(dtype)
        weights = _random(device, B, T, H).round()
        blocks = torch.rand(B, T, S // 8, device=device) > 0.3
        args = index_q, weights, keys, layout
        ours = fused.index_scores(*args, blocks.to(torch.uint8), 8)
        theirs = sublayers.index_scores(*args, blocks, 8)
        _same(f"index_scores {R} {T}", *([x.nan_to_num(neginf=-9)] for x in (ours, theirs)))
        mask = fused.best(theirs, k), sublayers.best(theirs, k)
        assert torch.equal(mask[0].bool(), mask[1]), f"best {R}"
        tensors.insert(2, _random(device, B, S, D).to(dtype))

    def attended(module, mask, tensors):
        def call(q, kv, *rest):
            far = rest[0] if R else None
            return module.attend(q, kv, far, mask, rest[-1], layout, W)[0]

        return _with_gradient(call, tensors)

    ours, theirs = attended(fused, mask[0], tensors), attended(sublayers, mask[1], tensors)
    exact = theirs
    if dtype != torch.float32:
        exact = attended(sublayers, mask[1], [x.float() for x in tensors])
    _same(f"attend {R} {T}", ours, theirs, exact)
    if R:
        q, kv, rows, sink = tensors
        _, lse = sublayers.attend(q, kv, rows, mask[1], sink, layout, W)
        ours, theirs = (
            [module.row_shares(q, rows, given, lse, 4)]
            for module, given in ((fused, mask[0]), (sublayers, mask[1]))
        )
        exact = [sublayers.row_shares(q.float(), rows.float(), mask[1], lse, 4)]
        _same(f"row_shares {R} {T}", ours, theirs, exact)


def _random(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device)


def _with_gradient(call, tensors: list[Tensor], *args) -> list[Tensor]:
    """The value, and the gradients of a fixed function of it."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    value = call(*tensors, *args)
    generator = torch.Generator().manual_seed(1)
    factor = torch.randn(value.shape, generator=generator).to(value.device)
    return [value.detach(), *torch.autograd.grad((value * factor).sum(), tensors)]


def _same(
    name: str, ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor] | None = None
) -> None:
    """Whether the kernels are as near to `exact` as PyTorch is in the same type; or near to it."""
    exact = theirs if exact is None else exact
    errors = [_error(*pair) for pair in zip(ours, exact, strict=True)]
    allowed = [2 * _error(*pair) + 5e-3 for pair in zip(theirs, exact, strict=True)]
    print(name, *(f"{error:.1e}" for error in errors), flush=True)
    # Where both are in float32 a GPU still takes tf32 within the products.
    if not all(error < most for error, most in zip(errors, allowed, strict=True)):
        raise SystemExit(f"{name}: the kernels compute something else")


def _error(x: Tensor, exact: Tensor) -> float:
    return ((x.float() - exact.float()).norm() / exact.float().norm()).item()


if __name__ == "__main__":
    agree("cuda" if torch.cuda.is_available() else "cpu")
