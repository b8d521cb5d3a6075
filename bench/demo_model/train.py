"""Trains the demo model on the GPUs of one machine within a number of seconds.

    python -m bench.demo_model.train PREPARED OUT --seconds 500 [--weights FOLDER]
    torchrun --nproc-per-node 2 -m bench.demo_model.train ...

First short sequences, then longer ones, by the share of --total tokens seen; where --seconds end
sooner, by the share of the time. Reads what prepare.py wrote. Writes the master weights in bf16,
from which --weights goes on with a fresh optimiser, and the record of the run. Each of several GPUs
takes --tokens of its own in a step.
"""

# pyright: basic, reportMissingImports=false

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.demo_model.forward import Batch, TrainingForm
from bench.demo_model.kernel_agreement import agree
from bench.demo_model.lookups import KINDS_OF_LOOKS, NOWHERE
from bench.demo_model.masters import apart, initial, load, save
from bench.demo_model.optimiser import Optimiser, Rates
from bench.demo_model.packing import Feed, Packed
from bench.demo_model.taught import aims_of
from bench.demo_model.validate import validate

# Share of the tokens seen until a phase ends, the lengths of its sequences, and the share of
# conversations that only look names up.
PHASES = (
    (0.12, [1024], 0.5),
    (0.45, [1024, 2048], 0.2),
    (0.8, [1024, 2048, 8192, 8192], 0.05),
    (1.0, [2048, 8192, 8192, 16384], 0.05),
)
# Sequences up to so long see every row. Where the indexer chooses from the first step on, it
# mostly leaves out the row that would have helped, and looking up far away is not learned at all.
SEES_ALL = 1024
# Of three layers one head is taught where to look. That a name stands before what it is asked by
# was not learned without in 400 million tokens: no part of it helps before all of it is there.
LOOKUP_WEIGHT = 0.2
TOKENS = 32768
TOTAL = 1_000_000_000
WARMUP_STEPS = 100
DECAY_FROM = 0.45
BIAS_RATE = 5e-3
LEAST_RATE = 40_000
SAVED_EACH_S = 60
# More than the batches that a worker makes.
SEEDS_OF_A_RANK = 10_000_000


@dataclass(frozen=True)
class Stepped:
    """Of a step: its losses (of all, of answers, of the indexers, of the heads that look up: TOOL,
    ASKED, NEXT), the gradient's norm before it was cut, the busiest expert's share.
    """

    loss: Tensor
    answers: Tensor
    index_loss: Tensor
    lookup_losses: Tensor
    norm: Tensor
    load_max: Tensor


