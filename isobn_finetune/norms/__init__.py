"""Norms of the pooler output. Each has one contract.

``Norm(hidden_size, **options)``; ``(batch, hidden_size)`` in and out; ``affine()`` returns the ``(weight, shift)`` that
it applies in eval mode. So whoever folds a norm into a classifier never asks which norm it holds.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from isobn_finetune.errors import ConfigError
from isobn_finetune.norms.batchnorm import BatchNorm
from isobn_finetune.norms.identity import Identity
from isobn_finetune.norms.isobn import IsoBN
from isobn_finetune.norms.statistics import StatisticsNorm
from isobn_finetune.tasks import nearest

NORMS: dict[str, type[nn.Module]] = {"none": Identity, "batchnorm": BatchNorm, "isobn": IsoBN}

__all__ = ["NORMS", "BatchNorm", "Identity", "IsoBN", "StatisticsNorm", "create_norm"]


def create_norm(name: str, hidden_size: int, **options: Any) -> nn.Module:
    """Builds a norm.

    Raises:
        ConfigError: The name is not known.
    """
    if name not in NORMS:
        raise ConfigError(f"unknown norm '{name}'. Known: {', '.join(NORMS)}.{nearest(name, NORMS)}")
    return NORMS[name](hidden_size, **options)
