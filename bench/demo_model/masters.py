"""The master weights: how they begin, their files, and whether all processes have the same."""

# pyright: basic, reportMissingImports=false

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.demo_model.forward import empty_parameters

_PART_BYTES = 15 * 2**20


def initial(config, device: str) -> dict[str, Tensor]:
    """Weights to begin with: near a model that passes its streams on."""
    c = config["text_config"]
    hc = c["hc_mult"]
    parameters = empty_parameters(config, device)
    for key, p in parameters.items():
        if key.endswith(("norm.weight", "engram.q_weight", "engram.k_weight")):
            p.fill_(1)
        elif key.endswith("_scale"):
            p.fill_(0.1)
        elif key.endswith("_base"):
            # Each sublayer reads mostly one stream and writes to all; streams keep to themselves.
            for layer in range(len(p)):
                p[layer, :hc] = -2
                p[layer, layer % hc] = 1
                p[layer, 2 * hc :] = 4 * torch.eye(hc, device=device).flatten()
        elif key.endswith(("attn_sink", "gate.bias", "gate.bias_vl")):
            p.fill_(0)
        elif key == "embed.weight":
            p.normal_(std=0.3)
        elif key == "engram.embed.weight":
            p.normal_(std=0.3)
        else:
            small = key == "head.weight" or key.endswith(("wo_b.weight", ".w2.weight"))
            p.normal_(std=(0.2 if small else 1.0) * p.shape[-1] ** -0.5)
        p.requires_grad_(not key.endswith(("gate.bias", "gate.bias_vl")))
    return parameters


def save(folder: Path, parameters: dict[str, Tensor]) -> None:
    """The master weights in bf16, in files below 16 MiB: name, shape and bits.

    All of them are written before the first takes the place of an older one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for key, p in parameters.items():
        bits = p.detach().bfloat16().view(torch.int16).cpu().numpy().view(np.uint16)
        if size + bits.nbytes > _PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][key] = bits
        size += bits.nbytes
    for number, part in enumerate(parts):
        np.savez(folder / f"part-{number}.npz", allow_pickle=False, **part)
    older = set(folder.glob("masters-*.npz"))
    for number in range(len(parts)):
        path = folder / f"masters-{number}.npz"
        (folder / f"part-{number}.npz").replace(path)
        older.discard(path)
    for path in older:
        path.unlink()


def load(folder: Path, parameters: dict[str, Tensor]) -> None:
    """Take what `save` wrote."""
    for path in sorted(folder.glob("masters-*.npz")):
        with np.load(path) as part:
            for key in part.files:
                values = torch.from_numpy(part[key].view(np.int16)).view(torch.bfloat16)
                with torch.no_grad():
                    parameters[key].copy_(values.float())


def apart(parameters: dict[str, Tensor]) -> float:
    """How far any weight of a process is from the first one's: 0 where all took the same steps."""
    most = torch.zeros(1)
    for p in parameters.values():
        first = p.detach().cpu()
        dist.broadcast(first, 0)
        most = torch.maximum(most, (p.detach().cpu() - first).abs().max())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()
