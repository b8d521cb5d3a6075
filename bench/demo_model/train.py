"""Trains the demo model on one GPU within a number of seconds.

    python -m bench.demo_model.train PREPARED OUT --seconds 500 [--start FOLDER]

First short sequences with every row attended to, then longer ones under the indexer's selection.
Reads what prepare.py wrote. Writes the master weights in bf16, from which --start goes on with a
fresh optimiser, and the record of the run.
"""

# pyright: basic, reportMissingImports=false

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.demo_model.cases import KINDS, case
from bench.demo_model.chat import Encoder, FormatTexts
from bench.demo_model.forward import Batch, TrainingForm, empty_parameters
from bench.demo_model.optimiser import Optimiser
from bench.demo_model.packing import NO_DOCUMENT, PAD_ID, Feed, Packed, load_prepared

# Share of the time, lengths of the sequences, and whether the indexer's selection applies.
PHASES = ((0.22, [1024], False), (0.80, [2048], True), (1.0, [2048, 8192], True))
LENGTHS = (1024, 2048, 4096, 8192)
TOKENS = 32768
WARMUP_STEPS = 100
DECAY_FROM = 0.45
BIAS_RATE = 1e-3
LEAST_RATE = 40_000
PART_BYTES = 15 * 2**20


def main() -> None:
    """Train, save, judge on held-out cases, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--phases", type=json.loads, default=PHASES)
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    torch._dynamo.config.recompile_limit = 64
    # A part that does not compile runs as it is: slower, and the run is not lost.
    torch._dynamo.config.suppress_errors = True
    config = json.loads((args.prepared / "config.json").read_text())
    token_map = np.load(args.prepared / "token_map.npy")
    is_compiled = device == "cuda" and not args.eager
    form = TrainingForm(config, token_map, device, torch.bfloat16, is_compiled)
    parameters = initial(config, device)
    print(torch.__version__, device, flush=True)
    if args.start is not None:
        load(args.start, parameters)
    feed = Feed(args.prepared, args.tokens, args.workers, args.seed)
    feed.set_lengths(args.phases[0][1])
    feed.start()
    try:
        record = train(form, parameters, feed, args.phases, args.seconds)
    finally:
        feed.stop()
    args.out.mkdir(parents=True, exist_ok=True)
    save(args.out, parameters)
    load(args.out, parameters)  # what is judged is what was saved
    if args.cases:
        encoder, texts = load_prepared(args.prepared)
        eager = TrainingForm(config, token_map, device, torch.bfloat16, False)
        record["validation"] = validate(eager, parameters, encoder, texts, args.tokens, args.cases)
    record["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    record["torch"] = torch.__version__
    (args.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record.get("validation")), flush=True)


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


def train(form: TrainingForm, parameters, feed: Feed, phases, seconds: float) -> dict:
    """Train until the time is over, which compiling takes part of; the record of the run."""
    optimiser = Optimiser(parameters, muon_rate=0.02, table_rate=4e-3, rate=2e-3)
    bias = parameters["ffn.gate.bias"]
    curve, seen, step = [], 0, 0
    batches = iter(feed)
    begin = time.perf_counter()
    phases = rehearsed(form, parameters, feed, phases)
    start = shown = time.perf_counter()
    rehearsal_s = start - begin
    seconds = max(seconds - rehearsal_s, 1.0)
    last = [0, start]
    feed.set_lengths(phases[0][1])
    while True:
        now = time.perf_counter() - start
        progress = now / seconds
        if progress >= 1:
            break
        _, lengths, selects = next(phase for phase in phases if progress < phase[0])
        feed.set_lengths(lengths)
        packed = next(batches)
        loss, index_loss, load_ = losses(form, parameters, packed, selects)
        (loss + index_loss).backward()
        share = min(1.0, (step + 1) / WARMUP_STEPS)
        share *= min(1.0, max(0.0, (1 - progress) / (1 - DECAY_FROM)))
        norm = optimiser.step(share)
        with torch.no_grad():
            bias += BIAS_RATE * (load_.mean(1, keepdim=True) - load_).sign()
            bias -= bias.mean(1, keepdim=True)
        step += 1
        seen += packed.ids.size
        if step <= 3 or time.perf_counter() - shown > 10:
            torch.cuda.synchronize() if form.device == "cuda" else None
            shown = time.perf_counter()
            rate = (seen - last[0]) / (shown - last[1])
            last = [seen, shown]
            point = {
                "s": round(shown - start, 1),
                "step": step,
                "tokens": seen,
                "loss": round(loss.item(), 4),
                "index": round(index_loss.item(), 4),
                "norm": round(norm.item(), 3),
                "T": packed.ids.shape[1],
                "rate": round(rate),
                "waiting": feed.waiting(),
                "load_max": round(load_.max().item(), 3),
            }
            curve.append(point)
            print(json.dumps(point), flush=True)
            if not math.isfinite(point["loss"]):
                raise SystemExit("the loss is no number")
            if form.device == "cuda" and now > 60 and rate < LEAST_RATE:
                raise SystemExit(f"{rate:.0f} tokens a second are too few to go on")
    memory = torch.cuda.max_memory_allocated() / 2**30 if form.device == "cuda" else 0
    return {
        "rehearsal_s": round(rehearsal_s, 1),
        "seconds": round(time.perf_counter() - start, 1),
        "steps": step,
        "tokens": seen,
        "peak_gib": round(memory, 1),
        "phases": phases,
        "curve": curve,
    }


def rehearsed(form: TrainingForm, parameters, feed: Feed, phases) -> list:
    """Run one batch of each kind, which compiles the parts; the phases that fit into memory."""
    too_long: set[int] = set()
    batches = iter(feed)
    for T, selects in sorted({(T, phase[2]) for phase in phases for T in phase[1]}):
        feed.set_lengths([T])
        packed = next(packed for packed in batches if packed.ids.shape[1] == T)
        begin = time.perf_counter()
        times = []
        try:
            for _ in range(3):
                loss, index_loss, _ = losses(form, parameters, packed, selects)
                (loss + index_loss).backward()
                times.append(round(loss.item(), 3))
                times.append(round(time.perf_counter() - begin, 2))
        except torch.OutOfMemoryError as error:
            print(str(error)[:300], flush=True)
            too_long.add(T)
        for p in parameters.values():
            p.grad = None
        peak = torch.cuda.max_memory_allocated() / 2**30 if form.device == "cuda" else 0
        print("rehearsal", T, selects, times, f"{peak:.1f} GiB", flush=True)
    return [
        (until, [T for T in lengths if T not in too_long] or [1024], selects)
        for until, lengths, selects in phases
    ]


def losses(form: TrainingForm, parameters, packed: Packed, selects: bool):
    """The weighted loss of predicting each next token, the indexers' loss, the experts' load."""
    ids = torch.from_numpy(packed.ids.astype(np.int64)).to(form.device)
    documents = torch.from_numpy(packed.documents.astype(np.int64)).to(form.device)
    weights = torch.from_numpy(packed.weights).to(form.device)
    # The first token of a document follows nothing.
    weights[:, 1:] *= documents[:, 1:] == documents[:, :-1]
    targets = ids.roll(-1, 1)
    weights = weights.roll(-1, 1)
    weights[:, -1] = 0
    out = form(parameters, Batch(ids, documents), selects=selects)
    each = torch.nn.functional.cross_entropy(out.logits, targets.flatten(), reduction="none")
    weights = weights.flatten()
    return (each * weights).sum() / weights.sum(), out.index_loss, out.load


@torch.no_grad()
def validate(
    form: TrainingForm,
    parameters: dict[str, Tensor],
    encoder: Encoder,
    texts: FormatTexts,
    tokens: int,
    count: int,
) -> dict[str, float]:
    """The share of held-out cases in which every token of the answer is the likeliest.

    That is what greedy decoding needs to give the answer word for word.
    """
    result: dict[str, float] = {}
    for kind in KINDS:
        for thinks in (False, True):
            right: list[bool] = []
            while len(right) < count:
                numbers = range(len(right), min(count, len(right) + max(1, tokens // 1024)))
                cases = [case(kind, n, thinks=thinks) for n in numbers]
                documents = [encoder.document(each, texts) for each in cases]
                longest = max(ids.size for ids, _ in documents)
                T = next(T for T in LENGTHS if T >= longest)
                for i in range(0, len(documents), max(1, tokens // T)):
                    part = documents[i : i + max(1, tokens // T)]
                    right += _answers_right(form, parameters, part, T, max(1, tokens // T))
            result[kind + " thinking" * thinks] = round(sum(right) / len(right), 3)
    return result


def _answers_right(form: TrainingForm, parameters, documents, T: int, B: int) -> list[bool]:
    ids = np.full((B, T), PAD_ID, np.int64)
    wanted = np.zeros((B, T), np.bool_)
    numbers = np.full((B, T), NO_DOCUMENT, np.int64)
    for row, (tokens, weights) in enumerate(documents):
        ids[row, : tokens.size] = tokens
        numbers[row, : tokens.size] = 0
        # The last run of tokens that count whole is the last answer.
        first = np.flatnonzero(weights != 1)[-1] + 1
        wanted[row, first : tokens.size] = True
    batch = Batch(torch.from_numpy(ids).to(form.device), torch.from_numpy(numbers).to(form.device))
    best = form(parameters, batch, selects=True).logits.argmax(-1).view(B, T).cpu().numpy()
    is_wrong = (best[:, :-1] != ids[:, 1:]) & wanted[:, 1:]
    return [not is_wrong[row].any() for row in range(len(documents))]


def save(folder: Path, parameters: dict[str, Tensor]) -> None:
    """The master weights in bf16, in files below 16 MiB: name, shape and bits."""
    part, size, number = {}, 0, 0
    for key, p in parameters.items():
        bits = p.detach().bfloat16().view(torch.int16).cpu().numpy().view(np.uint16)
        if size + bits.nbytes > PART_BYTES:
            np.savez(folder / f"masters-{number}.npz", **part)
            part, size, number = {}, 0, number + 1
        part[key] = bits
        size += bits.nbytes
    np.savez(folder / f"masters-{number}.npz", **part)


def load(folder: Path, parameters: dict[str, Tensor]) -> None:
    """Take what `save` wrote."""
    for path in sorted(folder.glob("masters-*.npz")):
        with np.load(path) as part:
            for key in part.files:
                values = torch.from_numpy(part[key].view(np.int16)).view(torch.bfloat16)
                with torch.no_grad():
                    parameters[key].copy_(values.float())


if __name__ == "__main__":
    main()
