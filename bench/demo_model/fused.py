"""The training form's heavy steps on a GPU: what `sublayers` does of the same names, by kernels."""

# A kernel is launched over a grid by indexing it.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

import torch
import triton
from torch import Tensor

from bench.demo_model import kernels
from bench.demo_model.sublayers import Layout

_SINKHORN_BLOCK = 64
_WIDE = {"queries": 32, "block": 64}


def sinkhorn(x: Tensor, rounds: int, eps: float) -> Tensor:
    return _Sinkhorn.apply(x.contiguous(), rounds, eps)


def attend(
    q: Tensor,
    kv: Tensor,
    rows: Tensor | None,
    mask: Tensor | None,
    sink: Tensor,
    layout: Layout,
    W: int,
) -> tuple[Tensor, Tensor]:
    return _Attend.apply(q.contiguous(), kv.contiguous(), rows, mask, sink, layout, W)


@torch.no_grad()
def row_shares(q: Tensor, rows: Tensor, mask: Tensor, lse: Tensor, stride: int) -> Tensor:
    (B, T, H, D), S = q.shape, rows.shape[1]
    U = T // stride
    out = torch.empty(B, U, S, device=q.device)
    grid = (triton.cdiv(U, 64), triton.cdiv(S, 64), B)
    args = (q.contiguous(), rows.contiguous(), mask, lse, out, T, S, U, D**-0.5)
    kernels.row_shares[grid](*args, stride=stride, H=H, D=D, queries=64, block=64)
    return out


@torch.no_grad()
def index_scores(
    q: Tensor, weights: Tensor, keys: Tensor, layout: Layout, blocks: Tensor | None, size: int
) -> Tensor:
    (B, T, H, D), S = q.shape, keys.shape[1]
    out = torch.empty(B, T, S, device=q.device)
    grid = (triton.cdiv(T, 64), triton.cdiv(S, 64), B)
    tensors = (q.contiguous(), weights.contiguous(), keys.contiguous(), layout.begins)
    kernels.index_scores[grid](
        *(*tensors, out if blocks is None else blocks, out, T, S),
        R=T // S,
        size=0 if blocks is None else size,
        H=H,
        D=D,
        queries=64,
        block=64,
    )
    return out


@torch.no_grad()
def best(score: Tensor, k: int) -> Tensor:
    S = score.shape[-1]
    out = torch.empty(score.shape, dtype=torch.uint8, device=score.device)
    width = triton.next_power_of_2(S)
    warps = min(16, max(4, width // 1024))
    kernels.choose[(score.numel() // S,)](score, out, S, k, width=width, num_warps=warps)
    return out


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rounds, eps):
        N, hc = x.shape[:2]
        out = torch.empty_like(x)
        sums = torch.empty(1 + 2 * rounds, N, hc, device=x.device)
        grid = (triton.cdiv(N, _SINKHORN_BLOCK),)
        sizes = {"hc": hc, "block": _SINKHORN_BLOCK, "num_warps": 2}
        kernels.sinkhorn_forward[grid](x, out, sums, N, eps, rounds, **sizes)
        ctx.save_for_backward(out, sums)
        ctx.args = grid, (N, eps, rounds), sizes
        return out

    @staticmethod
    def backward(ctx, gradient):
        out, sums = ctx.saved_tensors
        grid, args, sizes = ctx.args
        d_x = torch.empty_like(out)
        kernels.sinkhorn_backward[grid](out, sums, gradient.contiguous(), d_x, *args, **sizes)
        return d_x, None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, rows, mask, sink, layout, W):
        B, T, H, D = q.shape
        S = T if rows is None else rows.shape[1]
        R = 0 if rows is None else T // S
        far, seen = (kv, kv) if rows is None else (rows.contiguous(), mask)
        out, lse = torch.empty_like(q), torch.empty(B, T, H, device=q.device)
        args = (q, kv, far, seen, layout.begins, sink, out, lse, T, S, D**-0.5)
        sizes = {"R": R, "W": W, "H": H, "D": D}
        grid = (triton.cdiv(T, _WIDE["queries"]), B)
        kernels.attend_forward[grid](*args, **sizes, **_WIDE, num_warps=8)
        ctx.save_for_backward(q, kv, far, seen, sink, out, lse)
        ctx.layout, ctx.sizes = layout, sizes
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, gradient, _):
        q, kv, far, seen, sink, out, lse = ctx.saved_tensors
        layout, sizes = ctx.layout, ctx.sizes
        B, T, _, D = q.shape
        gradient = gradient.contiguous()
        delta = (out.float() * gradient.float()).sum(-1)
        d_sink = -(torch.exp(sink - lse) * delta).sum((0, 1))
        d_q, d_kv = torch.empty_like(q), torch.empty_like(kv)
        by_query = (triton.cdiv(T, _WIDE["queries"]), B)
        S, scale = far.shape[1], D**-0.5
        args = (q, kv, far, seen, layout.begins, lse, gradient, delta, d_q, T, S, scale)
        kernels.attend_backward_queries[by_query](*args, **sizes, **_WIDE, num_warps=8)

        def of_rows(rows, mask, result, R):
            grid = (triton.cdiv(rows.shape[1], _WIDE["block"]), B)
            args = (q, rows, mask, layout.begins, layout.ends, lse, gradient, delta, result)
            kernels.attend_backward_rows[grid](
                *args, T, rows.shape[1], scale, **(sizes | {"R": R}), **_WIDE, num_warps=8
            )
            return result

        of_rows(kv, kv, d_kv, 0)
        d_far = of_rows(far, seen, torch.empty_like(far), sizes["R"]) if sizes["R"] else None
        return d_q, d_kv, d_far, None, d_sink, None, None
