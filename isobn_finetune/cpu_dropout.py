"""Dropout that costs little on a CPU: sixteen random bits an element from torch's own generator, one fused select.

``torch.nn.functional.dropout`` draws its mask with ``bernoulli_``, which on a CPU takes a fifth of a BERT training
step. Here one 64-bit draw serves four elements, and the draws themselves are kept as the mask (two bytes an element).
The bits come from torch's global generator, so ``torch.manual_seed``, a restored random state and the recomputation
of gradient checkpointing all repeat them exactly.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_PATTERNS = 1 << 16
_MINUS_INFINITY = 0xFF80  # the bfloat16 pattern; counting down from here walks through ever larger numbers
_NEGATIVE = 0x7F80  # how many numbers lie below zero, minus infinity among them
_MAX_DROPPED = _NEGATIVE + 2 + 0x7F80  # all but the patterns that mean NaN
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # they hold every bfloat16 number; float16 does not


class DropoutRate:
    """A dropout probability in units of 1/65536, as a threshold on random bits read as bfloat16 numbers.

    Read as bfloat16, random patterns of 16 bits are not uniform numbers, but they are ordered: for every share p there
    is a number than which just p of the 65,536 patterns are not greater (patterns that mean NaN never compare as
    smaller or equal, and are kept). A compare and select on bfloat16 is one vectorised torch operation, where a
    Boolean mask needs three.

    Args:
        p: Probability of dropping an element, at most 0.996. It is met to 3e-5.
    """

    max_p = _MAX_DROPPED / _PATTERNS

    def __init__(self, p: float) -> None:
        dropped = round(p * _PATTERNS)
        if not 0 <= dropped <= _MAX_DROPPED:
            raise ValueError(f"dropout probability {p}: must lie between 0 and {self.max_p:.3f}")
        if dropped <= _NEGATIVE:
            bits = _MINUS_INFINITY - dropped + 1  # for none at all a NaN, than which nothing is smaller
        else:  # minus zero and zero are equal, so both go
            bits = max(dropped - _NEGATIVE - 2, 0)
            dropped = _NEGATIVE + 2 + bits
        self.keep_scale = _PATTERNS / (_PATTERNS - dropped)  # of the true rate, so the mean is kept exactly
        signed = bits - _PATTERNS if bits > _PATTERNS // 2 else bits
        self.threshold = torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16).item()


@lru_cache
def get_rate(p: float) -> DropoutRate:
    """The rate for a probability, made once."""
    return DropoutRate(p)


def draw_noise(shape: torch.Size | tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Draws 16 random bits an element from the device's global generator; they are read as bfloat16 of that shape."""
    count = 1
    for size in shape:
        count *= size
    words = torch.empty((count + 3) // 4, dtype=torch.int64, device=device).random_(-(2**63), None)
    return words.view(torch.bfloat16)[:count].view(shape)


def drop(x: Tensor, noise: Tensor, rate: DropoutRate) -> Tensor:
    """Zeroes the elements of ``x`` that ``noise`` chooses, without scaling the others."""
    if x.dtype not in _DTYPES:
        return x.masked_fill(noise <= rate.threshold, 0.0)
    return torch.ops.aten.threshold_backward(x, noise.to(x.dtype), rate.threshold)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: DropoutRate) -> Tensor:
        noise = draw_noise(x.shape)
        ctx.save_for_backward(noise)
        ctx.rate = rate
        return drop(x, noise, rate).mul_(rate.keep_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (noise,) = ctx.saved_tensors
        return drop(grad, noise, ctx.rate).mul_(ctx.rate.keep_scale), None


class CheapDropout(nn.Dropout):
    """``nn.Dropout`` with cheap random bits for tensors on a CPU; the same layer as before elsewhere.

    Args:
        p: Probability of dropping an element, met to 3e-5.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Drops elements while training and scales the others by the inverse of the kept share."""
        if not self.training or self.p == 0.0:
            return input
        if input.device.type != "cpu" or input.dtype not in _DTYPES or self.p > DropoutRate.max_p:
            return F.dropout(input, self.p, True, self.inplace)
        return _Dropout.apply(input, get_rate(self.p))


def use_cheap_dropout(model: nn.Module) -> int:
    """Replaces every ``nn.Dropout`` of a model by :class:`CheapDropout`; returns how many there were."""
    replaced = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, CheapDropout(child.p).train(child.training))
                replaced += 1
    return replaced
