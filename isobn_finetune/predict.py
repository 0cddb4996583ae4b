"""What a saved model says: scores on labelled splits, and predictions for a split or for new text."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tqdm import tqdm

from isobn_finetune.data import HUB, compute_fingerprint, load_splits
from isobn_finetune.errors import ConfigError, DataError
from isobn_finetune.metrics import compute_metrics, is_collapsed
from isobn_finetune.prediction_files import check_output, open_predictions
from isobn_finetune.results import describe_environment, has_labels, write_predictions
from isobn_finetune.run_folder import RunFolder, write_json
from isobn_finetune.saved_model import SavedModel, open_model
from isobn_finetune.tasks import TaskSpec, get_task
from isobn_finetune.text_files import TextRow, open_texts
from isobn_finetune.weights_file import compute_weights_digest
from isobn_finetune.whole_files import clean_interrupt

logger = logging.getLogger(__name__)

SCHEMA = 1
_WINDOW_ROWS = 1 << 14
_WINDOW_CHARACTERS = 1 << 23
"""What is read, sorted by length and predicted at a time: it bounds memory, and costs little padding."""


@dataclass
class EvaluationResult:
    """Scores of a saved model: the fields of ``evaluate.json``.

    Attributes:
        model: As it was named.
        task: Name of the task.
        norm: Name of the model's norm.
        primary_metric: The task's first metric.
        selection_split: The split on which a run chooses its best epoch.
        schema: Of ``evaluate.json``.
        score: Primary metric on that split, where it is among the evaluated.
        metrics: Split to metric to value, ``None`` where undefined.
        reasons: Split to metric to why it is undefined.
        collapsed: Split to whether one class is predicted throughout, or predictions have no spread.
        data: Source, rows a split, fingerprint of each.
        weights_sha256: Which weights were scored.
        environment: Versions and platform.
        output_dir: Where the files are.
    """

    model: str
    task: str
    norm: str
    primary_metric: str
    selection_split: str
    schema: int = SCHEMA
    score: float | None = None
    metrics: dict[str, dict[str, float | None]] = field(default_factory=dict)
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    collapsed: dict[str, bool] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    weights_sha256: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    output_dir: str | None = None

    def take_over(self, values: Any) -> None:
        """Keeps the other splits of an earlier ``evaluate.json`` of the same weights, task and data."""
        try:
            same = all(values[key] == getattr(self, key) for key in ("schema", "task", "weights_sha256"))
            if not same or values["data"]["source"] != self.data["source"]:
                return
            for split, metrics in values["metrics"].items():
                if split not in self.metrics:
                    self.metrics[split] = metrics
                    self.reasons[split] = values["reasons"].get(split, {})
                    self.collapsed[split] = split in values["collapsed_splits"]
                    for key in ("rows", "fingerprint"):
                        self.data[key][split] = values["data"][key][split]
        except (KeyError, TypeError, AttributeError):
            return  # not one of ours: replaced

    def to_json(self) -> dict[str, Any]:
        """The object that ``evaluate.json`` holds."""
        reasons = [f"{split}: {text}" for split, inner in self.reasons.items() for text in inner.values()]
        return {
            "schema": self.schema,
            "model": self.model,
            "task": self.task,
            "norm": self.norm,
            "primary_metric": self.primary_metric,
            "selection_split": self.selection_split,
            "score": self.score,
            "metrics": self.metrics,
            "collapsed": any(self.collapsed.values()),
            "collapsed_splits": [split for split, collapsed in self.collapsed.items() if collapsed],
            "reason": "; ".join(reasons) or None,
            "reasons": self.reasons,
            "data": self.data,
            "weights_sha256": self.weights_sha256,
            "environment": self.environment,
        }


def evaluate(
    model: str,
    task: str | None = None,
    source: str | None = None,
    splits: Sequence[str] | None = None,
    batch_size: int = 64,
    output_dir: str | None = None,
) -> EvaluationResult:
    """Scores a saved model on labelled splits.

    Args:
        model: Run folder, model folder, or hub id.
        task: ``None``: the one that the model was trained on.
        source: As ``--data``; ``None``: the data of the model's run, else the hub.
        splits: ``None``: the task's labelled dev sets.
        batch_size: Rows at once.
        output_dir: Gets ``evaluate.json`` and ``predictions/<split>.jsonl``; ``None`` writes nothing.

    Raises:
        ConfigError: Nothing was started: model, task, data, split or folder do not fit.
        DataError: A bad row in the data.
    """
    spec = get_task(task) if task is not None else None
    _check_evaluation_folder(output_dir)
    saved = open_model(model, task)
    spec = spec or _require_task(saved)
    source = source or _find_source(saved)
    chosen = list(dict.fromkeys(splits or spec.labelled_dev_splits or spec.splits))
    rows = load_splits(spec, source, chosen)
    for split in chosen:
        _check_labels(spec, split, source, rows[split])
    result = EvaluationResult(saved.name, spec.name, saved.norm, spec.primary_metric, spec.selection_split)
    result.data = {
        "source": source,
        "rows": {split: len(rows[split]) for split in chosen},
        "fingerprint": {split: compute_fingerprint({split: rows[split]}) for split in chosen},
    }
    result.weights_sha256 = compute_weights_digest(saved.folder)
    result.environment = describe_environment()
    with clean_interrupt():
        logits = {split: _score_split(saved, split, rows[split], batch_size, result) for split in chosen}
    folder = RunFolder(output_dir or ".")
    if output_dir is not None:
        result.take_over(_read_json(folder.path / "evaluate.json"))
    result.score = result.metrics.get(spec.selection_split, {}).get(spec.primary_metric)
    if output_dir is not None:
        for split in chosen:
            write_predictions(folder.predictions / f"{split}.jsonl", spec, logits[split], rows[split])
        write_json(folder.path / "evaluate.json", result.to_json())
        result.output_dir = output_dir
    return result


def _score_split(saved: SavedModel, split: str, rows: Dataset, batch_size: int, result: EvaluationResult) -> np.ndarray:
    spec = saved.spec
    logits = predict_rows(saved, rows, batch_size, f"{spec.title} {split}")
    predictions = logits[:, 0] if spec.is_regression else logits.argmax(axis=1)
    scores = compute_metrics(spec.metrics, predictions, np.array(rows["label"]))
    result.metrics[split] = scores.values
    if scores.reasons:
        result.reasons[split] = scores.reasons
    result.collapsed[split] = is_collapsed(predictions, spec.is_regression)
    return logits


def predict_rows(saved: SavedModel, rows: Dataset, batch_size: int, title: str) -> np.ndarray:
    """Logits ``(rows, num_labels)`` of a split, with a progress bar."""
    with _progress(title, len(rows)) as bar:
        windows = [logits for _, logits in _predict_windows(saved, _iterate(rows, saved.spec), batch_size, bar)]
    return np.concatenate(windows)


def _check_evaluation_folder(output_dir: str | None) -> None:
    if output_dir is None:
        return
    folder = RunFolder(output_dir)
    folder.check_usable()
    if folder.is_occupied():
        raise ConfigError(
            f"--output-dir {output_dir}: a run's folder, whose predictions would be overwritten; choose another, "
            f"such as {folder.path / 'evaluate'}"
        )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _check_labels(spec: TaskSpec, split: str, source: str, rows: Dataset) -> None:
    if len(rows) == 0:
        raise ConfigError(f"--data {source}: split {split} of {spec.title} has no rows")
    if not has_labels(rows):
        raise ConfigError(
            f"--data {source}: no labels in this split: {split} of {spec.title}. Use 'predict' for it, or score "
            f"{' or '.join(spec.labelled_dev_splits) or 'another task'}"
        )
    for row, label in enumerate(rows["label"]):
        if label == -1:
            raise DataError(f"--data {source}: split {split} of {spec.title}: row {row} has no label, others have")


def _require_task(saved: SavedModel) -> TaskSpec:
    if not saved.spec.files:
        raise ConfigError(f"--model {saved.name}: it does not say for which task it is; say --task")
    return saved.spec


def _find_source(saved: SavedModel) -> str:
    if saved.config is not None:
        return saved.config.data.source
    return HUB


def predict_split(
    model: str, split: str, output: str | None, task: str | None = None, source: str | None = None, batch_size: int = 64
) -> int:
    """Writes predictions for a split of a task, labelled or not.

    Args:
        model: Run folder, model folder, or hub id.
        split: Such as ``test``.
        output: ``.jsonl``, ``.csv`` or ``.tsv``; ``None``: standard output.
        task: ``None``: the one that the model was trained on.
        source: As ``--data``; ``None``: the data of the model's run, else the hub.
        batch_size: Rows at once.

    Returns:
        Number of rows.
    """
    check_output(output)
    saved = open_model(model, task)
    spec = _require_task(saved)
    source = source or _find_source(saved)
    rows = load_splits(spec, source, [split])[split]
    return _write(saved, _iterate(rows, spec), (), output, batch_size, total=len(rows))


def predict_texts(
    model: str,
    source: str,
    output: str | None,
    task: str | None = None,
    file_format: str | None = None,
    batch_size: int = 64,
) -> int:
    """Writes predictions for new texts, in their order and none left out.

    Args:
        model: Run folder, model folder, or hub id.
        source: CSV, TSV, JSONL, parquet or plain text file, or ``-`` for standard input.
        output: ``.jsonl``, ``.csv`` or ``.tsv``; ``None``: standard output.
        task: ``None``: the one that the model was trained on, if it says so.
        file_format: See :func:`open_texts`.
        batch_size: Rows at once.

    Returns:
        Number of rows.
    """
    check_output(output, source)
    return predict_opened(open_model(model, task), source, output, file_format, batch_size)


def predict_opened(
    saved: SavedModel, source: str, output: str | None, file_format: str | None = None, batch_size: int = 64
) -> int:
    """As :func:`predict_texts`, with a model that is open already."""
    with open_texts(source, saved.spec, file_format) as texts:
        return _write(saved, texts.rows, texts.columns, output, batch_size)


def _write(
    saved: SavedModel,
    rows: Iterable[TextRow],
    columns: Sequence[str],
    output: str | None,
    batch_size: int,
    total: int | None = None,
) -> int:
    with (
        clean_interrupt(),
        open_predictions(output, saved.spec, columns) as writer,
        _progress(saved.spec.title, total) as bar,
    ):
        for window, logits in _predict_windows(saved, rows, batch_size, bar):
            writer.write(window, logits)
    if writer.unknown_labels:
        logger.warning(
            "%d of %d rows have a label that %s does not know; it was left out.",
            writer.unknown_labels,
            writer.count,
            saved.spec.title,
        )
    if not writer.count:
        logger.warning("No rows, so no predictions.")
    return writer.count


def _predict_windows(
    saved: SavedModel, rows: Iterable[TextRow], batch_size: int, bar: Any
) -> Iterator[tuple[list[TextRow], np.ndarray]]:
    """Predicts a window of rows at a time; inside it rows of like length share a batch."""
    for window in _cut_windows(rows):
        features = saved.encode([row.texts for row in window])
        yield window, saved.compute_logits(features, batch_size, bar.update)


def _cut_windows(rows: Iterable[TextRow]) -> Iterator[list[TextRow]]:
    window: list[TextRow] = []
    characters = 0
    for row in rows:
        window.append(row)
        characters += sum(map(len, row.texts))
        if len(window) >= _WINDOW_ROWS or characters >= _WINDOW_CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window


def _iterate(rows: Dataset, spec: TaskSpec) -> Iterator[TextRow]:
    """Rows of a split, their labels as names."""
    labels = rows["label"]
    texts = zip(*(rows[column] for column in spec.text_columns), strict=True)
    for row, label in zip(texts, labels, strict=True):
        known = label if spec.is_regression or label < 0 else spec.labels[label]
        yield TextRow(row, known)


def _progress(title: str, total: int | None) -> Any:
    # disable=None: no bar where stderr is not a terminal.
    return tqdm(total=total, desc=title, unit="row", disable=None)


def format_evaluation(result: EvaluationResult) -> str:
    """The small table that ``evaluate`` prints."""
    spec = get_task(result.task)
    width = max(len(split) for split in result.metrics)
    lines = [f"{spec.title}, {result.model}, norm {result.norm}", ""]
    for split, values in result.metrics.items():
        for name, value in values.items():
            shown = "     -" if value is None else f"{value:.4f}"
            lines.append(f"  {split:<{width}}  {name:<22}{shown}   {result.data['rows'][split]} rows")
    if len(spec.labelled_dev_splits) > 1:
        lines.append(f"  {spec.selection_split} is the one that chooses the best epoch")
    for split, reasons in result.reasons.items():
        lines += [f"  undefined on {split}: {reason}" for reason in reasons.values()]
    for split, collapsed in result.collapsed.items():
        if collapsed:
            lines.append(f"  warning: collapsed on {split}, every prediction is the same")
    if result.output_dir is not None:
        lines.append(f"  files: {result.output_dir} (evaluate.json, predictions/)")
    return "\n".join(lines)