def main() -> None:
    """Train, save, judge on held-out cases, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--total", type=float, default=TOTAL)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a step")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--phases", type=json.loads, default=PHASES)
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument(
        "--decay-from", type=float, default=DECAY_FROM, help="share of the run, below 1"
    )
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    if ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
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
    print(torch.__version__, device, rank, "of", ranks, flush=True)
    if args.weights is not None:
        load(args.weights, parameters)
    agree(device)
    begin = time.perf_counter()
    run = Run(form, parameters, args.tokens, ranks)
    for T in sorted({T for _, lengths, _ in args.phases for T in lengths}):
        run.rehearse(T)
        print(f"rehearsal {T}: {time.perf_counter() - begin:.1f} s", flush=True)
    feed = Feed(args.prepared, args.tokens, args.workers, args.seed + rank * SEEDS_OF_A_RANK)
    feed.set_phase(*args.phases[0][1:])
    feed.start()
    seconds = max(args.seconds - (time.perf_counter() - begin), 1.0)
    try:
        plan = Plan(args.phases, args.total, seconds, args.decay_from)
        record = train(run, feed, plan, args.out if rank == 0 else None)
    finally:
        feed.stop()
    if rank == 0:
        save(args.out, parameters)
    if ranks > 1:
        record["apart"] = apart(parameters)
        dist.destroy_process_group()
    if rank:
        return
    load(args.out, parameters)  # what is judged is what was saved
    record["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    record["devices"] = ranks
    record["torch"] = torch.__version__
    written = args.out / "record.json"
    written.write_text(json.dumps(record, indent=1) + "\n")
    if args.cases:
        eager = TrainingForm(config, token_map, device, torch.bfloat16, False)
        record |= validate(eager, parameters, args.prepared, args.tokens, args.cases)
        written.write_text(json.dumps(record, indent=1) + "\n")


class Run:
    """The parameters with their optimiser, and a step over them: on a GPU in CUDA graphs, since
    thousands of small kernels take longer to launch than to run.

    A graph for each length of sequence computes gradients, one updates the weights; between them
    `ranks` processes take the mean of theirs.
    """

    def __init__(
        self, form: TrainingForm, parameters: dict[str, Tensor], tokens: int, ranks: int = 1
    ) -> None:
        self.form, self.parameters, self.tokens, self.ranks = form, parameters, tokens, ranks
        self.optimiser = Optimiser(parameters, Rates())
        self._bias = parameters["ffn.gate.bias"]
        self._bias_rate = torch.zeros((), device=form.device)
        # All gradients and the experts' load in one tensor, of which these are parts.
        shapes = [p.shape for p in (*self.optimiser.parameters, self._bias)]
        self._shared = torch.zeros(sum(map(math.prod, shapes)), device=form.device)
        parts = self._shared.split([math.prod(shape) for shape in shapes])
        self._parts = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        for p, part in zip(self.optimiser.parameters, self._parts[:-1], strict=True):
            p.grad = part
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._graphs: dict[int, tuple[Any, tuple[Tensor, ...]]] = {}
        self._update: tuple[Any, tuple[Tensor, ...]] | None = None

    def rehearse(self, T: int) -> None:
        """Compile and record the step for a length; weights and optimiser stay as they were."""
        B = self.tokens // T
        self._inputs[T] = (
            torch.randint(3, 1000, (B, T), device=self.form.device, dtype=torch.int32),
            torch.zeros(B, T, device=self.form.device, dtype=torch.int32),
            torch.ones(B, T, device=self.form.device),
            torch.full((KINDS_OF_LOOKS, B, T), NOWHERE, device=self.form.device, dtype=torch.int32),
        )
        if self.form.device != "cuda":
            return
        before = {key: p.detach().clone() for key, p in self.parameters.items()}
        self._graphs[T] = _recorded(partial(self._learn, T))
        if self._update is None:
            self._update = _recorded(self._apply)
        with torch.no_grad():
            for key, p in self.parameters.items():
                p.copy_(before[key])
        self.optimiser.reset()

    def step(self, packed: Packed, share: float, bias_rate: float) -> Stepped:
        """Take a step with so much of the full rates."""
        T = packed.ids.shape[1]
        arrays = (
            packed.ids.astype(np.int32),
            packed.documents.astype(np.int32),
            packed.weights,
            packed.looks.astype(np.int32),
        )
        for to, array in zip(self._inputs[T], arrays, strict=True):
            to.copy_(torch.from_numpy(array))
        self.optimiser.set_rates(share)
        self._bias_rate.fill_(bias_rate)
        learned = _replayed(self._graphs.get(T)) or self._learn(T)
        if self.ranks > 1:
            dist.all_reduce(self._shared)
            self._shared /= self.ranks
        return Stepped(*learned, *(_replayed(self._update) or self._apply()))

    def _learn(self, T: int) -> tuple[Tensor, ...]:
        """Fill the gradients: the losses."""
        loss, answers, index_loss, lookup_losses, load = losses(
            self.form, self.parameters, *self._inputs[T], selects=T > SEES_ALL
        )
        whole = loss + index_loss + LOOKUP_WEIGHT * lookup_losses.sum()
        gradients = torch.autograd.grad(whole, self.optimiser.parameters)
        torch._foreach_copy_(self._parts, [*gradients, load])
        return loss.detach(), answers, index_loss.detach(), lookup_losses.detach()

    @torch.no_grad()
    def _apply(self) -> tuple[Tensor, ...]:
        """Update weights and routing: the gradient's norm, the busiest expert's share."""
        # A gradient that is no number would end everything learned so far: it counts as none.
        is_number = torch.isfinite(self._shared.sum())
        self._shared.masked_fill_(~is_number, 0)
        norm = torch.where(is_number, self.optimiser.step(), torch.nan)
        load = self._parts[-1]
        self._bias += self._bias_rate * (load.mean(1, keepdim=True) - load).sign()
        self._bias -= self._bias.mean(1, keepdim=True)
        return norm, load.max()


def _recorded(call: Callable[[], tuple[Tensor, ...]]) -> tuple[Any, tuple[Tensor, ...]]:
    """A CUDA graph of what a function does, and the tensors in which it leaves its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = call()
    return graph, results


