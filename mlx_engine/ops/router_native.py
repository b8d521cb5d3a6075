"""The router's scores for a few tokens on NVIDIA GPUs, in bf16: the kernel of cuda/router.cu.

Shapes: T tokens, E experts, D hidden_size.
"""

import mlx.core as mx

from mlx_engine.ops.launch import Kernel

_THREADS = 128

_SCORES = Kernel(
    family="router",
    name="router_scores",
    inputs=("x", "gate", "gate_temp"),
    outputs=("scores",),
    body="""
    __shared__ float scratch[THREADS / 32][TOKENS];
    router_scores<TOKENS, D, E>(x, gate, gate_temp, scores, scratch, blockIdx.x, threadIdx.x);""",
    is_native=True,
)


def scores_of_few_tokens(x: mx.array, gate: mx.array, gate_temp: float) -> mx.array:
    """`router.route`'s scores f32 [T, E] of at most 8 tokens: x [T, D] and gate [E, D] in bf16."""
    (T, D), E = x.shape, gate.shape[0]
    (scores,) = _SCORES(
        [x, gate, gate_temp],
        template=[("TOKENS", T), ("D", D), ("E", E)],
        grid=(E * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        shapes=[(T, E)],
        dtypes=[mx.float32],
    )
    return scores
