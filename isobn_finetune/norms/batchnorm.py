"""Batch normalization, the paper's baseline."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isobn_finetune.norms.statistics import StatisticsNorm, compute_mean, reduce_sum


class BatchNorm(StatisticsNorm):
    """``BatchNorm1d`` over sentence vectors, in float32, that bears odd batches.

    Ioffe and Szegedy, "Batch Normalization", ICML 2015. As ``torch.nn.BatchNorm1d``, and further: a batch of one is
    normalized by the running values and does not change them; a batch with a value that is not finite leaves the
    running values as they were and is counted.

    Args:
        hidden_size: Width of ``pooler_output``.
        momentum: Weight of the newest batch in the moving averages.
        eps: Added to the variance.
        sync: Take each batch's moments over all processes of ``torch.distributed``.

    Shape:
        x and y: ``(batch, hidden_size)``, any float dtype.

    Buffers, saved with the checkpoint:
        running_mean and running_var ``(hidden_size,)``; num_batches_tracked, a count. Weight and bias are learned.
    """

    initial_values = {"weight": 1, "running_var": 1}
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, hidden_size: int, momentum: float = 0.1, eps: float = 1e-5, sync: bool = False) -> None:
        super().__init__(hidden_size, sync)
        self.momentum = momentum
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=torch.float32))
        self.register_buffer("running_mean", torch.zeros(hidden_size, dtype=torch.float32))
        self.register_buffer("running_var", torch.ones(hidden_size, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes ``x``, in training by its own moments."""
        with torch.autocast(x.device.type, enabled=False):
            values = x.float()
            mean, var = self.running_mean, self.running_var
            if self.training:
                count, batch_mean = compute_mean(values, self.sync)
                if count > 1:
                    mean = batch_mean
                    var = reduce_sum((values - mean).square().sum(dim=0), self.sync) / count
                    # Unbiased for the running variance, biased for the batch itself, as torch does.
                    self._update(mean.detach(), var.detach() * (count / (count - 1)))
            return ((values - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias).to(x.dtype)

    def affine(self) -> tuple[Tensor, Tensor]:
        """Returns ``(weight, shift)``, ``(hidden_size,)`` float32 each; in eval mode ``y = x * weight + shift``."""
        with torch.no_grad():
            weight = self.weight * torch.rsqrt(self.running_var + self.eps)
            return weight, self.bias - self.running_mean * weight

    def _update(self, mean: Tensor, var: Tensor) -> None:
        finite = self._is_finite(mean, var)
        self._count_batch(finite, ((self.running_mean, mean), (self.running_var, var)), self.momentum)

    def extra_repr(self) -> str:
        """Options, for ``print(model)``."""
        return f"{self.hidden_size}, momentum={self.momentum}, eps={self.eps}, sync={self.sync}"
