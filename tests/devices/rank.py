"""What a rank computes for test_numerics.py, and one device too: all that must be the same.

As a module it is a rank: `python -m tests.devices.rank FOLDER` writes FOLDER/rank-N.npz.
"""

import os
import sys
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.decoder import Decoder
from mlx_engine.devices import Devices
from mlx_engine.session import Prefill, Session
from tests.engine.quiet import quiet_tokens
from tests.engine.support import Subject, load, tiny_config
from tests.unit.arrays import arrays_of, host
from tests.unrounded import UNROUNDED

# Layers of all kinds, which two and four devices can share: a window alone, a source at ratio 2
# and its reuser, one at ratio 1 with candidates, its reuser, and one that chooses again.
CONFIG = tiny_config(
    num_hidden_layers=6,
    compress_ratios=[0, 2, 2, 1, 1, 1],
    kv_source_layer_ids=[1, 3],
    index_source_layer_ids=[1, 3, 5],
    candidate_source_layer_id=3,
    engram_layer_ids=[1, 3],
    num_nextn_predict_layers=0,
    num_attention_heads=8,
    o_groups=4,
    moe_intermediate_size=128,
    engram_n_heads=4,
)
# Chunks of more tokens than every rank adds up itself, and of fewer. They are not many: on two
# cores the threads of MLX's ring wait in turns, and an exchange of four ranks takes up to 0.3 s.
CHUNKS = [12, 9, 8, 11, 2, 1, 1, 1]
GREEDY = 6
# A prompt of which the upper layers see the end alone.
LONG = 40

Arrays = dict[str, NDArray[Any]]


def compute(subject: Subject) -> Arrays:
    """Every result of one rank: logits, discrete choices, greedy tokens, state."""
    ids, found = quiet_tokens("devices"), Arrays()
    runs = {"rounded": [len(ids)], "rounded chunks": CHUNKS, "unrounded chunks": CHUNKS}
    for key, chunks in runs.items():
        run = subject.run(ids, chunks, is_rounded=not key.startswith("un"))
        assert run.candidates is not None
        found[f"{key} logits"], found[f"{key} candidates"] = run.logits, run.candidates
        for layer, experts in run.experts.items():
            found[f"{key} experts {layer}"] = experts
        for layer, rows in run.rows.items():
            found[f"{key} rows {layer}"] = rows
    for prefill in ("short", "full"):
        found[f"{prefill} prefill logits"] = _long_prompt(subject, prefill)
    found["greedy"], found["greedy logits"] = _greedy(subject, ids)
    return found


def _long_prompt(subject: Subject, prefill: Prefill) -> NDArray[Any]:
    ids = np.random.default_rng(0).integers(3, 250, LONG).tolist()
    session = Session(
        subject.model, subject.reader, prefill=prefill, chunk_tokens=30, formats=UNROUNDED
    )
    return host(session.sync(ids))


def _greedy(subject: Subject, ids: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Tokens after a prompt and their logits: traced steps, begun before their id is read."""
    decoder = Decoder(subject.model, is_on=True)
    session = Session(subject.model, subject.reader, decoder=decoder)
    logits, tokens, rows = session.sync(ids), list[int](), list[NDArray[Any]]()
    for _ in range(GREEDY):
        token = mx.argmax(logits, keepdims=True)
        session.begin_step(token)
        rows.append(host(logits))
        tokens.append(cast(int, token.item()))
        logits = session.step(tokens[-1])
    assert decoder.traced > 0
    return np.array(tokens), np.stack(rows)


def exchanged(devices: Devices) -> Arrays:
    """What the exchanges make of this rank's arrays, which `own_array` gives."""
    found = Arrays()
    for tokens in (1, 8, 9, 40):
        x, tie = own_array(devices.rank, tokens), mx.ones((2, 20), mx.bfloat16)
        found[f"sum of {tokens}"] = host(devices.sum(x))
        found[f"sum of {tokens} after"] = host(devices.sum(x, after=tie))
        found[f"gather of {tokens}"] = host(devices.gather(x))
    first = own_array(devices.rank, 3)
    found["from_first"] = host(devices.from_first(first))
    # Sums would lose the sign of a zero, and what the bits of a NaN say.
    bits = mx.array([0x80000000, 0x7FC00001 + devices.rank], mx.uint32).view(mx.float32)
    found["from_first bits"] = np.array(devices.from_first(bits).view(mx.uint32))
    return found


def own_array(rank: int, tokens: int) -> mx.array:
    """A rank's own values in bf16: [T, 33]."""
    values = np.random.default_rng([rank, tokens]).standard_normal((tokens, 33))
    return mx.array(values.astype(np.float32)).astype(mx.bfloat16)


def costs(devices: Devices) -> Arrays:
    """Bytes that this rank reads and holds, and exchanges of a step."""
    read_bytes, preadv = 0, os.preadv

    def counted(*arguments: Any) -> int:
        nonlocal read_bytes
        done = preadv(*arguments)
        read_bytes += done
        return done

    with patch.object(os, "preadv", counted):
        subject = load(CONFIG, 0, devices)
    held = sum(array.nbytes for array in arrays_of(subject.model.weights))
    session = Session(subject.model, subject.reader)
    session.sync([5, 6, 7])
    assert subject.reader is not None
    before = subject.reader.stats()
    with patch.object(mx.distributed, "all_gather", wraps=mx.distributed.all_gather) as gathers:
        mx.eval(session.step(8))
    rows = subject.reader.stats().rows_requested - before.rows_requested
    subject.close()
    counts = {"read": read_bytes, "held": held, "exchanges": gathers.call_count, "rows": rows}
    return {f"own {name}": np.array(count) for name, count in counts.items()}


def main(folder: Path) -> None:
    """Join the ring, and write what came out."""
    devices = Devices.join("ring")
    subject = load(CONFIG, 0, devices)
    found = {**compute(subject), **exchanged(devices), **costs(devices)}
    np.savez(folder / f"rank-{devices.rank}.npz", allow_pickle=False, **found)
    subject.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
