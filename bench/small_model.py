"""Prefill and decode of a small random model on the CPU, against mlx-lm on the same checkpoint.

Each side runs as its own library runs it: this engine's session with its short prefill, mlx-lm in
chunks through its cache and with the next step enqueued before a token is read. Engram is off,
since the peer has none. Nothing is timed before both give the same logits and greedy tokens.
"""

import statistics
import sys
from functools import partial
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np

from bench.report import Report, paired_s, speedup
from bench.setting import CHUNK_TOKENS, SmallModel, small_model
from mlx_engine.formats import CacheFormats
from mlx_engine.model import Model
from mlx_engine.session import Session
from tests.peer import PeerSession, load_peer, without_roundings

# The peer takes twice as long in bfloat16, which a CPU does not compute in.
PROMPT_TOKENS = {"float32": 4096, "bfloat16": 2048}
PREFILLS = {"float32": 3, "bfloat16": 2}
DECODES = 12
DECODE_TOKENS = 8
# Longer than the window and than index_topk, so that everything selective takes part.
CHECK_TOKENS = 600
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


class Side(Protocol):
    """A library with the small model loaded."""

    def prefill(self, ids: list[int]) -> mx.array:
        """Forget what was before: logits [V] after a prompt."""
        ...

    def generate(self, token_id: int, tokens: int) -> list[int]:
        """Append a token: the greedy ones after it."""
        ...

    def state_bytes(self) -> int:
        """Bytes of what is remembered."""
        ...


class Own:
    """This engine, which reads each token before it starts the next step."""

    def __init__(self, model: Model, formats: CacheFormats | None = None) -> None:
        self._session = Session(model, None, chunk_tokens=CHUNK_TOKENS, formats=formats)

    def prefill(self, ids: list[int]) -> mx.array:
        self._session.reset()
        return self._session.sync(ids)

    def generate(self, token_id: int, tokens: int) -> list[int]:
        generated: list[int] = []
        for _ in range(tokens):
            token_id = cast(int, mx.argmax(self._session.step(token_id)).item())
            generated.append(token_id)
        return generated

    def state_bytes(self) -> int:
        return self._session.state_bytes


class Peer:
    """mlx-lm, which starts the next step before it reads a token."""

    def __init__(self, small: SmallModel, dtype: mx.Dtype) -> None:
        self._model = load_peer(small.directory, dtype)
        self._session = PeerSession(self._model)

    def prefill(self, ids: list[int]) -> mx.array:
        self._session = PeerSession(self._model)
        return self._session.prefill(ids, CHUNK_TOKENS)

    def generate(self, token_id: int, tokens: int) -> list[int]:
        return self._session.generate(token_id, tokens)

    def state_bytes(self) -> int:
        return sum(layer.nbytes for layer in self._session.cache)


def main() -> int:
    """Run the bench and return its exit code."""
    mx.set_default_device(mx.cpu)
    report = Report("small_model", __doc__)
    speeds: list[list[Any]] = []
    sizes: list[list[Any]] = []
    with small_model() as small:
        report.facts(small.sizes())
        _check_agreement(report, small)
        for name, dtype in DTYPES.items():
            sides = Own(Model(small.config, small.weights, dtype)), Peer(small, dtype)
            ids = small.prompt(PROMPT_TOKENS[name])
            speeds += _measure_speed(report, name, sides, ids)
            sizes += _measure_memory(report, name, sides, ids)
    report.table(("tokens/s", "prompt", "ds41", "mlx-lm", "times"), speeds)
    report.table(("bytes", "prompt", "ds41", "mlx-lm", "times"), sizes)
    for what, least in (("prefill float32", 2.0), ("decode float32", 0.95)):
        report.check(f"{what}, times the peer's speed", report.results[what]["times"], least=least)
    return report.finish()


def _check_agreement(report: Report, small: SmallModel) -> None:
    """Compare in float32 and without cache roundings, where only noise is between the two."""
    ids = small.prompt(CHECK_TOKENS)
    peer = Peer(small, mx.float32)
    with without_roundings() as formats:
        own = Own(Model(small.config, small.weights, mx.float32), formats)
        logits, expected = (np.array(side.prefill(ids), np.float32) for side in (own, peer))
        generated, wanted = (side.generate(ids[0], 2 * DECODE_TOKENS) for side in (own, peer))
    report.check("largest difference of logits", float(abs(logits - expected).max()), most=1e-3)
    same = sum(a == b for a, b in zip(generated, wanted, strict=True))
    report.check("greedy tokens that agree", same, least=len(wanted))


def _measure_speed(
    report: Report, name: str, sides: tuple[Side, Side], ids: list[int]
) -> list[list[Any]]:
    """Time prefill, then decode after it; return the table's rows."""
    for side in sides:  # warm up
        side.prefill(ids[:64])
        side.generate(ids[0], 2)

    def prefill(side: Side) -> None:
        mx.eval(side.prefill(ids))

    def decode(side: Side) -> None:
        side.generate(ids[0], DECODE_TOKENS)

    rows: list[list[Any]] = []
    for what, run, tokens, repetitions in (
        (f"prefill {name}", prefill, len(ids), PREFILLS[name]),
        (f"decode {name}", decode, DECODE_TOKENS, DECODES),
    ):
        own_s, peer_s = paired_s(partial(run, sides[0]), partial(run, sides[1]), repetitions)
        times = speedup(peer_s, own_s)
        report.results[what] = {"own_s": own_s, "peer_s": peer_s, "tokens": tokens, "times": times}
        rates = [tokens / statistics.median(seconds) for seconds in (own_s, peer_s)]
        rows.append([what, len(ids), *rates, times])
    return rows


def _measure_memory(
    report: Report, name: str, sides: tuple[Side, Side], ids: list[int]
) -> list[list[Any]]:
    """The state as decoding left it, then the peak of a short prefill; return the table's rows."""
    states = [side.state_bytes() for side in sides]
    peaks: list[int] = []
    for side in sides:
        live = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(side.prefill(ids[:CHECK_TOKENS]))
        peaks.append(mx.get_peak_memory() - live)
    report.results[f"memory {name}"] = {"state_bytes": states, "prefill_peak_bytes": peaks}
    return [
        [f"state {name}", len(ids), *states, states[1] / states[0]],
        [f"peak of a prefill {name}", CHECK_TOKENS, *peaks, peaks[1] / peaks[0]],
    ]


if __name__ == "__main__":
    sys.exit(main())
