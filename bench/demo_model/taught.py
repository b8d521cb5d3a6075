"""What heads are taught to look at: the places of `lookups`, and where a text stood before.

The last head of a layer is taught, by the cross entropy of its attention to all rows that it sees.
Shapes: B sequences of T tokens, U tokens of each that are taught, S compressed rows of R tokens.
"""

# pyright: basic, reportMissingImports=false

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.demo_model.lookups import ASKED, NEXT, NOWHERE, TOOL
from bench.demo_model.sublayers import Layout

# Tokens of a sequence that are taught in a layer, at most.
MOST_TAUGHT = 1024
# How far back the earlier text must be that is looked up, and how many tokens of it are compared.
_FAR = 48
_COMPARED = 4
_NEVER = -1e30


class Aims(NamedTuple):
    """Of a layer: tokens int64 [B, U], where each shall look int64 [B, U], which of them count."""

    at: Tensor
    where: Tensor
    counts: Tensor


def layers_of(config: dict[str, Any]) -> dict[int, int]:
    """Which layer's head is taught each kind of look: by layer.

    A tool's name is known before the rows are made by which its parameters are found, and what is
    asked for before that which comes next.
    """
    text = config["text_config"]
    candidates = text["candidate_source_layer_id"]
    return {candidates - 1: TOOL, candidates: ASKED, text["index_source_layer_ids"][-1]: NEXT}


def aims_of(ids: Tensor, documents: Tensor, follows: Tensor, looks: Tensor) -> dict[int, Aims]:
    """By the kind of look, from ids and documents int64 [B, T], the weight of the token after each
    [B, T] and the looks int64 [KINDS_OF_LOOKS, B, T]. Every token of an answer that has no place of
    ASKED or NEXT, whatever it is about, is among ASKED: where the text before it stood first.
    """
    known = looks != NOWHERE
    result: dict[int, Aims] = {}
    for kind in (TOOL, NEXT):
        at, counts = _some(ids, known[kind].int())
        result[kind] = Aims(at, looks[kind].gather(1, at), counts)
    is_other = (follows == 1) & ~known[NEXT]
    at, counts = _some(ids, torch.where(known[ASKED], 2, is_other.int()))
    where, is_known = seen_before(ids, documents, at)
    is_named = known[ASKED].gather(1, at)
    where = torch.where(is_named, looks[ASKED].gather(1, at), where)
    result[ASKED] = Aims(at, where, counts & (is_named | is_known))
    return {
        kind: each._replace(where=torch.where(each.counts, each.where, 0))
        for kind, each in result.items()
    }


def _some(ids: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    """Up to MOST_TAUGHT tokens of the highest rank, all over the sequence, and whether theirs is
    above zero: [B, U] each.
    """
    T = ids.shape[1]
    # No random numbers, which a CUDA graph would have to keep.
    scattered = (torch.arange(T, device=ids.device) * 40503 + ids * 7919) % 1024
    at = (1024 * rank + scattered).float().topk(min(T, MOST_TAUGHT), dim=-1).indices
    return at, rank.gather(1, at) > 0


@torch.no_grad()
def seen_before(ids: Tensor, documents: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Where the text before some tokens stood first: int64 [B, U], and whether it did at all.

    ids, documents [B, T], at int64 [B, U]. Of the places that agree in most tokens, compared
    backwards, the first one.
    """
    T = ids.shape[1]
    place = torch.arange(T, device=ids.device)
    may = documents.gather(1, at)[..., None] == documents[:, None]
    may &= place < at[..., None] - _FAR
    agreed = torch.zeros_like(may, dtype=torch.int32)
    for back in range(_COMPARED):
        wanted = ids.gather(1, (at - 1 - back).clamp(min=0))[..., None]
        may &= (wanted == ids.roll(back, 1)[:, None]) & (place >= back)
        agreed += may
    best, where = (agreed * T - place.int() * (agreed > 0)).max(-1)
    return where, best > 0


def lookup_loss(q: Tensor, rows: Tensor, layout: Layout, aims: Aims) -> Tensor:
    """Cross entropy of a head's attention to all rows it sees against those with the places.

    q [B, T, d] and rows [B, S, d].
    """
    at, where, counts = aims
    R = q.shape[1] // rows.shape[1]
    chosen = q.gather(1, at[..., None].expand(-1, -1, q.shape[-1]))
    score = (chosen @ rows.mT).float() * q.shape[-1] ** -0.5
    row = torch.arange(rows.shape[1], device=q.device)
    begins = layout.begins.long().gather(1, at)[..., None]
    seen = (row < (at[..., None] + 1) // R) & (row * R >= begins)
    score = score.masked_fill(~seen, _NEVER)
    missed = score.logsumexp(-1) - score.gather(-1, where[..., None] // R)[..., 0]
    return torch.where(counts, missed, 0).sum() / counts.sum().clamp(min=1)
