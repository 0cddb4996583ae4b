"""How evenly sentence embeddings use their space: the measures.

For embeddings ``(n, d)`` with covariance C (centred), its eigenvalues l_1 >= ... >= l_d, standard deviations s_i:

    EV_k                  sum of the k largest l over sum of all l. Zhou, Lin and Ren, "IsoBN", AAAI 2021,
                          https://arxiv.org/abs/2005.02178. k/d where isotropic, towards 1 where few directions rule.
    participation ratio   PR = (sum l)^2 / sum l^2, from 1 (one direction) to d (isotropic): how many directions are in
                          use, an effective rank. Gao et al., "A theory of multineuronal dimensionality, dynamics and
                          measurement", 2017, https://doi.org/10.1101/214262.
    IsoScore              Rudman, Gillman, Rayne and Eickhoff, "IsoScore: Measuring the Uniformity of Embedding Space
                          Utilization", Findings of ACL 2022, https://arxiv.org/abs/2108.07344. With u = sqrt(d) l / |l|
                          and defect D = |u - 1| / sqrt(2 (d - sqrt d)) it is ((d - D^2 (d - sqrt d))^2 - d) / (d^2-d).
                          Since |u - 1|^2 = 2d - 2 sqrt(d) (sum l) / |l|, all of it is (PR - 1) / (d - 1): 0 to 1.
    IsoScore*             IsoScore of the shrunk covariance (1 - z) C + z C_0. Rudman and Eickhoff, "Stable Anisotropic
                          Regularization" (I-STAR), ICLR 2024, https://arxiv.org/abs/2305.19358. Theirs takes C_0 from a
                          larger sample, or the identity where there is none, and leaves z to the user. Here C_0 is the
                          identity times the mean variance (so that units do not matter) and z is the oracle
                          approximating shrinkage of Chen, Wiesel, Eldar and Hero, IEEE TSP 2010,
                          https://arxiv.org/abs/0907.4698, which falls as 1/n.
    mean |correlation|    mean of |C_ij / (s_i s_j)| over i != j, dimensions without spread left out: the off-diagonal
                          of the matrix that Zhou et al. (2021, Section 3) draw.
    std CV                standard deviation of the s_i over their mean: how unequal dimensions are (same section).
    mean cosine           mean of cos(x, y) over all pairs of different rows, not centred. Ethayarajh, "How Contextual
                          are Contextualized Word Representations?", EMNLP 2019, https://arxiv.org/abs/1909.00512, takes
                          random pairs; |sum of unit rows|^2 gives the mean over all pairs exactly, without drawing. It
                          follows the mean vector more than the shape of the cloud (I-STAR calls it flawed).

With few rows (below about 5 d) EV_k reads high and IsoScore low; IsoScore* corrects for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from isobn_finetune.accumulator import CovarianceAccumulator, to_numpy

if TYPE_CHECKING:
    import torch

__all__ = [
    "CovarianceAccumulator",
    "compute_correlation",
    "compute_isotropy",
    "compute_measures",
    "compute_spectrum",
    "explained_variance",
    "iso_score",
    "iso_score_star",
    "mean_absolute_correlation",
    "mean_cosine_similarity",
    "participation_ratio",
    "std_variation",
    "why_undefined",
]

Source: TypeAlias = "np.ndarray | torch.Tensor | CovarianceAccumulator"
"""Embeddings ``(n, d)``, or an accumulator that has seen them."""


def explained_variance(embeddings: Source, top_k: int = 3) -> np.ndarray:
    """Returns EV_1 to EV_k ``(top_k,)``: the share of the variance in the k largest principal directions.

    1 where k exceeds the width.

    Raises:
        ValueError: Undefined: fewer than two rows, no variance, or a value that is not finite.
    """
    return _cumulative_share(compute_spectrum(embeddings), top_k)


def iso_score(embeddings: Source) -> float:
    """Returns IsoScore, 0 (one direction) to 1 (isotropic).

    Raises:
        ValueError: Undefined, as for :func:`explained_variance`, or of width 1.
    """
    return _iso_score(_covariance(embeddings))


def iso_score_star(embeddings: Source, zeta: float | None = None) -> float:
    """Returns IsoScore*: IsoScore of the covariance shrunk towards equal variances.

    Args:
        embeddings: Embeddings or an accumulator.
        zeta: Share of the target, 0 to 1; ``None`` chooses it by oracle approximating shrinkage.
    """
    accumulator = _accumulate(embeddings)
    covariance = _covariance(accumulator)
    if zeta is None:
        zeta = _shrinkage(covariance, accumulator.count)
    target = np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    return _iso_score((1 - zeta) * covariance + zeta * target)


def participation_ratio(embeddings: Source) -> float:
    """Returns the participation ratio, 1 (one direction) to d (isotropic)."""
    return _participation_ratio(_covariance(embeddings))


def mean_absolute_correlation(embeddings: Source) -> float:
    """Returns the mean |correlation| of two different dimensions that have spread.

    Raises:
        ValueError: Undefined, as for :func:`explained_variance`, or fewer than two dimensions have spread.
    """
    correlation = compute_correlation(embeddings)
    alive = np.diagonal(correlation) > 0
    width = np.count_nonzero(alive)
    if width < 2:
        raise ValueError("fewer than two dimensions vary, so there is no correlation.")
    return float((np.abs(correlation).sum() - width) / (width * (width - 1)))


def std_variation(embeddings: Source) -> float:
    """Returns the coefficient of variation of the standard deviations, 0 where all are equal."""
    std = np.sqrt(np.diagonal(_covariance(embeddings)))
    return float(std.std() / std.mean())


def mean_cosine_similarity(embeddings: np.ndarray | torch.Tensor) -> float:
    """Returns the mean cosine over all pairs of different rows; rows of length zero have no direction and are left out.

    Raises:
        ValueError: A value is not finite, or fewer than two rows have a length.
    """
    total, count = np.zeros(embeddings.shape[1]), 0
    for start in range(0, len(embeddings), 4096):
        rows = to_numpy(embeddings[start : start + 4096]).astype(np.float64)
        if not np.isfinite(rows).all():
            raise ValueError("embeddings hold values that are not finite.")
        # Scaled first: squares of very large or very small values leave float64's range.
        largest = np.abs(rows).max(axis=1, initial=0)
        rows, largest = rows[largest > 0], largest[largest > 0]
        rows /= largest[:, None]
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        total += rows.sum(axis=0)
        count += len(rows)
    if count < 2:
        raise ValueError("fewer than two rows have a length, so there is no pair.")
    return float(np.clip((total @ total - count) / (count * (count - 1)), -1, 1))


def compute_spectrum(embeddings: Source) -> np.ndarray:
    """Returns the covariance's eigenvalues ``(d,)``, largest first, none below zero."""
    return np.linalg.eigvalsh(_covariance(embeddings))[::-1].clip(min=0)


