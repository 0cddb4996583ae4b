from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
import scipy.stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from isobn_finetune.significance import (
    bootstrap_difference,
    compute_scores,
    detectable_difference,
    expected_maximum,
    holm,
    interval,
    judge,
    paired_correlation,
    permutation_p,
    resample_scores,
    score_runs,
    smallest_p,
    standard_error,
    wilcoxon_p,
)

SECOND_ROUTE = {
    "accuracy": lambda p, y: accuracy_score(y, p),
    "f1": lambda p, y: f1_score(y, p, zero_division=0),
    "matthews_correlation": lambda p, y: matthews_corrcoef(y, p),
    "pearson": lambda p, y: scipy.stats.pearsonr(p, y).statistic,
    "spearmanr": lambda p, y: scipy.stats.spearmanr(p, y).statistic,
}


@pytest.mark.parametrize("metric", SECOND_ROUTE)
def test_scores_of_resamples_equal_those_of_the_rows_written_out(metric: str) -> None:
    rng = np.random.default_rng(1)
    n, runs, resamples = 40, 3, 25
    if metric in ("pearson", "spearmanr"):
        labels = rng.integers(0, 6, n) * 1.0
        predictions = labels + rng.normal(0, 1, (runs, n))
        predictions[2] = np.round(predictions[2])  # with ties
    else:
        labels = rng.integers(0, 2, n)
        predictions = np.where(rng.random((runs, n)) < 0.7, labels, 1 - labels)
    drawn = rng.integers(0, n, (n, resamples))
    counts = np.stack([np.bincount(column, minlength=n) for column in drawn.T], axis=1)
    scores = compute_scores(metric, predictions, labels, counts)
    for run, resample in itertools.product(range(runs), range(resamples)):
        rows = drawn[:, resample]
        expected = SECOND_ROUTE[metric](predictions[run][rows], labels[rows])
        assert scores[run, resample] == pytest.approx(expected, abs=1e-12)
    whole = [SECOND_ROUTE[metric](row, labels) for row in predictions]
    assert score_runs(metric, predictions, labels) == pytest.approx(whole, abs=1e-12)


def test_matthews_of_three_classes_and_undefined_scores() -> None:
    rng = np.random.default_rng(2)
    labels, predictions = rng.integers(0, 3, 50), rng.integers(0, 3, (2, 50))
    assert score_runs("matthews_correlation", predictions, labels) == pytest.approx(
        [matthews_corrcoef(labels, row) for row in predictions]
    )
    ones = np.ones((1, 50))
    assert score_runs("matthews_correlation", ones, labels)[0] == 0
    assert score_runs("f1", np.zeros((1, 4)), np.zeros(4))[0] == 0
    for metric in ("pearson", "spearmanr"):
        assert np.isnan(score_runs(metric, ones * 0.3, labels * 1.0)[0])


def test_resampling_has_the_bootstraps_moments() -> None:
    rng = np.random.default_rng(3)
    labels = np.zeros(200, dtype=int)
    predictions = (rng.random((1, 200)) < 0.3).astype(int)
    rate = score_runs("accuracy", predictions, labels)[0]
    replicates = resample_scores("accuracy", predictions, labels, np.random.default_rng(0), 4000)[0]
    assert replicates.shape == (4000,)
    assert replicates.mean() == pytest.approx(rate, abs=0.003)
    assert replicates.std() == pytest.approx(math.sqrt(rate * (1 - rate) / 200), rel=0.05)
    # In chunks or at once: only the draws differ.
    large = resample_scores("accuracy", np.zeros((1, 30000), int), np.zeros(30000, int), np.random.default_rng(0), 300)
    assert large.shape == (1, 300) and (large == 1).all()


def test_the_bootstrap_draws_seeds_in_pairs() -> None:
    """Scores that differ between seeds, not between norms, leave nothing to be uncertain about."""
    scores = np.array([[0.5], [0.7], [0.9]]) * np.ones((3, 1000))
    rng = np.random.default_rng(0)
    assert interval(bootstrap_difference(scores + 0.02, scores, rng)) == pytest.approx((0.02, 0.02))
    # By enumeration: the mean of three draws from (-1, 0, 1) has variance 2/3 / 3.
    spread = bootstrap_difference(scores + np.array([[-1.0], [0.0], [1.0]]), scores, np.random.default_rng(1))
    assert spread.var() == pytest.approx(2 / 9, rel=0.1)
    assert set(np.round(np.unique(spread) * 3).astype(int)) == set(range(-3, 4))


