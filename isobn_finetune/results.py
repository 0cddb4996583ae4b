"""What a run leaves behind: result and predictions."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from isobn_finetune.config import RunConfig
from isobn_finetune.errors import DataError, IsobnError
from isobn_finetune.run_folder import RunFolder, dump_json, to_strict, write_json, write_text
from isobn_finetune.tasks import TaskSpec

logger = logging.getLogger(__name__)

SCHEMA = 1


@dataclass
class RunResult:
    """What a run came to: the fields of ``result.json``, and the folder it stands in.

    ``score`` is the primary metric on the selection split at the best evaluation, ``last_score`` at the last one.
    """

    output_dir: str
    status: str
    task: str
    model: str
    norm: dict[str, Any]
    seed: int
    primary_metric: str
    score: float | None = None
    last_score: float | None = None
    metrics: dict[str, dict[str, float | None]] = field(default_factory=dict)
    best: dict[str, float] | None = None
    collapsed: bool | None = None
    isotropy: dict[str, Any] | None = None
    train: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None

    @classmethod
    def begin(cls, config: RunConfig, output_dir: Path, **known: Any) -> RunResult:
        """The result of a run that has not come to its end, and so counts as failed until it has."""
        return cls(
            output_dir=str(output_dir),
            status="failed",
            task=config.task,
            model=config.model.name,
            norm=config.norm.model_dump(),
            seed=config.seed,
            primary_metric=config.best_metric,
            environment=describe_environment(),
            **known,
        )

    def to_json(self) -> dict[str, Any]:
        """The object that ``result.json`` holds."""
        values = asdict(self)
        del values["output_dir"]
        return {"schema": SCHEMA, **to_strict(values)}

    @classmethod
    def from_json(cls, output_dir: Path, values: Mapping[str, Any]) -> RunResult:
        """Reads it back.

        Raises:
            DataError: It lacks what every result has.
        """
        lacking = [name for name in ("status", "task", "model", "norm", "seed") if values.get(name) is None]
        if lacking:
            raise DataError(f"{output_dir / 'result.json'}: lacks {', '.join(lacking)}; --overwrite starts afresh")
        known: dict[str, Any] = {name: values.get(name) for name in cls.__dataclass_fields__ if name != "output_dir"}
        return cls(output_dir=str(output_dir), **known)


def write_predictions(path: Path, spec: TaskSpec, logits: np.ndarray, rows: Dataset) -> None:
    """Writes one line a row: ``idx``, ``prediction``, ``label`` (``null`` where hidden), and ``probabilities``."""
    lines: list[dict[str, Any]] = []
    labels = rows["label"]
    if spec.is_regression:
        hidden = not has_labels(rows)
        for index, (score, label) in enumerate(zip(logits[:, 0].tolist(), labels, strict=True)):
            lines.append({"idx": index, "prediction": score, "label": None if hidden else label})
    else:
        for index, (row, label) in enumerate(zip(compute_probabilities(logits).tolist(), labels, strict=True)):
            prediction = spec.labels[int(np.argmax(row))]
            known = spec.labels[label] if label >= 0 else None
            probabilities = dict(zip(spec.labels, row, strict=True))
            lines.append({"idx": index, "prediction": prediction, "label": known, "probabilities": probabilities})
    write_text(path, "".join(dump_json(line) + "\n" for line in lines))


def has_labels(rows: Dataset) -> bool:
    """False where a split's labels are hidden (all of them -1)."""
    return any(label != -1 for label in rows["label"])


def compute_probabilities(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in float64."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def describe_environment() -> dict[str, Any]:
    """Versions, platform and device."""
    packages = ("torch", "transformers", "datasets", "evaluate", "accelerate", "numpy", "scipy", "scikit-learn")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "isobn-finetune": version("isobn-finetune"),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "platform": platform.platform(),
        "device": device,
        "threads": torch.get_num_threads(),
    }


def explain_failure(error: BaseException) -> str:
    """What a result file says of an error. The text of an unforeseen one may quote rows of the data."""
    return str(error) if isinstance(error, IsobnError | OSError) else type(error).__name__


def write_result_if_possible(folder: RunFolder, result: RunResult) -> None:
    """The folder may be what failed."""
    try:
        write_json(folder.result, result.to_json())
    except OSError as error:
        logger.warning("%s: could not be written (%s).", folder.result, error.strerror)
