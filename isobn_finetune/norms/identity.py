"""No norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Identity(nn.Module):
    """Leaves sentence vectors as they are: the norm ``none``.

    Args:
        hidden_size: Width of ``pooler_output``.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x``, ``(batch, hidden_size)``."""
        return x

    def affine(self) -> tuple[Tensor, Tensor]:
        """Returns ones and zeros, each ``(hidden_size,)``."""
        return torch.ones(self.hidden_size), torch.zeros(self.hidden_size)
