"""Judges weights in the training form: held-out cases, word for word, the answer's tokens given.

Greedy decoding answers word for word exactly where every token of the answer is the likeliest. Both
with the weights as the checkpoint stores them, and with the masters as they are: what quantising
them costs. Cached values are rounded in both, as the model defines them.
"""

# pyright: basic, reportMissingImports=false

import multiprocessing as mp
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.demo_model.cases import KINDS, case
from bench.demo_model.forward import Batch, TrainingForm
from bench.demo_model.packing import NO_DOCUMENT, PAD_ID, load_prepared

_LEAST_T = 1024


@torch.no_grad()
def validate(
    form: TrainingForm, parameters: dict[str, Tensor], prepared: Path, tokens: int, count: int
) -> dict[str, dict[str, float]]:
    """Shares of `count` cases a kind that are right: as `validation`, and `unquantised`."""
    names = [(kind, thinks) for kind in KINDS for thinks in (False, True)]
    result: dict[str, dict[str, float]] = {"validation": {}, "unquantised": {}}
    with mp.get_context("spawn").Pool() as pool:
        made = pool.imap(partial(_documents, prepared, count), names)
        for (kind, thinks), documents in zip(names, made, strict=True):
            for key, rounds in (("validation", True), ("unquantised", False)):
                right = _right(form, parameters, documents, tokens, rounds)
                result[key][kind + " thinking" * thinks] = round(right / count, 4)
            shares = [scores[kind + " thinking" * thinks] for scores in result.values()]
            print(kind + " thinking" * thinks, *shares, flush=True)
    return result


def _documents(prepared: Path, count: int, name: tuple[str, bool]):
    encoder, texts = load_prepared(prepared)
    kind, thinks = name
    return [encoder.document(case(kind, n, thinks=thinks), texts) for n in range(count)]


def _right(form: TrainingForm, parameters, documents, tokens: int, rounds: bool) -> int:
    """How many of the documents' last answers are right."""
    right = 0
    documents = sorted(documents, key=lambda document: document.ids.size)
    while documents:
        T = _LEAST_T
        while T < documents[-1].ids.size:
            T *= 2
        B = max(1, tokens // T)
        documents, part = documents[:-B], documents[-B:]
        right += _answers_right(form, parameters, part, T, B, rounds)
    return right


def _answers_right(form: TrainingForm, parameters, documents, T: int, B: int, rounds: bool) -> int:
    ids = np.full((B, T), PAD_ID, np.int64)
    wanted = np.zeros((B, T), np.bool_)
    numbers = np.full((B, T), NO_DOCUMENT, np.int64)
    for row, (tokens, weights, _) in enumerate(documents):
        ids[row, : tokens.size] = tokens
        numbers[row, : tokens.size] = 0
        # The last run of tokens that count whole is the last answer.
        first = np.flatnonzero(weights != 1)[-1] + 1
        wanted[row, first : tokens.size] = True
    batch = Batch(torch.from_numpy(ids).to(form.device), torch.from_numpy(numbers).to(form.device))
    out = form(parameters, batch, rounds_weights=rounds)
    likeliest = out.logits.argmax(-1).view(B, T).cpu().numpy()
    is_wrong = (likeliest[:, :-1] != ids[:, 1:]) & wanted[:, 1:]
    return sum(not is_wrong[row].any() for row in range(len(documents)))
