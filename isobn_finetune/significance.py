"""Whether a difference between two norms is real: the tests of the report, each with its source.

- Multi-bootstrap, seeds and dev examples drawn together, the seeds in pairs: Sellam et al., "The MultiBERTs: BERT
  Reproductions for Robustness Analysis", ICLR 2022, section 4 and appendix, https://arxiv.org/abs/2106.16163;
  percentile interval (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993). `bootstrap_difference`.
- Exact paired permutation test: Fisher, "The Design of Experiments", 1935, section 21; `scipy.stats.permutation_test`
  with ``permutation_type="samples"``. With n pairs no two-sided p is below 2 / 2^n. `permutation_p`.
- Wilcoxon signed-rank test over tasks: Wilcoxon, 1945; advised for scores over data sets by Demsar, "Statistical
  Comparisons of Classifiers over Multiple Data Sets", JMLR 2006; `scipy.stats.wilcoxon`. `wilcoxon_p`.
- Holm's step-down correction: Holm, "A simple sequentially rejective multiple test procedure", 1979. `holm`.
- Smallest difference seen with 80% power: (t_0.975 + t_0.80) standard errors, as for a paired t-test (Cohen,
  "Statistical Power Analysis", 1988; Card et al., "With Little Power Comes Great Responsibility", EMNLP 2020), with the
  multi-bootstrap's standard error, enlarged by n / (n - 1) in variance since a bootstrap over n seeds is too narrow by
  that. `detectable_difference`.
- Expected maximum over a budget: Dodge et al., "Show Your Work: Improved Reporting of Experimental Results", EMNLP
  2019, equations 6 to 8, https://arxiv.org/abs/1909.03004. `expected_maximum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy.stats

RESAMPLES = 2000
CELLS = 4_000_000
"""Examples times resamples held at once: 16 MB in float32."""
EXACT_SEEDS = 14
"""Up to here all 2^n assignments of signs are tried; beyond, 2^14 - 1 random ones."""
EQUIVALENCE_MARGIN = 0.5
"""Points within which a difference is taken for none."""

# ---------------------------------------------------------------------------------------------------- scores

Scorer = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def compute_scores(metric: str, predictions: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Scores of several runs on several resamples of the same examples.

    Args:
        metric: ``accuracy``, ``f1`` (of class 1), ``matthews_correlation``, ``pearson`` or ``spearmanr``.
        predictions: ``(runs, n)``: class numbers, or real numbers for the correlations.
        labels: ``(n,)``.
        counts: ``(n, resamples)``: how often a resample holds an example; each column adds up to n.

    Returns:
        ``(runs, resamples)``; NaN where a correlation is undefined.
    """
    if metric == "spearmanr":
        return _spearman(predictions, labels, counts)
    if metric == "pearson":
        return _pearson(predictions, labels, counts)
    return _SCORERS[metric](predictions, labels, counts.astype(np.float32))


