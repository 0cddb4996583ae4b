"""What norms with batch statistics share: moments of a batch, and buffers that stay float32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce


def compute_moments(x: Tensor, sync: bool = False) -> tuple[int, Tensor, Tensor]:
    """Computes count, mean and covariance of a batch in float32.

    Args:
        x: ``(batch, hidden_size)``.
        sync: Over the batches of all processes. Two reductions, the second centred on the global mean: float32 sums of
            x and x x^T would lose the variance of saturated dimensions.

    Returns:
        The number of rows, the mean ``(hidden_size,)`` and the covariance ``(hidden_size, hidden_size)`` divided by
        the number of rows.
    """
    count, mean = compute_mean(x, sync)
    centred = x.float() - mean
    return count, mean, reduce_sum(centred.T @ centred, sync) / count


def compute_mean(x: Tensor, sync: bool = False) -> tuple[int, Tensor]:
    """Computes the number of rows and their mean ``(hidden_size,)`` in float32; see ``compute_moments``."""
    total, count = x.float().sum(dim=0), x.shape[0]
    if sync and process_count() > 1:
        packed = reduce_sum(torch.cat((total, total.new_tensor([count]))), sync)
        total, count = packed[:-1], int(packed[-1])
    return count, total / count


def process_count() -> int:
    """Processes of ``torch.distributed``, 1 where it does not run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def reduce_sum(x: Tensor, sync: bool) -> Tensor:
    """Adds ``x`` over all processes where ``sync`` asks for it; gradients flow back to all of them."""
    return all_reduce(x) if sync and process_count() > 1 else x


class StatisticsNorm(nn.Module):
    """Base of the norms that keep running statistics of training batches.

    The statistics stay float32 when the model is cast to half precision, and a batch with a value that is not finite
    leaves them as they were; ``num_batches_skipped`` counts those.
    """

    num_batches_tracked: Tensor
    num_batches_skipped: Tensor
    initial_values: ClassVar[dict[str, float]] = {}
    """Parameters and buffers that do not start at zero."""

    def __init__(self, hidden_size: int, sync: bool) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.sync = sync
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))
        # Not saved: it tells of this process's batches, for a message.
        self.register_buffer("num_batches_skipped", torch.tensor(0, dtype=torch.long), persistent=False)

    def has_statistics(self) -> bool:
        """False before the first batch, and for a file whose statistics were zeroed."""
        running = [buffer for name, buffer in self.named_buffers() if name.startswith("running_")]
        return bool(self.num_batches_tracked > 0) and all(bool(buffer.any()) for buffer in running)

    @staticmethod
    def _is_finite(*moments: Tensor) -> Tensor:
        """True, as a scalar tensor, where all moments are finite. Never waits for a GPU."""
        return torch.stack([moment.isfinite().all() for moment in moments]).all()

    def _count_batch(self, finite: Tensor, pairs: Iterable[tuple[Tensor, Tensor]], momentum: float) -> None:
        """Moves each running value towards the batch's, unless the batch is not finite."""
        for running, batch in pairs:
            # where, not a product with the flag: 0 * nan is nan.
            running.add_(torch.where(finite, batch - running, 0), alpha=momentum)
        self.num_batches_tracked.add_(finite)
        self.num_batches_skipped.add_(~finite)

    def _apply(self, fn, recurse: bool = True) -> nn.Module:  # type: ignore[no-untyped-def]
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and moved.dtype != torch.float32:
                return tensor.to(moved.device, torch.float32)
            return moved

        return super()._apply(keep_float32, recurse)