def _replayed(recorded: tuple[Any, tuple[Tensor, ...]] | None) -> tuple[Tensor, ...]:
    """The results of a graph, run again; none without one."""
    if recorded is None:
        return ()
    graph, results = recorded
    graph.replay()
    return results


@dataclass(frozen=True)
class Plan:
    """A run's phases, its tokens and seconds, and the share of it from which the rates fall."""

    phases: Any
    total: float
    seconds: float
    decay_from: float


def train(run: Run, feed: Feed, plan: Plan, out: Path | None) -> dict[str, Any]:
    """Train until the tokens or the time are over; the record of the run.

    The process that has `out` tells of it, and leaves the weights there now and then.
    """
    form = run.form
    curve, seen, step, again, broken = [], 0, 0, 0, 0
    start = shown = saved = time.perf_counter()
    last = [0, start]
    while True:
        progress = max(seen / plan.total, (time.perf_counter() - start) / plan.seconds)
        if run.ranks > 1:
            # The first one's clock counts for all.
            clock = torch.tensor(progress, dtype=torch.float64)
            dist.broadcast(clock, 0)
            progress = clock.item()
        if progress >= 1:
            break
        _, lengths, lookups = next(phase for phase in plan.phases if progress < phase[0])
        packed, is_new = feed.take(lengths, lookups)
        again += not is_new
        decay = min(1.0, (1 - progress) / (1 - plan.decay_from))
        share = decay * min(1.0, (step + 1) / WARMUP_STEPS)
        stepped = run.step(packed, share, BIAS_RATE * (1 - progress))
        step += 1
        seen += packed.ids.size * run.ranks
        if out is not None and (step <= 3 or time.perf_counter() - shown > 10):
            point = {
                "step": step,
                "tokens": seen,
                "loss": round(stepped.loss.item(), 4),
                "answers": round(stepped.answers.item(), 4),
                "index": round(stepped.index_loss.item(), 4),
                # Of TOOL, ASKED and NEXT.
                "lookups": [round(each, 4) for each in stepped.lookup_losses.tolist()],
                "norm": round(stepped.norm.item(), 3),
                "T": packed.ids.shape[1],
                "waiting": feed.waiting(),
                "again": again,
                "load_max": round(stepped.load_max.item(), 3),
            }
            shown = time.perf_counter()
            rate = (seen - last[0]) / (shown - last[1])
            last = [seen, shown]
            point |= {"s": round(shown - start, 1), "rate": round(rate)}
            curve.append(point)
            print(json.dumps(point), flush=True)
            # The gradients of a single such step were taken as none.
            broken = 0 if math.isfinite(point["loss"] + point["norm"]) else broken + 1
            if broken > 3:
                raise SystemExit("the loss is no number")
            if shown - saved > SAVED_EACH_S and not broken:
                save(out, run.parameters)
                saved = shown
            if form.device == "cuda" and shown - start > 60 and rate < LEAST_RATE:
                raise SystemExit(f"{rate:.0f} tokens a second are too few to go on")
    memory = torch.cuda.max_memory_allocated() / 2**30 if form.device == "cuda" else 0
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "steps": step,
        "batches_seen_again": again,
        "tokens": seen,
        "peak_gib": round(memory, 1),
        "phases": plan.phases,
        "curve": curve,
    }


def losses(
    form: TrainingForm,
    parameters,
    ids: Tensor,
    documents: Tensor,
    weights: Tensor,
    looks: Tensor,
    *,
    selects: bool = True,
):
    """The weighted loss of predicting each next token, that of answers alone, the indexers' loss,
    those of the heads that look up (TOOL, ASKED, NEXT), the experts' load.

    ids and documents int32 [B, T], weights f32 [B, T], looks int32 [KINDS_OF_LOOKS, B, T].
    """
    # The first token of a document follows nothing.
    targets = ids.roll(-1, 1).long().flatten()
    follows = torch.zeros_like(weights)
    follows[:, :-1] = weights[:, 1:] * (documents[:, 1:] == documents[:, :-1])
    ids, looks = ids.long(), looks.long()
    batch = Batch(ids, documents, aims_of(ids, documents, follows, looks))
    out = form(parameters, batch, selects=selects)
    loss, answers = form.cross_entropy(out.logits, targets, follows.flatten())
    return loss, answers, out.index_loss, torch.stack(out.lookup_losses), out.load


if __name__ == "__main__":
    main()