def compute_correlation(embeddings: Source) -> np.ndarray:
    """Returns the correlation matrix ``(d, d)``; rows and columns of dimensions without spread are zero."""
    covariance = _covariance(embeddings)
    std = np.sqrt(np.diagonal(covariance).clip(min=0))
    alive = std > 0
    inverse = np.where(alive, 1 / np.where(alive, std, 1), 0)
    correlation = (covariance * inverse[:, None] * inverse).clip(-1, 1)
    np.fill_diagonal(correlation, alive.astype(np.float64))
    return correlation


def compute_isotropy(embeddings: Source) -> dict[str, Any]:
    """Computes what result files hold: ``ev1``, ``ev2``, ``ev3`` and ``isoscore``.

    Never NaN: a value that is undefined is ``None``, and ``reason`` says why. Rows with a value that is not finite are
    left out; where there are such rows ``non_finite_rows`` is their count.
    """
    accumulator = _accumulate(embeddings)
    result: dict[str, Any] = dict.fromkeys(("ev1", "ev2", "ev3", "isoscore"))
    reason = why_undefined(accumulator)
    if reason is None:
        covariance = accumulator.covariance
        spectrum = np.linalg.eigvalsh(covariance)[::-1].clip(min=0)
        result["ev1"], result["ev2"], result["ev3"] = _cumulative_share(spectrum, 3).tolist()
        if len(covariance) > 1:
            result["isoscore"] = _iso_score(covariance)
        else:
            reason = "IsoScore needs at least two dimensions"
    if reason is not None:
        result["reason"] = reason
    if accumulator.non_finite_rows:
        result["non_finite_rows"] = accumulator.non_finite_rows
    return result


