"""Scores as GLUE counts them, and what to say where a score is undefined."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from isobn_finetune.glue_metric import GlueMetric

METRICS = ("accuracy", "f1", "matthews_correlation", "pearson", "spearmanr")
"""Names of all metrics, spelled as in configs and result files."""

CORRELATIONS = ("pearson", "spearmanr")
"""Metrics of real-valued predictions; the others take class numbers."""


class MetricResult(NamedTuple):
    """Scores by metric name, and for each that is ``None`` the reason, by the same name."""

    values: dict[str, float | None]
    reasons: dict[str, str]


def compute_metrics(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> MetricResult:
    """Computes metrics through ``evaluate``, with GLUE's definitions (Wang et al., ICLR 2019).

    ``f1`` is that of class 1. ``matthews_correlation`` is 0 where one class is predicted throughout. A correlation is
    undefined for fewer than two rows, or where predictions or labels do not vary.

    Args:
        names: Which of :data:`METRICS`.
        predictions: ``(n,)`` or ``(n, 1)``: class numbers, or real numbers for the correlations.
        labels: ``(n,)``, as predictions.

    Raises:
        ValueError: A name is unknown, the lengths differ, or a class number is negative (a hidden label) or not whole.
    """
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ValueError(f"unknown metric '{unknown[0]}'. Known: {', '.join(METRICS)}.")
    predictions, labels = _as_column(predictions, "predictions"), _as_column(labels, "labels")
    if len(predictions) != len(labels):
        raise ValueError(f"{len(predictions)} predictions but {len(labels)} labels.")

    reasons: dict[str, str] = {}
    for name in names:
        reason = _why_undefined(name, predictions, labels)
        if reason:
            reasons[name] = reason
    computable = [name for name in names if name not in reasons]
    if any(name not in CORRELATIONS for name in computable):
        _check_classes(predictions, "prediction")
        _check_classes(labels, "label")
    computed = (
        _glue_metric().compute(predictions=predictions, references=labels, names=computable) if computable else {}
    )
    values: dict[str, float | None] = {}
    for name in names:
        value = computed.get(name)
        if value is not None and not np.isfinite(value):
            reasons[name] = f"{name} is not finite: the spread of predictions or labels is lost in rounding"
        values[name] = None if name in reasons else value
    return MetricResult(values, reasons)


def is_collapsed(predictions: np.ndarray, is_regression: bool) -> bool:
    """True when one class is predicted throughout, or real-valued predictions have no spread beyond rounding.

    Fewer than two predictions cannot show a collapse. Predictions that are not finite count as one value.
    """
    predictions = _as_column(predictions, "predictions")
    if len(predictions) < 2:
        return False
    finite = predictions[np.isfinite(predictions)]
    if len(finite) == 0:
        return True
    if not is_regression:
        return len(np.unique(predictions)) == 1
    # Equal inputs in differently padded batches come out about 1e-7 apart in float32.
    return bool(np.ptp(finite) <= 1e-5 * np.abs(finite).max())


@functools.cache
def _glue_metric() -> GlueMetric:
    # Imported here: evaluate takes seconds to load.
    from isobn_finetune.glue_metric import GlueMetric

    return GlueMetric()


def _as_column(values: np.ndarray, what: str) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]  # never left to broadcast (n, 1) against (n,)
    if values.ndim != 1:
        raise ValueError(f"{what} have shape {values.shape}, expected (n,).")
    return values


def _why_undefined(name: str, predictions: np.ndarray, labels: np.ndarray) -> str | None:
    """Returns why a metric has no value, ``None`` where it has one."""
    if len(labels) == 0:
        return "no rows"
    for what, values in (("predictions", predictions), ("labels", labels)):
        bad = int(np.count_nonzero(~np.isfinite(values)))
        if bad:
            return f"{bad} of {len(values)} {what} are not finite"
    if name == "f1" and max(predictions.max(), labels.max()) > 1:
        return "f1 is defined for two classes, 0 and 1"
    if name in CORRELATIONS:
        if len(labels) < 2:
            return "a correlation needs at least two rows"
        for what, values in (("predictions", predictions), ("labels", labels)):
            if np.ptp(values) == 0:
                return f"all {what} are equal ({values[0]:g}), so a correlation is undefined"
    return None


def _check_classes(values: np.ndarray, what: str) -> None:
    bad = np.flatnonzero((values < 0) | (values != np.floor(values)))
    if len(bad):
        raise ValueError(
            f"{what} {values[bad[0]]:g} at row {bad[0]} is no class number (0, 1, ...). Hidden labels cannot be scored."
        )
