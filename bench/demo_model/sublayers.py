"""The arithmetic of the training form, each part a function that torch.compile takes whole.

Shapes: N = B * T tokens, T of each of B sequences, W sliding_window, S compressed rows, hc streams,
D hidden_size, H heads of size d, E experts. Section numbers refer to docs/model.md.
"""

# pyright: basic, reportMissingImports=false

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
    """Section 3.2: pre [N, hc], post [N, hc], comb [N, hc, hc]."""
    hc = streams.shape[1]
    v = streams.flatten(1).float()
    m = (v @ fn.T) * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-20)
    pre = torch.sigmoid(m[:, :hc] * scale[0] + base[:hc]) + 1e-6
    post = 2 * torch.sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = (m[:, 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(-1, (hc, hc))
    comb = comb.softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    return pre, post, comb


def collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor) -> Tensor:
    x = (pre[..., None] * streams.float()).sum(1).to(streams.dtype)
    return rms_norm(x, weight)


def expand(h: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out = post[..., None] * h[:, None].float()
    for j in range(streams.shape[1]):
        out = out + comb[:, j, :, None] * streams[:, j, None].float()
    return out.to(streams.dtype)


def query(x: Tensor, wq_a: Tensor, q_norm: Tensor, wq_b: Tensor, angle: Tensor, B: int, H: int):
    """qr [N, q_lora_rank], q [B, T, H, d] with its rotation."""
    qr = rms_norm(linear(x, wq_a), q_norm)
    q = linear(qr, wq_b).unflatten(-1, (H, -1)).unflatten(0, (B, -1))
    return qr, rope(q, angle[:, None])


def key_value(x: Tensor, wkv: Tensor, kv_norm: Tensor, angle: Tensor, B: int) -> Tensor:
    """Window rows [B, T, d]."""
    kv = rms_norm(linear(x, wkv), kv_norm).unflatten(0, (B, -1))
    return roundings.window(rope(kv, angle))


def attend(
    q: Tensor,
    kv: Tensor,
    rows: Tensor | None,
    window_mask: Tensor,
    mask: Tensor | None,
    sink: Tensor,
    angle: Tensor,
    W: int,
):
    """Attention over the window and the rows under their masks.

    q [B, T, H, d], kv [B, T, d], rows [B, S, d]. Returns o [B, T, H, d] and what the rows got,
    summed over heads, [B, T, S].
    """
    B, T, H, d = q.shape
    blocks = kv.unflatten(1, (-1, W))
    before = torch.cat([torch.zeros_like(blocks[:, :1]), blocks[:, :-1]], 1)
    near = torch.cat([before, blocks], 2)  # [B, T/W, 2W, d]
    by_block = q.reshape(B, T // W, W * H, d)
    score = (by_block @ near.mT).view(B, T, H, 2 * W).float()
    score = score.masked_fill(~window_mask[:, :, None], _NEVER)
    if rows is not None and mask is not None:
        far = (q.reshape(B, T * H, d) @ rows.mT).view(B, T, H, -1).float()
        score = torch.cat([score, far.masked_fill(~mask[:, :, None], _NEVER)], -1)
    score = score * d**-0.5
    m = torch.maximum(score.amax(-1, keepdim=True), sink[:, None]).detach()
    e = torch.exp(score - m)
    p = (e / (e.sum(-1, keepdim=True) + torch.exp(sink[:, None] - m))).to(q.dtype)
    o = (p[..., : 2 * W].reshape(B, T // W, W * H, 2 * W) @ near).view(B, T, H, d)
    mass = None
    if rows is not None:
        far = p[..., 2 * W :]
        o = o + (far.reshape(B, T * H, -1) @ rows).view(B, T, H, d)
        mass = far.detach().sum(2)
    return rope(o, angle[:, None], inverse=True), mass


def window_mask(documents: Tensor, W: int) -> Tensor:
    """Which of its block's and the block before's rows a query sees: bool [B, T, 2W]."""
    B, T = documents.shape
    blocks = documents.view(B, T // W, W)
    before = torch.cat([torch.full_like(blocks[:, :1], -1), blocks[:, :-1]], 1)
    near = torch.cat([before, blocks], 2)
    i = torch.arange(W, device=documents.device)[:, None]
    age = i + W - torch.arange(2 * W, device=documents.device)
    is_near = (age >= 0) & (age < W)
    return (is_near & (blocks[..., None] == near[:, :, None])).view(B, T, 2 * W)


def visible(documents: Tensor, R: int) -> Tensor:
    """Which rows a query sees: bool [B, T, S]."""
    T = documents.shape[1]
    closed = (torch.arange(T, device=documents.device) + 1) // R
    is_past = torch.arange(T // R, device=documents.device) < closed[:, None]
    return is_past & (documents[:, :, None] == documents[:, None, ::R])


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Section 3.6: f32 [B, T, S] from q [B, T, H, d], weights [B, T, H], keys [B, S, d]."""
    B, T, H, d = q.shape
    products = (q.reshape(B, T * H, d) @ keys.mT).view(B, T, H, -1)
    return (weights[..., None] * products.float().relu()).sum(2)


def index_loss(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, mass: Tensor) -> Tensor:
    """Cross entropy of the scores' softmax against the attention that rows got."""
    score = index_scores(q, weights, keys).masked_fill(~visible, _NEVER)
    return -(mass * score.log_softmax(-1)).sum(-1).mean()


def best(score: Tensor, k: int) -> Tensor:
    """Mask of the k largest of the last axis.

    Scores tie at zero, where no head of the indexer fires. The CPU takes the lowest of equal ones,
    as the engine does; the GPU's top-k takes any, in a fraction of a sort's time.
    """
    k = min(k, score.shape[-1])
    if score.is_cuda:
        chosen = score.topk(k, sorted=False).indices
    else:
        chosen = score.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, chosen, True)


def candidates(score: Tensor, visible: Tensor, size: int, topk: int) -> Tensor:
    """Rows of each query's best blocks, that of its newest row always among them: [B, T, S]."""
    S = score.shape[-1]
    blocks = -(-S // size)
    padded = torch.nn.functional.pad(score, (0, blocks * size - S), value=-torch.inf)
    highest = padded.unflatten(-1, (blocks, size)).amax(-1)
    position = torch.arange(S, device=score.device)
    newest = torch.where(visible, position, -1).amax(-1, keepdim=True)
    block_ids = torch.arange(blocks, device=score.device)
    highest = highest.masked_fill(block_ids == newest.div(size, rounding_mode="floor"), torch.inf)
    return best(highest, topk).repeat_interleave(size, -1)[..., :S] & visible


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