def score_runs(metric: str, predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Scores of several runs on the examples as they are, ``(runs,)``."""
    return compute_scores(metric, predictions, labels, np.ones((len(labels), 1), dtype=np.int32))[:, 0]


def resample_scores(
    metric: str, predictions: np.ndarray, labels: np.ndarray, rng: np.random.Generator, resamples: int = RESAMPLES
) -> np.ndarray:
    """Scores on bootstrap resamples of the examples, the same for all runs, ``(runs, resamples)``."""
    n = len(labels)
    chunk = max(1, min(resamples, CELLS // n))
    parts = []
    for start in range(0, resamples, chunk):
        size = min(chunk, resamples - start)
        drawn = rng.integers(0, n, size=(n, size)) * size + np.arange(size)
        counts = np.bincount(drawn.ravel(), minlength=n * size).reshape(n, size).astype(np.int32)
        parts.append(compute_scores(metric, predictions, labels, counts))
    return np.concatenate(parts, axis=1)


def _accuracy(predictions: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return _sum(predictions == labels, counts) / len(labels)


def _f1(predictions: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    predicted, true = predictions == 1, labels == 1
    hits = _sum(predicted & true, counts)
    total = _sum(predicted, counts) + _sum(true[None], counts)
    return np.divide(2 * hits, total, out=np.zeros_like(hits), where=total > 0)


def _matthews(predictions: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Gorodkin's form for any number of classes; 0 where one class is predicted, or true, throughout."""
    n = float(len(labels))
    correct = _sum(predictions == labels, counts)
    product, predicted_squares, true_squares = (np.zeros_like(correct) for _ in range(3))
    for label in np.union1d(np.unique(predictions), np.unique(labels)):
        predicted, true = _sum(predictions == label, counts), _sum((labels == label)[None], counts)
        product += predicted * true
        predicted_squares += predicted**2
        true_squares += true**2
    spread = (n**2 - predicted_squares) * (n**2 - true_squares)
    return np.divide(correct * n - product, np.sqrt(spread), out=np.zeros_like(correct), where=spread > 0)


_SCORERS: dict[str, Scorer] = {"accuracy": _accuracy, "f1": _f1, "matthews_correlation": _matthews}


def _sum(indicator: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``(runs, n)`` of truth values and counts to ``(runs, resamples)``; exact, as sums stay below 2^24."""
    return (indicator.astype(np.float32) @ counts).astype(np.float64)


def _pearson(predictions: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    n, weights = len(labels), counts.astype(np.float64)
    # Centred before any square is taken, so that no digits cancel.
    x = predictions - predictions.mean(axis=1, keepdims=True)
    y = (labels - labels.mean())[None]
    mean_x, mean_y = x @ weights / n, y @ weights / n
    covariance = (x * y) @ weights / n - mean_x * mean_y
    variances = ((x**2) @ weights / n - mean_x**2) * ((y**2) @ weights / n - mean_y**2)
    return _divide_by_root(covariance, variances, np.sum(x**2, axis=1, keepdims=True) / n)


def _spearman(predictions: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Pearson correlation of mid-ranks, ranked anew in each resample, where an example drawn twice is a tie."""
    n = len(labels)
    weights = counts.astype(np.float64)
    order, starts = _sort(labels)
    of_groups = _mid_ranks(weights[order], starts) - (n + 1) / 2
    sizes = np.diff([*starts, n])
    ranks_y = np.empty_like(weights)
    ranks_y[order] = np.repeat(of_groups, sizes, axis=0)
    weighted_y = weights * ranks_y
    spread_y = np.einsum("ij,ij->j", weighted_y, ranks_y)
    scores = np.empty((len(predictions), counts.shape[1]))
    for row, values in enumerate(predictions):
        order, starts = _sort(values)
        drawn, crossed = weights[order], weighted_y[order]
        ranks = _mid_ranks(drawn, starts) - (n + 1) / 2
        if len(starts) < n:
            drawn, crossed = np.add.reduceat(drawn, starts, axis=0), np.add.reduceat(crossed, starts, axis=0)
        covariance = np.einsum("ij,ij->j", ranks, crossed)
        spread = np.einsum("ij,ij,ij->j", ranks, ranks, drawn) * spread_y
        scores[row] = _divide_by_root(covariance, spread, np.ones(1))
    return scores


def _sort(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order of the values, and where in it each group of equal ones starts."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    return order, np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))


def _mid_ranks(drawn: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Mid-rank of each group of equal values, ``(groups, resamples)``, from counts in sorted order."""
    groups = drawn if len(starts) == len(drawn) else np.add.reduceat(drawn, starts, axis=0)
    return np.cumsum(groups, axis=0) - (groups - 1) / 2


def _divide_by_root(covariance: np.ndarray, variances: np.ndarray, scale: np.ndarray) -> np.ndarray:
    defined = variances > 1e-20 * np.abs(scale)
    root = np.sqrt(variances, out=np.ones_like(variances), where=defined)
    return np.where(defined, covariance / root, np.nan)


# -------------------------------------------------------------------------------------------------- the tests


def bootstrap_difference(first: np.ndarray, second: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Resampled mean differences, ``(resamples,)``: each resample of examples meets a resample of the seeds.

    Args:
        first: ``(seeds, resamples)`` of scores, from `resample_scores`.
        second: The same of the other norm, with the same seeds on the same resamples.
        rng: Draws the seeds.
    """
    seeds, resamples = first.shape
    drawn = rng.integers(0, seeds, size=(seeds, resamples))
    return np.take_along_axis(first - second, drawn, axis=0).mean(axis=0)


def interval(replicates: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval."""
    low, high = np.nanquantile(replicates, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def permutation_p(differences: Sequence[float]) -> float:
    """Two-sided p of the paired permutation test on the mean difference."""
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2 or not np.any(values):
        return 1.0
    resamples = 2**EXACT_SEEDS
    result = scipy.stats.permutation_test(
        (values, np.zeros_like(values)),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples if len(values) <= EXACT_SEEDS else resamples - 1,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def smallest_p(pairs: int) -> float:
    """The smallest two-sided p that so many pairs can give, by signs or by signed ranks: 2 / 2^n."""
    return min(1.0, 2.0 / 2 ** min(pairs, EXACT_SEEDS))


def wilcoxon_p(differences: Sequence[float]) -> float:
    """Two-sided p of the signed-rank test; exact for the numbers of tasks that there are."""
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    if len(values) == 0:
        return 1.0
    return float(scipy.stats.wilcoxon(values, method="auto").pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values, in the given order."""
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def paired_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson correlation of two norms' scores over the seeds; ``None`` for fewer than three, or without spread."""
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def standard_error(replicates: np.ndarray, seeds: int) -> float:
    """The bootstrap's standard error, made up for the seeds' being few."""
    return float(np.nanstd(replicates, ddof=1)) * math.sqrt(seeds / (seeds - 1))


def detectable_difference(error: float, degrees: int, power: float = 0.8) -> float:
    """The smallest difference that is found with this power at the 5% level, two-sided.

    Args:
        error: Standard error of the difference.
        degrees: Degrees of freedom: seeds less one, added up over tasks.
        power: Chance of finding it.
    """
    quantiles = scipy.stats.t.ppf([0.975, power], degrees)
    return float(quantiles.sum() * error)


def judge(low: float, high: float) -> str:
    """Turns an interval in points into a word.

    A difference within the margin is called equivalent even if its sign is sure: it is too small to matter.
    """
    if -EQUIVALENCE_MARGIN <= low and high <= EQUIVALENCE_MARGIN:
        return "equivalent"
    if low > 0:
        return "better"
    if high < 0:
        return "worse"
    return "cannot tell"


def expected_maximum(scores: Sequence[float]) -> list[float]:
    """Expected best score of n settings drawn from those tried, for n from 1 to all of them."""
    ordered = np.sort(np.asarray(scores, dtype=np.float64))
    count = len(ordered)
    upper = np.arange(1, count + 1) / count
    return [float(np.sum(ordered * (upper**n - (upper - 1 / count) ** n))) for n in range(1, count + 1)]
