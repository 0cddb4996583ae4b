"""Promises of isobn_finetune.isotropy and its accumulator."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from isobn_finetune import isotropy
from isobn_finetune.isotropy import CovarianceAccumulator, compute_isotropy, explained_variance


def draw(rows: int = 300, width: int = 12, seed: int = 0) -> np.ndarray:
    """Correlated embeddings with unequal spreads and a mean, ``(rows, width)`` float64."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((width, width)) * np.geomspace(3, 0.01, width)
    return rng.standard_normal((rows, width)) @ mixing + rng.standard_normal(width)


def share_by_svd(embeddings: np.ndarray, top_k: int) -> np.ndarray:
    values = np.linalg.svd(embeddings - embeddings.mean(axis=0), compute_uv=False) ** 2
    return np.cumsum(values)[:top_k] / values.sum()


@pytest.mark.parametrize(("rows", "width"), [(300, 12), (20, 50), (2, 3), (5000, 7)])
def test_explained_variance_equals_the_svd_of_centred_embeddings(rows: int, width: int) -> None:
    embeddings = draw(rows, width) + 100
    result = explained_variance(embeddings)
    assert result.shape == (3,)
    assert result.dtype == np.float64
    expected = share_by_svd(embeddings, 3)
    np.testing.assert_allclose(result, np.append(expected, [1, 1])[:3], rtol=0, atol=1e-8)


