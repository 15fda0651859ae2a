"""Keys and values as float8_e4m3fn: 1 sign bit, 4 bits of exponent, 3 of mantissa, up to ±448."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SIGN_AND_MAGNITUDE = ~0x4000  # all bits of a float16 but the upper one of the exponent
BIAS_RATIO = 2.0**8  # float16 has an exponent bias of 15, float8 of 7


def to_fp8(x: Tensor) -> Tensor:
    """Round to the nearest float8, and to ±448 beyond. Return its bits, uint8, which index operations support."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def from_fp8(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of `to_fp8` in another dtype, exactly. Their bits are shifted into place in a float16.

    torch's own conversion takes 10 times as long on a CPU.
    """
    half = bits.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(SIGN_AND_MAGNITUDE)
    return half.view(torch.float16).to(dtype).mul_(BIAS_RATIO)
