"""Mean and covariance of more embeddings than memory holds, in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_BLOCK_VALUES = 1 << 22
"""Values of a block of rows, 32 MiB in float64: large enough that adding up ``(d, d)`` products costs little."""

_SLICE_VALUES = 1 << 16
"""Values that are shifted and summed at once, 512 KiB in float64: they stay in the processor's cache."""


class CovarianceAccumulator:
    """Count, mean and covariance of embeddings in float64, in one pass and O(d^2) memory.

    Rows wait in a block, shifted by the mean of the rows before it; a full block is merged by the exact pairwise
    formula of Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance", 1983. So neither the order and
    size of batches nor large means cost precision, and a dimension that never moves has a variance of exactly zero.
    Rows with a value that is not finite are left out and counted.

    Args:
        hidden_size: Width d; taken from the first batch if not given.
    """

    def __init__(self, hidden_size: int | None = None) -> None:
        self.hidden_size = hidden_size
        self._non_finite_rows = 0
        self._count = 0
        # The mean is origin + offset: near the origin, an offset keeps digits that one sum of both would round away.
        self._origin: np.ndarray | None = None
        self._offset: np.ndarray | float = 0.0
        self._moment: np.ndarray | None = None  # sum of outer products of centred rows
        self._block: np.ndarray | None = None  # rows that wait, less the shift
        self._shift: np.ndarray | float = 0.0
        self._block_sum: np.ndarray | float = 0.0
        self._pending = 0

    @classmethod
    def from_moments(cls, count: int, mean: np.ndarray, covariance: np.ndarray) -> CovarianceAccumulator:
        """Starts from known moments; ``covariance`` ``(d, d)`` is the population's (divided by n)."""
        accumulator = cls(len(mean))
        accumulator._count = int(count)
        accumulator._origin = np.array(mean, dtype=np.float64)
        accumulator._moment = np.array(covariance, dtype=np.float64) * count
        return accumulator

    def update(self, batch: np.ndarray | torch.Tensor) -> None:
        """Adds rows ``(n, d)`` of any float type, on any device."""
        if batch.ndim != 2:
            raise ValueError(f"embeddings have shape {tuple(batch.shape)}, expected (n, d).")
        self._check_width(int(batch.shape[1]))
        start, total = 0, int(batch.shape[0])
        slice_rows = max(1, _SLICE_VALUES // max(1, int(batch.shape[1])))
        while start < total:
            if self._block is None:
                self._block = np.empty((max(64, min(4096, _BLOCK_VALUES // max(1, batch.shape[1]))), batch.shape[1]))
            taken = min(total - start, len(self._block) - self._pending, slice_rows)
            rows = to_numpy(batch[start : start + taken])
            if self._origin is None:
                first = rows[0].astype(np.float64)
                self._origin = np.where(np.isfinite(first), first, 0.0)
            if self._pending == 0:
                self._shift = self._origin + self._offset
            place = self._block[self._pending : self._pending + taken]
            with np.errstate(invalid="ignore", over="ignore"):
                np.subtract(rows, self._shift, out=place)
                self._block_sum = self._block_sum + place.sum(axis=0)
            self._pending += taken
            start += taken
            if self._pending == len(self._block):
                self._flush()

    def merge(self, other: CovarianceAccumulator) -> None:
        """Adds all rows of another accumulator, as if they had been given to this one."""
        self._non_finite_rows += other.non_finite_rows
        other._flush()
        if other._origin is None or other._moment is None:
            return
        self._check_width(len(other._origin))
        self._flush()
        if self._origin is None:
            self._origin = other._origin.copy()
        self._add(other._count, (other._origin - self._origin) + other._offset, other._moment)

    def transform(self, weight: np.ndarray, shift: np.ndarray) -> CovarianceAccumulator:
        """Returns the moments of ``x * weight + shift``, or ``x @ weight + shift`` for a ``(d, d)`` weight."""
        if self.count == 0:
            empty = CovarianceAccumulator(self.hidden_size)
            empty._non_finite_rows = self._non_finite_rows
            return empty
        weight, shift = np.asarray(weight, dtype=np.float64), np.asarray(shift, dtype=np.float64)
        if weight.ndim == 1:
            mean, covariance = self.mean * weight + shift, self.covariance * weight[:, None] * weight
        else:
            mean, covariance = self.mean @ weight + shift, weight.T @ self.covariance @ weight
        transformed = CovarianceAccumulator.from_moments(self.count, mean, covariance)
        transformed._non_finite_rows = self._non_finite_rows
        return transformed

    def to_array(self) -> np.ndarray:
        """Returns the state as one float64 vector, to be gathered over processes; its length depends on d alone."""
        self._flush()
        if self.hidden_size is None:
            raise ValueError("the accumulator has seen no batch and was given no hidden_size.")
        width = self.hidden_size
        origin = np.zeros(width) if self._origin is None else self._origin
        moment = np.zeros((width, width)) if self._moment is None else self._moment
        sizes = [width, self._count, self._non_finite_rows]
        return np.concatenate([sizes, origin, np.broadcast_to(self._offset, width), moment.ravel()], dtype=np.float64)

    @classmethod
    def from_array(cls, state: np.ndarray) -> CovarianceAccumulator:
        """Rebuilds an accumulator from :meth:`to_array`."""
        width, count, non_finite_rows = (int(size) for size in state[:3])
        accumulator = cls(width)
        accumulator._non_finite_rows = non_finite_rows
        if count > 0:
            origin, offset, moment = np.split(np.array(state[3:], dtype=np.float64), [width, 2 * width])
            accumulator._count, accumulator._origin, accumulator._offset = count, origin, offset
            accumulator._moment = moment.reshape(width, width)
        return accumulator

    @property
    def count(self) -> int:
        """Rows taken in, those left out not among them."""
        self._flush()
        return self._count

    @property
    def non_finite_rows(self) -> int:
        """Rows left out because they hold a value that is not finite."""
        self._flush()
        return self._non_finite_rows

    @property
    def mean(self) -> np.ndarray:
        """Mean ``(d,)``."""
        if self.count == 0 or self._origin is None:
            raise ValueError("the accumulator holds no rows.")
        return self._origin + self._offset

    @property
    def covariance(self) -> np.ndarray:
        """Covariance ``(d, d)`` of the rows themselves: divided by n, not n - 1."""
        if self.count == 0 or self._moment is None:
            raise ValueError("the accumulator holds no rows.")
        return self._moment / self._count

    @property
    def std(self) -> np.ndarray:
        """Standard deviations ``(d,)``."""
        return np.sqrt(np.diagonal(self.covariance).clip(min=0))

    def _check_width(self, width: int) -> None:
        if self.hidden_size is None:
            self.hidden_size = width
        if self.hidden_size != width:
            raise ValueError(f"embeddings of width {width} cannot be added to those of width {self.hidden_size}.")

    def _flush(self) -> None:
        """Merges the rows that wait in the block."""
        if self._pending == 0 or self._block is None:
            return
        block, delta = self._block[: self._pending], np.asarray(self._block_sum)
        self._pending, self._block_sum = 0, 0.0
        with np.errstate(invalid="ignore", over="ignore"):
            if not np.isfinite(delta).all():  # a value that is not finite makes its column's sum so
                finite = np.isfinite(block).all(axis=1)
                self._non_finite_rows += int(np.count_nonzero(~finite))
                block = block[finite]
                delta = block.sum(axis=0)
            if len(block) == 0:
                return
            delta = delta / len(block)
            if self._is_near(delta, len(block)):
                moment = block.T @ block
                moment -= np.outer(delta * len(block), delta)
            else:
                block -= delta
                moment = block.T @ block
            assert self._origin is not None  # set with the block's first row
            self._add(len(block), (self._shift - self._origin) + delta, moment)

    def _is_near(self, delta: np.ndarray, count: int) -> bool:
        """True where rows whose mean lies ``delta`` away can be centred after their product, without losing digits.

        The product then exceeds the centred one by at most the variance so far, over no more rows.
        """
        if self._moment is None or self._count < count:
            return False
        return bool((delta * delta * self._count <= np.diagonal(self._moment)).all())

    def _add(self, count: int, offset: np.ndarray, moment: np.ndarray) -> None:
        """Adds rows whose mean lies ``offset`` from the origin, with the moment about that mean."""
        total = self._count + count
        if total == 0:
            return
        delta = offset - self._offset
        if self._moment is None:
            self._moment = moment.copy()
        else:
            self._moment += moment
            self._moment += np.outer(delta * (self._count * count / total), delta)
        self._offset = self._offset + delta * (count / total)
        self._count = total


def to_numpy(rows: np.ndarray | torch.Tensor) -> np.ndarray:
    """Returns rows as an array on the CPU, half precision as float32, without a copy where none is needed."""
    if isinstance(rows, np.ndarray):
        return rows
    rows = rows.detach().cpu()
    # NumPy has no bfloat16; float32 holds every value of it.
    return (rows.float() if rows.dtype.itemsize < 4 else rows).numpy()