def test_interval_is_that_of_percentiles() -> None:
    assert interval(np.arange(1001.0)) == pytest.approx((25.0, 975.0))
    assert interval(np.append(np.arange(1001.0), np.nan)) == pytest.approx((25.0, 975.0))


def test_permutation_p_equals_full_enumeration() -> None:
    differences = np.array([1.0, 2.0, -0.5, 3.0, 1.0])
    means = [np.mean(differences * signs) for signs in itertools.product((1, -1), repeat=5)]
    expected = np.mean(np.abs(means) >= abs(differences.mean()) - 1e-12)
    assert permutation_p(differences) == pytest.approx(expected) == pytest.approx(0.125)
    assert permutation_p([1, 1, 1]) == smallest_p(3) == 0.25
    assert permutation_p([0.1, 0.2, 0.3, 0.1, 0.4]) == smallest_p(5) == 0.0625
    assert permutation_p([0.0, 0.0]) == 1.0
    assert permutation_p([1.0]) == smallest_p(1) == 1.0
    assert 0 < permutation_p(np.linspace(0.5, 1, 20)) < 0.001


def test_wilcoxon_p_equals_full_enumeration() -> None:
    differences = np.array([0.8, -0.1, 1.2, 0.4, 0.6, 2.0, 0.3])
    ranks = scipy.stats.rankdata(np.abs(differences))
    observed = ranks[differences > 0].sum()
    sums = np.array([ranks[np.array(signs)].sum() for signs in itertools.product((True, False), repeat=7)])
    upper, lower = np.mean(sums >= observed), np.mean(sums <= observed)
    assert wilcoxon_p(differences) == pytest.approx(min(1, 2 * min(upper, lower)))
    assert wilcoxon_p([1, 2, 3, 4]) == smallest_p(4) == 0.125
    assert wilcoxon_p([0, 0]) == 1.0
    assert wilcoxon_p([0, 1, 2, 3]) == 0.25


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_correlation_over_seeds() -> None:
    assert paired_correlation([1, 2, 3], [2, 4, 6.0]) == pytest.approx(1)
    assert paired_correlation([1, 2], [2, 4]) is None
    assert paired_correlation([1, 1, 1], [2, 4, 5]) is None


def test_detectable_difference_is_found_with_the_promised_power() -> None:
    replicates = np.tile([-1.0, 1.0], 500)
    assert standard_error(replicates, 5) == pytest.approx(replicates.std(ddof=1) * math.sqrt(5 / 4))
    # 2.7764 and 0.9410 are the t quantiles 0.975 and 0.8 at 4 degrees of freedom.
    assert detectable_difference(0.5, 4) == pytest.approx(0.5 * (2.7764 + 0.9410), abs=1e-3)
    rng = np.random.default_rng(0)
    seeds, sd = 12, 1.0
    effect = detectable_difference(sd / math.sqrt(seeds), seeds - 1)
    found = scipy.stats.ttest_1samp(rng.normal(effect, sd, (4000, seeds)), 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.03)


def test_verdicts() -> None:
    assert judge(0.6, 2) == "better" and judge(-2, -0.1) == "worse"
    assert judge(-0.5, 0.5) == judge(0.1, 0.4) == "equivalent"
    assert judge(-0.6, 0.4) == judge(-1, 2) == "cannot tell"
    assert judge(0.1, 0.7) == "better"


def test_expected_maximum_equals_enumeration() -> None:
    scores = [0.3, 0.9, 0.5]
    for budget, value in enumerate(expected_maximum(scores), 1):
        assert value == pytest.approx(np.mean([max(draw) for draw in itertools.product(scores, repeat=budget)]))


def test_resampling_many_runs_is_quick() -> None:
    rng = np.random.default_rng(0)
    labels = rng.random(300)
    started = time.process_time()
    resample_scores("spearmanr", rng.random((100, 300)), labels, rng)
    assert time.process_time() - started < 5
