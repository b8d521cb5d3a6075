"""The released number formats as roundings of torch tensors, gradients passing straight through.

Weights (section 2.2 of docs/model.md) and cached values (section 3.8). Scales come from exponent
bits, so the values are the engine's own to the last bit.
"""

# pyright: basic, reportMissingImports=false

import torch
from torch import Tensor

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
# The smallest amax that a scale is made for; an e8m0 byte must not become 0.
_LEAST = 2.0**-100


def fp8_weight(w: Tensor) -> Tensor:
    """e4m3 with a power-of-two scale for each 32 x 32 tile: [.., out, in], multiples of 32."""
    *lead, N, K = w.shape
    tiles = w.reshape(*lead, N // 32, 32, K // 32, 32)
    return _through(w, _e4m3(tiles, (-3, -1), _LEAST).reshape(w.shape))


def fp8_rows(w: Tensor) -> Tensor:
    """e4m3 with a power-of-two scale for 32 values of a row."""
    return _through(w, _e4m3(w.unflatten(-1, (-1, 32)), (-1,), _LEAST).flatten(-2))


def fp4_weight(w: Tensor) -> Tensor:
    """e2m1 with a power-of-two scale for 32 inputs."""
    return _through(w, _e2m1_power_of_two(w, _LEAST))


def bf16(w: Tensor) -> Tensor:
    """The nearest bf16 value."""
    return _through(w, w.bfloat16())


def window(x: Tensor) -> Tensor:
    """Window KV: e4m3, blocks of 32."""
    return _through(x, _e4m3(x.unflatten(-1, (-1, 32)), (-1,), 1e-4).flatten(-2))


def index(x: Tensor) -> Tensor:
    """Index queries and keys: e2m1, blocks of 32."""
    return _through(x, _e2m1_power_of_two(x, 6 * 2.0**-126))


def compressed(x: Tensor) -> Tensor:
    """Compressed KV: e2m1, blocks of 16 with an e4m3 scale."""
    blocks = x.float().unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = (amax / _E2M1_MAX).clamp(2.0**-9, _E4M3_MAX).to(torch.float8_e4m3fn).float()
    return _through(x, (_e2m1(blocks / scale) * scale).flatten(-2))


class _StraightThrough(torch.autograd.Function):
    """The second argument, with the gradient given to the first."""

    @staticmethod
    def forward(ctx, x, rounded):
        return rounded.to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _through(x: Tensor, rounded: Tensor) -> Tensor:
    return _StraightThrough.apply(x, rounded.detach())


def _e4m3(blocks: Tensor, dims: tuple[int, ...], least: float) -> Tensor:
    blocks = blocks.float()
    amax = blocks.abs().amax(dims, keepdim=True).clamp_min(least)
    scale = _power_of_two_ceil(amax / _E4M3_MAX)
    return (blocks / scale).to(torch.float8_e4m3fn).float() * scale


def _e2m1_power_of_two(x: Tensor, least: float) -> Tensor:
    blocks = x.float().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(least)
    scale = _power_of_two_ceil(amax / _E2M1_MAX)
    return (_e2m1(blocks / scale) * scale).flatten(-2)


def _e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with x's sign, ties to the even code."""
    mag = x.abs().clamp(max=_E2M1_MAX)
    fine, middle, coarse = (mag * 2).round() / 2, mag.round(), (mag / 2).round() * 2
    return torch.where(mag < 2, fine, torch.where(mag < 4, middle, coarse)) * x.sign()


def _power_of_two_ceil(x: Tensor) -> Tensor:
    """The least power of two that is at least x, a normal f32."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent << 23).view(torch.float32)
