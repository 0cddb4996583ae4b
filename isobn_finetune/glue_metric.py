"""GLUE's metrics as an ``evaluate`` metric module that needs no network and no folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

_DESCRIPTION = "Accuracy, F1, Matthews correlation, Pearson and Spearman correlation as the GLUE benchmark counts them."

_CITATION = """\
@inproceedings{wang2019glue,
  title={{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author={Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and Bowman, Samuel R.},
  booktitle={ICLR}, year={2019}
}"""


def _accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float((predictions == labels).mean())


def _f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    # GLUE scores class 1 ("equivalent", "duplicate"); 0, as there, where class 1 neither occurs nor is predicted.
    return float(f1_score(labels, predictions, pos_label=1, zero_division=0))


def _matthews_correlation(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(matthews_corrcoef(labels, predictions))


def _pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(pearsonr(predictions, labels)[0])


def _spearmanr(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(spearmanr(predictions, labels)[0])


_CLASSIFICATION: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews_correlation": _matthews_correlation,
}
_REGRESSION: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {"pearson": _pearson, "spearmanr": _spearmanr}


class GlueMetric(evaluate.Metric):
    """The five GLUE metrics; ``compute(predictions=..., references=..., names=[...])`` returns those named.

    Values that are undefined come back as NaN; :func:`isobn_finetune.metrics.compute_metrics` gives the reason.
    """

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True, seed=0)

    def _info(self) -> evaluate.MetricInfo:
        # float64 for both: class numbers are exact in it, and a score of 0.7 must not be read as 0.
        features = datasets.Features({name: datasets.Value("float64") for name in ("predictions", "references")})
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation=_CITATION, inputs_description="", features=features, format="numpy"
        )

    def _build_data_dir(self) -> str:
        # The base class makes a folder under HF_HOME here even for a metric that keeps everything in memory, and
        # fails where HF_HOME cannot be written.
        return ""

    def _compute(self, predictions: np.ndarray, references: np.ndarray, names: list[str]) -> dict[str, float]:
        values: dict[str, float] = {}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # undefined values are reported as such, not as library warnings
            for name in names:
                if name in _CLASSIFICATION:
                    values[name] = _CLASSIFICATION[name](predictions.astype(np.int64), references.astype(np.int64))
                else:
                    values[name] = _REGRESSION[name](predictions, references)
        return values
