"""Isotropic batch normalization."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from isobn_finetune.norms.statistics import StatisticsNorm, compute_moments


class IsoBN(StatisticsNorm):
    """Rescales pooled sentence vectors so that large, correlated dimensions stop dominating.

    Zhou, Lin and Ren, "IsoBN: Fine-Tuning BERT with Isotropic Batch Normalization",
    AAAI 2021, https://arxiv.org/abs/2005.02178. For dimensions i, j of x:

        rho_ij  = clip(cov_ij / (std_i * std_j), -1, 1)
        gamma_i = mean_j rho_ij^2                      how correlated dimension i is with all
        raw_i   = (gamma_i * std_i + eps)^(-beta)
        scale_i = raw_i * sqrt(sum_k cov_kk / (sum_k raw_k^2 * cov_kk + eps))    keeps total variance
        y_i     = scale_i * x_i

    Nothing is centred or learned, and no gradient flows through ``scale``. ``cov`` and ``std`` are moving averages
    over training batches, updated before use. They start at zero without bias correction, as in the authors' code, so
    rho is too large for roughly the first 60 steps at the default momentum.

    Where the authors' code gives NaN this layer does not: before the first training batch it is the identity; a
    dimension that never moved has ``rho_ij = 0`` and ``scale_i = 1``; a batch with a value that is not finite leaves
    the statistics as they were and is counted; a batch of one has no spread, so it is scaled by the running values.

    Args:
        hidden_size: Width of ``pooler_output``.
        momentum: Weight of the newest batch in the moving averages.
        beta: Strength, 0 (leaves x as it is) to 1 (divides by gamma_i * std_i).
        eps: Keeps both denominators away from zero.
        bias_correction: Divide the running values by ``1 - (1 - momentum)^t`` before use, as Adam does.
        sync: Take each batch's moments over all processes of ``torch.distributed``.

    Shape:
        x and y: ``(batch, hidden_size)``, any float dtype; statistics are kept in float32.

    Buffers, saved with the checkpoint:
        running_cov ``(hidden_size, hidden_size)``; running_std ``(hidden_size,)``, averaged by itself, so not the
        square root of running_cov's diagonal; num_batches_tracked, a count.
    """

    running_cov: Tensor
    running_std: Tensor
    _scale: Tensor | None
    _scale_statistics: tuple[Tensor, ...]
    _scale_versions: tuple[int, ...]

    def __init__(
        self,
        hidden_size: int,
        momentum: float = 0.05,
        beta: float = 0.5,
        eps: float = 1e-3,
        bias_correction: bool = False,
        sync: bool = False,
    ) -> None:
        super().__init__(hidden_size, sync)
        self.momentum = momentum
        self.beta = beta
        self.eps = eps
        self.bias_correction = bias_correction
        self.register_buffer("running_cov", torch.zeros(hidden_size, hidden_size, dtype=torch.float32))
        self.register_buffer("running_std", torch.zeros(hidden_size, dtype=torch.float32))
        self._forget_scale()

    def forward(self, x: Tensor) -> Tensor:
        """Scales ``x``, in training after its own moments have entered the running values."""
        # Outside autocast: the statistics and the product are float32 whatever the precision of the run.
        with torch.autocast(x.device.type, enabled=False):
            if self.training:
                self._update(x.detach())
            return (x.float() * self._current_scale()).to(x.dtype)

    def affine(self) -> tuple[Tensor, Tensor]:
        """Returns ``(weight, shift)``, ``(hidden_size,)`` float32 each; in eval mode ``y = x * weight + shift``."""
        scale = self._current_scale().clone()
        return scale, torch.zeros_like(scale)

    @torch.no_grad()
    def _update(self, x: Tensor) -> None:
        count, mean, cov = compute_moments(x, self.sync)
        if count < 2:
            return  # one row has no spread
        std = cov.diagonal().clamp(min=0).sqrt()
        self._count_batch(self._is_finite(mean, cov), ((self.running_cov, cov), (self.running_std, std)), self.momentum)

    def _current_scale(self) -> Tensor:
        """Scale of the present statistics, computed once per change of them."""
        statistics = (self.running_cov, self.running_std, self.num_batches_tracked)
        if any(tensor.is_inference() for tensor in statistics):
            return self._compute_scale()  # inference tensors do not count their changes
        # In-place changes (a training batch, load_state_dict) raise a tensor's version; others replace the tensor.
        versions = tuple(tensor._version for tensor in statistics)
        same = versions == self._scale_versions and all(map(operator.is_, statistics, self._scale_statistics))
        if self._scale is None or not same:
            self._scale, self._scale_statistics, self._scale_versions = self._compute_scale(), statistics, versions
        return self._scale

    def _forget_scale(self) -> None:
        self._scale, self._scale_statistics, self._scale_versions = None, (), ()

    # Not inference_mode: the cached scale must serve a later training step too.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _compute_scale(self) -> Tensor:
        cov, std = self.running_cov, self.running_std
        if self.bias_correction:
            # At t = 0 the correction is 0; the clamp only keeps that unused branch finite.
            t = self.num_batches_tracked.clamp(min=1).to(torch.float64)
            correction = (1 - (1 - self.momentum) ** t).float()
            cov, std = cov / correction, std / correction
        alive = std > 0
        safe_std = torch.where(alive, std, 1)
        rho = (cov / safe_std / safe_std[:, None]).clamp_(-1, 1)
        # A dead dimension's covariances are exactly zero, and so is its rho.
        gamma = rho.square_().mean(dim=1)
        raw = (gamma * std + self.eps).pow(-self.beta)
        variance = cov.diagonal()
        scale = raw * torch.sqrt(variance.sum() / ((raw.square() * variance).sum() + self.eps))
        return torch.where(alive & (self.num_batches_tracked > 0), scale, 1)

    def _apply(self, fn, recurse: bool = True) -> nn.Module:  # type: ignore[no-untyped-def]
        self._forget_scale()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        # Copies count their buffers' changes from zero, so the cache must not travel with them.
        self._forget_scale()
        return self.__dict__.copy()

    def extra_repr(self) -> str:
        """Options, for ``print(model)``."""
        return (
            f"{self.hidden_size}, momentum={self.momentum}, beta={self.beta}, eps={self.eps}, "
            f"bias_correction={self.bias_correction}, sync={self.sync}"
        )