def compute_measures(accumulator: CovarianceAccumulator, top_k: int = 3) -> dict[str, Any]:
    """Computes ``n`` and every measure of the covariance: ``ev1`` to ``ev<top_k>``, ``isoscore`` and so on.

    Never NaN: as :func:`compute_isotropy`.
    """
    names = [f"ev{k}" for k in range(1, max(top_k, 3) + 1)]
    result: dict[str, Any] = {"n": accumulator.count, **dict.fromkeys((*names, *_MEASURES))}
    reasons = [why_undefined(accumulator)]
    if reasons[0] is None:
        result |= dict(zip(names, explained_variance(accumulator, len(names)).tolist(), strict=True))
        for name, measure in _MEASURES.items():
            try:
                result[name] = measure(accumulator)
            except ValueError as error:  # width 1, or one dimension that varies
                reasons.append(str(error).rstrip("."))
    if any(reasons):
        result["reason"] = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
    if accumulator.non_finite_rows:
        result["non_finite_rows"] = accumulator.non_finite_rows
    return result


_MEASURES: dict[str, Callable[[CovarianceAccumulator], float]] = {
    "isoscore": iso_score,
    "isoscore_star": iso_score_star,
    "participation_ratio": participation_ratio,
    "mean_abs_correlation": mean_absolute_correlation,
    "std_variation": std_variation,
}


def why_undefined(accumulator: CovarianceAccumulator) -> str | None:
    """Returns why measures of the covariance are undefined, ``None`` where they are not."""
    left_out = accumulator.non_finite_rows
    if accumulator.count < 2:
        suffix = f" ({left_out} with values that are not finite left out)" if left_out else ""
        return f"isotropy needs at least two rows, got {accumulator.count}{suffix}"
    variance = np.diagonal(accumulator.covariance)
    if not np.isfinite(variance.sum()):
        return "the covariance is not finite: embeddings are too large"
    if variance.sum() <= 0:
        return f"all {accumulator.count} embeddings are equal, so there is no variance to share out"
    return None


def _accumulate(embeddings: Source) -> CovarianceAccumulator:
    if isinstance(embeddings, CovarianceAccumulator):
        return embeddings
    accumulator = CovarianceAccumulator()
    accumulator.update(embeddings)
    return accumulator


def _covariance(embeddings: Source) -> np.ndarray:
    """Covariance ``(d, d)`` of embeddings for which measures are defined."""
    accumulator = _accumulate(embeddings)
    if accumulator is not embeddings and accumulator.non_finite_rows:
        total = accumulator.count + accumulator.non_finite_rows
        raise ValueError(f"{accumulator.non_finite_rows} of {total} rows hold values that are not finite.")
    reason = why_undefined(accumulator)
    if reason is not None:
        raise ValueError(f"{reason}.")
    return accumulator.covariance


def _cumulative_share(spectrum: np.ndarray, top_k: int) -> np.ndarray:
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}, expected 1 or more.")
    share = np.ones(top_k)
    largest = spectrum[:top_k]
    share[: len(largest)] = np.minimum(np.cumsum(largest) / spectrum.sum(), 1)
    return share


def _participation_ratio(covariance: np.ndarray) -> float:
    # sum l = trace, sum l^2 = squared Frobenius norm: no decomposition needed. Scaled, so that squares stay in range.
    scaled = covariance / np.trace(covariance)
    return float(1 / np.square(scaled).sum())


def _iso_score(covariance: np.ndarray) -> float:
    width = len(covariance)
    if width < 2:
        raise ValueError("IsoScore needs at least two dimensions.")
    return float(np.clip((_participation_ratio(covariance) - 1) / (width - 1), 0, 1))


def _shrinkage(covariance: np.ndarray, count: int) -> float:
    """Oracle approximating shrinkage towards the mean variance: Chen et al., 2010, equation 23."""
    width = len(covariance)
    # tr(C)^2 = 1 after scaling, tr(C^2) = 1 / PR.
    square = 1 / _participation_ratio(covariance)
    numerator = (1 - 2 / width) * square + 1
    denominator = (count + 1 - 2 / width) * (square - 1 / width)
    return 1.0 if denominator <= 0 else float(min(1.0, numerator / denominator))
