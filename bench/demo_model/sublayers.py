"""The arithmetic of the training form; `fused` has kernels for what takes longest.

Shapes: N = B * T tokens, T of each of B sequences, W sliding_window, S compressed rows, hc streams,
D hidden_size, H heads of size d, E experts. Section numbers refer to docs/model.md.
"""

# pyright: basic, reportMissingImports=false

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.demo_model import roundings

_NEVER = -1e30


def linear(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.to(x.dtype).T


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-20) * weight).to(x.dtype)


def rope(x: Tensor, angle: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last channels of x [.., C] by angle [.., C_rope / 2], pairs (2i, 2i + 1)."""
    n = 2 * angle.shape[-1]
    cos, sin = angle.cos(), angle.sin() * (-1 if inverse else 1)
    re, im = x[..., -n:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([re * cos - im * sin, re * sin + im * cos], -1).flatten(-2)
    return torch.cat([x[..., :-n], turned.to(x.dtype)], -1)


def mix(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor):
    """Section 3.2: pre [N, hc], post [N, hc], comb before Sinkhorn [N, hc, hc]."""
    hc = streams.shape[1]
    v = streams.flatten(1).float()
    m = (v @ fn.T) * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-20)
    pre = torch.sigmoid(m[:, :hc] * scale[0] + base[:hc]) + 1e-6
    post = 2 * torch.sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = (m[:, 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(-1, (hc, hc))
    return pre, post, comb


def sinkhorn(x: Tensor, rounds: int, eps: float) -> Tensor:
    """Section 3.2: columns brought to a sum of one, then rows and columns `rounds` times."""
    comb = x.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(rounds):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor) -> Tensor:
    x = (pre[..., None] * streams.float()).sum(1).to(streams.dtype)
    return rms_norm(x, weight)


def expand(h: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out = post[..., None] * h[:, None].float()
    for j in range(streams.shape[1]):
        out = out + comb[:, j, :, None] * streams[:, j, None].float()
    return out.to(streams.dtype)


def query(x: Tensor, wq_a: Tensor, q_norm: Tensor, wq_b: Tensor, angle: Tensor, H: int):
    """qr [N, q_lora_rank], q [N, H, d] with its rotation."""
    qr = rms_norm(linear(x, wq_a), q_norm)
    q = linear(qr, wq_b).unflatten(-1, (H, -1))
    return qr, rope(q, angle[:, None])


def output(o: Tensor, wo_a: Tensor, wo_b: Tensor, angle: Tensor, G: int) -> Tensor:
    """From o [N, H, d] to [N, D], in G groups."""
    o = rope(o, angle[:, None], inverse=True).flatten(1).unflatten(1, (G, -1))
    y = torch.einsum("ngi,gri->ngr", o, wo_a.to(o.dtype).unflatten(0, (G, -1))).flatten(1)
    return linear(y, wo_b)


def key_value(x: Tensor, wkv: Tensor, kv_norm: Tensor, angle: Tensor) -> Tensor:
    """Window rows [N, d]."""
    return roundings.window(rope(rms_norm(linear(x, wkv), kv_norm), angle))


def compressed(
    x: Tensor,
    wkv: Tensor,
    wgate: Tensor | None,
    norm: Tensor,
    wk: Tensor,
    k_norm: Tensor,
    angle: Tensor,
    R: int,
) -> tuple[Tensor, Tensor]:
    """Sections 3.5 and 3.6: rows [N / R, d] and index keys, which teach x nothing."""
    latent = x.float() @ wkv.T
    if wgate is not None:
        share = (x.float() @ wgate.T).unflatten(0, (-1, R)).softmax(1)
        latent = (latent.unflatten(0, (-1, R)) * share).sum(1)
    latent = rms_norm(latent.to(x.dtype), norm)
    key = rms_norm(linear(latent.detach(), wk), k_norm)
    angle = angle[::R]
    return roundings.compressed(rope(latent, angle)), roundings.index(rope(key, angle))


def index_query(
    x: Tensor, qr: Tensor, wq_b: Tensor, weights_proj: Tensor, angle: Tensor
) -> tuple[Tensor, Tensor]:
    """Section 3.6: the indexer's queries [N, H, d] and their heads' weights f32 [N, H]."""
    H = len(weights_proj)
    q = linear(qr.detach(), wq_b).unflatten(-1, (H, -1))
    weights = linear(x.detach(), weights_proj).float() * (q.shape[-1] * H) ** -0.5
    return roundings.index(rope(q, angle[:, None])), weights


@dataclass(frozen=True)
class Layout:
    """Of each token [B, T], int32: the first token of its document, and the first one after it."""

    begins: Tensor
    ends: Tensor


def layout_of(documents: Tensor) -> Layout:
    """From document numbers [B, T]; a document's tokens stand together."""
    T = documents.shape[1]
    position = torch.arange(T, device=documents.device)
    is_new = documents[:, 1:] != documents[:, :-1]
    edge = torch.ones_like(is_new[:, :1])
    begins = torch.where(torch.cat([edge, is_new], 1), position, 0).cummax(1).values
    last = torch.where(torch.cat([is_new, edge], 1), position, T).flip(1).cummin(1).values.flip(1)
    return Layout(begins.int(), (last + 1).int())


def attend(
    q: Tensor,
    kv: Tensor,
    rows: Tensor | None,
    mask: Tensor | None,
    sink: Tensor,
    layout: Layout,
    W: int,
) -> tuple[Tensor, Tensor]:
    """Attention over the window and the rows under their mask.

    q [B, T, H, d], kv [B, T, d], rows [B, S, d], mask [B, T, S]. Returns out [B, T, H, d] and the
    logarithm of what the shares were divided by, f32 [B, T, H].
    """
    B, T, H, d = q.shape
    blocks = kv.unflatten(1, (-1, W))
    before = torch.cat([torch.zeros_like(blocks[:, :1]), blocks[:, :-1]], 1)
    near = torch.cat([before, blocks], 2)  # [B, T/W, 2W, d]
    by_block = q.reshape(B, T // W, W * H, d)
    score = (by_block @ near.mT).view(B, T, H, 2 * W).float()
    score = score.masked_fill(~window_mask(layout, W)[:, :, None], _NEVER)
    if rows is not None and mask is not None:
        far = (q.reshape(B, T * H, d) @ rows.mT).view(B, T, H, -1).float()
        score = torch.cat([score, far.masked_fill(~mask[:, :, None], _NEVER)], -1)
    score = score * d**-0.5
    lse = torch.logaddexp(score.logsumexp(-1), sink)
    p = torch.exp(score - lse[..., None]).to(q.dtype)
    out = (p[..., : 2 * W].reshape(B, T // W, W * H, 2 * W) @ near).view(B, T, H, d)
    if rows is not None:
        out = out + (p[..., 2 * W :].reshape(B, T * H, -1) @ rows).view(B, T, H, d)
    return out, lse.detach()


@torch.no_grad()
def row_shares(q: Tensor, rows: Tensor, mask: Tensor, lse: Tensor, stride: int) -> Tensor:
    """What each row got of every stride-th query, summed over heads: f32 [B, T / stride, S]."""
    q, mask, lse = q[:, ::stride], mask[:, ::stride], lse[:, ::stride]
    score = torch.einsum("buhd,bsd->buhs", q, rows).float() * q.shape[-1] ** -0.5
    share = torch.exp(score - lse[..., None]).masked_fill(~mask[:, :, None], 0)
    return share.sum(2)


def window_mask(layout: Layout, W: int) -> Tensor:
    """Which of its block's and the block before's rows a query sees: bool [B, T, 2W]."""
    T = layout.begins.shape[1]
    t = torch.arange(T, device=layout.begins.device)[:, None]
    s = t // W * W - W + torch.arange(2 * W, device=t.device)
    return (s <= t) & (s > t - W) & (s >= layout.begins[..., None])


def visible(layout: Layout, R: int, stride: int = 1) -> Tensor:
    """Which rows every stride-th query sees: bool [B, T / stride, S]."""
    T = layout.begins.shape[1]
    closed = (torch.arange(0, T, stride, device=layout.begins.device) + 1) // R
    row = torch.arange(T // R, device=layout.begins.device)
    return (row < closed[:, None]) & (row * R >= layout.begins[:, ::stride, None])


def products(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Section 3.6: f32 [B, T, S] from q [B, T, H, d], weights [B, T, H], keys [B, S, d]."""
    B, T, H, d = q.shape
    products = (q.reshape(B, T * H, d) @ keys.mT).view(B, T, H, -1)
    return (weights[..., None] * products.float().relu()).sum(2)


@torch.no_grad()
def index_scores(
    q: Tensor, weights: Tensor, keys: Tensor, layout: Layout, blocks: Tensor | None, size: int
) -> Tensor:
    """The products, -inf where a query does not see the row, or its block is none of `blocks`."""
    seen = visible(layout, q.shape[1] // keys.shape[1])
    if blocks is not None:
        seen &= blocks.repeat_interleave(size, -1)[..., : keys.shape[1]]
    return products(q, weights, keys).masked_fill(~seen, -torch.inf)


def index_loss(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, share: Tensor) -> Tensor:
    """Cross entropy of the scores' softmax against the attention that rows got."""
    score = products(q, weights, keys).masked_fill(~visible, _NEVER)
    return -(share * score.log_softmax(-1)).sum(-1).mean()


@torch.no_grad()
def best(score: Tensor, k: int) -> Tensor:
    """Mask of the k highest of the last axis, the lowest of equal ones; never at -inf."""
    order = score.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, True)
    return chosen & (score > -torch.inf)


@torch.no_grad()
def block_scores(score: Tensor, layout: Layout, size: int) -> Tensor:
    """The highest score in each block of rows; that of a query's newest row comes first."""
    T, S = score.shape[1:]
    blocks, R = -(-S // size), T // S
    padded = torch.nn.functional.pad(score, (0, blocks * size - S), value=-torch.inf)
    highest = padded.unflatten(-1, (blocks, size)).amax(-1)
    newest = (torch.arange(T, device=score.device) + 1) // R - 1
    is_seen = newest * R >= layout.begins
    is_newest = torch.arange(blocks, device=score.device) == (newest // size)[:, None]
    return highest.masked_fill(is_newest & is_seen[..., None], torch.inf)


def moe(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    shared_w1: Tensor,
    shared_w2: Tensor,
    shared_w3: Tensor,
    k: int,
    scale: float,
    limit: float,
):
    """Section 3.7, all experts as one wide FFN with most of its width at zero: [N, D] and load."""
    E = gate.shape[0]
    s = torch.nn.functional.softplus(x.float() @ gate.T).sqrt()
    top = (s + bias).detach().topk(k, -1).indices
    chosen = torch.zeros_like(s).scatter(-1, top, 1.0)
    weight = s * chosen
    weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * scale
    weight = torch.cat([weight, torch.ones_like(weight[:, :1])], 1)  # the shared expert's is 1
    g = linear(x, torch.cat([w1.flatten(0, 1), shared_w1])).float().clamp(max=limit)
    u = linear(x, torch.cat([w3.flatten(0, 1), shared_w3])).float().clamp(-limit, limit)
    h = (torch.nn.functional.silu(g) * u).unflatten(-1, (E + 1, -1)) * weight[..., None]
    out = torch.cat([w2.transpose(1, 2).flatten(0, 1), shared_w2.T])
    return h.flatten(1).to(x.dtype) @ out.to(x.dtype), chosen.mean(0)


def engram_gate(streams: Tensor, e: Tensor, wkv: Tensor, q_weight: Tensor, k_weight: Tensor):
    """Section 4.4: streams [N, hc, D], rows e [N, columns * head_dim]."""
    hc, D = streams.shape[1:]
    kv = linear(e.to(streams.dtype), wkv).float().unflatten(-1, (hc + 1, D))
    key, value = kv[:, :hc], kv[:, hc:]
    h = streams.float()
    r = torch.rsqrt(h.square().mean(-1) + 1e-20) * torch.rsqrt(key.square().mean(-1) + 1e-20)
    d = (h * (q_weight * k_weight) * key).sum(-1) * r * D**-0.5
    root = torch.sqrt(d.abs().clamp_min(1e-6))
    gate = torch.sigmoid(torch.where(d < 0, -root, root))
    return (h + gate[..., None] * value).to(streams.dtype)


class _Rows(torch.autograd.Function):
    """Rows of a table; the gradients of equal rows are added without sorting them first."""

    @staticmethod
    def forward(ctx, table, ids):
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        return table[ids]

    @staticmethod
    def backward(ctx, gradient):
        (ids,) = ctx.saved_tensors
        table = torch.zeros(ctx.shape, device=ids.device)
        return table.index_add_(0, ids.flatten(), gradient.flatten(0, ids.ndim - 1)), None


def rows_of(table: Tensor, ids: Tensor) -> Tensor:
    return _Rows.apply(table, ids)


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Of [N, V], [N], [N]: the mean by weight, and that of the tokens that count whole."""
    each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    whole = (weights == 1).float()
    # Of a sequence that is all one long text of others nothing counts.
    answers = (each * whole).detach().sum() / whole.sum().clamp(min=1)
    return (each * weights).sum() / weights.sum().clamp(min=1), answers