def test_explained_variance_by_hand() -> None:
    # Four points with variances 4.5 and 0.5 and no correlation, centred at (7, 7).
    embeddings = np.array([[4.0, 7], [10, 7], [7, 6], [7, 8]])
    np.testing.assert_allclose(explained_variance(embeddings, top_k=3), [0.9, 1, 1], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tensors_give_what_their_values_give_as_an_array(dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(draw()).to(dtype).requires_grad_()
    expected = explained_variance(tensor.detach().double().numpy(), 5)
    np.testing.assert_allclose(explained_variance(tensor, 5), expected, atol=1e-12)


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_below_one_is_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match="top_k"):
        explained_variance(draw(), top_k)


@pytest.mark.parametrize(("rows", "width"), [(400, 10), (15, 40)])
def test_iso_score_equals_the_reference_package(rows: int, width: int) -> None:
    reference = pytest.importorskip("IsoScore.IsoScore")
    for seed in range(3):
        embeddings = draw(rows, width, seed)
        assert isotropy.iso_score(embeddings) == pytest.approx(float(reference.IsoScore(embeddings)), abs=1e-6)


def test_iso_score_star_equals_the_reference_package() -> None:
    reference = pytest.importorskip("IsoScore.IsoScore")
    embeddings = draw(25, 20)
    target = torch.eye(20, dtype=torch.float64) * float(np.cov(embeddings.T).trace()) / 20
    for zeta in (0.0, 0.2, 0.9):
        expected = float(reference.IsoScore_star(embeddings, target, zeta))
        assert isotropy.iso_score_star(embeddings, zeta) == pytest.approx(expected, abs=1e-6)


def test_shrinkage_is_the_oracle_approximating_one() -> None:
    embeddings = draw(25, 20)
    c = np.cov(embeddings.T, bias=True)
    square, trace, n, p = (c @ c).trace(), c.trace(), 25, 20
    zeta = ((1 - 2 / p) * square + trace**2) / ((n + 1 - 2 / p) * (square - trace**2 / p))
    assert 0 < zeta < 1
    assert isotropy.iso_score_star(embeddings) == pytest.approx(isotropy.iso_score_star(embeddings, zeta), abs=1e-12)


def test_few_rows_read_less_isotropic_than_the_shrunk_score_says() -> None:
    rng = np.random.default_rng(0)
    few = rng.standard_normal((40, 64))  # truly isotropic: IsoScore 1
    assert isotropy.iso_score(few) < 0.5
    assert isotropy.iso_score_star(few) > 0.95


def test_measures_by_hand() -> None:
    # Variances 1 and 4, covariance 1: correlation 0.5, eigenvalues (5 +- sqrt 13) / 2.
    source = CovarianceAccumulator.from_moments(10, np.zeros(2), np.array([[1.0, 1], [1, 4]]))
    assert isotropy.mean_absolute_correlation(source) == pytest.approx(0.5)
    assert isotropy.std_variation(source) == pytest.approx(1 / 3)
    assert isotropy.participation_ratio(source) == pytest.approx(25 / 19)
    assert isotropy.iso_score(source) == pytest.approx(6 / 19)
    np.testing.assert_allclose(explained_variance(source, 1), [(5 + np.sqrt(13)) / 10])


def test_mean_cosine_equals_the_mean_over_all_pairs() -> None:
    embeddings = draw(40, 6)
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    pairs = (unit @ unit.T)[np.triu_indices(40, 1)]
    assert isotropy.mean_cosine_similarity(embeddings) == pytest.approx(pairs.mean(), abs=1e-12)
    assert isotropy.mean_cosine_similarity(torch.from_numpy(embeddings)) == pytest.approx(pairs.mean(), abs=1e-12)


def test_mean_cosine_bears_zero_rows_and_extreme_sizes() -> None:
    assert isotropy.mean_cosine_similarity(np.array([[1e200, 0], [0, 0], [1e-200, 0]])) == pytest.approx(1)
    with pytest.raises(ValueError, match="no pair"):
        isotropy.mean_cosine_similarity(np.array([[1.0, 0], [0, 0]]))


def assert_same_moments(accumulator: CovarianceAccumulator, embeddings: np.ndarray) -> None:
    """Compares with the two-pass result, to 1e-10 of each pair's standard deviations."""
    exact = embeddings.astype(np.longdouble)
    mean = exact.mean(axis=0)
    covariance = ((exact - mean).T @ (exact - mean) / len(exact)).astype(np.float64)
    scale = np.sqrt(np.outer(np.diagonal(covariance), np.diagonal(covariance)))
    assert accumulator.count == len(embeddings)
    np.testing.assert_allclose(accumulator.mean, mean.astype(np.float64), rtol=0, atol=1e-14 * np.abs(exact).max())
    assert (np.abs(accumulator.covariance - covariance) / scale).max() < 1e-10


@pytest.mark.parametrize("order", ["drawn", "sorted", "small first"])
@pytest.mark.parametrize("batch_size", [1, 7, 5000, 12000])
def test_accumulator_equals_two_passes_with_large_means_in_any_order(order: str, batch_size: int) -> None:
    rng = np.random.default_rng(1)
    embeddings = rng.standard_normal((12000, 5)) * [1, 1, 1e-3, 1, 1] + [1e4, -1e4, 1e4, 0, 1]
    if order == "sorted":
        embeddings = embeddings[np.argsort(embeddings[:, 0])]
    if order == "small first":
        embeddings[:50] = embeddings[0] + rng.standard_normal((50, 5)) * 1e-9
    accumulator = CovarianceAccumulator()
    for start in range(0, len(embeddings), batch_size):
        accumulator.update(embeddings[start : start + batch_size])
    assert_same_moments(accumulator, embeddings)


def test_accumulator_bears_jumps_of_the_mean_between_blocks() -> None:
    rng = np.random.default_rng(2)
    embeddings = np.concatenate([rng.standard_normal((5000, 4)) + offset for offset in (0, 1e4, -1e4, 0)])
    accumulator = CovarianceAccumulator()
    accumulator.update(embeddings)
    assert_same_moments(accumulator, embeddings)


@pytest.mark.parametrize("sizes", [(0, 500, 1, 4999, 6500), (6500, 4999, 1, 500, 0)])
def test_merged_shards_equal_one_pass(sizes: tuple[int, ...]) -> None:
    embeddings = np.random.default_rng(3).standard_normal((12000, 5)) + 1e4
    merged, start = CovarianceAccumulator(5), 0
    for size in sizes:
        shard = CovarianceAccumulator(5)
        shard.update(embeddings[start : start + size])
        shard = CovarianceAccumulator.from_array(shard.to_array())  # as it travels between processes
        assert shard.count == size
        merged.merge(shard)
        start += size
    assert_same_moments(merged, embeddings)


def test_accumulator_can_be_read_between_updates_and_its_results_do_not_change() -> None:
    embeddings = draw(100, 4)
    accumulator = CovarianceAccumulator()
    accumulator.update(embeddings[:30])
    mean, covariance = accumulator.mean, accumulator.covariance
    kept = (mean.copy(), covariance.copy())
    accumulator.update(embeddings[30:])
    assert_same_moments(accumulator, embeddings)
    np.testing.assert_array_equal(mean, kept[0])
    np.testing.assert_array_equal(covariance, kept[1])


def test_accumulator_leaves_its_input_as_it_was() -> None:
    embeddings = draw(100, 4)
    before = embeddings.copy()
    accumulator = CovarianceAccumulator()
    accumulator.update(embeddings)
    other = CovarianceAccumulator()
    other.merge(accumulator)
    other.update(embeddings)
    np.testing.assert_array_equal(embeddings, before)
    assert (accumulator.count, other.count) == (100, 200)


@pytest.mark.parametrize("weight", ["vector", "matrix"])
def test_transformed_moments_equal_those_of_transformed_rows(weight: str) -> None:
    embeddings, rng = draw(200, 6), np.random.default_rng(4)
    shift = rng.standard_normal(6)
    accumulator = CovarianceAccumulator()
    accumulator.update(embeddings)
    if weight == "vector":
        scale = rng.standard_normal(6)
        assert_same_moments(accumulator.transform(scale, shift), embeddings * scale + shift)
    else:
        matrix = rng.standard_normal((6, 6))
        assert_same_moments(accumulator.transform(matrix, shift), embeddings @ matrix + shift)


def test_transforming_no_rows_gives_no_rows() -> None:
    result = compute_isotropy(CovarianceAccumulator(3).transform(np.ones(3), np.zeros(3)))
    assert result["ev1"] is None
    assert "got 0" in result["reason"]


def test_rows_with_values_that_are_not_finite_are_left_out_and_counted(recwarn: pytest.WarningsRecorder) -> None:
    embeddings = draw(5000, 4)
    spoilt = embeddings.copy()
    spoilt[0, 1], spoilt[17, 0], spoilt[4700] = np.nan, np.inf, -np.inf
    accumulator = CovarianceAccumulator()
    accumulator.update(spoilt)
    assert_same_moments(accumulator, np.delete(embeddings, [0, 17, 4700], axis=0))
    assert accumulator.non_finite_rows == 3
    result = compute_isotropy(accumulator)
    assert result["non_finite_rows"] == 3
    assert result["ev3"] == pytest.approx(share_by_svd(np.delete(embeddings, [0, 17, 4700], axis=0), 3)[2])
    with pytest.raises(ValueError, match="3 of 5000 rows"):
        explained_variance(spoilt)
    assert len(recwarn) == 0


@pytest.mark.parametrize(
    ("embeddings", "reason"),
    [
        (np.zeros((0, 4)), "at least two rows, got 0"),
        (np.ones((1, 4)), "at least two rows, got 1"),
        (np.full((9000, 4), 0.1), "all 9000 embeddings are equal"),
        (np.full((5, 4), np.nan), "got 0 (5 with values that are not finite left out)"),
        (np.array([[1e300, 0], [-1e300, 0]]), "not finite"),
    ],
)
def test_undefined_isotropy_is_null_with_a_reason(
    embeddings: np.ndarray, reason: str, recwarn: pytest.WarningsRecorder
) -> None:
    result = compute_isotropy(embeddings)
    assert [result[name] for name in ("ev1", "ev2", "ev3", "isoscore")] == [None] * 4
    assert reason in result["reason"]
    json.dumps(result, allow_nan=False)
    for measure in (explained_variance, isotropy.iso_score, isotropy.mean_absolute_correlation):
        with pytest.raises(ValueError, match=r"two rows|equal|not finite"):
            measure(embeddings)
    assert len(recwarn) == 0


def test_constant_dimensions_leave_every_measure_defined() -> None:
    embeddings = np.hstack([draw(100, 3), np.full((100, 2), 0.1)])
    result = compute_isotropy(embeddings)
    np.testing.assert_allclose([result["ev1"], result["ev2"]], share_by_svd(embeddings, 2), atol=1e-8)
    assert "reason" not in result
    by_hand = np.abs(np.corrcoef(draw(100, 3).T))[np.triu_indices(3, 1)].mean()
    assert isotropy.mean_absolute_correlation(embeddings) == pytest.approx(by_hand)
    assert np.isfinite(isotropy.std_variation(embeddings))


def test_all_measures_are_those_of_the_single_functions() -> None:
    embeddings = draw(100, 5)
    accumulator = CovarianceAccumulator()
    accumulator.update(embeddings)
    result = isotropy.compute_measures(accumulator, top_k=4)
    assert result.pop("n") == 100
    assert [result.pop(f"ev{k}") for k in range(1, 5)] == pytest.approx(share_by_svd(embeddings, 4), abs=1e-8)
    assert result == {
        "isoscore": isotropy.iso_score(embeddings),
        "isoscore_star": isotropy.iso_score_star(embeddings),
        "participation_ratio": isotropy.participation_ratio(embeddings),
        "mean_abs_correlation": isotropy.mean_absolute_correlation(embeddings),
        "std_variation": isotropy.std_variation(embeddings),
    }


def test_single_undefined_measures_are_null_and_the_others_stay() -> None:
    accumulator = CovarianceAccumulator()
    accumulator.update(np.array([[1.0, 0.0], [2.0, 0.0], [4.0, 0.0]]))
    result = isotropy.compute_measures(accumulator)
    assert (result["ev1"], result["isoscore"], result["mean_abs_correlation"]) == (1.0, 0.0, None)
    assert result["reason"] == "fewer than two dimensions vary, so there is no correlation"

    undefined = isotropy.compute_measures(CovarianceAccumulator(2))
    assert undefined["n"] == 0
    assert {undefined[name] for name in undefined if name not in ("n", "reason")} == {None}


def test_width_one_has_explained_variance_but_no_iso_score() -> None:
    result = compute_isotropy(draw(10, 1))
    assert (result["ev1"], result["ev3"], result["isoscore"]) == (1.0, 1.0, None)
    assert "two dimensions" in result["reason"]


def test_wrong_shapes_are_refused() -> None:
    accumulator = CovarianceAccumulator()
    accumulator.update(draw(5, 4))
    with pytest.raises(ValueError, match="width 3"):
        accumulator.update(draw(5, 3))
    with pytest.raises(ValueError, match=r"expected \(n, d\)"):
        accumulator.update(np.zeros(4))


def test_accumulator_keeps_memory_independent_of_the_number_of_rows() -> None:
    tracemalloc = pytest.importorskip("tracemalloc")
    batch = np.ones((20_000, 64), dtype=np.float32)
    accumulator = CovarianceAccumulator()
    accumulator.update(batch[:10])
    tracemalloc.start()
    for _ in range(5):
        accumulator.update(batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000  # a float64 copy of the batch alone would take 10 MB


def test_importing_isotropy_does_not_import_torch() -> None:
    script = "import sys, isobn_finetune.isotropy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
