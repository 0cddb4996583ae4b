"""Promises of isobn_finetune.metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from isobn_finetune.metrics import METRICS, compute_metrics, is_collapsed

GOLD = np.array([1, 0, 0, 1, 1])
PREDICTED = np.array([1, 1, 0, 1, 0])


def test_classification_values_equal_glues() -> None:
    result = compute_metrics(("accuracy", "f1", "matthews_correlation"), PREDICTED, GOLD)
    assert result.values["accuracy"] == pytest.approx(0.6, abs=1e-12)
    assert result.values["f1"] == pytest.approx(2 / 3, abs=1e-12)
    assert result.values["matthews_correlation"] == pytest.approx(1 / 6, abs=1e-12)
    assert result.reasons == {}


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_regression_values_equal_glues(shape: tuple[int, ...]) -> None:
    gold, predicted = np.array([0.5, 2.5, 3, 5]), np.array([1, 2, 4, 4.5], dtype=np.float32)
    values, reasons = compute_metrics(("pearson", "spearmanr"), predicted.reshape(shape), gold)
    assert values["pearson"] == pytest.approx(0.914213, abs=5e-7)
    assert values["spearmanr"] == pytest.approx(1.0, abs=1e-12)
    assert reasons == {}


def test_fractional_labels_are_not_cut_to_whole_numbers() -> None:
    values, _ = compute_metrics(("spearmanr",), np.array([3, 2, 1]), np.array([0.7, 0.2, 0.1]))
    assert values["spearmanr"] == pytest.approx(1.0)


def test_f1_scores_class_one_only() -> None:
    values, _ = compute_metrics(("f1",), np.array([0, 0, 0, 1]), np.array([0, 0, 1, 0]))
    assert values["f1"] == 0.0  # the mean over both classes would be 0.33


def test_repeated_calls_do_not_share_rows() -> None:
    first = compute_metrics(("accuracy",), PREDICTED, GOLD)
    second = compute_metrics(("accuracy",), GOLD[:2], GOLD[:2])
    assert (first.values["accuracy"], second.values["accuracy"]) == (pytest.approx(0.6), 1.0)


def test_matthews_of_one_predicted_class_is_zero_without_warning(recwarn: pytest.WarningsRecorder) -> None:
    values, reasons = compute_metrics(("matthews_correlation", "f1"), np.zeros(5), GOLD)
    assert values == {"matthews_correlation": 0.0, "f1": 0.0}
    assert reasons == {}
    assert len(recwarn) == 0


def test_three_classes_have_accuracy_and_matthews_but_no_f1() -> None:
    values, reasons = compute_metrics(("accuracy", "matthews_correlation", "f1"), [0, 1, 2, 2], [0, 1, 2, 1])
    assert values["accuracy"] == 0.75
    assert values["matthews_correlation"] == pytest.approx(7 / 10)
    assert values["f1"] is None
    assert "two classes" in reasons["f1"]


@pytest.mark.parametrize(
    ("predictions", "labels", "reason"),
    [
        ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], "all predictions are equal (2)"),
        ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0], "all labels are equal"),
        ([1.0], [1.0], "at least two rows"),
        ([], [], "no rows"),
        ([1.0, float("nan"), float("inf")], [1.0, 2.0, 3.0], "2 of 3 predictions are not finite"),
    ],
)
def test_undefined_correlation_is_none_with_a_reason(
    predictions: list[float], labels: list[float], reason: str, recwarn: pytest.WarningsRecorder
) -> None:
    result = compute_metrics(("pearson", "spearmanr"), np.array(predictions), np.array(labels))
    for name in ("pearson", "spearmanr"):
        assert result.values[name] is None
        assert reason in result.reasons[name]
    assert len(recwarn) == 0


def test_spread_lost_in_rounding_is_none_with_a_reason(recwarn: pytest.WarningsRecorder) -> None:
    result = compute_metrics(("pearson",), np.array([1e-200, 2e-200, 3e-200]) * 1e-120, np.array([1.0, 2.0, 3.0]))
    value = result.values["pearson"]
    assert value is None or np.isfinite(value)
    assert (value is None) == ("pearson" in result.reasons)
    assert len(recwarn) == 0


@pytest.mark.parametrize(
    ("names", "predictions", "labels", "message"),
    [
        (["acuracy"], [1], [1], "unknown metric 'acuracy'"),
        (["accuracy"], [1, 0], [1], "2 predictions but 1 labels"),
        (["accuracy"], [1, 0], [1, -1], "Hidden labels cannot be scored"),
        (["accuracy"], [0.5, 0], [1, 1], "no class number"),
        (["accuracy"], [[0.5, 0.1]], [1], "expected"),
    ],
)
def test_wrong_input_is_refused(names: list[str], predictions: list, labels: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_metrics(names, np.array(predictions), np.array(labels))


@pytest.mark.parametrize(
    ("predictions", "is_regression", "collapsed"),
    [
        ([1, 1, 1], False, True),
        ([1, 0, 1], False, False),
        ([1], False, False),
        ([2.5, 2.5 + 1e-7, 2.5], True, True),
        ([0.0, 0.0], True, True),
        ([2.5, 2.6, 2.5], True, False),
        ([float("nan"), float("nan")], True, True),
        ([3.0], True, False),
    ],
)
def test_collapse_is_seen(predictions: list[float], is_regression: bool, collapsed: bool) -> None:
    assert is_collapsed(np.array(predictions), is_regression) is collapsed


def test_metrics_touch_no_network_no_working_directory_and_no_cache(tmp_path: Path) -> None:
    (tmp_path / "glue").mkdir()
    (tmp_path / "glue" / "glue.py").write_text("raise RuntimeError('the stray folder was read')\n")
    script = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): raise RuntimeError('network')\n"
        "socket.socket.connect = refuse\n"
        "from isobn_finetune.metrics import compute_metrics\n"
        "assert 'evaluate' not in sys.modules and 'sklearn' not in sys.modules\n"
        f"values, reasons = compute_metrics({METRICS!r}, [1, 1, 0, 1, 0], [1, 0, 0, 1, 1])\n"
        "assert reasons == {}, reasons\n"
        "sys.stdout.write(repr(values['accuracy']))\n"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    for name in ("HF_DATASETS_CACHE", "HF_METRICS_CACHE", "HF_EVALUATE_CACHE", "HF_MODULES_CACHE"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.6", "")
    left = [str(path) for path in (tmp_path / "cache").rglob("*") if "metrics" in str(path) or path.suffix == ".lock"]
    assert left == []
