"""How tokens are drawn: temperature, top-k, min-p, top-p and a seed; and how likely they were.

Owns the parameters with their checks and the seed's sequence; the drawing itself is ops.sampling's,
when to stop is decided elsewhere.
"""

import math
import random
import secrets
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_engine.errors import BadRequest
from mlx_engine.ops.sampling import draw, greedy, keep_top

_SEEDS = 2**63

# Below it the logits would overflow; the greatest wins there in any case.
_LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the defaults are the vendor's for this model, in every effort.

    temperature: 0 takes the most likely token. min_p: a token needs this share of the greatest
    probability. top_p: the most likely tokens that reach this sum are kept. seed: the same seed
    gives the same tokens, None a fresh one. top_k: how many of the most likely tokens are kept
    ahead of the other rules, 0 for all. Raises BadRequest for impossible values.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    top_k: int = 0

    def __post_init__(self) -> None:
        # Written so that NaN, which compares false with everything, is refused too.
        if not 0 <= self.temperature < math.inf:
            raise BadRequest(f"temperature is {self.temperature}, it must be a number from 0 up")
        if not 0 < self.top_p <= 1:
            raise BadRequest(f"top_p is {self.top_p}, it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise BadRequest(f"min_p is {self.min_p}, it must be from 0 to 1")
        if self.seed is not None and not 0 <= self.seed < _SEEDS:
            raise BadRequest(f"seed is {self.seed}, it must be from 0 to 2**63 - 1")
        if self.top_k < 0:
            raise BadRequest(f"top_k is {self.top_k}, it must be from 0 (all tokens) up")


@dataclass(frozen=True)
class ScoredToken:
    """A token and its log probability, and the most likely ones with theirs, the greatest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def score(logits: mx.array, token_id: int, n_top: int) -> ScoredToken:
    """How likely a token was, and the `n_top` most likely: from logits f32 [V], on the host.

    Of the model's own probabilities, whatever temperature and rules it was drawn by. Equal logits
    rank by id, the lowest first.
    """
    values = np.array(logits, np.float64)
    greatest = values.max()
    log_probs = values - (greatest + math.log(np.exp(values - greatest).sum()))
    # All that are as great as the last of them, so that equals can be told apart by their ids.
    least = np.partition(values, -n_top)[-n_top] if 0 < n_top < values.size else -math.inf
    ids = np.flatnonzero(values >= least) if n_top else np.empty(0, np.int64)
    top = ids[np.argsort(-values[ids], kind="stable")][:n_top].tolist()
    return ScoredToken(token_id, float(log_probs[token_id]), tuple((i, log_probs[i]) for i in top))


@dataclass(frozen=True)
class Draw:
    """One draw: how, and by which random bits, 64 of them."""

    sampling: Sampling
    bits: int

    def __call__(self, logits: mx.array) -> mx.array:
        """Choose a token: logits f32 [V] to its id, a uint32 scalar not yet computed.

        Equal logits rank by id, the lowest first.
        """
        sampling = self.sampling
        if sampling.temperature == 0:
            return greedy(logits)
        return draw(
            keep_top(logits, sampling.top_k),
            mx.random.key(self.bits),
            temperature=max(sampling.temperature, _LEAST_TEMPERATURE),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )


class Sampler:
    """Draws one token a call; every call goes one step along the seed's sequence of keys."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        seed = secrets.randbelow(_SEEDS) if sampling.seed is None else sampling.seed
        # On the host, where a key costs the device nothing.
        self._keys = random.Random(seed)

    def next(self) -> Draw:
        """The next draw, still to be done."""
        return Draw(self._sampling, self._keys.getrandbits(64))

    def __call__(self, logits: mx.array) -> mx.array:
        """Do the next draw."""
        return self.next()(logits)
